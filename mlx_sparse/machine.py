"""On what something is measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any


def machine() -> dict[str, Any]:
    """The machine, and the versions of what runs there."""
    return hardware() | versions()


def hardware() -> dict[str, Any]:
    """The machine, and the device of it that MLX uses."""
    import mlx.core as mx

    info = mx.device_info()
    return {
        "platform": platform.platform(),
        "chip": info.get("device_name"),
        "architecture": info.get("architecture"),
        "device": str(mx.default_device()),
        "memory": memory(),
    }


def memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def versions() -> dict[str, str]:
    """Of Python and of the packages that figures depend on."""
    packages = ("mlx", "mlx-lm", "numpy", "mlx-sparse-attention")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
