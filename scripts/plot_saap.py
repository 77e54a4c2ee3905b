"""Draw docs/results/saap.svg from the tables of saap.md: recall over selectivity, and by distance.

python scripts/plot_saap.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "mlx-sparse"  # the same file from the same numbers
from matplotlib import pyplot as plt  # noqa: E402 - after the choice of renderer

FOLDER = Path(__file__).parents[1] / "docs" / "results"
STYLES = {
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


def tables(text: str) -> dict[str, tuple[list[str], dict[str, list[float]]]]:
    """Columns and rows of numbers, by the first cell of the header."""
    found: dict[str, tuple[list[str], dict[str, list[float]]]] = {}
    header: list[str] | None = None
    for line in text.splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells
            wanted = header[0] in CURVES or header[0].startswith("found at")
            found.update({header[0]: (header[1:], {})} if wanted else {})
        elif header[0] in found and not line.startswith("|-"):
            found[header[0]][1][cells[0]] = [float(cell) for cell in cells[1:]]
    return found


def main() -> None:
    found = tables((FOLDER / "saap.md").read_text(encoding="utf-8"))
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for axes, (name, title) in zip(panels, CURVES.items(), strict=False):
        columns, rows = found[name]
        selectivity = [0.0, *(float(column.rstrip("%")) / 100 for column in columns)]
        for router, (label, line, colour) in STYLES.items():
            axes.plot(selectivity, [0.0, *rows[router]], line, color=colour, label=label, markersize=4)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("selectivity")
        axes.set_ylabel("recall")
    panels[0].legend(frameon=False, fontsize=8)
    ((name, (columns, rows)),) = ((name, table) for name, table in found.items() if name.startswith("found at"))
    axes, places = panels[2], range(len(columns))
    axes.bar(places, rows["share of the far attention"], color="0.85", label="share of the far attention")
    for router, (_, line, colour) in STYLES.items():
        if router in rows:
            axes.plot(places, rows[router], line, color=colour, markersize=4)
    axes.set_xticks(list(places), columns, fontsize=7)
    axes.set_title(f"by distance, at a selectivity of {name.removeprefix('found at ')}", fontsize=9)
    axes.set_xlabel("tokens away")
    axes.set_ylabel("recall")
    axes.legend(frameon=False, fontsize=8)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1)
    target = FOLDER / "saap.svg"
    figure.savefig(target, metadata={"Date": None})
    print(target)


if __name__ == "__main__":
    main()
