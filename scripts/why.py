#!/usr/bin/env python3
"""Measure on real text why SparQ and SAAP work, with the statistics of their papers (docs/results/why.md).

python scripts/why.py [--model gemma-3-270m --accept-license gemma] >> docs/results/why.jsonl

The script records queries and keys of the layers without a sliding window, and prints a row of JSON for each method and
metric. "examples" counts the queries whose keys are selected, in all layers. Standard errors are over passages.

kurtosis               excess kurtosis of the components of a query; 0 for a normal distribution
top_32_mass            softmax mass of the 32 keys with the highest scores of a query head
agreement              share of the exact top k keys that the method selects
recall                 exact attention recall of the selected keys
bias, error            mean (absolute) difference of alpha (sparq.8) from the exact recall of a query head
correlation, too_high  of the estimate (sparq.24) with the exact recall; share of estimates 0.02 above the recall
span                   share of the passage between the first and the last decile of the keys of a k-means bucket
shift, shift_of_keys   total variation distance of the buckets of the queries, or of as many keys, from all keys
negative               share of negative inner products of queries and keys
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from evidence import origin
from tqdm import tqdm

from mlx_sparse.checks import Parser
from mlx_sparse.core.attend.ops import exact_logits, group_queries, softmax_lse
from mlx_sparse.files import cache_directory
from mlx_sparse.lm.model import has_qk_norm
from mlx_sparse.methods.sparq import ops
from mlx_sparse.methods.sparq.config import Selection
from mlx_sparse.methods.text import parse
from mlx_sparse.tools.assets.models import DEFAULT, add_model_options, check_model
from mlx_sparse.tools.evaluate import texts as real_texts
from mlx_sparse.tools.evaluate.inputs import encode_texts, load_model
from mlx_sparse.tools.evaluate.tasks.text import read_text
from mlx_sparse.tools.train.collect import Collection, collect, find_layer_shapes
from mlx_sparse.tools.train.layers import bucket_ids, fit_centroids
from mlx_sparse.tools.train.rows import Texts

Array = np.ndarray
RANKS, TOP_KS, BUCKETS = (4, 8, 16, 32, 64, 128, 256), (32, 64, 128, 256), 32
QUERIES = 128  # recorded queries in the last quarter of a passage
SELECTIONS = 30  # selections per passage, in all layers together


def methods(D: int) -> dict[str, tuple[str, ...]]:
    """Return a dict from each method to its metrics. The first method selects the exact top k keys."""
    ranks = [rank for rank in RANKS if rank <= D]
    found: dict[str, tuple[str, ...]] = {f"sparq:preset=paper,rank={D},local_window=0": ()}
    found |= {f"sparq:rank={rank},top_k={k}": ("recall",) for k in TOP_KS for rank in ranks}
    for rank in ranks[:-1]:
        for score in ("preset=paper,", "component_score=query_key,key_bits=16,", ""):
            found[f"sparq:{score}rank={rank},local_window=0"] = ("agreement",)
        found[f"random_projection:rank={rank}"] = ("agreement",)
    for rank in (D // 4, D // 2):
        for temperature in ("coverage", "sqrt(D)", "sqrt(r)"):
            found[f"sparq:preset=paper,rank={rank};temperature={temperature}"] = ("bias", "error")
    estimates = ("sparq", "sparq:top_k=32", "sparq:preset=paper", f"sparq:rank={D // 4}", f"sparq:rank={D // 2}")
    return found | dict.fromkeys(estimates, ("recall", "bias", "correlation", "too_high"))


def metrics(alpha: Array, exact: Array, same: Array) -> dict[str, float]:
    """Return all metrics of a method from ``alpha (..., G)``, the ``exact`` recall, and the agreement ``(...)``."""
    estimate, recall = alpha.mean(axis=-1).ravel(), exact.mean(axis=-1).ravel()
    found = {"agreement": same.mean(), "recall": exact.mean(), "bias": (alpha - exact).mean()}
    found |= {"error": np.abs(alpha - exact).mean(), "too_high": (estimate > recall + 0.02).mean()}
    return found | {"correlation": np.corrcoef(estimate, recall)[0, 1]}


def select(query: mx.array, keys: mx.array, scale: float, qk_norm: bool) -> tuple[Array, float]:
    """Run `methods` for ``query (1, Hq, 1, D)``. Return ``(methods, Hkv, 2 G + 1)`` and the mean mass of 32 keys."""
    _, Hkv, _, D = keys.shape
    coded, weight_of_one = ops.code_keys(keys, None), mx.ones((1, Hkv, D))
    beside = {16: (mx.contiguous(keys.swapaxes(-1, -2)), ops.deviation(keys, None))}
    beside[4] = (coded, ops.key_spread(coded, keys, None))
    weights, _ = softmax_lse(exact_logits(group_queries(query, Hkv) * scale, keys), None)
    best, found = None, []
    for method in methods(D):
        text, _, temperature = method.replace("random_projection", "sparq").partition(";temperature=")
        config: Any = parse(text)[0].at(keys.shape[2]).for_model(qk_norm=qk_norm, grouped=query.shape[1] > Hkv)
        window = config.top_k // 4 if config.local_window is None else config.local_window
        wide = scale * math.sqrt(D / config.rank)
        if method.startswith("random"):
            basis = random_basis(D, config.rank)
            made = ops.sparq_select(query @ basis, keys @ basis, Selection(config.rank, config.top_k, 0, wide))
        else:
            keys_t, weight = beside[config.key_bits]
            if config.component_score == "query":  # equal weights select the same components, without (sparq.3)'s t
                weight = weight_of_one if temperature.startswith("sqrt") else None
            factor = wide if temperature == "sqrt(r)" else scale
            selection = Selection(config.rank, config.top_k, window, factor, weight, None, keys_t)
            made = ops.sparq_select(query, keys, selection)
        indices, alpha, _ = made
        best = indices if best is None else best
        exact = mx.take_along_axis(weights, indices[:, :, None], axis=-1).sum(axis=-1)
        same = (indices[..., None] == best[..., None, :]).any(axis=-1).mean(axis=-1, keepdims=True)
        found.append(mx.concatenate([alpha.reshape(exact.shape), exact, same], axis=-1)[0])
    return np.array(mx.stack(found)), mx.sort(weights, axis=-1)[..., -32:].sum(axis=-1).mean().item()


@cache
def random_basis(D: int, rank: int) -> mx.array:
    return mx.array(np.linalg.qr(np.random.default_rng(0).standard_normal((D, rank)))[0], mx.float32)


def of_buckets(queries: Array, keys: Array, positions: Array) -> dict[str, Array]:
    """Cluster ``keys (W, Hkv, S, D)`` of each head, and return a dict from metrics to one number per passage."""
    W, heads, S, D = keys.shape
    rows, without_sinks = queries.reshape(W, heads, -1, D), keys[:, :, 1:].swapaxes(0, 1).reshape(heads, -1, D)
    centroids = np.stack([fit_centroids(own, BUCKETS) for own in without_sinks])
    ids, asked = bucket_ids(keys, centroids), bucket_ids(rows, centroids)

    def shift(ids_of_part: Array) -> Array:
        difference = shares(ids_of_part) - shares(ids[:, :, None])
        return np.abs(difference).sum(axis=-1).mean(axis=(1, 2)) / 2

    def shares(array: Array) -> Array:
        return (array[..., None] == np.arange(BUCKETS)).mean(axis=-2)

    def span(own: Array) -> float:
        parts = [np.flatnonzero(own == bucket) for bucket in range(BUCKETS)]
        return sum(len(part) * np.subtract(*np.quantile(part, (0.9, 0.1))) for part in parts if len(part)) / S**2

    products = (query.astype(np.float32) @ key.swapaxes(-1, -2) for query, key in zip(rows, keys, strict=True))
    return {
        "span": np.array([np.mean([span(own) for own in passage]) for passage in ids]),
        "shift": shift(asked.reshape(W, heads, -1, positions.shape[1])),
        "shift_of_keys": shift(np.take_along_axis(ids, positions[:, None], axis=2)[:, :, None]),
        "negative": np.array([(product < 0).mean() for product in products]),
    }


def measure(texts: Texts, qk_norm: bool, steps: int) -> dict[str, Array]:
    """Return a dict from metrics of a layer to one number per passage. "selections" has the arrays of `select`."""
    few, made = texts.thinned(steps), []
    for (window, index), position in np.ndenumerate(few.positions):
        rows = few.rope_queries[window, :, index : index + 1], few.rope_keys[window, :, : position + 1]
        made.append(select(*(mx.array(array[None].astype(np.float32)) for array in rows), texts.scale, qk_norm))
    queries = np.asarray(texts.rope_queries, np.float32)
    centered = queries - queries.mean(axis=-1, keepdims=True)
    kurtosis = (centered**4).mean(axis=-1) / (centered**2).mean(axis=-1) ** 2 - 3
    found = {"kurtosis": kurtosis.mean(axis=(1, 2))}
    found["top_32_mass"] = np.array([mass for _, mass in made]).reshape(few.positions.shape).mean(axis=1)
    selections = np.array([part for part, _ in made])
    found["selections"] = selections.reshape(*few.positions.shape, *selections.shape[1:])
    for name in ("pre_rope", "rope"):
        own = of_buckets(getattr(texts, f"{name}_queries"), getattr(texts, f"{name}_keys"), texts.positions)
        found |= {f"{metric}_{name}": value for metric, value in own.items()}
    return found


def numbers(D: int, layers: list[dict[str, Array]]) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """Yield each method and metric with one number per passage and one number per layer."""
    for metric in [name for name in layers[0] if name != "selections"]:
        values = np.stack([layer[metric] for layer in layers])
        yield "dense", metric, list(values.mean(axis=0)), list(values.mean(axis=1))
    every = np.stack([layer["selections"] for layer in layers])  # (layers, windows, queries, methods, Hkv, 2 G + 1)
    G = every.shape[-1] // 2
    for place, (method, names) in enumerate(methods(D).items()):
        parts = np.split(every[:, :, :, place], (G, 2 * G), axis=-1)
        by_passage = [metrics(*(part[:, window] for part in parts)) for window in range(every.shape[1])]
        by_layer = [metrics(*(part[layer] for part in parts)) for layer in range(len(every))]
        for name in names:
            yield method, name, [of[name] for of in by_passage], [of[name] for of in by_layer]


def main() -> int:
    """Print a row for each method and metric, and return the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--text", nargs="+", default=["shakespeare", "novels", "python"], help="names or files")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a passage (default: 2048)")
    parser.add_argument("--passages", type=int, default=4, help="passages of each text (default: 4)")
    args = parser.parse_args()
    check_model(args.model, cache_directory(), args.accept_license)
    model, tokenizer, _ = load_model(args.model, None, args.accept_license, only_mlx_lm=True)
    options: dict[str, int] = {"context": args.context, "limit": args.passages, "seed": 0}
    tokens = encode_texts(tokenizer, real_texts.read(args.text))
    passages = [passage.tokens for part in tokens for passage in read_text(part, tokenizer, **options)]
    shapes, last = find_layer_shapes(model, 0), args.context // 4
    steps = -(-SELECTIONS // len(shapes))
    name = Path(args.model or DEFAULT).name
    about = {
        **origin("why.py", sys.argv[1:], "mlx", "mlx-lm"),
        "model": name,
        "task": "text",
        "context": args.context,
        "examples": len(passages) * steps * len(shapes),
        "passages": len(passages),
    }
    with tempfile.TemporaryDirectory() as folder:
        sizes = (len(passages), args.context, min(QUERIES, last), args.context - last)
        recorded = Collection(Path(folder), shapes, *sizes, seed=0)
        with tqdm(total=len(passages) * args.context, unit="token", desc="recording", disable=None) as progress:
            collect(model, recorded, passages, key="", progress=progress)
        layers = [
            measure(recorded.texts(layer), has_qk_norm(model), steps)
            for layer in tqdm(shapes, desc="layers", disable=None)
        ]
    for method, metric, by_passage, by_layer in numbers(next(iter(shapes.values())).D, layers):
        short = re.sub("[^a-z0-9_]+", "-", method.lower()).strip("-")
        key = f"why/{name.split('-')[0]}/text/{args.context / 1024:g}k/{short}/{metric}"
        sem = np.std(by_passage, ddof=1) / math.sqrt(len(passages))
        rounded = [round(float(number), 4) for number in by_layer]
        found = {"mean": float(np.mean(by_passage)), "sem": float(sem), "by_layer": rounded}
        found |= {"lowest": min(rounded), "highest": max(rounded)}
        print(json.dumps({"key": key, **about, "method": method, "metric": metric, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
