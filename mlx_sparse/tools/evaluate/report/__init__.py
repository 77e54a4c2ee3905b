"""Pictures and one HTML file of what an evaluation found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ....extras import require
from ....files import replace_file
from ..metadata import Facts
from ..results import Row
from . import style
from .agreement import draw_agreement
from .maps import draw_density, draw_needle
from .page import Section, chosen, page
from .quality import draw_quality
from .speed import Speed, draw_speed
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
    facts: Facts,
    *,
    selection: Sequence[SelectionRow] = (),
    speed: Sequence[Speed] = (),
) -> None:
    """Write ``report.html`` and its pictures as SVG into ``folder``.

    The same arguments make the same files, byte by byte. A picture that nothing can be drawn in is left out.
    """
    tasks = list(dict.fromkeys(row.task for row in rows))
    figures: dict[str, Figure | None] = {f"quality-{task}": draw_quality(rows, task) for task in tasks}
    figures |= {f"depths-{task}": draw_needle([row for row in rows if row.task == task]) for task in tasks}
    figures |= {"density": draw_density(rows), "agreement": draw_agreement(selection), "speed": draw_speed(speed)}
    pictures = {name: style.svg(figure, name) for name, figure in figures.items() if figure is not None}
    for name, picture in pictures.items():
        _replace(folder / f"{name}.svg", picture)
    choices, times = [agreement_table(selection)] * bool(selection), [speed_table(speed)] * bool(speed)
    sections = [
        Section("Density by layer and head", chosen(pictures, "density")),
        Section("SparQ's choice of keys", chosen(pictures, "agreement"), choices),
        Section("Speed", chosen(pictures, "speed"), times),
    ]
    _replace(folder / "report.html", page(facts, rows, pictures, sections))


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as the SVG file ``path``, at once or not at all."""
    _replace(path, style.svg(figure))


def _replace(path: Path, content: str) -> None:
    replace_file(path, lambda new: new.write_text(content, encoding="utf-8"))
