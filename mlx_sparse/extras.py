"""Find missing optional packages, and build the command that installs the missing packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from .checks import BackendUnavailable

NAME = "mlx-sparse-attention"
REBUILD = "--force-reinstall --no-deps"  # reinstall this package only

# Extra that installs each import name; empty for the dependencies that are always installed.
EXTRAS = {
    **dict.fromkeys(("mlx", "mlx_lm", "numpy", "psutil", "rich", "safetensors", "tqdm", "tomli"), ""),
    "transformers": "",
    **dict.fromkeys(("onnx", "onnxruntime"), "onnx"),
    **dict.fromkeys(("torch", "triton"), "cuda"),
    "gguf": "gemma",
    "lm_eval": "lm-eval",
    "mlx_vlm": "vlm",
}


class PackageMissing(BackendUnavailable, ImportError):
    """A required package is not installed or cannot be imported."""


def install_hint(extra: str = "", options: str = "") -> str:
    """Return the command that reinstalls this package with ``extra`` and the installer's ``options``.

    The command uses the origin that the installer recorded (PEP 610). The origin is a folder, a file, a repository or
    an index.
    """
    mine = _distribution()
    if origin := mine and _origin(mine, extra):
        return f"`{' '.join(filter(None, (_installer(mine), options, origin)))}`"
    clone, wheel = (f"'{place}[{extra}]'" if extra else place for place in (".", "FILE.whl"))
    pip = " ".join(filter(None, ("pip install", options)))
    return f"`{pip} {clone}` in the clone, or with a wheel `{pip} {wheel}`"


def build_hint() -> str:
    """Return the command that reinstalls this package from source and compiles its native kernels."""
    mine = _distribution()
    origin = mine and _origin(mine)
    if not mine or not origin or origin.rstrip("'").endswith(".whl"):
        return f"`pip install {REBUILD} .` in the clone"
    return install_hint(options=f"{REBUILD} --no-binary {NAME}" if origin == NAME else REBUILD)


def _distribution() -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError:
        return None


def _origin(mine: importlib.metadata.Distribution, extra: str = "") -> str | None:
    """Return the pip argument that reinstalls ``mine`` with ``extra``, or None if the local source no longer exists."""
    extra = f"[{extra}]" if extra else ""
    recorded = mine.read_text("direct_url.json")
    if recorded is None:
        return shlex.quote(f"{NAME}{extra}")
    found = json.loads(recorded)
    url = urlsplit(found["url"])
    if "vcs_info" in found:
        place = f"{found['vcs_info']['vcs']}+{found['url']}@{found['vcs_info']['commit_id']}"
    elif url.scheme == "file":
        path = url2pathname(url.path)
        editable = "-e " if found.get("dir_info", {}).get("editable") else ""
        return f"{editable}{shlex.quote(f'{path}{extra}')}" if Path(path).exists() else None
    else:
        place = found["url"]
    within = f"#subdirectory={found['subdirectory']}" if "subdirectory" in found else ""
    return shlex.quote(f"{NAME}{extra} @ {place}{within}")


def _installer(mine: importlib.metadata.Distribution) -> str:
    """Return the pip, uv or pipx command that installs into this environment, even if the environment is inactive."""
    home = Path(sys.prefix)
    if (home / "pipx_metadata.json").is_file():
        return f"pipx runpip {shlex.quote(home.name)} install"
    if (mine.read_text("INSTALLER") or "").strip() == "uv":
        return f"uv pip install --python {shlex.quote(sys.prefix)}"
    pip = shutil.which("pip")
    mine_first = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return "pip install" if mine_first else f"{shlex.quote(sys.executable)} -m pip install"


def not_installed(*packages: str) -> str | None:
    """Return a message with the missing ``packages`` and the install command, or None if all packages are installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"{' and '.join(missing)} not installed: run {install_hint(EXTRAS[missing[0]])}" if missing else None


def require(package: str) -> None:
    """Raise unless ``package`` is installed. The package is not imported."""
    if importlib.util.find_spec(package) is None:
        raise PackageMissing(_message(package, "to be installed, got none"))


@contextlib.contextmanager
def naming_missing() -> Iterator[None]:
    """Convert an ImportError that is raised in the ``with`` block to a one-line error.

    Raises:
        PackageMissing: a package is missing or cannot be imported. The message contains the command that installs the
            package.
    """
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "mlx_sparse":
            raise
        missing = isinstance(error, ModuleNotFoundError)
        found = "to be installed, got none" if missing else f"to load, got: {str(error).partition(chr(10))[0]}"
        raise PackageMissing(_message(error.name, found)) from None


def _message(module: str, found: str) -> str:
    extra = EXTRAS.get(module.partition(".")[0])
    return f"{module}: expected it {found}. {'Install it' if extra is None else f'Run {install_hint(extra)}'}."
