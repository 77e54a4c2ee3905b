"""What a call of a model is made for, for the thread that makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum


class Phase(Enum):
    """Drafts may be sparse; everything else of a lossless model is dense, and what checks drafts is counted."""

    DRAFT = "draft"
    CHECK = "check"


current: ContextVar[Phase | None] = ContextVar("phase", default=None)


@contextlib.contextmanager
def entered(phase: Phase) -> Iterator[None]:
    """Make calls for ``phase`` meanwhile."""
    token = current.set(phase)
    try:
        yield
    finally:
        current.reset(token)
