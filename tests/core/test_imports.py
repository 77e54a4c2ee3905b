"""Test the direction of dependencies; imports are read from the source without running it."""

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dev import imported_by

from mlx_sparse.core import table
from mlx_sparse.methods import METHODS

ROOT = Path(__file__).parents[2]

# A package or module of mlx_sparse imports its own level and lower ones, without cycles.
LEVELS = [
    {"checks", "extras", "files", "model_info", "model_parts"},
    {"methods"},
    {"ops", "kernels", "artefact"},
    {"api", "oracle", "cache", "calibrate"},
    {"lm", "_boot"},  # the start-up hook calls lm
    {"tools"},
    {"cli", "__init__"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
# Modules that backends outside mlx_sparse may import.
SHARED = {"checks", "extras", "files", "methods", "api"}
BENCH = SHARED | {"tools", "oracle"}  # allowed for benchmark variants, whose core is in tools
FREE = {"torch", "triton", "onnx", "onnxruntime"}  # mlx_sparse runs without them
FACTS = (["__version__"], ["__path__"])  # attributes of the package that are no modules
APART = {"cuda_ref", "onnx_export"}  # installed inside mlx_sparse


@functools.cache
def imports(path: Path, root: Path = ROOT, *, when_read: bool = False) -> list[str]:
    """Return the dotted names that a file imports; ``when_read`` leaves out imports inside functions."""
    return imported_by(path, root, everything=not when_read)


def parts_imported(path: Path) -> set[str]:
    """Return the parts of mlx_sparse that a file imports; a public name counts as __init__."""
    names = [name.split(".") for name in imports(path)]
    parts = {(rest or ["__init__"])[0] for top, *rest in names if top == "mlx_sparse" and rest not in FACTS}
    parts -= APART
    home = ROOT / "mlx_sparse"
    return {part if (home / part).is_dir() or (home / f"{part}.py").is_file() else "__init__" for part in parts}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "mlx_sparse").parts[0].removesuffix(".py")


def defining_file(name: str) -> Path | None:
    """Return the file of mlx_sparse that defines a dotted name, or None for other packages."""
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
def packages_needed(path: Path) -> frozenset[str]:
    """Return the packages that a file imports directly or through other files of mlx_sparse."""
    todo, seen, found = [path], set(), set()
    while todo:
        file = todo.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        names = set(imports(file, when_read=True))
        homes = {name: defining_file(name) for name in names}
        for home in filter(None, homes.values()):  # and the packages that it is in
            todo += [home, *(up / "__init__.py" for up in home.parents if up.is_relative_to(ROOT / "mlx_sparse"))]
        found |= {name.split(".")[0] for name, home in homes.items() if home is None}
    return frozenset(found - {"mlx_sparse"})


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


LIBRARY = files("mlx_sparse")


def test_at_most_seven_levels():
    assert len(LEVELS) <= 7


def test_imports_point_down():
    needs: dict[str, set[str]] = {}
    for path in LIBRARY:
        part = part_of(path)
        needs.setdefault(part, set()).update(parts_imported(path) - {part})
        assert part in LEVEL, f"add {part} to LEVELS"
        wrong = [other for other in needs[part] if LEVEL[other] > LEVEL[part]]
        assert not wrong, f"{name(path)} must not import {', '.join(sorted(wrong))}"
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError


def test_backends_do_not_import_each_other():
    backends = {"oracle", "ops", "kernels"}
    for path in LIBRARY:
        if (part := part_of(path)) in backends:
            allowed = {"ops"} if part == "kernels" else set()  # launchers reuse array operations
            assert not (parts_imported(path) & backends) - {part} - allowed, path


def test_no_circular_imports():
    arrows = {
        path: {defining_file(found) for found in imports(path, when_read=True)} - {path, None} for path in LIBRARY
    }
    packages = {path for path in LIBRARY if path.name == "__init__.py"}  # packages import their own modules
    sorter = graphlib.TopologicalSorter({path: found - packages for path, found in arrows.items()})
    sorter.prepare()  # raises CycleError


# Benchmarks may use the oracle to check results.
def test_oracle_is_not_used_at_run_time():
    checking = [ROOT / "mlx_sparse" / folder for folder in ("oracle", "tools/bench")]
    for path in LIBRARY:
        if not any(path.is_relative_to(folder) for folder in checking):
            assert "oracle" not in parts_imported(path), path


@pytest.mark.parametrize(
    ("folder", "without"),
    [
        ("mlx_sparse", FREE),
        ("cuda_ref", {"mlx", "mlx_lm", "onnx", "onnxruntime"}),
        ("onnx_export", {"mlx", "mlx_lm", "triton"}),
    ],
)
def test_parts_do_not_need_packages_of_other_parts(folder, without):
    exporter = ROOT / "onnx_export" / "exporter"  # the exporter reads mlx-lm's models
    for path in files(folder):
        if path.is_relative_to(exporter) or path == ROOT / "onnx_export" / "bench_generate.py":
            continue
        assert not {found.split(".")[0] for found in imports(path)} & without, path
        assert not packages_needed(path) & without, f"{path} imports it through other files"
        if folder != "mlx_sparse":
            allowed = BENCH if path.name == "bench.py" else SHARED
            assert parts_imported(path) <= allowed, path


@pytest.mark.parametrize("module", ["core", "inputs", "command"])
def test_benchmark_core_needs_only_numpy(module):
    path = ROOT / "mlx_sparse" / "tools" / "bench" / f"{module}.py"
    assert packages_needed(path) - {"numpy", "tomli"} <= sys.stdlib_module_names  # on Python 3.10 for tomllib


TESTS = {path.stem for path in (ROOT / "tests").rglob("*.py")} | {"msl"}


@pytest.mark.parametrize("folder", ["mlx_sparse", "cuda_ref", "onnx_export"])
def test_installed_code_does_not_import_tests(folder):
    """Test that installed code does not import tests or change sys.path."""
    assert {"msl", "cases", "conftest"} <= TESTS
    for path in files(folder):
        top = {found.split(".")[0] for found in imports(path)}
        assert not top & (TESTS | {"tests", "scripts"}), path
        assert "sys.path" not in ast.unparse(ast.parse(path.read_text())), path


METHOD_CLASSES = {cls.__name__ for cls in METHODS.values()}


def checked_classes(source: str) -> Iterator[str]:
    """Yield the class names in ``isinstance``, ``issubclass`` and class patterns."""
    for node in ast.walk(ast.parse(source)):
        checked: list[ast.AST] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            checked = list(node.args[1:])
        elif isinstance(node, ast.MatchClass):
            checked = [node.cls]
        for part in (part for one in checked for part in ast.walk(one)):
            if isinstance(part, ast.Name | ast.Attribute):
                yield part.id if isinstance(part, ast.Name) else part.attr


@pytest.mark.parametrize("folder", ["mlx_sparse", "cuda_ref", "onnx_export"])
def test_code_does_not_test_for_method_classes(folder):
    home = ROOT / "mlx_sparse" / "methods"
    for path in files(folder):
        if not path.is_relative_to(home):
            checked = METHOD_CLASSES & set(checked_classes(path.read_text()))
            assert not checked, (
                f"{name(path)} must not test for {', '.join(sorted(checked))}: use an attribute of the method"
            )


# A new method with auxiliary cache state needs no change in these files.
@pytest.mark.parametrize(
    "file",
    [
        *("cache/sparse_cache.py", "cache/kv_cache.py", "cache/state.py"),
        *("lm/plan.py", "lm/call.py", "lm/hooks/__init__.py", "lm/command.py"),
    ],
)
def test_generic_files_name_no_method(file):
    """Check code, comments and docstrings."""
    entries = [*table.STATES.values(), *table.HOOKS.values()]
    names = METHOD_CLASSES | set(METHODS) | {entry.partition(":")[2] for entry in entries}
    names |= {entry.partition(":")[0].rpartition(".")[2] for entry in table.STATES.values()}
    text = (ROOT / "mlx_sparse" / file).read_text()
    allowed = {"dense", "Dense", "sample"}  # also names of dense attention and of a sample of queries
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
def test_imports_are_found(tmp_path, source, found):
    path = tmp_path / "mlx_sparse" / "lm" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert set(imports(path, tmp_path)) == found
