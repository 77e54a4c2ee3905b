"""Define the start-up hook that adds the option --attn to the commands of mlx-lm and mlx-vlm.

If the environment variable MLX_SPARSE_ATTN is set, the hook also enables each model that mlx-lm or mlx-vlm loads.
The installation adds two files that Python reads when it starts. The .pth file (pyproject.toml) has one line of code.
The code puts a finder into sys.meta_path. The finder imports this module when mlx_lm or mlx_vlm is imported. Python
3.15 reads the .start file instead and calls install(). This module imports only sys, to keep the start-up time short.
"""

import sys

TYPE_CHECKING = False  # importing typing would take longer than the rest of the hook
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

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


class CommandFinder:
    """Import finder that wraps main() in the modules of `COMMANDS` and `VLM_COMMANDS`.

    If the environment variable `VARIABLE` is set, the finder also wraps load_model() in the modules of `LOADERS`.
    """

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        return find_spec(name, path, target)


def find_spec(name: str, path: "Sequence[str] | None", target: "ModuleType | None") -> "ModuleSpec | None":
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
    if spec is None or spec.loader is None:
        return spec
    exec_module = spec.loader.exec_module

    def exec_and_wrap(module: "ModuleType") -> None:
        exec_module(module)
        if module.__name__ == name:  # a loader can serve several modules
            wrap(module)

    spec.loader.exec_module = exec_and_wrap  # type: ignore[method-assign]
    return spec


def _variable() -> str:
    """Return the methods in the environment variable `VARIABLE`, or an empty string if the variable is not set."""
    import os

    return os.environ.get(VARIABLE, "").strip()


def _is_ours(finder: object) -> bool:
    """Return True if ``finder`` is a CommandFinder of this module or of the .pth file."""
    return type(finder).__name__ == CommandFinder.__name__


def _wrap_main(module: "ModuleType") -> None:
    import functools

    original = getattr(module, "main", None)
    if original is None:
        return

    @functools.wraps(original)
    def main() -> object:
        from mlx_sparse.lm.command import run

        return run(original, {**COMMANDS, **VLM_COMMANDS}[module.__name__])

    module.main = main  # type: ignore[attr-defined]


def _wrap_load_model(module: "ModuleType") -> None:
    """Wrap ``module.load_model`` to enable the methods in MLX_SPARSE_ATTN on each loaded model."""
    import functools

    original = getattr(module, "load_model", None)
    if original is None:
        return

    @functools.wraps(original)
    def load_model(*args: object, **kwargs: object) -> object:
        loaded = original(*args, **kwargs)
        sharded = sys._getframe(1).f_code.co_name == "sharded_load"
        try:
            from mlx_sparse.lm.variable import enable_loaded
        except ImportError as error:  # the library has changed
            print(f"[mlx-sparse] {VARIABLE}: attention is dense: {error}", file=sys.stderr)
        else:
            enable_loaded(loaded[0] if isinstance(loaded, tuple) else loaded, sharded=sharded)
        return loaded

    load_model.without_variable = original  # type: ignore[attr-defined]
    module.load_model = load_model  # type: ignore[attr-defined]


def installed() -> bool:
    """Return True if the start-up hook is installed in this process."""
    return any(map(_is_ours, sys.meta_path))


def install() -> None:
    """Put a CommandFinder first in sys.meta_path, unless sys.meta_path already contains a CommandFinder."""
    if not installed():
        sys.meta_path.insert(0, CommandFinder())
