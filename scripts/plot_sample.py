"""Draw docs/results/sample.svg: agreement with dense attention and KL over density, from the tables of sample.md.

python scripts/plot_sample.py
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "mlx-sparse"  # the same file from the same numbers
from matplotlib import pyplot as plt  # noqa: E402 - after the choice of renderer

FOLDER = Path(__file__).parents[1] / "docs" / "results"
STYLES = {
    "sample, 1 chunk": ("o-", "tab:blue"),
    "sample, 2 chunks": ("s-", "tab:cyan"),
    "sample, 4 chunks": ("^-", "tab:purple"),
    "minference": ("D--", "tab:orange"),
    "streaming_prefill": ("v--", "0.45"),
}


def curve_of(method: str) -> str:
    """The curve that a method belongs to."""
    if not method.startswith("sample"):
        return method.partition(":")[0]
    chunks = re.search(r"chunks=(\d+)", method)
    count = int(chunks[1]) if chunks else 1
    return f"sample, {count} chunk{'s' * (count > 1)}"


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """Rows with a density, by the heading they stand under."""
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    heading, header = "", None
    for line in text.splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if line.startswith("#"):
            heading = line.strip("# ")
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells if {"method", "density", "KL"} <= set(cells) else []
        elif header and not line.startswith("|-") and cells[header.index("method")] != "dense":
            found[heading].append(dict(zip(header, cells, strict=True)))
    return found


def main() -> None:
    found = tables((FOLDER / "sample.md").read_text(encoding="utf-8"))
    figure, grid = plt.subplots(len(found), 2, figsize=(8, 3.2 * len(found)), layout="constrained", squeeze=False)
    for (heading, rows), (agreement, kl) in zip(found.items(), grid, strict=True):
        for name, (line, colour) in STYLES.items():
            points = sorted(
                tuple(float(row[column].split()[0]) for column in ("density", "agreement", "KL"))
                for row in rows
                if curve_of(row["method"]) == name
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
    target = FOLDER / "sample.svg"
    figure.savefig(target, metadata={"Date": None})
    print(target)


if __name__ == "__main__":
    main()
