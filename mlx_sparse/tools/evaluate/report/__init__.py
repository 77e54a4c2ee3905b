"""Pictures and one HTML file of what an evaluation found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....common.extras import require
from ....common.files import replace_file
from ..results import Row
from . import style
from .agreement import draw_agreement
from .maps import draw_density, draw_needle
from .page import page
from .quality import draw_quality
from .speed import draw_speed
from .tables import agreement_table, speed_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..selection import SelectionRow

__all__ = ["check", "draw_agreement", "draw_density", "draw_needle", "draw_quality", "draw_speed", "save", "write"]


def check() -> None:
    """Refuse before anything is run what could not be drawn.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    require("matplotlib")


def write(
    folder: Path,
    rows: Sequence[Row],
    facts: Mapping[str, Any],
    *,
    selection: Sequence[SelectionRow] = (),
    speed: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write ``report.html`` and its pictures as SVG into ``folder``.

    ``facts`` are those of `facts.run_facts`, ``speed`` rows of ``mlx-sparse bench -o jsonl``. The same arguments make
    the same files, byte by byte. A picture that nothing can be drawn in is left out.
    """
    tasks = list(dict.fromkeys(row.task for row in rows))
    figures: dict[str, Figure | None] = {f"quality-{task}": draw_quality(rows, task) for task in tasks}
    figures |= {f"depths-{task}": draw_needle([row for row in rows if row.task == task]) for task in tasks}
    figures |= {"density": draw_density(rows), "agreement": draw_agreement(selection), "speed": draw_speed(speed)}
    pictures = {name: style.svg(figure) for name, figure in figures.items() if figure is not None}
    for name, root in pictures.items():
        _replace(folder / f"{name}.svg", style.to_file(root))
    sections = [
        ("density", "Density by layer and head", None),
        ("agreement", "SparQ's choice of keys", agreement_table(selection) if selection else None),
        ("speed", "Speed", speed_table(speed) if speed else None),
    ]
    _replace(folder / "report.html", page(facts, rows, pictures, sections))


def save(figure: Figure, path: Path) -> None:
    """Write one picture as SVG."""
    _replace(path, style.to_file(style.svg(figure)))


def _replace(path: Path, content: bytes) -> None:
    replace_file(path, lambda new: new.write_bytes(content))
