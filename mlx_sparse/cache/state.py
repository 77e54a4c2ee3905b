"""Base class of the auxiliary cache states of all methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from .sparse_cache import SparseCache


class State(ABC):
    """Auxiliary cache state of a method. It follows the writes and trims of its cache, and is copied with it.

    A cache makes the state, without arguments, at the first decode step of its method. A state that can be rebuilt from
    keys and values implements `nbytes`, `rewind` and `read`. mlx-lm also quantizes rows (`pack`) and changes batches
    (`filter`, `extract`, `roll`, `join`, `merge`). These methods return the state after the change. Here they return
    None: the state is dropped, and the next step rebuilds it.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all arrays of the state."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Forget the rows at index ``length`` and above, because they will be overwritten."""

    def receive(self, start: int, keys: mx.array) -> None:
        """Prepare for ``keys (B, Hkv, n, D)``, which the cache will write at row ``start``. Forget later rows."""
        self.rewind(start)

    def read(self, cache: SparseCache, config: Any, G: int, *, whole: bool) -> dict[str, Any]:
        """Cover the rows in use of ``cache``, and return arguments of the method's function by name.

        Args:
            config: the method and its settings.
            G: query heads per KV head.
            whole: True if the function reads whole buffers and a length; False if it reads arrays of the rows in use.
        """
        return {}

    def store_returned(self, *returned: mx.array) -> None:
        """Store the arrays that the method's function returned after ``out`` and ``lse``."""
        raise NotImplementedError(
            f"{type(self).__name__}: the method's function returned arrays that this state cannot store"
        )

    def pack(self) -> State | None:
        """Return the state after the rows of the cache are quantized in place, or None."""
        return None

    def filter(self, sequences: list[int], length: int, start: int) -> State | None:
        """Return the state of these sequences of a batch, for the rows ``[start, length)``, or None."""
        return None

    def extract(self, sequence: int, length: int, start: int) -> State | None:
        """Return the state of one sequence, for the rows ``[start, length)``, or None. The batch is not changed."""
        return None

    def roll(self, padding: mx.array | None, length: int) -> State | None:
        """Return the state after the last ``padding (B,)`` of ``length`` rows moved to the front, or None.

        These rows are padding. If ``padding`` is None, no row moves: mlx-lm announces right padding, or found none.
        """
        return None

    def join(self, cache: SparseCache, theirs: State | None, other: SparseCache) -> State | None:
        """Return the state after the sequences of ``other`` are appended to the batch ``cache``, or None.

        All sequences are aligned at their last row. The caches are not changed yet.

        Args:
            theirs: the state of the same method on ``other``.
        """
        return None

    @classmethod
    def merge(cls, parts: Sequence[tuple[State | None, SparseCache]]) -> State | None:
        """Return the state of one left-padded batch of these caches, or None. The caches are not changed."""
        return None
