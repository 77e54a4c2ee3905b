#!/usr/bin/env python3
"""Draw the plots for the documentation. This script needs matplotlib.

python scripts/plots.py bytes      docs/bytes.svg: bytes of a decode step by context and by layer, from formulas
python scripts/plots.py speed      docs/speed.svg: tokens per second by context, from docs/results/speed.jsonl

`mlx-sparse report` draws docs/quality.svg, which shows the quality against the bytes that the methods read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

from mlx_sparse.core.stats import dense_elements
from mlx_sparse.methods import SparQ

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "mlx-sparse"  # makes the files reproducible
from matplotlib import pyplot as plt  # noqa: E402 - the renderer is selected first

DOCS = Path(__file__).parents[1] / "docs"
ROWS = DOCS / "results" / "speed.jsonl"
LAYERS, KV_HEADS, D, ITEM = 32, 8, 128, 2  # Llama 3.1 8B, float16
CONTEXTS = [1024 * 2**i for i in range(8)]
GEMMA = {"layers": 18, "full": (5, 11, 17), "window": 512, "heads": 1, "D": 256, "item": 2}  # Gemma 3 270M, bfloat16
LONG = 32_768  # tokens of the picture by layer
METHODS = {"dense": "0.45", "sparq": "tab:blue", "sample+sparq": "tab:cyan"}  # with colors


def main() -> int:
    """Draw the requested plot, and return the exit code."""
    actions = {"bytes": draw_bytes, "speed": draw_speed}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit(f"usage: plots.py {'|'.join(actions)}")
    print(actions[sys.argv[1]]())
    return 0


def draw_bytes() -> Path:
    """Draw the bytes of keys and values that a decode step reads, by context length and by layer."""

    def gigabytes(elements: int) -> float:
        return LAYERS * KV_HEADS * ITEM * elements / 1e9

    figure, (axes, bars) = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
    axes.plot(CONTEXTS, [gigabytes(dense_elements(S, D)) for S in CONTEXTS], "o-", color="0.45", label="dense")
    for method, color in ((SparQ(), "tab:blue"), (SparQ(key_bits=16), "tab:cyan")):
        moved = [gigabytes(method.elements(S, D)) for S in CONTEXTS]
        axes.plot(CONTEXTS, moved, "o-", color=color, label=str(method))
    axes.set_yscale("log")
    _by_context(
        axes, CONTEXTS, "GB of K and V per token (log scale)", "By formula, not measured: Llama 3.1 8B, float16"
    )

    bytes_of = GEMMA["heads"] * GEMMA["item"] / 1e6
    keys = [LONG if layer in GEMMA["full"] else GEMMA["window"] for layer in range(GEMMA["layers"])]
    dense = [bytes_of * dense_elements(S, GEMMA["D"]) for S in keys]
    sparse = [bytes_of * SparQ().elements(S, GEMMA["D"]) if S == LONG else None for S in keys]
    bars.bar(range(len(keys)), dense, color="0.75", label="dense")
    served = [(layer, moved) for layer, moved in enumerate(sparse) if moved is not None]
    bars.bar(*zip(*served, strict=True), color="tab:blue", label="sparq")
    bars.set_xticks(range(1, len(keys), 4))
    bars.set_ylim(top=1.4 * max(dense))  # room for the legend
    bars.set_xlabel("layer (layers with short bars have a sliding window)")
    bars.set_ylabel("MB of K and V per token")
    bars.set_title(f"By formula, not measured: Gemma 3 270M, {LONG // 1024}k tokens", fontsize=10)
    bars.legend(frameon=False)
    return _save(figure, "bytes.svg")


def draw_speed() -> Path:
    """Draw the prompt and generation speeds of whole commands by context length, from the rows of `bench generate`."""
    rows = [row for row in map(json.loads, ROWS.read_text().splitlines()) if row["task"] == "generate"]
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
    for axes, speed in zip(panels, ("prompt", "generation"), strict=True):
        for method, color in METHODS.items():
            own = [row for row in rows if row["method"] == f"{method} mlx" and row["metric"] == speed]
            label = "plain mlx-lm" if method == "dense" else f"--attn {method}"
            axes.plot([row["context"] for row in own], [row["mean"] for row in own], "o-", color=color, label=label)
        axes.set_ylim(bottom=0)
        _by_context(
            axes, sorted({row["context"] for row in rows}), f"{speed} tokens/s", "SmolLM2-135M, float32, two CPU cores"
        )
    return _save(figure, "speed.svg")


def _by_context(axes: Any, contexts: list[int], label: str, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{S / 1024:.3g}k" for S in contexts])
    axes.minorticks_off()
    axes.set_xlabel("context, tokens")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def _save(figure: Any, name: str) -> Path:
    figure.savefig(DOCS / name, metadata={"Date": None})
    return DOCS / name


if __name__ == "__main__":
    sys.exit(main())
