"""On what something was measured, and where the figures go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..files import replace_file
from ..machine import hardware, versions


def machine() -> dict[str, Any]:
    """What this is measured on."""
    return hardware() | versions()


def write(path: Path, text: str) -> None:
    """Replace a file at once or not at all."""
    replace_file(path, lambda new: new.write_text(text + "\n", encoding="utf-8"))
