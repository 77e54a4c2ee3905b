"""Dependencies point one way: the imports of every file are read, none is run."""

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dev import imported_by

from mlx_sparse.methods import METHODS, table

ROOT = Path(__file__).parent.parent

# A package or module of mlx_sparse imports its own level and lower ones, and no two import each other.
LEVELS = [
    {"checks", "extras", "files", "model_info", "model_parts"},
    {"methods"},
    {"oracle", "ops", "kernels", "artefact"},
    {"api", "cache", "calibrate"},
    {"lm", "_boot"},  # the start-up hook hands over to lm
    {"tools"},
    {"cli", "__init__"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# What backends outside this folder share.
SHARED = {"checks", "extras", "files", "methods", "api"}
BENCH = SHARED | {"tools", "oracle"}  # for the variants of the benchmark, whose core is in tools
FREE = {"torch", "triton", "onnx", "onnxruntime"}  # mlx_sparse runs without them
FACTS = (["__version__"], ["__path__"])  # of the package, which name no part of it
APART = {"cuda_ref", "onnx_export"}  # installed inside mlx_sparse


@functools.cache
def imports(path: Path, root: Path = ROOT, *, when_read: bool = False) -> list[str]:
    """Return the dotted names of what a file imports; ``when_read``: only what it imports when it is imported."""
    return imported_by(path, root, everything=not when_read)


def rooms_imported(path: Path) -> set[str]:
    """The rooms of mlx_sparse that a file imports; a public name counts as __init__."""
    names = [name.split(".") for name in imports(path)]
    rooms = {(rest or ["__init__"])[0] for top, *rest in names if top == "mlx_sparse" and rest not in FACTS}
    rooms -= APART
    home = ROOT / "mlx_sparse"
    return {room if (home / room).is_dir() or (home / f"{room}.py").is_file() else "__init__" for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "mlx_sparse").parts[0].removesuffix(".py")


def home_of(name: str) -> Path | None:
    """The file of mlx_sparse in which a dotted name is; None for names of others."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] == "mlx_sparse":
        at = ROOT.joinpath(*parts)
        if at.with_suffix(".py").is_file():
            return at.with_suffix(".py")
        if (at / "__init__.py").is_file():
            return at / "__init__.py"
        parts.pop()
    return None


@functools.cache
def others_needed(path: Path) -> frozenset[str]:
    """Packages that importing a file imports, by way of other files of mlx_sparse too."""
    todo, seen, found = [path], set(), set()
    while todo:
        file = todo.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        names = set(imports(file, when_read=True))
        homes = {name: home_of(name) for name in names}
        for home in filter(None, homes.values()):  # and the packages that it is in
            todo += [home, *(up / "__init__.py" for up in home.parents if up.is_relative_to(ROOT / "mlx_sparse"))]
        found |= {name.split(".")[0] for name, home in homes.items() if home is None}
    return frozenset(found - {"mlx_sparse"})


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


LIBRARY = files("mlx_sparse")


def test_there_are_seven_levels_at_most():
    assert len(LEVELS) <= 7


def test_imports_point_down_and_no_two_packages_import_each_other():
    needs: dict[str, set[str]] = {}
    for path in LIBRARY:
        room = room_of(path)
        needs.setdefault(room, set()).update(rooms_imported(path) - {room})
        assert room in LEVEL, f"state in LEVELS what mlx_sparse.{room} may import"
        wrong = [other for other in needs[room] if LEVEL[other] > LEVEL[room]]
        assert not wrong, f"{name(path)} must not import {', '.join(sorted(wrong))}"
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError


def test_backends_do_not_import_each_other():
    backends = {"oracle", "ops", "kernels"}
    for path in LIBRARY:
        if (room := room_of(path)) in backends:
            allowed = {"ops"} if room == "kernels" else set()  # launchers reuse array operations
            assert not (rooms_imported(path) & backends) - {room} - allowed, path


def test_no_file_is_imported_by_what_it_imports():
    arrows = {path: {home_of(found) for found in imports(path, when_read=True)} - {path, None} for path in LIBRARY}
    packages = {path for path in LIBRARY if path.name == "__init__.py"}  # they name what is in them
    sorter = graphlib.TopologicalSorter({path: found - packages for path, found in arrows.items()})
    sorter.prepare()  # raises CycleError


# The benchmarks check what they measure.
def test_the_oracle_is_not_called_at_run_time():
    checking = [ROOT / "mlx_sparse" / folder for folder in ("oracle", "tools/bench")]
    for path in LIBRARY:
        if not any(path.is_relative_to(folder) for folder in checking):
            assert "oracle" not in rooms_imported(path), path


@pytest.mark.parametrize(
    ("folder", "without"),
    [
        ("mlx_sparse", FREE),
        ("cuda_ref", {"mlx", "mlx_lm", "onnx", "onnxruntime"}),
        ("onnx_export", {"mlx", "mlx_lm", "triton"}),
    ],
)
def test_each_part_runs_without_what_belongs_to_others(folder, without):
    exporter = ROOT / "onnx_export" / "exporter"  # it reads mlx-lm's models, and so does who exports
    for path in files(folder):
        if path.is_relative_to(exporter) or path == ROOT / "onnx_export" / "bench_generate.py":
            continue
        assert not {found.split(".")[0] for found in imports(path)} & without, path
        assert not others_needed(path) & without, f"{path} by way of other files"
        if folder != "mlx_sparse":
            allowed = BENCH if path.name == "bench.py" else SHARED
            assert rooms_imported(path) <= allowed, path


@pytest.mark.parametrize("module", ["core", "inputs", "command"])
def test_the_core_of_the_benchmark_needs_numpy_alone(module):
    path = ROOT / "mlx_sparse" / "tools" / "bench" / f"{module}.py"
    assert others_needed(path) - {"numpy", "tomli"} <= sys.stdlib_module_names  # on Python 3.10 for tomllib


TESTS = {path.stem for path in (ROOT / "tests").rglob("*.py")} | {"msl"}


@pytest.mark.parametrize("folder", ["mlx_sparse", "cuda_ref", "onnx_export"])
def test_nothing_that_is_installed_imports_the_tests(folder):
    """Nor does it change where Python looks for modules."""
    assert {"msl", "cases", "conftest"} <= TESTS
    for path in files(folder):
        top = {found.split(".")[0] for found in imports(path)}
        assert not top & (TESTS | {"tests", "scripts"}), path
        assert "sys.path" not in ast.unparse(ast.parse(path.read_text())), path


PARTICULAR = {cls.__name__ for cls in METHODS.values()}


def asked_classes(source: str) -> Iterator[str]:
    """Names in the second argument of every ``isinstance`` and ``issubclass``, and of every class that is matched."""
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = list(node.args[1:])
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        for part in (part for one in asked for part in ast.walk(one)):
            if isinstance(part, ast.Name | ast.Attribute):
                yield part.id if isinstance(part, ast.Name) else part.attr


@pytest.mark.parametrize("folder", ["mlx_sparse", "cuda_ref", "onnx_export"])
def test_a_method_is_asked_what_it_is_not_which_it_is(folder):
    home = ROOT / "mlx_sparse" / "methods"
    for path in files(folder):
        if not path.is_relative_to(home):
            asked = PARTICULAR & set(asked_classes(path.read_text()))
            assert not asked, f"{name(path)} must not ask for {', '.join(sorted(asked))}: ask the method"


def test_the_reader_of_asked_classes():
    source = "isinstance(a, SparQ) or isinstance(b, (m.H2O, int))\nmatch c:\n    case SAAP(): SparQState()"
    assert set(asked_classes(source)) == {"SparQ", "m", "H2O", "int", "SAAP"}


# A new method, and what it keeps beside a cache, needs no line in these.
@pytest.mark.parametrize(
    "file",
    [
        *("cache/sparse_cache.py", "cache/kv_cache.py", "cache/state.py"),
        *("lm/plan.py", "lm/call.py", "lm/hooks.py", "lm/command.py"),
    ],
)
def test_what_serves_all_methods_names_none(file):
    """Neither in code nor in words."""
    entries = [*table.STATES.values(), *table.HOOKS.values()]
    names = PARTICULAR | set(METHODS) | {entry.partition(":")[2] for entry in entries}
    names |= {entry.partition(":")[0].rpartition(".")[2] for entry in table.STATES.values()}
    text = (ROOT / "mlx_sparse" / file).read_text()
    allowed = {"dense", "Dense", "sample"}  # attention by mlx-lm; a sample of queries
    found = {word for word in names - allowed if re.search(rf"\b{word}\b", text)}
    assert not found, f"mlx_sparse/{file} names {', '.join(sorted(found))}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn", {"torch.nn"}),
        ("from ..cache import f", {"mlx_sparse.cache.f"}),
        ("from . import a", {"mlx_sparse.lm.a"}),
        ("def f():\n    from mlx_sparse import oracle", {"mlx_sparse.oracle"}),
        ("importlib.import_module('mlx_sparse.oracle')", {"mlx_sparse.oracle"}),
        ("if TYPE_CHECKING:\n    import mlx\nelse:\n    import numpy", {"numpy"}),
    ],
)
def test_the_reader_of_imports(tmp_path, source, found):
    path = tmp_path / "mlx_sparse" / "lm" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert set(imports(path, tmp_path)) == found
