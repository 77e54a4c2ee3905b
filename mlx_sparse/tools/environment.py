"""Describe the machine on which a measurement runs. Serial numbers and host names are not included."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from ..core import registry

PACKAGES = ("mlx", "mlx-lm", "numpy", "mlx-sparse-attention")


def machine() -> dict[str, object]:
    """Return a dict of the hardware of this machine, and of the versions of Python and of `PACKAGES`."""
    return {**hardware(), **versions()}


def hardware() -> dict[str, str | int | None]:
    """Return a dict of the platform, the chip, its architecture, MLX's default device, and the memory size in bytes.

    "dense" is the dense attention of measurements: "cpu" for native kernels, "mlx" for mlx-lm's attention.
    """
    import mlx.core as mx

    info = mx.device_info()
    return {
        "platform": platform.platform(),
        "chip": info.get("device_name"),
        "architecture": info.get("architecture"),
        "device": str(mx.default_device()),
        "dense": "mlx" if registry.unavailable("cpu") else "cpu",
        "memory": memory(),
    }


def memory() -> int:
    """Return the memory size of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Return a dict from "python" and each of ``packages`` to the version. The version of a missing package is None."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in packages}}


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None if the package is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
