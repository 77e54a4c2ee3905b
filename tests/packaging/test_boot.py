"""Test the time of the start-up hook, and that it wraps only the commands of mlx-lm."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import hook_cost
import pytest
from hook_cost import PTH

from mlx_sparse import _boot

NAMES = ["generate", "chat", "server", "benchmark", "cache_prompt", "evaluate"]
COMMANDS = [f"mlx_lm.{name}" for name in NAMES]
READ_ONLY = """
class Loader(Base):
    def __setattr__(self, name, value): raise AttributeError("read-only")
"""


def python(code: str, *options: str) -> str:
    """Return the output of a fresh interpreter."""
    result = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_hook_is_installed_once():
    """Python runs the .pth files of a virtual environment twice."""
    code = (
        f"import sys\n{PTH}\n{PTH}\nprint([type(finder).__name__ for finder in sys.meta_path].count('CommandFinder'))"
    )
    assert python(code, "-I", "-S") == "1\n"


def test_hook_imports_nothing():
    # -S excludes start-up files of other packages.
    code = f"import sys; before = set(sys.modules)\n{PTH}\nprint(*sorted(set(sys.modules) - before))"
    assert python(code, "-I", "-S").split() == []


def test_every_interpreter_installs_the_hook_without_heavy_modules():
    """Test the .pth file of the wheel, which an editable install has too."""
    code = "import sys; print(type(sys.meta_path[0]).__name__, *sys.modules)"
    first, *modules = python(code).split()
    assert first == "CommandFinder"
    assert not {"argparse", "mlx", "mlx_lm", "mlx_sparse", "numpy", "transformers"} & set(modules)


def fake_library(folder: Path) -> None:
    """Write a package mlx_lm whose commands print their names."""
    package = folder / "mlx_lm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "utils.py").write_text("def load_model(): return 7\n")
    for name in [*NAMES, "lora", "convert"]:
        (package / f"{name}.py").write_text('def main():\n    "The original."\n    return __name__\n')


@pytest.fixture
def fake_mlx_lm(tmp_path):
    """Create fake modules mlx_lm and mlx_sparse.lm.command; return the start of a script that uses them."""
    fake_library(tmp_path)
    return f"""
import importlib, sys, types
sys.path[:0] = [{str(tmp_path)!r}, {str(hook_cost.ROOT)!r}]
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "CommandFinder"]
{PTH}
command = types.ModuleType("mlx_sparse.lm.command")
command.run = lambda main, name: "run " + name + " " + main()
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_command_main_calls_run(fake_mlx_lm, name):
    code = f"""{fake_mlx_lm}
module = importlib.import_module({name!r})
assert not any(m == "mlx" or m.startswith("mlx_sparse.lm") for m in sys.modules)
sys.modules.update({{"mlx_sparse.lm": types.ModuleType("mlx_sparse.lm"), "mlx_sparse.lm.command": command}})
print(module.main(), "|", module.main.__name__, module.main.__doc__)
"""
    assert python(code) == f"run {name} {name} | main The original.\n"


@pytest.mark.parametrize("name", ["mlx_lm.lora", "mlx_lm.convert"])
def test_other_modules_keep_their_main(fake_mlx_lm, name):
    code = f"{fake_mlx_lm}\nprint(importlib.import_module({name!r}).main())"
    assert python(code) == f"{name}\n"


RUN = "def run(main, name): return 'ours ' + main()\n"
BROKEN = "raise RuntimeError('a broken file')\n"
# By name: the files of a folder with packages, those of the working folder, and the result of the command.
INSTALLATIONS = {
    "complete": ({"__init__.py": "", "lm/command.py": RUN}, {}, "ours mlx_lm.generate"),
    "a file of the user": (
        {"__init__.py": "", "lm/command.py": RUN},
        {"mlx_sparse.py": BROKEN},
        "ours mlx_lm.generate",
    ),
    "a folder of the user": (
        {"__init__.py": "", "lm/command.py": RUN},
        {"mlx_sparse/__init__.py": BROKEN, "mlx_sparse/_boot.py": BROKEN},
        "ours mlx_lm.generate",
    ),
    "only the .pth file": (None, {}, "mlx_lm.generate"),
    "only the .pth file, and a file of the user": (None, {"mlx_sparse.py": BROKEN}, "mlx_lm.generate"),
    "an empty folder": ({"_boot.py": None}, {}, "mlx_lm.generate"),
    "a broken hook": ({"__init__.py": "", "_boot.py": "def ("}, {}, "mlx_lm.generate"),
    "a broken package": ({"__init__.py": BROKEN}, {}, "mlx_lm.generate"),
    "a package without its files": ({"__init__.py": ""}, {}, "mlx_lm.generate"),
    "a broken command": ({"__init__.py": "", "lm/command.py": BROKEN}, {}, "mlx_lm.generate"),
}


@pytest.mark.parametrize("asked", ["", "--attn", "--attn-config=a.toml", "MLX_SPARSE_ATTN"])
@pytest.mark.parametrize("name", INSTALLATIONS)
def test_broken_installation_leaves_mlx_lm_as_it_is(name, asked, tmp_path):
    files, own, result = INSTALLATIONS[name]
    fake_library(tmp_path / "site")
    written = {f"site/mlx_sparse/{path}": text for path, text in (files or {}).items()}
    if files is not None:
        written = {"site/mlx_sparse/_boot.py": Path(_boot.__file__).read_text()} | written
    for path, text in {**written, **{f"work/{path}": text for path, text in own.items()}}.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(text)
    code = f"""
import os, sys
sys.path.append({str(tmp_path / "site")!r})
{PTH}
sys.path.insert(0, {str(tmp_path / "work")!r})  # Python adds the working folder after the start-up files have run
sys.argv = ["mlx_lm.generate", *{[asked] if asked.startswith("-") else []}]
import mlx_lm.chat, mlx_lm.generate
from mlx_lm.utils import load_model
print(mlx_lm.generate.main(), load_model())
"""
    environment = {"MLX_SPARSE_ATTN": "sparq"} if asked.isupper() else {}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{result} 7\n"), done.stderr
    lines = done.stderr.splitlines()
    assert all(line.startswith("[mlx-sparse] attention is dense: ") for line in lines)
    if asked.isupper():  # the fake package has no lm/variable.py
        assert 1 <= len(lines) <= 2
    else:
        assert len(lines) == (bool(asked) and not result.startswith("ours"))


def test_another_imported_mlx_sparse_stays_imported(fake_mlx_lm):
    code = f"""{fake_mlx_lm}
own = sys.modules["mlx_sparse"] = types.ModuleType("mlx_sparse")
print(importlib.import_module("mlx_lm.generate").main(), sys.modules["mlx_sparse"] is own)
"""
    assert python(code) == "mlx_lm.generate True\n"


@pytest.mark.parametrize("loader", ["class Loader(Base): __slots__ = ()", READ_ONLY])
def test_loader_without_new_attributes_is_wrapped(loader, fake_mlx_lm):
    code = f"""{fake_mlx_lm}
from importlib.machinery import ModuleSpec

class Base:
    __slots__ = ()
    def create_module(self, spec): return None
    def exec_module(self, module): module.main = lambda: "the original"

{loader}

class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, Loader()) if name == "mlx_lm.generate" else None

sys.meta_path.insert(1, Finder())
sys.modules |= {{"mlx_sparse.lm": types.ModuleType("mlx_sparse.lm"), "mlx_sparse.lm.command": command}}
module = importlib.import_module("mlx_lm.generate")
print(module.main(), type(module.__loader__).__name__, type(module.__spec__.loader).__name__)
"""
    assert python(code) == "run mlx_lm.generate the original Loader Loader\n"


def test_module_without_main_and_missing_mlx_lm_are_unchanged(tmp_path):
    (tmp_path / "mlx_lm").mkdir()
    (tmp_path / "mlx_lm" / "generate.py").write_text("answer = 42\n")
    code = f"""
import importlib.util, sys
sys.path.append({str(hook_cost.ROOT)!r})
{PTH}
sys.path[:] = [{str(tmp_path)!r}]
from mlx_lm.generate import answer
print(answer, importlib.util.find_spec("mlx_lm.chat"))
"""
    assert python(code) == "42 None\n"


def test_the_commands_exist_in_the_installed_mlx_lm():
    for name in COMMANDS:
        spec = importlib.util.find_spec(name)
        assert spec is not None and "\ndef main()" in Path(spec.origin).read_text(), name
    assert set(COMMANDS) == set(_boot.COMMANDS)
