"""Packages that may be missing, and what to type then: no package index has this one, with or without an extra."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from ..checks import BackendUnavailable

# Names to import, and the extra that has them; none where a plain install brings them.
EXTRAS = {
    **dict.fromkeys(("jinja2", "mlx", "mlx_lm", "numpy", "psutil", "safetensors", "tqdm", "tomli", "transformers"), ""),
    **dict.fromkeys(("onnx", "onnx_ir", "onnxscript", "onnxruntime"), "onnx"),
    **dict.fromkeys(("torch", "triton"), "cuda"),
    "faiss": "saap",
    "gguf": "gemma",
    "lm_eval": "lm-eval",
    "matplotlib": "eval",
}


class PackageMissing(BackendUnavailable, ImportError):
    """A package that is needed is not installed, or does not load."""


def install_hint(extra: str = "", options: str = "") -> str:
    """What to type to install this package, with ``extra`` and pip's ``options``."""
    pip = " ".join(filter(None, ("pip install", options)))
    clone, wheel = (f"'{place}[{extra}]'" if extra else place for place in (".", "FILE.whl"))
    return f"`{pip} {clone}` in the clone, or with a wheel `{pip} {wheel}`"


def not_installed(*packages: str) -> str | None:
    """Which of ``packages``, all of one extra, are missing, and what to type; None when all are there."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"{' and '.join(missing)} not installed: run {install_hint(EXTRAS[missing[0]])}" if missing else None


def require(package: str) -> None:
    """Check that ``package`` is installed, without importing it.

    Raises:
        PackageMissing: it is not.
    """
    if importlib.util.find_spec(package) is None:
        raise PackageMissing(_told(package, "to be installed, got none"))


@contextlib.contextmanager
def naming_missing() -> Iterator[None]:
    """Say in one line which package is missing or does not load.

    Raises:
        PackageMissing: in place of the ImportError of another package.
    """
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "mlx_sparse":
            raise
        missing = isinstance(error, ModuleNotFoundError)
        found = "to be installed, got none" if missing else f"to load, got: {str(error).partition(chr(10))[0]}"
        raise PackageMissing(_told(error.name, found)) from None


def _told(module: str, found: str) -> str:
    extra = EXTRAS.get(module.partition(".")[0])
    return f"{module}: expected it {found}. {'Install it' if extra is None else f'Run {install_hint(extra)}'}."
