"""Build the support matrix, a table of all methods and backends in the registry."""

from __future__ import annotations

from typing import Any

from ..core.registry import BACKENDS, backends_of, unavailable
from ..methods import METHODS


def rows() -> list[dict[str, Any]]:
    """Return one row per method. The value of "backends" is a dict from each backend of the method to a string.

    The string is "yes", or the reason why the backend cannot run on this machine.
    """
    return [
        {
            "method": name,
            "stage": method.stage,
            "source": method.source,
            "backends": {backend: unavailable(backend) or "yes" for backend in backends_of(name)},
        }
        for name, method in METHODS.items()
    ]


def text() -> str:
    """Return the support matrix as text for a terminal, and the reasons why backends cannot run on this machine."""
    lines = [f"{'method':<19}{'stage':<20}" + "".join(f"{backend:<10}" for backend in BACKENDS)]
    for row in rows():
        cells = [row["backends"].get(backend, "no") for backend in BACKENDS]
        cells = [cell if cell in ("yes", "no") else "not here" for cell in cells]
        lines.append(f"{row['method']:<19}{row['stage']:<20}" + "".join(f"{cell:<10}" for cell in cells).rstrip())
    lines.append("")
    for name, what in BACKENDS.items():
        reason = unavailable(name)
        lines.append(f"{name}: {what}" + (f". Not here: {reason}" if reason else ""))
    return "\n".join(lines)
