"""Dense attention of a verification step on a GPU, and how many drafts one kernel checks."""

from __future__ import annotations

import mlx.core as mx

from ...cache.sparse_cache import SparseCache
from ...kernels import attend_rows as metal
from ...methods import registry
from ...ops.packed_rows import Rows
from ..dense import with_sinks

# MLX's kernel for few queries takes so many of them, so many rows of a KV head (its query heads times the queries), and
# these head dims.
QUERIES, ROWS, HEAD_DIMS = 8, 32, (64, 96, 128, 256)


def rows_at_once(backend: str, D: int, *, packed: bool) -> int:
    """Return the rows of a KV head that one kernel attends densely on a GPU."""
    ours = (
        backend != "ops" and not packed and metal.supports(D, registry.METAL_ROWS) and not registry.unavailable("metal")
    )
    return registry.METAL_ROWS if ours else ROWS


def fused(G: int, rows: int = ROWS) -> int:
    """Return the number of drafts, at least one, whose check one kernel attends on a GPU in so many ``rows``.

    With ``G`` query heads per KV head. With more drafts, scores go through memory.
    """
    return max(min(QUERIES, rows // G) - 1, 1)


def large_group(backend: str, queries: mx.array, keys: Rows) -> bool:
    """Return True if the Metal kernel for large query groups takes a check that MLX's kernel does not."""
    _, heads, L, D = queries.shape
    G = heads // keys.shape[1]
    if L <= QUERIES and G * L <= ROWS and D in HEAD_DIMS:
        return False
    return isinstance(keys, mx.array) and ROWS < rows_at_once(backend, D, packed=False) >= G * L


def attend_check(
    backend: str, queries: mx.array, keys: Rows, cache: SparseCache, scale: float, sinks: mx.array | None
) -> mx.array | None:
    """Attend causally ``(1, Hq, L, D)`` with the kernel for large query groups; None for MLX's own attention."""
    if not large_group(backend, queries, keys):
        return None
    rows, values, _ = cache.rows("metal")
    out, lse = metal.attend_rows(queries, rows, values, scale=scale, length=cache.length)
    return out if sinks is None else with_sinks(out, lse, sinks)
