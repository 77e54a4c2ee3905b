"""Start-up hook: gives mlx-lm's commands the --attn option.

Installation adds a .pth and a .start file that call install() whenever Python starts. So this module imports nothing
but sys, and does nothing until one of the command modules of mlx-lm is imported.
"""

import sys

TYPE_CHECKING = False  # typing itself would cost more than the rest of the hook
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

NAMES = ("generate", "chat", "server", "benchmark", "cache_prompt", "evaluate")
COMMANDS = frozenset(f"mlx_lm.{name}" for name in NAMES)


class CommandFinder:
    """Finds mlx-lm's command modules where the other finders do, and wraps their main()."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in COMMANDS:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, CommandFinder)]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        exec_module = spec.loader.exec_module

        def exec_and_wrap(module: "ModuleType") -> None:
            exec_module(module)
            if module.__name__ == name and hasattr(module, "main"):  # a loader can serve several modules
                _wrap_main(module)

        spec.loader.exec_module = exec_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap_main(module: "ModuleType") -> None:
    import functools

    original = module.main

    @functools.wraps(original)
    def main() -> object:
        from mlx_sparse.lm.command import run

        return run(original, module.__name__)

    module.main = main  # type: ignore[attr-defined]


def install() -> None:
    """Put the finder first in sys.meta_path, once."""
    if not any(isinstance(finder, CommandFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CommandFinder())
