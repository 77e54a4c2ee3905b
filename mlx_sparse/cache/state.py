"""What methods keep beside the keys and values of a cache: the protocol of all states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from .sparse_cache import SparseCache


class State(ABC):
    """What a method keeps beside a cache: up to date with its writes and trims, and copied with it.

    Of what mlx-lm does to rows (`pack`) and to those of a batch (`filter`, `extract`, `roll`, `join`, `merge`) a state
    answers what is left of it. Nothing is the answer here, for states that the next step can rebuild from keys and
    values: theirs are `rewind`, `read` and `nbytes`. A cache begins a state, without arguments, at the first step of
    its method.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that it takes."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Forget rows from ``length`` on: they are about to be overwritten."""

    def receive(self, start: int, keys: mx.array) -> None:
        """The cache is about to write ``keys (B, Hkv, n, D)`` at row ``start``: what was there and behind is gone."""
        self.rewind(start)

    def read(self, cache: SparseCache, config: Any, G: int, *, whole: bool) -> dict[str, Any]:
        """Cover the rows that ``cache`` has in use; return what the method's function takes of them, by its names.

        Args:
            config: the method and its settings.
            G: query heads per KV head.
            whole: whether the function reads whole buffers and a length, or arrays of just these rows.
        """
        return {}

    def take_back(self, *returned: mx.array) -> None:
        """Store the arrays that the method's function returned besides ``out`` and ``lse``."""
        raise NotImplementedError(f"{type(self).__name__}: the method's function returns what it does not take back")

    def pack(self) -> State | None:
        """Return the state after the rows of the cache are quantized in place, or None."""
        return None

    def filter(self, sequences: list[int], length: int, start: int) -> State | None:
        """Only these sequences remain of a batch of ``length`` rows, from row ``start`` on."""
        return None

    def extract(self, sequence: int, length: int, start: int) -> State | None:
        """One sequence, from row ``start`` on of ``length``, becomes a cache of its own; the batch stays as it is."""
        return None

    def roll(self, padding: mx.array | None, length: int) -> State | None:
        """Move the last ``padding (B,)`` of ``length`` rows of each sequence, which stand for nothing, to the front.

        With None for ``padding`` no row moves: a batch is told of padding to come, or that none came.
        """
        return None

    def join(self, cache: SparseCache, theirs: State | None, other: SparseCache) -> State | None:
        """The sequences of ``other`` are about to be added behind those of ``cache``, all aligned at the end.

        Args:
            theirs: what the same method keeps beside ``other``.
        """
        return None

    @classmethod
    def merge(cls, parts: Sequence[tuple[State | None, SparseCache]]) -> State | None:
        """Return the state of one batch of these caches, which stay as they are, padded on the left."""
        return None
