"""Define the base class for a method's auxiliary cache state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

Cache = Any  # a `SparseCache`, whose module imports this module
# Function from a cache and its length to keyword arguments for the method's function.
Read = Callable[[Cache, int], dict[str, object]]


class State(ABC):
    """Auxiliary cache state of a method, which is updated when its cache is written, trimmed or copied.

    In the method's first decode step, the cache creates the state and passes no arguments. If a state can be rebuilt
    from keys and values, its class must implement only `nbytes`, `rewind` and `bind`. mlx-lm may quantize the rows of a
    cache (`pack`) and change the sequences of a batch (`filter`, `extract`, `roll`, `merge`). A subclass can override
    these methods to return the updated state. The methods of the base class return None, and the cache then drops the
    state. The next decode step creates a new state.

    Attributes:
        listening: True during a forward pass in which the cache must store newly written keys in ``received``.
        received: start row and keys ``(B, Hkv, n, D)`` of the last write; None after the method has read them.
    """

    listening: bool = False
    received: tuple[int, mx.array] | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Number of bytes in all arrays of this state."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Forget the rows from index ``length`` on, because they will be overwritten."""

    def bind(self, cache: Cache, config: Any, G: int, *, whole: bool) -> Read:
        """Return a function that updates the state for a decode step, and returns arguments for the method's function.

        A layer calls `bind` when it is planned, so the decode steps do not read the configuration. A state
        that only the method's hooks read has no such function.

        Args:
            config: the method and its parameters.
            G: number of query heads per KV head.
            whole: True if the method's function takes whole buffers and a length; False if it takes only the rows in
                use.
        """
        raise NotImplementedError

    # Function that stores the arrays that the method's function returned in addition to ``out`` and ``lse``. If it is
    # None, the only such array is the estimated attention recall ``(B, Hkv)``, which the caller counts.
    keep: Callable[..., None] | None = None

    def pack(self) -> State | None:
        """Return the state to use after mlx-lm has quantized the cache, or None to drop the state."""
        return None

    def filter(self, sequences: list[int], length: int, start: int) -> State | None:
        """Return the state for ``sequences`` and the rows ``[start, length)``, or None to drop the state."""
        return None

    def extract(self, sequence: int, length: int, start: int) -> State | None:
        """Return a new state for one sequence and rows ``[start, length)``, or None. Leave this state unchanged.

        Override this method if `filter` changes the state in place.
        """
        return self.filter([sequence], length, start)

    def roll(self, padding: mx.array | None, length: int) -> State | None:
        """Return the state after mlx-lm converts right padding to left padding, or None to drop the state.

        The last ``padding (B,)`` of the ``length`` rows move to the front. If ``padding`` is None, no rows move. Then
        mlx-lm is about to pad on the right, or there was no padding.
        """
        return None

    @classmethod
    def merge(cls, parts: Sequence[tuple[State | None, Cache]]) -> State | None:
        """Return a new state for a left-padded batch of the caches in ``parts``, or None to create no state."""
        return None
