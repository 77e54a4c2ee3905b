"""Provide sparse attention for long-context language models on MLX.

The functions for arrays are `sparq_attention`, `saap_attention`, `sample_attention` and the baselines. The functions
for models are `enable`, `disable`, `sparse`, `lossless` and `report`. Every name is imported on first use, so importing
this package imports neither mlx nor mlx_lm.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checks import ArtefactError as ArtefactError
    from .checks import BackendUnavailable as BackendUnavailable
    from .checks import ConfigError as ConfigError
    from .checks import ShapeError as ShapeError
    from .checks import SparseAttentionError as SparseAttentionError
    from .core.packed_rows import PackedRows as PackedRows
    from .core.stats import Stats as Stats
    from .lm import disable as disable
    from .lm import enable as enable
    from .lm import lossless as lossless
    from .lm import report as report
    from .lm import sparse as sparse
    from .methods.sparq.scoring_keys import KeyCodes as KeyCodes

    __version__: str

_HOMES = {
    "checks": "ArtefactError BackendUnavailable ConfigError ShapeError SparseAttentionError",
    "methods.sparq.scoring_keys": "KeyCodes",
    "core.packed_rows": "PackedRows",
    "core.stats": "Stats",
    "api.mlx_functions": "attend_blocks attend_indices code_keys h2o_scores saap_assign saap_route sample_select",
    "lm": "disable enable lossless report sparse",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def _attention() -> list[str]:
    from .methods import METHODS

    return [f"{method}_attention" for method in METHODS]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("mlx-sparse-attention")
        except PackageNotFoundError:  # an interrupted uninstall removed the metadata
            return "unknown"
    home_of = dict.fromkeys(_attention(), "api.mlx_functions") if name.endswith("_attention") else _HOME_OF
    if name not in home_of:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from .extras import naming_missing

    with naming_missing():
        home = import_module(f"{__name__}.{home_of[name]}")
    globals()[name] = value = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return [*sorted([*_HOME_OF, *_attention()]), "__version__"]
