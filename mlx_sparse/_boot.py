"""Define the start-up hook that adds the option --attn to the commands of mlx-lm and mlx-vlm.

If the environment variable MLX_SPARSE_ATTN is set, the hook also enables each model that mlx-lm or mlx-vlm loads.
The installation adds a .pth file (pyproject.toml) with one line of code, which Python runs when it starts. The code
puts a finder into sys.meta_path. The finder reads this file when mlx_lm or mlx_vlm is imported, and then calls
`find_spec`. The name mlx_sparse is not imported until a command runs, because it may also name a file of the user.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "MLX_SPARSE_ATTN"
NAMES = ("generate", "chat", "server", "benchmark", "cache_prompt", "evaluate")
# Names of the commands by the module of their main().
COMMANDS = {f"mlx_lm.{name}": f"mlx_lm.{name}" for name in NAMES}
VLM_COMMANDS = {
    "mlx_vlm.generate.dispatch": "mlx_vlm.generate",
    "mlx_vlm.chat": "mlx_vlm.chat",
    "mlx_vlm.server.cli": "mlx_vlm.server",
}
LOADERS = ("mlx_lm.utils", "mlx_vlm.utils")  # modules of load_model()


def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """Return an import spec whose loader wraps main() or load_model() of the module ``name``.

    If the module has nothing to wrap, return None.
    """
    wrap: Callable[[ModuleType], None]
    if name in COMMANDS or name in VLM_COMMANDS:
        wrap = _wrap_main
    elif name in LOADERS and _variable():
        wrap = _wrap_load_model
    else:
        return None
    others = [finder for finder in sys.meta_path if not _is_ours(finder)]
    found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
    spec = next((spec for spec in found if spec is not None), None)
    if spec is not None and hasattr(spec.loader, "exec_module"):
        spec.loader = WrappingLoader(spec.loader, wrap)  # type: ignore[assignment]
    return spec


class WrappingLoader:
    """Stand-in for a ``loader`` whose attributes may be read-only. After a module is executed, it calls ``wrap``."""

    def __init__(self, loader: Any, wrap: Callable[[ModuleType], None]) -> None:
        self._loader, self._wrap = loader, wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with contextlib.suppress(AttributeError):  # a module without the function, or one that cannot be changed
            self._wrap(module)


def _variable() -> str:
    """Return the methods in the environment variable `VARIABLE`, or an empty string if the variable is not set."""
    return os.environ.get(VARIABLE, "").strip()


def _is_ours(finder: object) -> bool:
    """Return True if ``finder`` is the finder of the .pth file."""
    return type(finder).__name__ == "CommandFinder"


def installed() -> bool:
    """Return True if the start-up hook is installed in this process."""
    return any(map(_is_ours, sys.meta_path))


def _wrap_main(module: Any) -> None:
    original = module.main

    @functools.wraps(original)
    def main() -> object:
        try:
            run = _import("lm.command").run
        except Exception as error:
            _step_aside(error)
            return original()
        return run(original, {**COMMANDS, **VLM_COMMANDS}[module.__name__])

    module.main = main


def _wrap_load_model(module: Any) -> None:
    """Wrap ``module.load_model`` to enable the methods in MLX_SPARSE_ATTN on each loaded model."""
    original = module.load_model

    @functools.wraps(original)
    def load_model(*args: object, **kwargs: object) -> object:
        loaded = original(*args, **kwargs)
        sharded = sys._getframe(1).f_code.co_name == "sharded_load"
        try:
            enable_loaded = _import("lm.variable").enable_loaded
        except Exception as error:
            _step_aside(error)
        else:
            enable_loaded(loaded[0] if isinstance(loaded, tuple) else loaded, sharded=sharded)
        return loaded

    load_model.without_variable = original  # type: ignore[attr-defined]
    module.load_model = load_model


def _import(name: str) -> Any:
    """Import a module of the package in the folder of this file. ``import mlx_sparse`` may find another package.

    Raises:
        ImportError: the process has already imported another mlx_sparse.
    """
    folder = Path(__file__).parent
    package = folder.name
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)  # in an editable installation, it also has the folder of the build
        if spec is None or spec.origin != str(folder / "__init__.py"):
            spec = importlib.util.spec_from_file_location(package, folder / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[package] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[package])
        except BaseException:
            del sys.modules[package]
            raise
    found = getattr(sys.modules[package], "__file__", None)
    if not found or not folder.samefile(Path(found).parent):
        raise ImportError(f"{package}: expected the package in {folder}, got {found}")
    return importlib.import_module(f"{package}.{name}")


def _step_aside(error: Exception) -> None:
    """Print why a command or a model stays unchanged, if the user asked for sparse attention."""
    if _variable() or any(word.startswith("--attn") for word in sys.argv):
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        with contextlib.suppress(Exception):  # standard error may be closed
            sys.stderr.write(f"[mlx-sparse] attention is dense: {reason[:200]}\n")
