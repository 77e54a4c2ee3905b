"""Bytes that one decode step of SAAP moves, counted by running the kernels in the harness of tests/msl.

Routing, list and attention run as a cache launches them, with an index that covers all keys but the recent ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np
from launches import dense_kernel
from tqdm import tqdm
from traffic_sparq import LEVELS, dense_step, parts_of

from mlx_sparse.checks import check_int
from mlx_sparse.common import stats
from mlx_sparse.kernels import attend
from mlx_sparse.methods import SAAP, registry
from mlx_sparse.tools.bench.core import Shape

PARTS = {
    **dict.fromkeys(("hidden_weight", "hidden_bias", "out_weight", "out_bias"), "network"),
    **dict.fromkeys(("units", "bits"), "between layers"),
    **dict.fromkeys(("visited", "offsets", "key_ids", "indices", "counts"), "list"),
    **{"keys": "K rows", "values": "V rows"},
}  # anything else: rest
NAMES = [*dict.fromkeys(PARTS.values()), "rest"]
S, KV_HEADS, G, D, ITEM = 131_072, 8, 4, 128, 2
BUCKETS, HIDDEN = 1024, 1024
EVERY = 20  # one key in so many is in a visited bucket: 5 %
FILLINGS = {
    "balanced": "the visited buckets hold 5 % of the keys, all of them as many",
    "half visited": "one bucket holds every other key and is visited; otherwise balanced",
    "half unvisited": "the same bucket, not visited",
}


@dataclass(frozen=True)
class Row:
    """What one step moves.

    Attributes:
        S, kv_heads: keys and KV heads.
        attended: keys, the mean over the heads.
        slots: room of a list.
        groups: threadgroups that attend to a list.
        chain: most tiles of keys that one of them works off one after the other.
        alone: the same if the window and each bucket were one threadgroup's.
        parts: bytes by part and level.
        formula: (saap.14), in bytes.
    """

    name: str
    S: int
    kv_heads: int
    attended: float
    slots: int
    groups: int
    chain: int
    alone: int
    parts: dict[str, Counter[str]]
    formula: int

    @property
    def total(self) -> Counter[str]:
        return sum(self.parts.values(), Counter())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts = {name: value for name, value in vars(self).items() if name != "parts"}
        moved = {part: {level: count[level] for level in LEVELS} for part, count in self.parts.items()}
        return {"G": G, **facts, "bytes": moved}


def measure(msl: Any, config: SAAP, length: int = S, kv_heads: int = KV_HEADS) -> list[Row]:
    """Dense attention, then every filling of the buckets.

    Raises:
        ConfigError: as many probes as buckets.
    """
    check_int("probes", config.probes, 1, BUCKETS - 1)
    jobs = tqdm([None, *FILLINGS], unit="run", disable=None)
    return [step(msl, config, name, length, kv_heads) if name else _dense(msl, length, kv_heads) for name in jobs]


def bucket_ids(filling: str, visited: np.ndarray, length: int) -> np.ndarray:
    """``(1, Hkv, length)`` int16 for the ``visited (1, Hkv, probes)`` buckets."""
    ids = np.empty((1, visited.shape[1], length), np.int16)
    key = np.arange(length)
    for row, chosen in zip(ids[0], visited[0], strict=True):
        others = np.setdiff1d(np.arange(BUCKETS), chosen)
        row[:] = np.where(key % EVERY == 1, chosen[key // EVERY % len(chosen)], others[key % len(others)])
        if filling != "balanced":
            row[::2] = (chosen if filling == "half visited" else others)[0]
    return ids


def step(msl: Any, config: SAAP, filling: str, length: int, kv_heads: int) -> Row:
    """One step: route, list, attend."""
    route, index, expand, attended = (
        registry.load(name, "metal") for name in ("saap_route", "saap_index", "saap_indices", "attend_indices")
    )
    mx.random.seed(0)
    weights = {
        "hidden_weight": _random(kv_heads, D, HIDDEN) * D**-0.5,
        "hidden_bias": _random(kv_heads, HIDDEN),
        "out_weight": _random(kv_heads, HIDDEN, BUCKETS) * HIDDEN**-0.5,
        "out_bias": _random(kv_heads, BUCKETS),
    }
    keys, values = (_random(1, kv_heads, length, D) for _ in "kv")
    with msl.emulated(strict=False) as metal:
        visited = route(_random(1, kv_heads * G, 1, D), probes=config.probes, **weights)
        ids = bucket_ids(filling, np.array(visited), length)
        covered = length - config.recent_tokens
        offsets, key_ids = index(mx.array(ids[..., :covered]), buckets=BUCKETS, sink_tokens=config.sink_tokens)
        sizes = np.diff(np.array(offsets), axis=-1)
        slots = config.sink_tokens + config.recent_tokens + config.fold_every
        slots += int(np.sort(sizes, axis=-1)[..., -config.probes :].sum(axis=-1).max())
        indices, counts = expand(
            visited,
            offsets,
            key_ids,
            length=length,
            covered=covered,
            sink_tokens=config.sink_tokens,
            capacity=slots,
        )
        queries = _random(1, kv_heads * G, 1, D)
        attended(queries, keys, values, indices, scale=D**-0.5, counts=counts)
        reports = list(metal.launches)
    used = np.array(counts)
    groups = attend.splits_of(slots, kv_heads)
    network = D * HIDDEN + HIDDEN + HIDDEN * BUCKETS + BUCKETS
    elements = sum(stats.saap_elements(D, int(count), network=network) for count in used.ravel())
    chosen = np.take_along_axis(sizes, np.array(visited), axis=-1)
    return Row(
        filling,
        length,
        kv_heads,
        float(used.mean()),
        slots,
        groups,
        chain=ceil(ceil(int(used.max()) / attend.TILE) / groups),
        alone=ceil(max(config.recent_tokens, int(chosen.max())) / attend.TILE),
        parts=parts_of(reports, PARTS),
        formula=elements * ITEM,
    )


def text(rows: Sequence[Row], config: SAAP) -> str:
    """The rows for people."""
    window = f"{config.sink_tokens} + {config.recent_tokens:,} keys exactly"
    head = [
        f"One decode step in kB (1,000 bytes) over S = {rows[0].S:,} keys: {rows[0].kv_heads} KV heads, G = {G}, "
        f"D = {D}, float16, a network of {HIDDEN:,} hidden units, {config.probes} of {BUCKETS:,} buckets, {window}.",
        *(f"* {name}: {what}." for name, what in FILLINGS.items()),
    ]
    columns = ["keys", "level", *NAMES, "sum", "formula", "sum / formula"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    chains = [
        "| keys | attended | slots of a list | threadgroups | tiles in turn | with a threadgroup per bucket |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        for level in LEVELS:
            moved = [f"{row.parts[part][level] / 1e3:,.0f}" if part in row.parts else "" for part in NAMES]
            total = row.total[level]
            cells = [row.name, level, *moved, f"{total / 1e3:,.0f}", f"{row.formula / 1e3:,.0f}"]
            lines.append(f"| {' | '.join(cells)} | {total / row.formula:.3f} |")
        numbers = (row.slots, row.groups, row.chain, row.alone)
        chains.append(f"| {row.name} | {row.attended:,.0f} | {' | '.join(f'{number:,}' for number in numbers)} |")
    return "\n\n".join("\n".join(block) for block in (head, lines, chains))


def _dense(msl: Any, length: int, kv_heads: int) -> Row:
    """MLX's kernel of a base chip, run for one KV head: the others do the same."""
    shape = Shape(G, 1, D)
    kernel = dense_kernel("g", shape, length)
    parts = parts_of(dense_step(msl, kernel, shape, length), PARTS)
    parts = {name: Counter({level: kv_heads * count[level] for level in LEVELS}) for name, count in parts.items()}
    chain = ceil(length / kernel.blocks / attend.TILE)
    formula = kv_heads * stats.dense_elements(length, D) * ITEM
    return Row(f"MLX's {kernel.name}", length, kv_heads, length, length, kernel.blocks, chain, chain, parts, formula)


def _random(*shape: int) -> mx.array:
    return mx.random.normal(shape, dtype=mx.float16)
