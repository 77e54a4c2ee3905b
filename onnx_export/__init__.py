"""Export of models to ONNX: the operators of domain ``mlx_sparse``, and models built around them."""

if __name__ != "mlx_sparse.onnx_export":  # an editable install puts the project root on sys.path
    raise ImportError("onnx_export/ is installed as mlx_sparse.onnx_export: run `pip install -e .`, then import that")

from .build import check, function, functions, node, operator_model
from .domain import COMPAT, DEFAULT, DOMAIN, SPEC, VERSION, Profile
from .schemas import OPERATORS, registered

__all__ = [
    "COMPAT",
    "DEFAULT",
    "DOMAIN",
    "OPERATORS",
    "SPEC",
    "VERSION",
    "Profile",
    "check",
    "function",
    "functions",
    "node",
    "operator_model",
    "registered",
]
