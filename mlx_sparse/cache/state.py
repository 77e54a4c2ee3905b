"""Define the base class for a method's auxiliary cache state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from .sparse_cache import SparseCache


class State(ABC):
    """Auxiliary cache state of a method, which is updated when its cache is written, trimmed or copied.

    In the method's first decode step, the cache creates the state and passes no arguments. If a state can be rebuilt
    from keys and values, its class must implement only `nbytes`, `rewind` and `read`. mlx-lm may quantize the rows of a
    cache (`pack`) and change the sequences of a batch (`filter`, `extract`, `roll`, `join`, `merge`). A subclass can
    override these methods to return the updated state. The methods of the base class return None, and the cache
    then drops the state. The next decode step creates a new state.

    Attributes:
        listening: True during a forward pass in which the cache must store newly written keys in ``received``.
        received: start row and keys ``(B, Hkv, n, D)`` of the last write; None after the method has read them.
        recall: estimated attention recall ``(B, Hkv)`` of the last decode step; None if the method makes no estimate,
            or after the call has read the estimate.
    """

    listening: bool = False
    received: tuple[int, mx.array] | None = None
    recall: mx.array | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Number of bytes in all arrays of this state."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Forget the rows from index ``length`` on, because they will be overwritten."""

    def read(self, cache: SparseCache, config: Any, G: int, *, whole: bool) -> dict[str, Any]:
        """Update the state for all rows of ``cache``, and return keyword arguments for the method's function.

        Args:
            config: the method and its parameters.
            G: number of query heads per KV head.
            whole: True if the function takes whole buffers and a length; False if it takes only the rows in use.
        """
        return {}

    def store_returned(self, *returned: mx.array) -> None:
        """Store the arrays that the method's function returned in addition to ``out`` and ``lse``."""
        raise NotImplementedError(
            f"{type(self).__name__}: the method's function returned arrays that this state cannot store"
        )

    def pack(self) -> State | None:
        """Return the state to use after mlx-lm has quantized the cache, or None to drop the state."""
        return None

    def filter(self, sequences: list[int], length: int, start: int) -> State | None:
        """Return the state for ``sequences`` and the rows ``[start, length)``, or None to drop the state."""
        return None

    def extract(self, sequence: int, length: int, start: int) -> State | None:
        """Return a new state for one sequence and rows ``[start, length)``, or None. Leave this state unchanged."""
        return None

    def roll(self, padding: mx.array | None, length: int) -> State | None:
        """Return the state after mlx-lm converts right padding to left padding, or None to drop the state.

        The last ``padding (B,)`` of the ``length`` rows move to the front. If ``padding`` is None, no rows move. Then
        mlx-lm is about to pad on the right, or there was no padding.
        """
        return None

    def join(self, cache: SparseCache, theirs: State | None, other: SparseCache) -> State | None:
        """Return the state for ``cache`` after the sequences of ``other`` are appended, or None to drop the state.

        All sequences end at the same row. mlx-lm appends the sequences after this call.

        Args:
            theirs: state of the method for ``other``; None if ``other`` has no such state.
        """
        return None

    @classmethod
    def merge(cls, parts: Sequence[tuple[State | None, SparseCache]]) -> State | None:
        """Return a new state for a left-padded batch of the caches in ``parts``, or None to create no state."""
        return None
