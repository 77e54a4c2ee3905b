"""The public functions, written once for every array library.

Shapes: ``queries (B, Hq, L, D)``, ``keys`` and ``values (B, Hkv, S, D)`` with the current tokens included; query i of L
sits at position ``S - L + i``; ``left_padding (B,)`` int is the first valid key of each row. Every function returns
``out (B, Hq, L, D)`` in the type of ``queries`` and, with ``return_stats=True``, a `Stats`; ``return_stats="mass"``
also measures the retained attention mass, which costs one dense pass over the keys. Decode methods attend densely when
there is nothing to leave out or more than one query (``L > 1``).

All raise `ShapeError` for arrays that do not fit together, `ConfigError` for parameters out of range and
`BackendUnavailable` for a backend that cannot run here.
"""

from ..methods.table import FUNCTIONS
from .baseline_functions import BaselineFunctions
from .checked_call import Library
from .decode_functions import DecodeFunctions
from .prefill_functions import PrefillFunctions
from .saap_functions import SaapFunctions


class Functions(DecodeFunctions, PrefillFunctions, SaapFunctions, BaselineFunctions):
    """All of them, on the arrays of one library."""

    def __init__(self, library: Library) -> None:
        self._library = library


def public_functions(*backends: str) -> list[str]:
    """Return the names of the public functions that any of these backends has."""
    names = [name for name in dir(Functions) if not name.startswith("_")]
    return [name for name in names if FUNCTIONS.get(name.removesuffix("_attention"), {}).keys() & set(backends)]
