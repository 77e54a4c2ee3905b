"""Test that internal functions have few parameters."""

import ast
from pathlib import Path

import pytest

import mlx_sparse
from mlx_sparse import cuda_ref, onnx_export, oracle

ROOT = Path(__file__).parents[2]
MOST = 8
# The function of a backend has the name and the parameters of the public function.
PUBLIC = {*dir(mlx_sparse), *oracle.__all__, *cuda_ref._HOME_OF, *onnx_export.__all__}
LAUNCHES = ("triton.jit", "torch.library.custom_op")  # kernels, and operators that take one tensor per parameter


def count_parameters(function: ast.FunctionDef) -> int:
    """Return the number of parameters without ``self`` or ``cls``."""
    args = function.args
    named = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len(named) + bool(args.vararg) + bool(args.kwarg) - (named[:1] in (["self"], ["cls"]))


def is_launch(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith(LAUNCHES) for decorator in function.decorator_list)


@pytest.mark.parametrize("folder", ["mlx_sparse", "cuda_ref", "onnx_export", "scripts"])
def test_functions_have_at_most_eight_parameters(folder: str) -> None:
    """Allow more parameters in public functions and in launches of kernels."""
    found = [
        f"{path.relative_to(ROOT).as_posix()}: {node.name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and count_parameters(node) > MOST
        and node.name not in PUBLIC
        and not is_launch(node)
    ]
    assert not found


def test_parameters_are_counted() -> None:
    (function,) = ast.parse("def f(self, a, /, b, *c, d, **e): ...").body
    assert isinstance(function, ast.FunctionDef)
    assert count_parameters(function) == 5
