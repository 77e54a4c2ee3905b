"""Bytes that one decode step of SparQ moves, its kernels run as the product launches them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from counting import Row, dense_step, parts_of, random, table_of
from launches import DenseKernel, dense_kernel
from tqdm import tqdm

from mlx_sparse.common import stats
from mlx_sparse.methods import SparQ, registry
from mlx_sparse.tools.bench.core import Shape

ANY_PARAMETERS = False
PARTS = {
    **dict.fromkeys(("keys_t", "codes", "lo", "step", "centre"), "keys_t"),
    **{"keys": "K rows", "values": "V rows", "logits": "score buffer"},
}  # anything else: rest
KV_HEADS, D, ITEM = 8, 128, 2
CASES = tuple((S, G) for S in (4096, 16384) for G in (1, 4, 8, 16))
CHIPS = {"g": "base and Pro", "s": "Max", "d": "Ultra"}  # by MLX's letter


def measure(msl: Any, config: SparQ, cases: Iterable[tuple[int, int]] = CASES, kv_heads: int = KV_HEADS) -> list[Row]:
    """Run every case in the harness."""
    mx.random.seed(0)
    whole = dataclasses.replace(config, key_bits=16)
    jobs: list[tuple[int, int, SparQ | DenseKernel]] = []
    for S, G in cases:
        shape = Shape(kv_heads * G, kv_heads, D)
        kernels = dict.fromkeys(dense_kernel(c, shape, S) for c in CHIPS)
        jobs += [(S, G, contender) for contender in (*dict.fromkeys((whole, config)), *kernels)]
    rows = []
    for S, G, contender in tqdm(jobs, unit="run", disable=None):
        shape = Shape(kv_heads * G, kv_heads, D)
        if isinstance(contender, SparQ):
            reports, name = _sparq(contender, msl, shape, S), str(contender)
            elements = contender.elements(S, D)
        else:
            reports, name = dense_step(msl, contender, shape, S), _name(contender, shape, S)
            elements = stats.dense_elements(S, D)
        facts = {"S": S, "G": G, "launches": len(reports)}
        if isinstance(contender, SparQ):
            facts["score_bytes"] = (
                S * G * kv_heads * (1 if contender.key_bits < 16 and not contender.reallocates(G) else 4)
            )
        rows.append(Row(name, facts, parts_of(reports, PARTS), kv_heads * elements * ITEM))
    return rows


def text(rows: Sequence[Row], config: SparQ) -> str:
    """The tables for people: one for each case."""
    blocks = [
        f"One decode step in kB (1,000 bytes): {KV_HEADS} KV heads, D = {D}, rank {config.rank}, "
        f"top_k {config.top_k}, float16; keys of {config.key_bits} bits but where it says otherwise.",
        "lane: what lanes ask for. threadgroup, dispatch: lines of 128 bytes, counted once per threadgroup or launch.",
    ]
    columns = {"kernels": lambda row: row.name, "launches": lambda row: str(row.facts["launches"])}
    for S, G in dict.fromkeys((row.facts["S"], row.facts["G"]) for row in rows):
        chosen = [row for row in rows if (row.facts["S"], row.facts["G"]) == (S, G)]
        counted = table_of(chosen, columns, PARTS)
        blocks.append(f"S = {S:,}, G = {G}\n\n{counted}\n\n{_score_buffer(chosen[0])}")
    return "\n\n".join(blocks)


def _score_buffer(row: Row) -> str:
    """How sparq's sum comes about: the paper's formula knows no scores on their way between two launches."""
    moved = row.parts["score buffer"]["dispatch"]
    size = row.facts["score_bytes"]
    others = (row.total["dispatch"] - moved) / (row.formula or 1)
    return (
        f"{row.name} at dispatch level: {others:.3f} x the formula, and {moved / size:.2f} x its score buffer of "
        f"{size / 1e3:,.0f} kB, written and read."
    )


def _name(kernel: DenseKernel, shape: Shape, S: int) -> str:
    chips = ", ".join(name for letter, name in CHIPS.items() if dense_kernel(letter, shape, S) == kernel)
    blocks = f" of {kernel.blocks} blocks" if kernel.blocks > 1 else ""
    return f"MLX's {kernel.name}{blocks} ({chips})"


def _sparq(config: SparQ, msl: Any, shape: Shape, S: int) -> list[Any]:
    keys, values = (random(shape.Hkv, S, D) for _ in "kv")
    with msl.emulated(strict=False) as metal:
        registry.load("sparq", "metal")(
            random(shape.Hq, 1, D),
            keys,
            values,
            **config.parameters(shape.G),
            component_weight=None,
            scale=D**-0.5,
            left_padding=None,
            keys_t=_copy(keys, config),
            value_mean=values.astype(mx.float32).mean(axis=2),
        )
        return list(metal.launches)


def _copy(keys: mx.array, config: SparQ) -> Any:
    if config.key_bits == 16:
        return mx.contiguous(keys.swapaxes(-1, -2))
    coded = registry.load("code_keys", "metal")(keys, None, key_bits=config.key_bits)
    mx.eval(*coded)
    return coded
