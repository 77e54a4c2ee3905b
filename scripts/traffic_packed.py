"""Bytes that one decode step of SparQ moves over packed rows, of quantised caches, beside MLX's quantised attention."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from counting import Row, parts_of, random, table_of
from tqdm import tqdm
from traffic_sparq import KV_HEADS, D

from mlx_sparse.common.packed_rows import PackedRows
from mlx_sparse.methods import SparQ, registry

PARTS = ("codes", "scales", "biases")
COPY = dict.fromkeys(("codes", "lo", "step", "centre"), "keys scored")
OTHERS = {"logits": "score buffer"}  # anything else: rest
COLUMNS = {"scored": "keys scored", "keys": "K rows", "values": "V rows", **OTHERS}
S, G, ITEM, GROUP_SIZE = 16_384, 4, 2, 64
CASES = tuple((bits, score) for bits in (4, 8) for score in ("rows", "copy"))


def measure(
    msl: Any, config: SparQ, cases: Iterable[tuple[int, str]] = CASES, length: int = S, kv_heads: int = KV_HEADS
) -> list[Row]:
    """Run every case, bits of the rows and what they are scored by, in the harness."""
    mx.random.seed(0)
    jobs = tqdm(cases, unit="run", disable=None)
    return [_step(msl, dataclasses.replace(config, score=score), bits, length, kv_heads) for bits, score in jobs]


def _step(msl: Any, config: SparQ, bits: int, length: int, kv_heads: int) -> Row:
    plain = [random(kv_heads, length, D) for _ in "kv"]
    keys, values = (PackedRows.of(rows, bits=bits, group_size=GROUP_SIZE) for rows in plain)
    scored: dict[str, Any] = {"keys_t": None, "key_bits": 16, "rank": D}
    if not config.scores_rows(packed=True):
        scored = {"keys_t": registry.load("code_keys", "metal")(keys[:], None, key_bits=config.key_bits)}
        mx.eval(*scored["keys_t"])
    with msl.emulated(strict=False) as metal:
        registry.load("sparq", "metal")(
            random(kv_heads * G, 1, D),
            keys,
            values,
            **config.parameters(G) | scored,
            component_weight=None,
            scale=D**-0.5,
            left_padding=None,
            value_mean=None,
        )
        first, *others = metal.launches
    parts: dict[str, Counter[str]] = {}
    for reports, key_rows in (([first], "keys scored"), (others, "K rows")):
        names = {f"{rows}_{part}": title for rows, title in (("key", key_rows), ("value", "V rows")) for part in PARTS}
        for name, count in parts_of(reports, {**COPY, **OTHERS, **names}).items():
            parts[name] = parts.get(name, Counter()) + count
    facts = {"S": length, "G": G, "row_bits": bits, "launches": 1 + len(others)}
    facts["mlx"] = kv_heads * (2 * length * keys.row_bytes + 4 * length * G * ITEM)
    formula = kv_heads * config.step_bytes(length, D, itemsize=ITEM, row_bytes=keys.row_bytes)
    return Row(f"sparq:score={config.score}", facts, parts, formula)


def text(rows: Sequence[Row], config: SparQ) -> str:
    """The rows for people."""
    first = rows[0].facts
    head = (
        f"One decode step in kB over packed rows, groups of {GROUP_SIZE}: S = {first['S']:,}, G = {G}; the copy has "
        f"{config.key_bits} bits and is read at rank {config.rank}."
    )
    columns = {
        "bits of the rows": lambda row: str(row.facts["row_bits"]),
        "kernels": lambda row: row.name,
        "launches": lambda row: str(row.facts["launches"]),
    }
    theirs = {row.facts["row_bits"]: row.facts["mlx"] for row in rows}
    least = ", ".join(f"{size / 1e3:,.0f} kB with {bits} bits" for bits, size in theirs.items())
    foot = (
        f"mlx-lm's attention over them moves {least} at least: keys and values once, and a float16 score per key and "
        "query head that one product writes, softmax reads and writes, and the other product reads."
    )
    return f"{head}\n\n{table_of(rows, columns, COLUMNS)}\n\n{foot}"
