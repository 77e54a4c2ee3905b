"""Check whether the Triton kernels can run on this machine."""

from __future__ import annotations

import importlib.util
import os
import sys

from mlx_sparse.extras import not_installed

OLDEST = (8, 0)  # the oldest compute capability that the tests compile the kernels for


def interpreted() -> bool:
    """Return True if TRITON_INTERPRET=1 is set. Triton then interprets kernels on the CPU (slow, for tests only)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def unavailable() -> str | None:
    """Return the reason why the Triton kernels cannot run on this machine, or None."""
    if importlib.util.find_spec("triton") is None and sys.platform != "linux":
        return "triton has packages for Linux only"
    reason = not_installed("torch", "triton")
    return reason if reason or interpreted() else _no_gpu()


def _no_gpu() -> str | None:
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"torch does not work here: {error}"
    if torch.version.hip:
        return "torch is built for AMD GPUs; the kernels were tested for NVIDIA GPUs only"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU; TRITON_INTERPRET=1 runs the kernels on the CPU for tests"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        return "the GPU is an sm_{}{}; the kernels need an sm_{}{} (A100) or newer".format(*capability, *OLDEST)
    return None
