"""Implement each method in one room: sparq, saap and sample, and the papers' baselines and patterns.

In each room `config` has the settings, crossover length and bytes moved. `oracle`, `ops` and `metal` have the functions
on the backends, and `state` has the auxiliary cache state.

The text form of a method is ``METHOD[:key=value,...][+METHOD...]``, for example ``"sparq:rank=16,top_k=64"``. `parse`
reads the text form, and ``str(method)`` prints it. `METHODS` lists all methods by name. Every name is imported on first
use, because `mlx_sparse.cuda_ref` needs few of them.
"""
# ruff: noqa: F403

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..core.base import Dense as Dense
    from .baselines.config import *
    from .gather.config import *
    from .patterns.config import *
    from .saap.config import *
    from .sample.config import *
    from .sparq.config import *
    from .text import *

_HOMES = {
    "..core.base": "Dense",
    ".baselines.config": "FlexGen H2O OracleTopK Quest Streaming",
    ".gather.config": "Gather",
    ".patterns.config": "BigBird HashSparse HyperAttention MInference StreamingPrefill",
    ".saap.config": "SAAP",
    ".sample.config": "Sample SampleRange",
    ".sparq.config": "SparQ",
    ".text": "MAX_TOML_BYTES METHODS load_toml parse read_toml split_methods",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> "Any":
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOME_OF[name], __name__), name)
    return value
