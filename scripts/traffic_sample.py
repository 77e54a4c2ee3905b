"""Bytes and multiply-adds of one prefill step, SampleAttention's kernels run as the product launches them.

What is multiplied is counted by what is staged: each element of a staged tile meets every row of its threadgroup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from counting import STEEL_TILE, Row, dense_prompt, parts_of, random, table_of
from tqdm import tqdm

from mlx_sparse.common.block_layout import Layout
from mlx_sparse.kernels import blocks, sample
from mlx_sparse.methods import Sample, registry

ANY_PARAMETERS = False
PARTS = {"queries": "Q", "keys": "K", "values": "V", "partials": "sums of rows"}  # anything else: rest
STEEL = {"Q": "Q", "K": "K", "V": "V"}
BLOCK, G, D, ITEM = 128, 2, 128, 2
CASES = ((512, 512), (512, 1536))  # L, S
SHARES = (1.0, 0.25)  # of the causal blocks that the lists hold


def measure(msl: Any, config: Sample, cases: Iterable[tuple[int, int]] = CASES) -> list[Row]:
    """Run every case in the harness."""
    mx.random.seed(0)
    rows = []
    for L, S in tqdm(cases, unit="case", disable=None):
        q, k, v = (random(heads, n, D) for heads, n in ((G, L), (1, S), (1, S)))
        steel = [dense_prompt(msl, q, k, v)]
        rows += [
            _row(q, k, "MLX's dense kernel", steel, STEEL_TILE[0], 1.0),
            *(_attend(msl, q, k, v, share) for share in SHARES),
            _scores(msl, q, k),
        ]
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


def _row(q: mx.array, k: mx.array, name: str, reports: Sequence[Any], rows: int, density: float | None) -> Row:
    parts = parts_of(reports, PARTS | STEEL)
    staged = sum(parts[part]["lane"] // ITEM for part in ("K", "V") if part in parts)
    facts = {"L": q.shape[2], "S": k.shape[2], "density": density, "multiply_adds": staged * rows}
    return Row(name, facts, parts)


def text(rows: Sequence[Row], config: Sample) -> str:
    """The rows for people."""
    columns = {
        "L": lambda row: f"{row.facts['L']:,}",
        "S": lambda row: f"{row.facts['S']:,}",
        "kernels": lambda row: row.name,
        "density": lambda row: "" if row.facts["density"] is None else f"{row.facts['density']:.3f}",
        "multiply-adds, millions": lambda row: f"{row.facts['multiply_adds'] / 1e6:,.1f}",
    }
    head = f"Prefill steps of {G} query heads of one KV head, D = {D}, block_size {BLOCK}, float16; kB are 1,000 bytes."
    return f"{head}\n\n{table_of(rows, columns, PARTS)}"
