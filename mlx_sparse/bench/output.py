"""On what something was measured."""

from __future__ import annotations

from typing import Any

from ..machine import hardware, versions


def machine() -> dict[str, Any]:
    """What this is measured on."""
    return hardware() | versions()
