"""What kernels move, as the harness of tests/msl counts it: ours as they are launched, and MLX's own beside them.

The text of MLX's kernels is read from the installed wheel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from launches import DenseKernel

from mlx_sparse.tools.bench.core import Shape
from mlx_sparse.tools.formats import table

LEVELS = ("lane", "threadgroup", "dispatch")
INCLUDE = Path(mx.__file__).parent / "include"
STEEL_TILE = 32, 16  # rows and keys of a tile of MLX's kernel for prompts, for D = 128


@dataclass(frozen=True)
class Row:
    """What a step or a kernel moves.

    Attributes:
        facts: what else there is to say.
        parts: bytes by part and level.
        formula: bytes by the method's formula; None for none.
    """

    name: str
    facts: Mapping[str, Any]
    parts: Mapping[str, Counter[str]]
    formula: int | None = None

    @property
    def total(self) -> Counter[str]:
        return sum(self.parts.values(), Counter())

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        moved = {part: {level: count[level] for level in LEVELS} for part, count in self.parts.items()}
        formula = {} if self.formula is None else {"formula": self.formula}
        return {"kernels": self.name, **self.facts, **formula, "bytes": moved}


def parts_of(reports: Iterable[Any], names: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Bytes by part and level; ``names`` says which part a buffer belongs to, and any other is the rest."""
    parts: dict[str, Counter[str]] = {part: Counter() for part in [*names.values(), "rest"]}
    for report in reports:
        for buffers in (report.reads, report.writes):
            for name, traffic in buffers.items():
                parts[names.get(name, "rest")].update({level: getattr(traffic, level) for level in LEVELS})
    return {part: count for part, count in parts.items() if any(count.values())}


def table_of(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]], names: Mapping[str, str]) -> str:
    """kB by level and part.

    Args:
        columns: what is said of a row, by title.
        names: of the parts by buffer.
    """
    parts = [*dict.fromkeys(names.values()), "rest"]
    ratios = rows[0].formula is not None
    lines = []
    for row in rows:
        for level in LEVELS:
            cells = [*(say(row) for say in columns.values()), level]
            cells += [_kilobytes(row.parts[part][level]) if part in row.parts else "" for part in parts]
            cells.append(_kilobytes(row.total[level]))
            if row.formula is not None:
                cells += [_kilobytes(row.formula), f"{row.total[level] / row.formula:.3f}"]
            lines.append(cells)
    return table([*columns, "level", *parts, "sum", *(["formula", "sum / formula"] if ratios else [])], lines)


def _kilobytes(size: float) -> str:
    return f"{size / 1e3:,.0f}"


def random(heads: int, length: int, D: int) -> mx.array:
    """float16 ``(1, heads, length, D)``."""
    return mx.random.normal((1, heads, length, D), dtype=mx.float16)


def dense_step(msl: Any, kernel: DenseKernel, shape: Shape, S: int) -> list[Any]:
    """MLX's kernel for decode steps, launched as MLX launches it."""
    D = shape.D
    queries, keys, values = (
        np.array(random(heads, n, D)) for heads, n in ((shape.Hq, 1), (shape.Hkv, S), (shape.Hkv, S))
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


def _launch(msl: Any, name: str, blocks: int, buffers: dict[str, Any], grid: Any, threadgroup: Any) -> Any:
    kernels = "mlx/backend/metal/kernels"
    source = f'#include "{kernels}/utils.h"\n#include "{kernels}/sdpa_vector.h"\n'
    off = ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks")
    kernel = msl.Kernel(source, name, constants=dict.fromkeys(off, False) | {"blocks": blocks}, include=[INCLUDE])
    return kernel(buffers, grid=grid, threadgroup=threadgroup, threads=False)


def dense_prompt(msl: Any, q: mx.array, k: mx.array, v: mx.array) -> Any:
    """MLX's kernel for prompts over the whole causal triangle."""
    (_, G, L, D), S = q.shape, k.shape[2]
    rows, keys = STEEL_TILE
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
    kernel = msl.Kernel(
        '#include "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention.h"\n',
        f"attention<half, {rows}, {keys}, {D}, {D}, 4, 1, half, float>",
        constants={
            **{"align_Q": L % rows == 0, "align_K": S % keys == 0, "do_causal": True},
            **dict.fromkeys(("has_mask", "has_sinks", "save_lse"), False),
        },
        include=[INCLUDE],
    )
    grid = (ceil(L / rows), G, 1)
    return kernel(arrays | {"params": parameters}, grid=grid, threadgroup=(32, 4, 1), threads=False)
