"""Define the start-up hook that adds the option --attn to mlx-lm's commands.

The installation adds two files that Python reads when it starts. The .pth file (pyproject.toml) has one line of code,
which puts a finder into sys.meta_path. The finder imports this module when mlx_lm is imported. Python 3.15 reads the
.start file instead and calls install(). This module imports only sys, to keep the start-up time short.
"""

import sys

TYPE_CHECKING = False  # importing typing would take longer than the rest of the hook
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

NAMES = ("generate", "chat", "server", "benchmark", "cache_prompt", "evaluate")
COMMANDS = frozenset(f"mlx_lm.{name}" for name in NAMES)


class CommandFinder:
    """Import finder that wraps the main() of each command module of mlx-lm."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        return find_spec(name, path, target)


def find_spec(name: str, path: "Sequence[str] | None", target: "ModuleType | None") -> "ModuleSpec | None":
    """Return an import spec for a command module, with a loader that wraps main(); None for other modules."""
    if name not in COMMANDS:
        return None
    others = [finder for finder in sys.meta_path if not _is_ours(finder)]
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


def _is_ours(finder: object) -> bool:
    """Return True if ``finder`` is a CommandFinder of this module or of the .pth file."""
    return type(finder).__name__ == CommandFinder.__name__


def _wrap_main(module: "ModuleType") -> None:
    import functools

    original = module.main

    @functools.wraps(original)
    def main() -> object:
        from mlx_sparse.lm.command import run

        return run(original, module.__name__)

    module.main = main  # type: ignore[attr-defined]


def installed() -> bool:
    """Return True if the start-up hook is installed in this process."""
    return any(map(_is_ours, sys.meta_path))


def install() -> None:
    """Put a CommandFinder first in sys.meta_path, unless sys.meta_path already contains a CommandFinder."""
    if not installed():
        sys.meta_path.insert(0, CommandFinder())
