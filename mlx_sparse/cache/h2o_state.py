"""H2O's auxiliary cache state: the attention that each key has received (docs/spec/sparq.md, "Baselines")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..methods import H2O, registry
from .state import State

if TYPE_CHECKING:
    from .sparse_cache import SparseCache

# Number of last states that are kept for trims after rejected drafts. Each has one float32 number per key.
STATES = 16


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores after the queries of rows ``[0, length)``.

    Attributes:
        scores: float32 ``(B, Hkv, length)``; -inf for evicted and padded keys.
    """

    length: int
    scores: mx.array


class H2OState(State):
    """Scores of the keys of a cache.

    The scores cannot be rebuilt from keys and values. They become unknown if queries were not counted, or if a trim
    goes back further than the kept states.

    Attributes:
        states: the last states, the longest last; empty before the first row.
    """

    def __init__(self, states: list[Scores] | None = None) -> None:
        self.states = states or []
        self._submitted = True

    @property
    def nbytes(self) -> int:
        return sum(state.scores.nbytes for state in self.states)

    @property
    def length(self) -> int:
        """Number of rows whose queries have been counted."""
        return self.states[-1].length if self.states else 0

    def rewind(self, length: int) -> None:
        while self.length > length:
            self.states.pop()

    def add(self, queries: mx.array, keys: mx.array, *, scale: float, left_padding: mx.array | None) -> None:
        """Count the queries of a dense call.

        Args:
            queries: ``(B, Hq, L, D)``, the last of ``keys (B, Hkv, S, D)``; ``length`` is ``S - L``.
        """
        L, S = queries.shape[2], keys.shape[2]
        # In a verification step any draft may be rejected, so every query gets a state.
        step = 1 if L <= STATES else L
        for stop in range(step, L + 1, step):
            counted, seen = queries[:, :, stop - step : stop], keys[:, :, : S - L + stop]
            received = registry.load("h2o_scores", "ops")(counted, seen, scale=scale, left_padding=left_padding)
            self._push(self._grown(received.shape) + received)

    def read(self, cache: SparseCache, config: H2O, G: int, *, whole: bool) -> dict[str, Any]:
        return {"scores": self._grown((*cache.key_rows.shape[:2], cache.length))}

    def store_returned(self, *returned: mx.array) -> None:
        self._push(*returned)

    def pack(self) -> H2OState:
        return self

    def filter(self, sequences: list[int], length: int, start: int) -> H2OState | None:
        if self.length != length:
            return None
        return H2OState([Scores(length - start, self.states[-1].scores[sequences][..., start:])])

    def extract(self, sequence: int, length: int, start: int) -> H2OState | None:
        return self.filter([sequence], length, start)

    def join(self, cache: SparseCache, theirs: State | None, other: SparseCache) -> H2OState | None:
        return self.merge([(self, cache), (theirs, other)])

    @classmethod
    def merge(cls, parts: Sequence[tuple[State | None, SparseCache]]) -> H2OState | None:
        """Return the state of the batch; None if the scores of one cache are unknown."""
        S = max(cache.length for _, cache in parts)
        padded = []
        for received, cache in parts:
            if not isinstance(received, H2OState) or not 0 < cache.length == received.length:
                return None
            widths = [(0, 0), (0, 0), (S - cache.length, 0)]
            padded.append(mx.pad(received.states[-1].scores, widths, constant_values=-mx.inf))
        return H2OState([Scores(S, mx.concatenate(padded))])

    def submit(self) -> None:
        """Start computing the added scores. Otherwise they would not be evaluated, and would keep the keys alive."""
        if not self._submitted:
            mx.async_eval([state.scores for state in self.states])  # type: ignore[no-untyped-call]
            self._submitted = True

    def _grown(self, shape: tuple[int, ...]) -> mx.array:
        """Return the last scores ``(B, Hkv, S)``, 0 for later rows."""
        if not self.states:
            return mx.zeros(shape)
        return mx.pad(self.states[-1].scores, [(0, 0), (0, 0), (0, shape[2] - self.length)])

    def _push(self, scores: mx.array) -> None:
        self.states = [*self.states, Scores(scores.shape[2], scores)][-STATES:]
        self._submitted = False
