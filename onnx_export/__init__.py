"""Export models to ONNX with operators from the domain ``mlx_sparse``."""

if __name__ != "mlx_sparse.onnx_export":  # an editable install puts the project root on sys.path
    raise ImportError("onnx_export/ is installed as mlx_sparse.onnx_export: run `pip install -e .`, then import that")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .build import check as check
    from .build import node as node
    from .build import operator_model as operator_model
    from .build import registered as registered
    from .compose import function as function
    from .compose import functions as functions
    from .domain import COMPAT as COMPAT
    from .domain import DEFAULT as DEFAULT
    from .domain import DOMAIN as DOMAIN
    from .domain import SPEC as SPEC
    from .domain import VERSION as VERSION
    from .domain import Profile as Profile
    from .exporter.export import export as export
    from .operators import OPERATORS as OPERATORS
    from .runtime.native import library_path as library_path
    from .runtime.native import session_options as session_options
    from .runtime.runner import Runner as Runner

_HOMES = {
    "build": "check node operator_model registered",
    "domain": "COMPAT DEFAULT DOMAIN SPEC VERSION Profile",
    "exporter.export": "export",
    "compose": "function functions",
    "runtime.native": "library_path session_options",
    "operators": "OPERATORS",
    "runtime.runner": "Runner",
}  # imported on first use, so that a command can print a one-line error if onnx is missing
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from mlx_sparse.extras import naming_missing

    with naming_missing():
        home = import_module(f"{__name__}.{_HOME_OF[name]}")
    return getattr(home, name)
