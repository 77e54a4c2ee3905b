"""Bytes that several queries at once move: a dense check of drafts, and what a sparse call of several attends.

python scripts/traffic_rows.py [--keys N] [--top-k N]

Counted in the harness of tests/msl, as scripts/traffic.py does: Linux, and a clang or the test extra, which brings one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from counting import LEVELS, dense_step, random
from launches import dense_kernel

from mlx_sparse.common.stats import dense_elements
from mlx_sparse.kernels.attend import attend_indices
from mlx_sparse.kernels.attend_rows import attend_rows
from mlx_sparse.tools.bench.core import Shape
from mlx_sparse.tools.formats import table

TESTS = Path(__file__).resolve().parents[1] / "tests"
D, ITEM = 128, 2
SIZES = [(G, L) for G in (4, 8) for L in (2, 4, 8, 16)]


def moved(reports: list[Any], level: str) -> int:
    """Bytes of all buffers."""
    return sum(
        getattr(traffic, level)
        for report in reports
        for buffers in (report.reads, report.writes)
        for traffic in buffers.values()
    )


def calls(msl: Any, G: int, L: int, S: int, top_k: int) -> dict[str, tuple[int, list[Any]]]:
    """Keys that each call attends, and its launches: a dense check, and the attention of a sparse call."""
    keys, values = (random(1, S, D) for _ in "kv")
    chosen = np.sort(np.random.default_rng(0).choice(S, top_k, replace=False)).astype(np.int32)
    found = {}
    with msl.emulated(strict=False) as metal:
        attend_rows(random(G, L, D), keys, values, scale=D**-0.5)
        found["check"] = S, list(metal.launches)
        metal.clear()
        attend_indices(random(G * L, 1, D), keys, values, mx.array(chosen)[None, None], scale=D**-0.5)
        found["list"] = top_k, list(metal.launches)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--top-k", type=int, default=512)
    args = parser.parse_args()
    sys.path.append(str(TESTS))
    import msl

    lines = []
    for G, L in SIZES:
        shape = Shape(G, 1, D)
        step = moved(dense_step(msl, dense_kernel("s", shape, args.keys), shape, args.keys), "dispatch")
        for name, (keys, reports) in calls(msl, G, L, args.keys, args.top_k).items():
            formula = dense_elements(keys, D) * ITEM
            counts = [moved(reports, level) for level in LEVELS]
            kernels = ", ".join(report.kernel for report in reports)
            of_step = f"{counts[-1] / step:.2f}" if name == "check" else ""
            cells = [f"{count / 1e3:,.0f}" for count in counts]
            lines.append([name, G, L, keys, kernels, *cells, f"{counts[-1] / formula:.3f}", of_step])
    heads = ["call", "G", "L", "keys", "kernels", *LEVELS, "x the formula of a step", "x MLX's dense step"]
    print(table(heads, [[str(cell) for cell in line] for line in lines]))


if __name__ == "__main__":
    main()
