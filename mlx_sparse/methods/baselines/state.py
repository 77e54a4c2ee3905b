"""Define H2O's auxiliary cache state, the accumulated attention of each key (docs/spec/sparq.md, "Baselines")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from ...cache.state import Read, State
from .config import H2O
from .ops import h2o_scores

if TYPE_CHECKING:
    from ...cache.sparse_cache import SparseCache

# Number of states that are stored, so that rejected drafts can be trimmed. A state has one float32 per key and KV head.
STATES = 16


@dataclass(frozen=True, eq=False)
class Scores:
    """Attention weight of each key, summed over the queries of rows ``[0, length)``.

    Attributes:
        length: number of rows whose queries are included in the scores.
        scores: float32 ``(B, Hkv, length)`` sums of attention weights; -inf for evicted keys and padding.
    """

    length: int
    scores: mx.array


class H2OState(State):
    """Accumulated attention scores for the keys of a cache.

    The scores cannot be rebuilt from keys and values. The scores become unknown if the queries of some rows were not
    added. They also become unknown if a trim leaves fewer rows than the oldest entry of ``states`` covers.

    Attributes:
        states: list of `Scores`, one for each of the last `STATES` updates, in ascending order of length.
    """

    def __init__(self, states: list[Scores] | None = None) -> None:
        self.states = states or []
        self._submitted = True

    @property
    def nbytes(self) -> int:
        return sum(state.scores.nbytes for state in self.states)

    @property
    def length(self) -> int:
        """Number of rows whose queries are included in the scores."""
        return self.states[-1].length if self.states else 0

    def rewind(self, length: int) -> None:
        while self.length > length:
            self.states.pop()

    def add(self, queries: mx.array, keys: mx.array, *, scale: float, left_padding: mx.array | None) -> None:
        """Add the attention weights of a dense call to the scores.

        Args:
            queries: ``(B, Hq, L, D)`` queries of the last L rows of ``keys``.
            keys: ``(B, Hkv, S, D)`` keys of the first S rows. The scores must already include the queries of the first
                ``S - L`` rows.
        """
        L, S = queries.shape[2], keys.shape[2]
        # Store a state for every query of a verification step, because any draft can be rejected.
        step = 1 if L <= STATES else L
        for stop in range(step, L + 1, step):
            counted, seen = queries[:, :, stop - step : stop], keys[:, :, : S - L + stop]
            received = h2o_scores(counted, seen, scale=scale, left_padding=left_padding)
            self._push(self._grown(received.shape) + received)

    def bind(self, cache: SparseCache, config: H2O, G: int, *, whole: bool) -> Read:
        return lambda cache, S: {"scores": self._grown((*cache.key_rows.shape[:2], S))}

    def keep(self, scores: mx.array) -> None:
        self._push(scores)

    def pack(self) -> H2OState:
        return self

    def filter(self, sequences: list[int], length: int, start: int) -> H2OState | None:
        if self.length != length:
            return None
        return H2OState([Scores(length - start, self.states[-1].scores[sequences][..., start:])])

    @classmethod
    def merge(cls, parts: Sequence[tuple[State | None, SparseCache]]) -> H2OState | None:
        """Return the state of the merged batch, or None if the scores of any cache are unknown."""
        S = max(cache.length for _, cache in parts)
        padded = []
        for received, cache in parts:
            if not isinstance(received, H2OState) or not 0 < cache.length == received.length:
                return None
            widths = [(0, 0), (0, 0), (S - cache.length, 0)]
            padded.append(mx.pad(received.states[-1].scores, widths, constant_values=-mx.inf))
        return H2OState([Scores(S, mx.concatenate(padded))])

    def submit(self) -> None:
        """Start computing the new scores on the device. Unevaluated scores would keep old keys in memory."""
        if not self._submitted:
            mx.async_eval([state.scores for state in self.states])  # type: ignore[no-untyped-call]
            self._submitted = True

    def _grown(self, shape: tuple[int, ...]) -> mx.array:
        """Pad the latest scores ``(B, Hkv, length)`` with zeros to ``shape``, which is ``(B, Hkv, S)``."""
        if not self.states:
            return mx.zeros(shape)
        return mx.pad(self.states[-1].scores, [(0, 0), (0, 0), (0, shape[2] - self.length)])

    def _push(self, scores: mx.array) -> None:
        self.states = [*self.states, Scores(scores.shape[2], scores)][-STATES:]
        self._submitted = False
