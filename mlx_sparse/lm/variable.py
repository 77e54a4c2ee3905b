"""Enable the models that a program loads, if the environment variable ``MLX_SPARSE_ATTN`` is set."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

from ..checks import ConfigError, echoed, reason_of, shortened
from ..model_info import is_drafter

if TYPE_CHECKING:
    from mlx import nn

VARIABLE = "MLX_SPARSE_ATTN"  # also in `_boot`, which imports this module
_lock = threading.Lock()


def enable_loaded(model: nn.Module, *, sharded: bool = False) -> None:
    """Enable the methods in ``MLX_SPARSE_ATTN`` on a model that was just loaded, and print a line to standard error.

    If an error occurs, the line contains the error, and the model runs with dense attention. A model that is
    ``sharded`` after its load also stays dense, because it must be enabled after that.
    """
    attn = os.environ.get(VARIABLE, "").strip()
    if not attn or is_drafter(model):
        return
    try:
        line = _enable(model, attn, sharded)
    except Exception as error:
        line = f"attention is dense: {shortened(reason_of(error))}"
    if line is None:
        return
    text = "".join(c if c.isprintable() else "?" for c in f"[mlx-sparse] {VARIABLE}={echoed(attn)}: {line}")
    with contextlib.suppress(Exception):  # standard error may be closed
        sys.stderr.write(f"{text}\n")  # one call, so that threads do not mix their lines
        sys.stderr.flush()


def _enable(model: nn.Module, attn: str, sharded: bool) -> str | None:
    """Enable ``attn`` on ``model`` and return a description; None if ``model`` is enabled already."""
    if sharded:
        raise ConfigError("the model is sharded after its load. Use a command with --attn.")
    from .loading import blas_note, unfit_warning
    from .model import enable, plan_of

    with _lock:
        if plan_of(model) is not None:  # a load inside the load
            return None
        report = enable(model, attn)
    return "; ".join([*report.opening(), *filter(None, (unfit_warning(report.model_type), blas_note(model)))])
