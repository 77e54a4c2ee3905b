"""A heat map of what prompts attended, by layer and head."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ..checks import BackendUnavailable, ConfigError
from ..files import replace_file
from .results import Row

FORMATS = (".png", ".svg", ".pdf")
PANEL = 3.6  # inches


def check_picture(path: Path) -> None:
    """Refuse before anything is run what `draw_density` could not write.

    Raises:
        ConfigError: another kind of file, or a folder that is not there.
        BackendUnavailable: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--density-map: expected a file name in {', '.join(FORMATS)}, got {path}.")
    if not path.parent.is_dir():
        raise ConfigError(f"--density-map: expected a folder that exists, got {path.parent}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable(
            "matplotlib: expected it to be installed for --density-map, got none. Run: "
            "pip install 'mlx-sparse-attention[eval]'"
        )


def draw_density(rows: Sequence[Row], path: Path) -> None:
    """Write one panel for each row that has a density."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.density]
    if not rows:
        raise ConfigError("--density-map: expected a sparse prefill, got none: no call of a prompt was sparse.")
    across = min(len(rows), 3)
    down = -(-len(rows) // across)
    figure = Figure(figsize=(PANEL * across, PANEL * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for panel, row in zip(panels, rows, strict=False):
        image = panel.imshow(row.density, vmin=0, vmax=1, aspect="auto", interpolation="nearest", cmap="viridis")
        panel.set_title(f"{row.method}\n{row.task}", fontsize=7)
        panel.set_xlabel("query head")
        panel.set_ylabel("layer")
    for panel in panels[len(rows) :]:
        panel.remove()
    figure.colorbar(image, ax=list(panels[: len(rows)]), label="share of the causal block pairs attended")
    replace_file(path, lambda new: figure.savefig(new, dpi=100))
