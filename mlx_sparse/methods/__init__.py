"""Define one frozen dataclass per method, with its settings, crossover length and bytes moved.

The text form of a method is ``METHOD[:key=value,...][+METHOD...]``, for example ``"sparq:rank=16,top_k=64"``. `parse`
reads the text form, and ``str(method)`` prints it. `METHODS` lists all methods by name. `mlx_sparse.methods.table`
lists the function of each method on each backend, and the class of its auxiliary cache state. Every name is imported
on first use, because `mlx_sparse.cuda_ref` needs only the table.
"""
# ruff: noqa: F403

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .base import *
    from .baselines import *
    from .cost import *
    from .quest import *
    from .saap import *
    from .sample import *
    from .sparq import *
    from .text import *

_HOMES = {
    "baselines": "BigBird FlexGen H2O HashSparse HyperAttention MInference OracleTopK Streaming StreamingPrefill",
    "base": "NEVER QK_NORMS Dense Method Prefill Step",
    "cost": "ENOUGH_SAVED SAMPLE_DENSE_BELOW SAMPLE_DENSE_ABOVE nvidia_kind",
    "quest": "Quest",
    "saap": "SAAP",
    "sample": "Sample SampleRange",
    "sparq": "SparQ",
    "text": "MAX_TOML_BYTES METHODS load_toml parse read_toml split_methods",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> "Any":
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value
