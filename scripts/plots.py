"""Draw docs/bytes.svg: the bytes that a decode step reads, by formula. This script needs matplotlib.

python scripts/plots.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

from mlx_sparse.methods.stats import dense_elements, sparq_elements

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "mlx-sparse"  # makes the file reproducible
from matplotlib import pyplot as plt  # noqa: E402 - the renderer is selected first

TARGET = Path(__file__).parents[1] / "docs" / "bytes.svg"
LAYERS, KV_HEADS, D, ITEM = 32, 8, 128, 2  # Llama 3.1 8B, float16
CONTEXTS = [1024 * 2**i for i in range(8)]


def main() -> int:
    """Draw the picture and print its path; return the exit code."""
    _bytes().savefig(TARGET, metadata={"Date": None})
    print(TARGET)
    return 0


def _bytes() -> Any:
    def gigabytes(elements: int) -> float:
        return LAYERS * KV_HEADS * ITEM * elements / 1e9

    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    axes.plot(CONTEXTS, [gigabytes(dense_elements(S, D)) for S in CONTEXTS], "o-", color="0.45", label="dense")
    for rank, color in ((32, "tab:blue"), (16, "tab:cyan")):
        moved = [gigabytes(sparq_elements(S, D, rank=rank, top_k=128)) for S in CONTEXTS]
        axes.plot(CONTEXTS, moved, "o-", color=color, label=f"sparq:rank={rank},top_k=128")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(CONTEXTS, [f"{S // 1024}k" for S in CONTEXTS])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("GB of K and V per token")
    axes.set_title("Computed for Llama 3.1 8B in float16", fontsize=10)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    sys.exit(main())
