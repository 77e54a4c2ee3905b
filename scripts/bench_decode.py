"""Time one decode step of SparQ on the `ops` backend against MLX's dense attention, interleaved in one run.

python scripts/bench_decode.py [--rank 32] [--top-k 128] [--repeat 15]
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median

import mlx.core as mx

import mlx_sparse

SHAPES = [(9, 3, 64), (32, 8, 128), (32, 32, 128)]  # query heads, KV heads, head dim
LENGTHS = [512, 1024, 2048, 4096, 16384]


def seconds(run: Callable[[], mx.array]) -> float:
    start = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - start


def measure(Hq: int, Hkv: int, D: int, S: int, dtype: mx.Dtype, args: argparse.Namespace) -> tuple[float, float]:
    """Median milliseconds of dense and sparse, one after the other."""
    queries, keys, values = (mx.random.normal((1, H, L, D)).astype(dtype) for H, L in ((Hq, 1), (Hkv, S), (Hkv, S)))
    keys_t = mx.contiguous(keys.swapaxes(-1, -2))
    mean = values.astype(mx.float32).mean(axis=2)
    mx.eval(queries, keys, values, keys_t, mean)

    def dense() -> mx.array:
        out: mx.array = mlx_sparse.dense_attention(queries, keys, values)
        return out

    def sparse() -> mx.array:
        out: mx.array = mlx_sparse.sparq_attention(
            queries, keys, values, rank=args.rank, top_k=args.top_k, keys_t=keys_t, value_mean=mean
        )
        return out

    seconds(dense), seconds(sparse)
    pairs = [(seconds(dense), seconds(sparse)) for _ in range(args.repeat)]
    return 1e3 * median(pair[0] for pair in pairs), 1e3 * median(pair[1] for pair in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    print(f"mlx {version('mlx')}, {mx.default_device()}, {platform.machine()}, rank {args.rank}, top_k {args.top_k}\n")
    print("| type | query heads | KV heads | D | S | dense ms | sparq ms | dense / sparq |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in (mx.float32, mx.float16):
        for Hq, Hkv, D in SHAPES:
            for S in LENGTHS:
                dense, sparse = measure(Hq, Hkv, D, S, dtype, args)
                name = str(dtype).rpartition(".")[2]
                print(f"| {name} | {Hq} | {Hkv} | {D} | {S} | {dense:.2f} | {sparse:.2f} | {dense / sparse:.2f} |")


if __name__ == "__main__":
    main()
