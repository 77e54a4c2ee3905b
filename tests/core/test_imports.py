"""Test the direction of dependencies; imports are read from the source without running it."""

import ast
import functools
import graphlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dev import imported_by

from mlx_sparse.core import registry
from mlx_sparse.methods import METHODS

ROOT = Path(__file__).parents[2]

# Modules that backends outside mlx_sparse may import.
SHARED = {"checks", "extras", "files", "native", "core", "methods", "api"}
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


def inside(path: Path) -> str:
    return path.relative_to(ROOT / "mlx_sparse").as_posix()


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Return the files that each file of mlx_sparse imports, also for types, in functions and from its package."""
    found = {
        path: {defining_file(name) for name in imported_by(path, everything=True, types=True)} - {path, None}
        for path in LIBRARY
    }
    return {inside(path): {inside(other) for other in others if other} for path, others in found.items()}


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    todo, seen = list(graph[start]), set()
    while todo:
        if (node := todo.pop()) not in seen:
            seen.add(node)
            todo += graph[node]
    return seen


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of nodes that reach each other."""
    after = {node: reached(graph, node) for node in graph}
    found = [{other for other in after[node] if node in after[other]} for node in graph]
    return [circle for n, circle in enumerate(found) if circle and circle not in found[:n]]


def levels(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the parts in levels. A part imports only parts of lower levels, and at least one of the next lower."""
    sorter, found = graphlib.TopologicalSorter(graph), []
    sorter.prepare()  # raises CycleError
    while ready := sorter.get_ready():
        found.append(sorted(ready))
        sorter.done(*ready)
    return found


def parts() -> dict[str, set[str]]:
    """Return the packages and modules of mlx_sparse that each package or module imports."""
    found: dict[str, set[str]] = {}
    for path, others in arrows().items():
        found.setdefault(path.partition("/")[0], set()).update(other.partition("/")[0] for other in others)
    return {part.removesuffix(".py"): {o.removesuffix(".py") for o in needs - {part}} for part, needs in found.items()}


def picture() -> str:
    """Return the levels of the packages and modules, from the command to the modules that import nothing."""
    return "\n".join("  ".join(level) for level in reversed(levels(parts())))


def test_contributing_draws_the_levels_of_the_imports():
    """Fail if packages import each other in a circle, or if the picture in CONTRIBUTING.md is not the measured one."""
    assert f"```\n{picture()}\n```" in (ROOT / "CONTRIBUTING.md").read_text(), f"measured levels:\n{picture()}"


def test_no_files_import_each_other():
    assert not circles(arrows())


def test_circles_and_levels_of_a_small_graph():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]
    assert levels({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [["c"], ["b"], ["a"]]


def backend_of(file: str) -> str:
    """Return the backend that a file of a room implements; "" for other files. The front door of NumPy is no room."""
    rooms = file.startswith(("core/", "methods/"))
    return Path(file).stem.partition("_")[0] if rooms else "oracle" * file.startswith("oracle/")


def test_backends_do_not_import_each_other():
    backends = {"oracle", "ops", "cpu", "metal"}
    assert backends <= {backend_of(file) for file in arrows()}
    for file, others in arrows().items():
        backend = backend_of(file)
        if backend in backends:
            allowed = {backend} | ({"ops"} if backend in ("cpu", "metal") else set())  # they reuse array operations
            wrong = {other for other in others if backend_of(other) in backends - allowed}
            assert not wrong, f"{file} must not import {', '.join(sorted(wrong))}"


# Benchmarks may use the oracle to check results.
def test_oracle_is_not_used_at_run_time():
    for file, others in arrows().items():
        if backend_of(file) != "oracle" and not file.startswith("tools/bench/"):
            assert not [other for other in others if backend_of(other) == "oracle"], file


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
        if path != ROOT / "mlx_sparse" / "_boot.py":  # restores sys.path after its own import
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
        *("lm/plan.py", "lm/call.py", "lm/hooks/__init__.py", "lm/session.py"),
    ],
)
def test_generic_files_name_no_method(file):
    """Check code, comments and docstrings."""
    names = METHOD_CLASSES | set(METHODS)
    for name, kind in itertools.product(METHODS, ("state", "hooks")):
        if found := registry.load_class(name, kind):
            names |= {found.__name__, found.__module__.rpartition(".")[2]} - {"state"}
    text = (ROOT / "mlx_sparse" / file).read_text()
    allowed = {"dense", "Dense", "sample", "gather"}  # also names of dense attention, a sample of queries, a collective
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
