"""Test missing packages: a one-line error that names the command to install them."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from absent import OFFLINE, without
from json_tables import read_tables
from tier import some

from mlx_sparse import extras
from mlx_sparse.checks import BackendUnavailable
from mlx_sparse.cli import HOSTED

DATA = read_tables(__file__)

pytestmark = pytest.mark.slow  # environments

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
EXPORT = "mlx_sparse.onnx_export.exporter.command"


def run(absent: str, *command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | OFFLINE | without(absent),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


COMMANDS = [
    *(("mlx", name) for name in HOSTED),
    *map(tuple, DATA["commands"]),
    *((name, "export-onnx --model nowhere -o out") for name in ("onnx", "onnxruntime", "mlx")),
]
SUBCOMMAND = "mlx-sparse export-onnx"  # the same command under its other name
COMMANDS.append(("onnx", f"{SUBCOMMAND} --model nowhere -o out"))


# Runs each command like the installed script, with the import of its module, and prints the results as JSON.
SCRIPT = f"""
import contextlib, importlib, io, json, sys
found = []
for words in json.loads(sys.argv[1]):
    words = words.split()
    module = {EXPORT!r} if words[0] == "export-onnx" else "mlx_sparse.cli"
    outputs = io.StringIO()
    with contextlib.redirect_stderr(outputs), contextlib.redirect_stdout(outputs):
        try:
            code = importlib.import_module(module).main(words[1:])
        except SystemExit as end:
            code = end.code
    found.append((code, outputs.getvalue()))
print(json.dumps(found))
"""


@functools.cache
def outputs(absent: str, folder: Path) -> dict[str, tuple[int, str]]:
    """Run every command that needs ``absent`` in one process; return exit codes and outputs."""
    (folder / "model").mkdir()
    words = [words for name, words in COMMANDS if name == absent]
    # This command looks for the model first.
    named = [f"{text} --model model" if text == "bench generate --runtime onnx" else text for text in words]
    programs = [text if "export-onnx" in text else f"mlx-sparse {text}" for text in named]
    done = run(absent, "-c", SCRIPT, json.dumps(programs), folder=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["model"]
    return dict(zip(words, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("absent", "words"), some(COMMANDS, 10), ids=str)
def test_commands_name_the_missing_package(absent: str, words: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / f"without-{absent}"
    folder.mkdir(exist_ok=True)
    code, text = outputs(absent, folder)[words]
    program = "export-onnx" if "export-onnx" in words else "mlx-sparse"
    assert code == 2, text
    assert text.startswith(f"{program}: error: ") and text.count("\n") == 1, text
    assert absent in text and extras.install_hint(extras.EXTRAS[absent]) in text


@pytest.mark.parametrize("absent", ["mlx", "mlx_lm", "torch", "onnx", "onnxruntime"])
@pytest.mark.parametrize("command", ["matrix", "doctor"])
def test_matrix_and_doctor_need_no_optional_package(command: str, absent: str) -> None:
    done = run(absent, "-m", "mlx_sparse.cli", command)
    assert (done.returncode, done.stderr) == (int(command == "doctor" and absent.startswith("mlx")), "")
    assert not absent.startswith("onnx") or f"{absent} not installed: run {extras.install_hint('onnx')}" in done.stdout


@pytest.mark.parametrize(("absent", "name"), DATA["imports"])
def test_imports_name_the_missing_package(absent: str, name: str) -> None:
    module, _, function = name.rpartition(".")
    done = run(absent, "-c", f"import {module}\nfrom {module} import {function}")
    assert (done.returncode, done.stdout) == (1, "")
    hint = extras.install_hint(extras.EXTRAS[absent])
    message = f"{absent}: expected it to be installed, got none. Run {hint}."
    assert done.stderr.splitlines()[-1] == f"mlx_sparse.extras.PackageMissing: {message}"
    assert done.stderr.count("Traceback") == 1  # without the chained traceback of the import


def test_missing_package_is_an_import_error() -> None:
    with pytest.raises(ImportError) as caught, extras.naming_missing():
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    assert isinstance(caught.value, BackendUnavailable)


def test_broken_packages_are_named_with_a_reason() -> None:
    message = "mlx.core: expected it to load, got: libmlx.so: cannot open. Run " + extras.install_hint()
    with pytest.raises(extras.PackageMissing, match=re.escape(message)), extras.naming_missing():
        raise ImportError("libmlx.so: cannot open\nand more", name="mlx.core")


@pytest.mark.parametrize("error", [ModuleNotFoundError("x", name="mlx_sparse.x"), ImportError("x"), OSError("x")])
def test_own_import_errors_are_not_renamed(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, extras.naming_missing():
        raise error
    assert caught.value is error


def test_extras_match_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {"": project["dependencies"]} | project["optional-dependencies"]
    del declared["test"], declared["docs"]  # for developers
    homes: dict[str, set[str]] = {}
    for extra, requirements in declared.items():
        for requirement in requirements:
            name = re.split(r"[\[<>=;]", requirement)[0].replace("-", "_").removesuffix("_cpu")
            homes.setdefault(name, set()).add(extra)
    assert extras.EXTRAS.keys() == homes.keys()
    homes["transformers"].add("")  # a dependency of mlx-lm, which a plain install includes
    assert all(extra in homes[name] for name, extra in extras.EXTRAS.items())


def test_no_hint_uses_an_unpublished_name() -> None:
    files = [path for folder in ("mlx_sparse", "cuda_ref", "onnx_export") for path in (ROOT / folder).rglob("*.py")]
    files += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").glob("*.*")]
    wrong = re.compile(r"pip install [^\n`]*mlx-sparse-attention")
    assert not [path.name for path in files if wrong.search(path.read_text())]


def test_sources_in_place_of_the_installed_package_are_a_one_line_error(tmp_path: Path) -> None:
    """After `pip install .`, a program in the clone's folder imports the sources, which lack the mapped folders."""
    shutil.copytree(ROOT / "mlx_sparse", tmp_path / "mlx_sparse")
    code = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "ScikitBuildRedirectingFinder"]
from mlx_sparse.core import registry
registry.resolve("auto", "sparq", D=64, G=1)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stderr.splitlines()[-1].startswith("mlx_sparse.extras.PackageMissing: mlx_sparse: expected the")
    assert "Move the program to another folder, or run `pip install -e .`" in result.stderr
