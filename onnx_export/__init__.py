"""Export of models to ONNX: the operators of domain ``mlx_sparse``, and models built around them."""

if __name__ != "mlx_sparse.onnx_export":  # an editable install puts the project root on sys.path
    raise ImportError("onnx_export/ is installed as mlx_sparse.onnx_export: run `pip install -e .`, then import that")

from .build import check, function, functions, node, operator_model
from .domain import COMPAT, DEFAULT, DOMAIN, SPEC, VERSION, Profile
from .native import library_path, session_options
from .operators import OPERATORS
from .schemas import registered

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .exporter.export import export as export
    from .runner import Runner as Runner

__all__ = [
    "COMPAT",
    "DEFAULT",
    "DOMAIN",
    "OPERATORS",
    "SPEC",
    "VERSION",
    "Profile",
    "Runner",
    "check",
    "export",
    "function",
    "functions",
    "library_path",
    "node",
    "operator_model",
    "registered",
    "session_options",
]

_HOME_OF = {"export": "exporter.export", "Runner": "runner"}  # imported when used: these need more than onnx


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
