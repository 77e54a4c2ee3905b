"""Test that the pictures of the documentation are drawn from the committed rows."""

from __future__ import annotations

import re
from pathlib import Path

import plots
import pytest

PICTURES = {
    "speed": "speed.svg",
    "quality": "quality.svg",
    **{name: f"results/{name}.svg" for name in ("peers", "prefill", "why")},
    "needles": "results/needle.svg",
}


def numbers_of(picture: Path) -> list[str]:
    """Return the coordinates of all paths of an SVG file. Matplotlib's versions may differ in everything else."""
    return re.findall(r'<path d="([^"]*)"', picture.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_drawn_from_the_committed_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    committed = plots.DOCS / PICTURES[name]
    monkeypatch.setattr(plots, "DOCS", tmp_path)
    monkeypatch.setattr("sys.argv", ["plots.py", name])
    plots.main()
    assert numbers_of(tmp_path / PICTURES[name]) == numbers_of(committed)
    assert len(numbers_of(committed)) > 20
