"""On what something was measured, and where the figures go."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..files import replace_file


def machine() -> dict[str, Any]:
    """What this is measured on."""
    import mlx.core as mx

    info = mx.device_info()
    return {
        "platform": platform.platform(),
        "chip": info.get("device_name"),
        "architecture": info.get("architecture"),
        "device": str(mx.default_device()),
        "memory": memory(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "mlx-sparse-attention")},
    }


def memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def write(path: Path, text: str) -> None:
    """Replace a file at once or not at all."""
    replace_file(path, lambda new: new.write_text(text + "\n", encoding="utf-8"))
