"""Time and peak memory per appended token of the KV cache, with and without what SparQ keeps beside it.

python scripts/bench_cache.py [--context 65536] [--heads 8] [--dim 128] [--tokens 100]
"""

from __future__ import annotations

import argparse
import statistics
import time

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_sparse.cache.kv_cache import SparseKVCache
from mlx_sparse.cache.sparq_state import SparQState
from mlx_sparse.methods import SparQ
from mlx_sparse.tools.formats import table

KEPT = {
    "mlx-lm's KVCache": None,
    "+ keys in 4 bits, and their spread": SparQ(reallocate=False, component_score="query_key", key_bits=4),
    "or component-major keys": SparQ(reallocate=False, component_score="query", key_bits=16),
    "+ value sum": SparQ(reallocate=True, component_score="query", key_bits=16),
    "+ key moments": SparQ(reallocate=True, component_score="query_key", key_bits=16),
}


def measure(config: SparQ | None, shape: tuple[int, int, int], tokens: int) -> tuple[float, float, float]:
    """Median microseconds per token, and MiB: of the cache, and of the peak above it."""
    heads, context, dim = shape
    mx.clear_cache()
    # Filled in chunks, as a prompt is; the last step of 256 rows has room for the tokens.
    cache = KVCache() if config is None else SparseKVCache()
    chunk = mx.random.normal((1, heads, 2048, dim)).astype(mx.float16)
    while cache.offset < context - 256:
        rows = chunk[:, :, : min(2048, context - 256 - cache.offset)]
        cache.update_and_fetch(rows, rows)
        mx.eval(cache.keys, cache.values)
    side = SparQState()
    if isinstance(cache, SparseKVCache):
        cache.hold("sparq", side)

    def append() -> None:
        row = mx.ones((1, heads, 1, dim), mx.float16)
        cache.update_and_fetch(row, row)
        kept = (
            side.read(cache, config, 1, whole=True) if config is not None and isinstance(cache, SparseKVCache) else {}
        )
        mx.eval(cache.keys, cache.values, kept)

    for _ in range(3):
        append()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    seconds = []
    for _ in range(tokens):
        start = time.perf_counter()
        append()
        seconds.append(time.perf_counter() - start)
    extra = mx.get_peak_memory() - before
    return statistics.median(seconds) * 1e6, cache.nbytes / 2**20, extra / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=100, help="at most 250: one step of the buffers")
    args = parser.parse_args()
    print(
        f"S = {args.context:,}, H = {args.heads}, D = {args.dim}, float16, {args.tokens} tokens, {mx.default_device()}"
    )
    lines = []
    for name, config in KEPT.items():
        micros, own, extra = measure(config, (args.heads, args.context, args.dim), min(args.tokens, 250))
        lines.append([name, f"{own:.0f}", f"{micros:.0f}", f"{extra:.2f}"])
    print(table(["kept", "cache MiB", "us per appended token (median)", "peak above the cache, MiB"], lines))


if __name__ == "__main__":
    main()
