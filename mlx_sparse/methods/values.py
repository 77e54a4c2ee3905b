"""Values in the text form."""

from __future__ import annotations

import contextlib


def read_value(text: str) -> str | int | float | bool | None:
    """A word, a number, or else the text itself."""
    words: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        with contextlib.suppress(ValueError):
            number: int | float = read(text)
            return number
    return text
