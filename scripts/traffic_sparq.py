"""Bytes that one decode step of SparQ moves, counted by running the kernels in the harness of tests/msl.

SparQ's kernels run as the product launches them; beside them MLX's own vector attention, its text read from the
installed wheel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from launches import DenseKernel, dense_kernel
from tqdm import tqdm

from mlx_sparse.common import stats
from mlx_sparse.methods import registry
from mlx_sparse.tools.bench.core import Shape

LEVELS = ("lane", "threadgroup", "dispatch")
PARTS = {"keys_t": "keys_t", "keys": "K rows", "values": "V rows", "logits": "score buffer"}  # anything else: rest
RANK, TOP_K, KV_HEADS, D, ITEM = 32, 128, 8, 128, 2
CASES = tuple((S, G) for S in (4096, 16384) for G in (4, 1))
CHIPS = {"g": "base and Pro", "s": "Max", "d": "Ultra"}  # by MLX's letter


@dataclass(frozen=True)
class Table:
    """What one implementation moves in one case: bytes by part and level, and by its formula."""

    S: int
    G: int
    name: str
    launches: int
    parts: dict[str, Counter[str]]
    formula: int

    @property
    def total(self) -> Counter[str]:
        return sum(self.parts.values(), Counter())

    def as_dicts(self) -> list[dict[str, Any]]:
        """One row per part, then the sum and the formula, for JSON."""
        case = {"S": self.S, "G": self.G, "kernels": self.name, "launches": self.launches}
        rows = [{**case, "part": part, **self._bytes(count)} for part, count in self.parts.items()]
        return [*rows, {**case, "part": "sum", **self._bytes(self.total), "formula": self.formula}]

    @staticmethod
    def _bytes(count: Counter[str]) -> dict[str, int]:
        return {level: count[level] for level in LEVELS}


def measure(msl: Any, cases: Iterable[tuple[int, int]] = CASES, kv_heads: int = KV_HEADS) -> list[Table]:
    """Run every case in the harness."""
    mx.random.seed(0)
    jobs: list[tuple[int, int, DenseKernel | None]] = []
    for S, G in cases:
        shape = Shape(kv_heads * G, kv_heads, D)
        jobs += [(S, G, None), *((S, G, kernel) for kernel in dict.fromkeys(dense_kernel(c, shape, S) for c in CHIPS))]
    tables = []
    for S, G, kernel in tqdm(jobs, unit="run", disable=None):
        shape = Shape(kv_heads * G, kv_heads, D)
        reports = _sparq(msl, shape, S) if kernel is None else dense_step(msl, kernel, shape, S)
        elements = stats.dense_elements(S, D) if kernel else stats.sparq_elements(S, D, rank=RANK, top_k=TOP_K)
        name = _name(kernel, shape, S) if kernel else "sparq"
        tables.append(Table(S, G, name, len(reports), parts_of(reports, PARTS), kv_heads * elements * ITEM))
    return tables


def text(tables: Sequence[Table]) -> str:
    """The tables for people: one for each case."""
    blocks = [
        f"One decode step in kB (1,000 bytes): {KV_HEADS} KV heads, D = {D}, rank {RANK}, top_k {TOP_K}, float16.",
        "lane: what lanes ask for. threadgroup, dispatch: lines of 128 bytes, counted once per threadgroup or launch.",
    ]
    for S, G in dict.fromkeys((table.S, table.G) for table in tables):
        chosen = [table for table in tables if (table.S, table.G) == (S, G)]
        blocks.append(f"S = {S:,}, G = {G}\n\n{_text(chosen)}\n\n{_score_buffer(chosen[0])}")
    return "\n\n".join(blocks)


def _text(tables: Sequence[Table]) -> str:
    parts = [*PARTS.values(), "rest"]
    lines = [
        "| kernels | launches | level | " + " | ".join(parts) + " | sum | formula | sum / formula |",
        "|---" * (len(parts) + 6) + "|",
    ]
    for table in tables:
        for level in LEVELS:
            kilobytes = [f"{table.parts[p][level] / 1e3:,.0f}" if p in table.parts else "" for p in parts]
            total = table.total[level]
            cells = [table.name, str(table.launches), level, *kilobytes, f"{total / 1e3:,.0f}"]
            lines.append(f"| {' | '.join(cells)} | {table.formula / 1e3:,.0f} | {total / table.formula:.3f} |")
    return "\n".join(lines)


def _score_buffer(table: Table) -> str:
    """How sparq's sum comes about: the paper's formula knows no scores on their way between two launches."""
    moved = table.parts["score buffer"]["dispatch"]
    size = 4 * table.S * table.G * KV_HEADS
    others = (table.total["dispatch"] - moved) / table.formula
    return (
        f"sparq at dispatch level: {others:.3f} x the formula, and {moved / size:.2f} x its score buffer of "
        f"{size / 1e3:,.0f} kB, written and read."
    )


def _name(kernel: DenseKernel, shape: Shape, S: int) -> str:
    chips = ", ".join(name for letter, name in CHIPS.items() if dense_kernel(letter, shape, S) == kernel)
    blocks = f" of {kernel.blocks} blocks" if kernel.blocks > 1 else ""
    return f"MLX's {kernel.name}{blocks} ({chips})"


def parts_of(reports: Iterable[Any], names: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Bytes by part and level; ``names`` says which part a buffer belongs to, and any other is the rest."""
    parts: dict[str, Counter[str]] = {part: Counter() for part in [*names.values(), "rest"]}
    for report in reports:
        for buffers in (report.reads, report.writes):
            for name, traffic in buffers.items():
                parts[names.get(name, "rest")].update({level: getattr(traffic, level) for level in LEVELS})
    return {part: count for part, count in parts.items() if any(count.values())}


def _sparq(msl: Any, shape: Shape, S: int) -> list[Any]:
    keys, values = (_random(shape.Hkv, S) for _ in "kv")
    with msl.emulated(strict=False) as metal:
        registry.load("sparq", "metal")(
            _random(shape.Hq, 1),
            keys,
            values,
            rank=RANK,
            top_k=TOP_K,
            local_window=TOP_K // 4,
            reallocate=shape.G == 1,
            group_reduce="softmax",
            component_weight=None,
            scale=D**-0.5,
            left_padding=None,
            keys_t=mx.contiguous(keys.swapaxes(-1, -2)),
            value_mean=values.astype(mx.float32).mean(axis=2),
        )
        return list(metal.launches)


def dense_step(msl: Any, kernel: DenseKernel, shape: Shape, S: int) -> list[Any]:
    """MLX's kernel, launched as MLX launches it."""
    queries, keys, values = (
        np.array(_random(heads, n)) for heads, n in ((shape.Hq, 1), (shape.Hkv, S), (shape.Hkv, S))
    )
    out, length, scale = np.empty_like(queries), np.array(S, np.int32), np.array(D**-0.5, np.float32)
    strides = {f"{a}_{b}_stride": np.array(n, np.uint64) for a in "kv" for b, n in (("head", S * D), ("seq", D))}
    inputs = {"queries": queries, "keys": keys, "values": values}
    sizes = {"N": length, **strides, "scale": scale}
    if kernel.launches == 1:
        factor = np.array(shape.G, np.int32)
        buffers = inputs | {"out": out, "gqa_factor": factor} | sizes
        return [_launch(msl, f"{kernel.name}<half, {D}, {D}>", 1, buffers, (shape.Hq, 1, 1), (1024, 1, 1))]
    partials = np.empty((shape.Hq, kernel.blocks, D), np.float16)
    sums, maxs = (np.empty((shape.Hq, kernel.blocks), np.float32) for _ in range(2))
    group = f", {shape.G}" if kernel.name.endswith("gqa") else ""
    first = _launch(
        msl,
        f"{kernel.name}<half, {D}, {D}{group}, 4>",
        kernel.blocks,
        inputs | {"out": partials, "sums": sums, "maxs": maxs} | sizes,
        (shape.Hkv, 1, kernel.blocks),
        (32, shape.G, 1),
    )
    merged = {"partials": partials, "sums": sums, "maxs": maxs, "out": out}
    merged["blocks"] = np.array(kernel.blocks, np.int32)
    name = f"sdpa_vector_2pass_2<half, {D}>"
    return [first, _launch(msl, name, kernel.blocks, merged, (shape.Hq, 1, 1), (1024, 1, 1))]


def _launch(
    msl: Any,
    name: str,
    blocks: int,
    buffers: dict[str, Any],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> Any:
    include = Path(mx.__file__).parent / "include"
    kernels = "mlx/backend/metal/kernels"
    source = f'#include "{kernels}/utils.h"\n#include "{kernels}/sdpa_vector.h"\n'
    off = ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks")
    kernel = msl.Kernel(source, name, constants=dict.fromkeys(off, False) | {"blocks": blocks}, include=[include])
    return kernel(buffers, grid=grid, threadgroup=threadgroup, threads=False)


def _random(heads: int, length: int) -> mx.array:
    return mx.random.normal((1, heads, length, D), dtype=mx.float16)
