"""The public functions, written once for every array library.

Shapes: ``queries (B, Hq, L, D)``, ``keys`` and ``values (B, Hkv, S, D)`` with the current tokens included; query i of L
sits at position ``S - L + i``; ``left_padding (B,)`` int is the first valid key of each row. Every function returns
``out (B, Hq, L, D)`` in the type of ``queries`` and, with ``return_stats=True``, a `Stats`; ``return_stats="mass"``
also measures the retained attention mass, which costs one dense pass over the keys. Decode methods attend densely when
there is nothing to leave out or more than one query (``L > 1``).

All raise `ShapeError` for arrays that do not fit together, `ConfigError` for parameters out of range and
`BackendUnavailable` for a backend that cannot run here.
"""

from ..call import Library
from .baselines import BaselineFunctions
from .decode import DecodeFunctions
from .prefill import PrefillFunctions
from .saap import SaapFunctions


class Functions(DecodeFunctions, PrefillFunctions, SaapFunctions, BaselineFunctions):
    """All of them, on the arrays of one library."""

    def __init__(self, library: Library) -> None:
        self._library = library
