"""Packages that may be missing, and the command that brings them, for how this one was installed."""

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
REBUILD = "--force-reinstall --no-deps"  # what is installed comes anew, and alone

# Names to import, and the extra that has them; none where a plain install brings them.
EXTRAS = {
    **dict.fromkeys(("jinja2", "mlx", "mlx_lm", "numpy", "psutil", "safetensors", "tqdm", "tomli", "transformers"), ""),
    **dict.fromkeys(("onnx", "onnxruntime"), "onnx"),
    **dict.fromkeys(("torch", "triton"), "cuda"),
    "gguf": "gemma",
    "lm_eval": "lm-eval",
    "matplotlib": "eval",
}


class PackageMissing(BackendUnavailable, ImportError):
    """A package that is needed is not installed, or does not load."""


def install_hint(extra: str = "", options: str = "") -> str:
    """Return the command that installs this package here again, with ``extra`` and the installer's ``options``.

    The installer recorded the origin (PEP 610): a folder, a file, a repository or an index.
    """
    mine = _distribution()
    if origin := mine and _origin(mine, extra):
        return f"`{' '.join(filter(None, (_installer(mine), options, origin)))}`"
    clone, wheel = (f"'{place}[{extra}]'" if extra else place for place in (".", "FILE.whl"))
    pip = " ".join(filter(None, ("pip install", options)))
    return f"`{pip} {clone}` in the clone, or with a wheel `{pip} {wheel}`"


def build_hint() -> str:
    """Return the command that installs this package again and compiles its native kernels: not from a wheel."""
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
    """Return the origin of ``mine`` with ``extra`` as an installer's argument; None if the origin is gone."""
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
    """Return the command that installs into this environment, activated or not."""
    home = Path(sys.prefix)
    if (home / "pipx_metadata.json").is_file():
        return f"pipx runpip {shlex.quote(home.name)} install"
    if (mine.read_text("INSTALLER") or "").strip() == "uv":
        return f"uv pip install --python {shlex.quote(sys.prefix)}"
    pip = shutil.which("pip")
    mine_first = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return "pip install" if mine_first else f"{shlex.quote(sys.executable)} -m pip install"


def not_installed(*packages: str) -> str | None:
    """Return which ``packages`` of one extra are missing, and the command that installs them; None if all are there."""
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
    """Turn the ImportError of a package into one line.

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
