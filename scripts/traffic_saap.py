"""Bytes that one decode step of SAAP moves.

Routing, list and attention run as a cache launches them, with an index that covers all keys but the recent ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np
from counting import LEVELS, Row, dense_step, parts_of, random, table_of
from launches import Network, dense_kernel
from tqdm import tqdm

from mlx_sparse.checks import check_int
from mlx_sparse.common import stats
from mlx_sparse.kernels import attend
from mlx_sparse.methods import SAAP, registry
from mlx_sparse.tools.bench.core import Shape
from mlx_sparse.tools.bench.inputs import bucket_ids
from mlx_sparse.tools.formats import table

ANY_PARAMETERS = True
PARTS = {
    **dict.fromkeys(("hidden_weight", "hidden_bias", "out_weight", "out_bias"), "network"),
    **dict.fromkeys(("units", "bits"), "between layers"),
    **dict.fromkeys(("visited", "offsets", "key_ids", "indices", "counts"), "list"),
    **{"keys": "K rows", "values": "V rows"},
}  # anything else: rest
S, KV_HEADS, G, D, ITEM = 131_072, 8, 4, 128, 2
NETWORK = Network(buckets=1024, hidden=1024)
EVERY = 20  # one key in so many is in a visited bucket: 5 %
FILLINGS = {
    "balanced": "the visited buckets hold 5 % of the keys, all of them as many",
    "half visited": "one bucket holds every other key and is visited; otherwise balanced",
    "half unvisited": "the same bucket, not visited",
}
# chain: most tiles of keys that a threadgroup works off one after the other; alone: the same if the window and each
# bucket were one threadgroup's.
CHAINS = {
    "attended": "attended",
    "slots": "slots of a list",
    "groups": "threadgroups",
    "chain": "tiles in turn",
    "alone": "with a threadgroup per bucket",
}


def measure(msl: Any, config: SAAP, length: int = S, kv_heads: int = KV_HEADS) -> list[Row]:
    """Dense attention, then every filling of the buckets.

    Raises:
        ConfigError: as many probes as buckets.
    """
    check_int("probes", config.probes, 1, NETWORK.buckets - 1)
    jobs = tqdm([None, *FILLINGS], unit="run", disable=None)
    return [step(msl, config, name, length, kv_heads) if name else _dense(msl, length, kv_heads) for name in jobs]


def filled(filling: str, visited: np.ndarray, length: int) -> np.ndarray:
    """``(1, Hkv, length)`` int16 for the ``visited (1, Hkv, probes)`` buckets."""
    ids = bucket_ids(visited[0], NETWORK.buckets, length, EVERY)
    if filling != "balanced":
        for row, chosen in zip(ids, visited[0], strict=True):
            others = np.setdiff1d(np.arange(NETWORK.buckets), chosen)
            row[::2] = (chosen if filling == "half visited" else others)[0]
    return ids[None]


def step(msl: Any, config: SAAP, filling: str, length: int, kv_heads: int) -> Row:
    """One step: route, list, attend."""
    route, index, expand, attended = (
        registry.load(name, "metal") for name in ("saap_route", "saap_index", "saap_indices", "attend_indices")
    )
    mx.random.seed(0)
    C, H = NETWORK.buckets, NETWORK.hidden
    weights = {
        "hidden_weight": random(kv_heads, D, H)[0] * D**-0.5,
        "hidden_bias": random(1, kv_heads, H)[0, 0],
        "out_weight": random(kv_heads, H, C)[0] * H**-0.5,
        "out_bias": random(1, kv_heads, C)[0, 0],
    }
    keys, values = (random(kv_heads, length, D) for _ in "kv")
    with msl.emulated(strict=False) as metal:
        visited = route(random(kv_heads * G, 1, D), probes=config.probes, **weights)
        ids = filled(filling, np.array(visited), length)
        covered = length - config.recent_tokens
        offsets, key_ids = index(mx.array(ids[..., :covered]), buckets=C, sink_tokens=config.sink_tokens)
        sizes = np.diff(np.array(offsets), axis=-1)
        slots = config.sink_tokens + config.recent_tokens + config.fold_every
        slots += int(np.sort(sizes, axis=-1)[..., -config.probes :].sum(axis=-1).max())
        listed = {"length": length, "covered": covered, "sink_tokens": config.sink_tokens, "capacity": slots}
        indices, counts = expand(visited, offsets, key_ids, **listed)
        queries = random(kv_heads * G, 1, D)
        attended(queries, keys, values, indices, scale=D**-0.5, counts=counts)
        reports = list(metal.launches)
    used, groups = np.array(counts), attend.splits_of(slots, kv_heads)
    elements = sum(stats.saap_elements(D, int(count), network=NETWORK.weights(D)) for count in used.ravel())
    chosen = np.take_along_axis(sizes, np.array(visited), axis=-1)
    facts = {"G": G, "S": length, "kv_heads": kv_heads, "attended": float(used.mean()), "slots": slots}
    facts |= {"groups": groups, "chain": ceil(ceil(int(used.max()) / attend.TILE) / groups)}
    facts["alone"] = ceil(max(config.recent_tokens, int(chosen.max())) / attend.TILE)
    return Row(filling, facts, parts_of(reports, PARTS), elements * ITEM)


def text(rows: Sequence[Row], config: SAAP) -> str:
    """The rows for people."""
    first = rows[0].facts
    head = [
        f"One decode step in kB (1,000 bytes) over S = {first['S']:,} keys: {first['kv_heads']} KV heads, G = {G}, "
        f"D = {D}, float16, a network of {NETWORK.hidden:,} hidden units, {config.probes} of {NETWORK.buckets:,} "
        f"buckets, {config.sink_tokens} + {config.recent_tokens:,} keys exactly.",
        *(f"* {name}: {what}." for name, what in FILLINGS.items()),
    ]
    chains = [[row.name, *(f"{row.facts[name]:,.0f}" for name in CHAINS)] for row in rows]
    tables = [table_of(rows, {"keys": lambda row: row.name}, PARTS), table(["keys", *CHAINS.values()], chains)]
    return "\n\n".join(["\n".join(head), *tables])


def _dense(msl: Any, length: int, kv_heads: int) -> Row:
    """MLX's kernel of a base chip, run for one KV head: the others do the same."""
    shape = Shape(G, 1, D)
    kernel = dense_kernel("g", shape, length)
    parts = parts_of(dense_step(msl, kernel, shape, length), PARTS)
    parts = {name: Counter({level: kv_heads * count[level] for level in LEVELS}) for name, count in parts.items()}
    chain = ceil(length / kernel.blocks / attend.TILE)
    facts = {"G": G, "S": length, "kv_heads": kv_heads, "attended": length, "slots": length, "groups": kernel.blocks}
    formula = kv_heads * stats.dense_elements(length, D) * ITEM
    return Row(f"MLX's {kernel.name}", facts | {"chain": chain, "alone": chain}, parts, formula)
