"""Dependencies point one way: the imports of every file are read, none is run."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A part of mlx_sparse may import parts of a lower level, never of its own or a higher one.
LEVELS = [
    {"layout", "files", "tools.environment"},
    {"checks"},
    {"stats", "call_report", "tools.formats", "extras"},
    {"config"},
    {"patterns", "kept", "pieces", "bucket_lists", "kmeans", "artefact"},
    {"oracle", "ops", "kernels"},
    {"registry", "moments"},
    {"api", "side", "buckets", "received"},
    {"cache"},
    {"lm"},
    {"_boot"},  # the start-up hook hands over to lm
    {"demo"},
    {"evaluate"},  # on the demo's model and BLAS
    {"tools.bench"},  # on the evaluation's texts and the demo's commands
    {"tune", "saap"},
    {"doctor", "matrix"},
    {"tools"},  # an empty __init__
    {"cli"},
    {"__init__", "__main__"},
]
LEAVES = set().union(*LEVELS[:4])  # they need nothing but Python: what backends outside this folder share
# Of the benchmarks, what every engine's contenders are measured by.
CORE = {f"mlx_sparse.tools.bench.{name}" for name in ("core", "run", "thresholds", "command")}
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
FREE = {"torch", "triton", "onnx", "onnx_ir", "onnxscript", "onnxruntime"}  # mlx_sparse runs without them
FACTS = (["__version__"], ["__path__"])  # of the package, which name no part of it


def imports(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Dotted names of what a file imports when it runs, `from a import b` as a.b; type-checking blocks never run."""
    package = list(path.relative_to(root).parent.parts)
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def parts_imported(path: Path, apart: set[str] = frozenset()) -> set[str]:
    """The parts of mlx_sparse that a file imports, but for modules ``apart``; a public name counts as __init__."""
    names = [name.split(".") for name in imports(path) if not name.startswith(tuple(apart))]
    parts = {part(rest or ["__init__"]) for top, *rest in names if top == "mlx_sparse" and rest not in FACTS}
    home = ROOT / "mlx_sparse"
    places = {name: home / name.replace(".", "/") for name in parts}
    return {name if at.is_dir() or at.with_suffix(".py").is_file() else "__init__" for name, at in places.items()}


def part(names: list[str]) -> str:
    """A room; those in tools count each."""
    return ".".join(names[:2]) if names[0] == "tools" else names[0]


def part_of(path: Path) -> str:
    names = [name.removesuffix(".py") for name in path.relative_to(ROOT / "mlx_sparse").parts]
    return "tools" if names == ["tools", "__init__"] else part(names)


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


LIBRARY = files("mlx_sparse")


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_imports_point_down(path):
    room = part_of(path)
    assert room in LEVEL, f"say in LEVELS what mlx_sparse.{room} may import"
    wrong = [other for other in parts_imported(path) - {room} if LEVEL[other] >= LEVEL[room]]
    assert not wrong, f"mlx_sparse.{room} must not import {', '.join(sorted(wrong))}"


# Benchmarks check what they time.
CHECKS_RESULTS = ("oracle", "evaluate", "tools.bench")


@pytest.mark.parametrize("path", [p for p in LIBRARY if part_of(p) not in CHECKS_RESULTS], ids=name)
def test_the_oracle_is_not_called_at_run_time(path):
    assert "oracle" not in parts_imported(path)


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_the_library_runs_without_torch_triton_and_onnx(path):
    assert not {found.split(".")[0] for found in imports(path)} & FREE


@pytest.mark.parametrize("path", files("cuda_ref"), ids=name)
def test_the_triton_kernels_run_without_mlx(path):
    assert not {found.split(".")[0] for found in imports(path)} & {"mlx", "mlx_lm", "onnx", "onnxruntime"}
    assert parts_imported(path, CORE if "bench" in path.parts else set()) <= LEAVES


ONNX_EXPORT = [path for path in files("onnx_export") if not path.is_relative_to(ROOT / "onnx_export" / "exporter")]


@pytest.mark.parametrize("path", ONNX_EXPORT, ids=name)
def test_exported_files_run_without_mlx(path):
    assert not {found.split(".")[0] for found in imports(path)} & {"mlx", "mlx_lm", "triton"}
    benchmark = "bench" in path.parts
    assert parts_imported(path, CORE if benchmark else set()) <= (LEAVES | {"oracle"} if benchmark else LEAVES)


@pytest.mark.parametrize("module", sorted(CORE))
def test_the_core_of_the_benchmarks_needs_nothing_but_python(module):
    path = ROOT / f"{module.replace('.', '/')}.py"
    others = {found.split(".")[0] for found in imports(path)} - {"mlx_sparse"}
    assert others <= sys.stdlib_module_names
    assert parts_imported(path, CORE) <= LEAVES


TESTS = {path.stem for path in (ROOT / "tests").iterdir() if path.suffix == ".py" or path.is_dir()}


@pytest.mark.parametrize("folder", ["mlx_sparse", "cuda_ref", "onnx_export"])
def test_nothing_that_is_installed_imports_the_tests(folder):
    """Nor does it change where Python looks for modules."""
    assert {"msl", "cases", "conftest"} <= TESTS
    for path in files(folder):
        top = {found.split(".")[0] for found in imports(path)}
        assert not top & (TESTS | {"tests", "scripts"}), path
        assert "sys.path" not in ast.unparse(ast.parse(path.read_text())), path


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn", {"torch.nn"}),
        ("from ..cache import f", {"mlx_sparse.cache.kv_cache.f"}),
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
