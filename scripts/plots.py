"""Draw the pictures of README and docs/results from formulae and JSON lines. Needs matplotlib.

python scripts/plots.py bytes                       docs/bytes.svg: what one decoded token moves, by formula
python scripts/plots.py saap                        docs/results/saap.svg from saap.jsonl
python scripts/plots.py sample                      docs/results/sample.svg from sample.jsonl
python scripts/plots.py speed FILE.jsonl FILE.svg   times that `mlx-sparse bench step | prompt -o jsonl` printed
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from mlx_sparse.common.stats import dense_elements, sparq_elements

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "mlx-sparse"  # the same file from the same numbers
from matplotlib import pyplot as plt  # noqa: E402 - after the choice of renderer

DOCS = Path(__file__).parents[1] / "docs"
LAYERS, KV_HEADS, D, ITEM = 32, 8, 128, 2  # Llama 3.1 8B, float16
CONTEXTS = [1024 * 2**i for i in range(8)]
ROUTERS = {
    "oracle": ("best buckets before RoPE", "--", "0.3"),
    "trained": ("query network", "o-", "tab:blue"),
    "kmeans": ("k-means before RoPE", "s-", "tab:orange"),
    "roped": ("k-means after RoPE", "^-", "tab:red"),
    "random": ("random buckets", ":", "0.6"),
}
CURVES = {
    "router, long-range queries": "queries that look far away",
    "router, all far attention": "all far attention",
}
METHODS = {
    "sample, 1 chunk": ("o-", "tab:blue"),
    "sample, 2 chunks": ("s-", "tab:cyan"),
    "sample, 4 chunks": ("^-", "tab:purple"),
    "minference": ("D--", "tab:orange"),
    "streaming_prefill": ("v--", "0.45"),
}


def main(argv: Sequence[str]) -> int:
    """Draw one; return the exit code."""
    match list(argv):
        case ["bytes"]:
            _save(_bytes(), DOCS / "bytes.svg")
        case ["saap"]:
            _save(_saap(_lines(DOCS / "results" / "saap.jsonl")), DOCS / "results" / "saap.svg")
        case ["sample"]:
            _save(_sample(_lines(DOCS / "results" / "sample.jsonl")), DOCS / "results" / "sample.svg")
        case ["speed", source, target]:
            return _speed(Path(source), Path(target))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _save(figure: Any, target: Path) -> None:
    figure.savefig(target, metadata={"Date": None})
    print(target)


def _bytes() -> Any:
    def gigabytes(elements: int) -> float:
        return LAYERS * KV_HEADS * ITEM * elements / 1e9

    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    axes.plot(CONTEXTS, [gigabytes(dense_elements(S, D)) for S in CONTEXTS], "o-", color="0.45", label="dense")
    for rank, colour in ((32, "tab:blue"), (16, "tab:cyan")):
        moved = [gigabytes(sparq_elements(S, D, rank=rank, top_k=128)) for S in CONTEXTS]
        axes.plot(CONTEXTS, moved, "o-", color=colour, label=f"sparq:rank={rank},top_k=128")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(CONTEXTS, [f"{S // 1024}k" for S in CONTEXTS])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("GB of K and V per token")
    axes.set_title("Computed for Llama 3.1 8B in float16", fontsize=10)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure


def _saap(rows: Sequence[dict[str, Any]]) -> Any:
    """Recall over selectivity, and by distance: rows that scripts/saap_recall.py writes."""
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for axes, (name, title) in zip(panels, CURVES.items(), strict=False):
        of = {row["router"]: row for row in rows if row["table"] == name}
        for router, (label, line, colour) in ROUTERS.items():
            selectivity = [0.0, *(float(column.rstrip("%")) / 100 for column in of[router]["columns"])]
            axes.plot(selectivity, [0.0, *of[router]["values"]], line, color=colour, label=label, markersize=4)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("selectivity")
        axes.set_ylabel("recall")
    panels[0].legend(frameon=False, fontsize=8)
    (name,) = {row["table"] for row in rows} - CURVES.keys()
    of, axes = {row["router"]: row for row in rows if row["table"] == name}, panels[2]
    share = of["share of the far attention"]
    places = range(len(share["columns"]))
    axes.bar(places, share["values"], color="0.85", label="share of the far attention")
    for router, (_, line, colour) in ROUTERS.items():
        if router in of:
            axes.plot(places, of[router]["values"], line, color=colour, markersize=4)
    axes.set_xticks(list(places), share["columns"], fontsize=7)
    axes.set_title(f"by distance, at a selectivity of {name.removeprefix('found at ')}", fontsize=9)
    axes.set_xlabel("tokens away")
    axes.set_ylabel("recall")
    axes.legend(frameon=False, fontsize=8)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1)
    return figure


def curve_of(method: str) -> str:
    """The curve that a method belongs to."""
    if not method.startswith("sample"):
        return method.partition(":")[0]
    chunks = re.search(r"chunks=(\d+)", method)
    count = int(chunks[1]) if chunks else 1
    return f"sample, {count} chunk{'s' * (count > 1)}"


def _sample(rows: Sequence[dict[str, Any]]) -> Any:
    """Agreement with dense attention and KL over density, a row of panels for each text and model."""
    headings = list(dict.fromkeys(row["heading"] for row in rows))
    figure, grid = plt.subplots(len(headings), 2, figsize=(8, 3.2 * len(headings)), layout="constrained", squeeze=False)
    for heading, (agreement, kl) in zip(headings, grid, strict=True):
        for name, (line, colour) in METHODS.items():
            points = sorted(
                tuple(row[column] for column in ("density", "agreement", "KL"))
                for row in rows
                if row["heading"] == heading and curve_of(row["method"]) == name
            )
            if points:
                density, agreed, divergence = zip(*points, strict=True)
                agreement.plot(density, agreed, line, color=colour, label=name, markersize=4)
                kl.plot(density, divergence, line, color=colour, label=name, markersize=4)
        agreement.set_ylabel("agreement with dense")
        kl.set_ylabel("KL from dense, nats")
        kl.set_yscale("log")
        for axes in (agreement, kl):
            axes.set_title(heading, fontsize=9)
            axes.set_xlabel("density")
            axes.grid(alpha=0.3)
    grid[0][0].legend(frameon=False, fontsize=8)
    return figure


def _speed(source: Path, target: Path) -> int:
    from mlx_sparse.tools.evaluate import report
    from mlx_sparse.tools.evaluate.report.read import read_speed

    figure = report.draw_speed(read_speed(source))
    if figure is None:
        print(f"{source}: no row has times: nothing to draw.", file=sys.stderr)
        return 1
    report.save(figure, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
