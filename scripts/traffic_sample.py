"""Bytes and multiply-adds of one prefill step, counted by running the kernels in the harness of tests/msl.

SampleAttention's kernels run as the product launches them, and MLX's own prefill kernel ("steel") as MLX does. What is
multiplied is counted by what is staged: each element of a staged tile meets every row of its threadgroup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm
from traffic_sparq import LEVELS

from mlx_sparse.common.block_layout import Layout
from mlx_sparse.kernels import blocks, sample
from mlx_sparse.methods import registry

PARTS = {"queries": "Q", "keys": "K", "values": "V", "partials": "sums of rows"}  # anything else: rest
STEEL = {"Q": "queries", "K": "keys", "V": "values"}
BLOCK, G, D, ITEM = 128, 2, 128, 2
CASES = ((512, 512), (512, 1536))  # L, S
SHARES = (1.0, 0.25)  # of the causal blocks that the lists hold


@dataclass(frozen=True)
class Row:
    """What one kernel moves and multiplies: bytes by part and level, multiply-adds."""

    L: int
    S: int
    name: str
    density: float | None
    multiply_adds: int
    parts: dict[str, Counter[str]]

    @property
    def total(self) -> Counter[str]:
        return sum(self.parts.values(), Counter())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        case = {"L": self.L, "S": self.S, "kernels": self.name, "density": self.density}
        moved = {part: {level: count[level] for level in LEVELS} for part, count in self.parts.items()}
        return {**case, "multiply_adds": self.multiply_adds, "bytes": moved}


def measure(msl: Any, cases: Iterable[tuple[int, int]] = CASES) -> list[Row]:
    """Run every case in the harness."""
    mx.random.seed(0)
    rows = []
    for L, S in tqdm(cases, unit="case", disable=None):
        q, k, v = (mx.random.normal((1, heads, n, D), dtype=mx.float16) for heads, n in ((G, L), (1, S), (1, S)))
        rows += [_steel(msl, q, k, v), *(_attend(msl, q, k, v, share) for share in SHARES), _scores(msl, q, k)]
    return rows


def _attend(msl: Any, q: mx.array, k: mx.array, v: mx.array, share: float) -> Row:
    """Attention over random lists that hold the diagonal."""
    layout = Layout(q.shape[2], k.shape[2], 1, BLOCK)
    row = np.arange(layout.first_block, layout.key_blocks)[:, None]
    block = np.arange(layout.key_blocks)
    mask = np.random.default_rng(0).random((1, G, layout.row_blocks, layout.key_blocks)) < share
    mask = (mask | (block == row)) & (block <= row)
    lists = np.sort(np.where(mask, block, layout.key_blocks), axis=-1)
    lists = np.where(lists < layout.key_blocks, lists, -1).astype(np.int32)
    with msl.emulated(strict=False) as metal:
        registry.load("attend_blocks", "metal")(q, k, v, mx.array(lists), block_size=BLOCK, scale=D**-0.5)
        rows, _ = blocks.tile_of(D, ITEM)
        density = float(mask.sum() / (G * layout.causal_pairs))
        return _row(q, k, "attend_blocks", metal.launches, rows, density)


def _scores(msl: Any, q: mx.array, k: mx.array) -> Row:
    with msl.emulated(strict=False) as metal:
        registry.load("sample_scores", "metal")(q, k, chunks=1, block_size=BLOCK, scale=D**-0.5)
        shape = sample.shape_of(BLOCK, D, ITEM)
        rows = shape["FRAGMENTS"] * shape["SIMDGROUPS"] * sample.SIDE
        return _row(q, k, "sample_scores", metal.launches, rows, None)


def _steel(msl: Any, q: mx.array, k: mx.array, v: mx.array) -> Row:
    """MLX's kernel over the whole causal triangle."""
    L, S = q.shape[2], k.shape[2]
    rows, keys = 32, 16  # of its tiles for D = 128
    arrays = {"Q": np.array(q[0]), "K": np.array(k[0]), "V": np.array(v[0]), "O": np.empty((G, L, D), np.float16)}
    numbers = {
        **{"B": 1, "H": G, "D": D, "qL": L, "kL": S, "gqa_factor": G, "scale": D**-0.5},
        **{"NQ": ceil(L / rows), "NK": ceil(S / keys), "NQ_aligned": L // rows, "NK_aligned": S // keys},
        **{"qL_rem": L % rows, "kL_rem": S % keys, "qL_off": S - L},
    }
    strides = {f"{name}_strides": (array.size, array.shape[1] * D, D) for name, array in arrays.items()}
    fields: list[Any] = [(name, "f4" if name == "scale" else "i4") for name in numbers]
    parameters = np.zeros((), np.dtype([*fields, *((name, "i8", 3) for name in strides)], align=True))
    parameters[...] = (*numbers.values(), *strides.values())
    include = Path(mx.__file__).parent / "include"
    source = '#include "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention.h"\n'
    kernel = msl.Kernel(
        source,
        f"attention<half, {rows}, {keys}, {D}, {D}, 4, 1, half, float>",
        constants={
            **{"align_Q": L % rows == 0, "align_K": S % keys == 0, "do_causal": True},
            **dict.fromkeys(("has_mask", "has_sinks", "save_lse"), False),
        },
        include=[include],
    )
    grid = (ceil(L / rows), G, 1)
    report = kernel(arrays | {"params": parameters}, grid=grid, threadgroup=(32, 4, 1), threads=False)
    return _row(q, k, "MLX's dense kernel", [report], rows, 1.0)


def _row(q: mx.array, k: mx.array, name: str, reports: Sequence[Any], rows: int, density: float | None) -> Row:
    parts: dict[str, Counter[str]] = {part: Counter() for part in [*PARTS.values(), "rest"]}
    staged = 0
    for report in reports:
        for moved in (report.reads, report.writes):
            for buffer, traffic in moved.items():
                part = PARTS.get(STEEL.get(buffer, buffer), "rest")
                parts[part].update({level: getattr(traffic, level) for level in LEVELS})
                staged += traffic.lane // ITEM if part in ("K", "V") else 0
    found = {part: count for part, count in parts.items() if any(count.values())}
    return Row(q.shape[2], k.shape[2], name, density, staged * rows, found)


def text(rows: Sequence[Row]) -> str:
    """The rows for people."""
    parts = [*PARTS.values(), "rest"]
    lines = [
        f"Prefill steps of {G} query heads of one KV head, D = {D}, block_size {BLOCK}, float16; kB are 1,000 bytes.",
        "| L | S | kernels | density | multiply-adds, millions | level | " + " | ".join(parts) + " | sum |",
        "|---" * (len(parts) + 7) + "|",
    ]
    for row in rows:
        for level in LEVELS:
            density = "" if row.density is None else f"{row.density:.3f}"
            cells = [f"{row.L:,}", f"{row.S:,}", row.name, density, f"{row.multiply_adds / 1e6:,.1f}", level]
            cells += [f"{row.parts[part][level] / 1e3:,.0f}" if part in row.parts else "" for part in parts]
            lines.append(f"| {' | '.join([*cells, f'{row.total[level] / 1e3:,.0f}'])} |")
    return lines[0] + "\n\n" + "\n".join(lines[1:])
