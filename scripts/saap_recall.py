"""What routers find in text that was held out, with the keys before RoPE and after it: two tables of saap.md.

python scripts/saap_recall.py --collected WORK/collected-... --artefact A.safetensors --roped R.safetensors \
    [--context 8192 --queries 1024 --farther-than 256 --thinned 256] [--jsonl docs/results/saap.jsonl]

WORK is what `mlx-sparse train-saap --work WORK` keeps; of its two folders the one of the held-out text.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mlx_sparse import artefact
from mlx_sparse.tools.formats import table
from mlx_sparse.tools.train.collect import Collection, Place
from mlx_sparse.tools.train.layers import bucket_ids
from mlx_sparse.tools.train.recall import curve, grouped_queries, index, router_scores
from mlx_sparse.tools.train.rows import Distances, Texts

GRID = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
BAND_AT = 0.1  # the selectivity at which recall is shown by distance
ROUTERS = ("trained", "kmeans", "roped", "random", "oracle")


def main() -> None:
    args = _arguments()
    of = {space: artefact.load(path) for space, path in (("before", args.artefact), ("roped", args.roped))}
    exact = of["before"].sink_tokens, of["before"].recent_tokens
    nearest = [(sum(exact) << i) - exact[0] for i in range(args.context // sum(exact))]  # 511, 1023, 2047, ...
    nearest = [distance for distance in nearest if distance < args.context - 1]
    first = max(sum(exact), args.context // 2)
    about = json.loads((args.collected / "about.json").read_text(encoding="utf-8"))
    places = {int(layer): Place(**place) for layer, place in about["places"].items()}
    found = Collection(args.collected, places, about["windows"], args.context, args.queries, first, args.seed)
    recall: dict[str, list[Any]] = defaultdict(list)
    mass: dict[str, list[Any]] = defaultdict(list)
    bands: dict[str, list[Any]] = defaultdict(list)
    for number in tqdm(args.layers or list(of["before"].layers), unit="layer"):
        texts = found.texts(number).thinned(args.thinned)
        layers = {space: made.layers[number] for space, made in of.items()}
        ids = {
            space: bucket_ids(keys, np.array(layers[space].centroids, np.float32))
            for space, keys in (("before", texts.keys_before), ("roped", texts.keys_after))
        }
        buckets = of["before"].buckets
        ids["random"] = np.random.default_rng(number).integers(0, buckets, ids["before"].shape, np.int32)
        for head in range(texts.heads):
            seen = {
                space: [
                    index(texts, rows, head, buckets=buckets, distances=Distances(exact[0], near, args.farther_than))
                    for near in (nearest if space != "random" else nearest[:1])
                ]
                for space, rows in ids.items()
            }
            for router in ROUTERS:
                space = router if router in ("roped", "random") else "before"
                scores = _scores(router, texts, layers, head, seen[space][0])
                drawn = curve(seen[space][0], scores, Distances(*exact, args.farther_than))
                recall[router].append([np.interp(at, drawn.selectivity, drawn.recall) for at in GRID])
                mass[router].append([np.interp(at, drawn.selectivity, drawn.mass) for at in GRID])
                if router != "random":
                    bands[router].append(_by_distance(seen[space], scores))
    tables = [
        ("router, long-range queries", GRID, {name: np.mean(rows, axis=0) for name, rows in recall.items()}),
        ("router, all far attention", GRID, {name: np.mean(rows, axis=0) for name, rows in mass.items()}),
    ]
    totals = np.array([total for _, total in bands["kmeans"]])
    shares = {"share of the far attention": (totals / totals.sum(axis=1, keepdims=True)).mean(axis=0)}
    for name, rows in bands.items():
        shares[name] = np.mean([kept / np.maximum(total, 1e-30) for kept, total in rows], axis=0)
    ends = [*nearest[1:], args.context]
    bands_of = [f"{a:,} to {b:,}" for a, b in zip(nearest, ends, strict=True)]
    tables.append((f"found at {BAND_AT:.0%}", bands_of, shares))
    for title, columns, rows in tables:
        print(_table(title, columns, rows))
    if args.jsonl:  # what scripts/plots.py draws
        lines = [
            {"table": title, "router": name, "columns": _names(columns), "values": [round(float(v), 3) for v in values]}
            for title, columns, rows in tables
            for name, values in rows.items()
        ]
        args.jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("collected", "artefact", "roped"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in (("context", 8192), ("queries", 1024), ("farther-than", 256), ("seed", 0), ("thinned", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--jsonl", type=Path, help="also write the tables there")
    parser.add_argument("--layers", type=int, nargs="+", help="(default: all)")
    return parser.parse_args()


def _scores(router: str, texts: Texts, layers: dict[str, Any], head: int, seen: Any) -> Any:
    """``(n, C)`` of each bucket at each position."""
    if router == "random":
        return np.random.default_rng(0).random(seen.keys.shape)
    if router == "oracle":  # where the attention of the group is
        return (seen.mass / np.maximum(seen.mass.sum(axis=2, keepdims=True), 1e-30)).sum(axis=1)
    roped = router == "roped"
    queries = grouped_queries(texts, head, roped=roped)
    layer = layers["roped" if roped else "before"]
    return router_scores(queries, layer, head, scale=texts.scale, kmeans=router != "trained")


def _by_distance(seen: list[Any], scores: Any) -> tuple[Any, Any]:
    """Far attention on the buckets visited at `BAND_AT`, and in all, by distance: the bands between ``seen``'s."""
    order = np.argsort(-scores, axis=1, kind="stable")
    keys = np.take_along_axis(seen[0].keys, order, axis=1).cumsum(axis=1)
    inside = keys <= BAND_AT * keys[:, -1:]
    visited = np.zeros(scores.shape, bool)
    np.put_along_axis(visited, order, inside, axis=1)
    kept = np.array([(one.mass * visited[:, None]).sum() for one in seen] + [0.0])
    total = np.array([one.mass.sum() for one in seen] + [0.0])
    return kept[:-1] - kept[1:], total[:-1] - total[1:]


def _names(columns: Any) -> list[str]:
    return [column if isinstance(column, str) else f"{column:.0%}" for column in columns]


def _table(title: str, columns: Any, rows: dict[str, Any]) -> str:
    lines = [[name, *(f"{value:.3f}" for value in values)] for name, values in rows.items()]
    return table([title, *_names(columns)], lines) + "\n"


if __name__ == "__main__":
    main()
