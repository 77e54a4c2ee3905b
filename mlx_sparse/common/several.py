"""What calls of several queries have in common, of any array library (docs/spec/several.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checks import Sizes
from .reasons import VERIFY_QUERIES

VERIFY = ("dense", "sparse")


def is_sparse(n: Sizes, verify: str, attended: int) -> bool:
    """Whether a call chooses among its keys: its first query sees more of them than the ``attended`` ones.

    A call of several queries has to be asked to, by ``verify="sparse"``, and to be short (several.1).
    """
    return n.S - n.L + 1 > attended and (n.L == 1 or (n.L <= VERIFY_QUERIES and verify == "sparse"))


def group_sizes(n: Sizes, verify: str) -> Sizes:
    """Sizes of the step that a call chooses by: the group of a KV head has the queries of all its heads."""
    return replace(n, Hq=n.Hq * n.L) if is_sparse(n, verify, 0) else n


def fold(queries: Any) -> Any:
    """(several.2) the queries of each head as heads of one query: ``(B, Hq, L, D)`` to ``(B, Hq * L, 1, D)``."""
    B, Hq, L, D = queries.shape
    if L == 1:
        return queries
    return queries.reshape(B, Hq * L, 1, D)
