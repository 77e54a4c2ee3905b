"""Define SparQ's auxiliary cache state, which has component-major or int4 scoring keys, and running statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ...cache.state import Cache, Read, State
from ...core.packed_rows import PackedRows, Rows
from .config import SparQ
from .low_rank import Array, ProjectedRows, fit, stack
from .ops import code_groups, key_spread
from .running_statistics import RunningStatistics
from .scoring_keys import GROUP, WORDS, KeyCodes, Projection

if TYPE_CHECKING:
    from ...cache.sparse_cache import SparseCache

# The capacity of component-major keys is a multiple of this number of keys, so that the row of each component starts on
# a cache line of 128 bytes.
ROW_MULTIPLE = 64
# The same alignment for int4 codes, as a number of groups.
GROUPS_MULTIPLE = 4
# Number of rows that prefill quantizes and evaluates at a time, to limit the memory of the float32 copies.
QUANTIZED_ROWS = 2048


class SparQState(State):
    """SparQ's scoring keys and running statistics, which can be rebuilt from keys and values.

    Only projections follow the sequences of a batch, because a fit takes longer than new scoring keys. A trim of more
    than half of the rows removes the projections, and the next decode step fits the rows that it has.

    Attributes:
        columns: component-major keys; None unless the last decode step used ``key_bits=16``.
        codes: quantized scoring keys; None unless the last decode step used ``key_bits=4``.
        keys, values: running statistics of the keys and the values; None before the first decode step that needs
            them.
        projections: projection of each sequence, or None before its fit (``component_score="low_rank"``).
        projection: ``projections`` as one batch, whose scoring keys are in ``codes``; None if ``codes`` has keys.
        fitted_rows: number of rows at the last change of ``projections``.
    """

    def __init__(self) -> None:
        self.columns: Columns | None = None
        self.codes: Codes | None = None
        self.keys: RunningStatistics | None = None
        self.values: RunningStatistics | None = None
        self.projections: list[Projection | None] = []
        self.projection: Projection | None = None
        self.fitted_rows = 0

    @property
    def nbytes(self) -> int:
        projected = [] if self.projection is None else [self.projection.queries, self.projection.keys]
        parts: list[Any] = [self.columns, self.codes, self.keys, self.values, *projected]
        return sum(int(part.nbytes) for part in parts if part is not None)

    def rewind(self, length: int) -> None:
        if 2 * length < self.fitted_rows:
            self.projections, self.projection, self.codes, self.fitted_rows = [], None, None, 0
        for part in (self.columns, self.codes, self.keys, self.values):
            if part is not None:
                part.rewind(length)

    def filter(self, sequences: list[int], length: int, start: int) -> State | None:
        return _with_projections([self.projections[i] for i in sequences] if self.projections else [], length - start)

    def roll(self, padding: mx.array | None, length: int) -> State | None:
        return _with_projections(self.projections, length)

    @classmethod
    def merge(cls, parts: Sequence[tuple[Any, Cache]]) -> State | None:
        projections: list[Projection | None] = []
        for state, cache in parts:
            projections += (state and state.projections) or [None] * len(cache.first_rows())
        return _with_projections(projections, max(cache.length for _, cache in parts))

    def bind(
        self,
        cache: SparseCache,
        config: SparQ,
        G: int,
        *,
        whole: bool,
        query_covariance: Callable[[], Array] | None = None,
    ) -> Read:
        """See `State.bind`. ``query_covariance`` computes ``C_q (D, D)`` of a layer with latents (low_rank.1)."""
        weighted = config.component_score == "query_key"
        if config.scores_rows(packed=isinstance(cache.key_rows, PackedRows)):
            score = self._bind_rows(cache.key_rows.shape[3])
        elif config.component_score == "low_rank":
            assert query_covariance is not None
            score = self._bind_projected(query_covariance, config.rank, whole=whole)
        elif config.key_bits == 16:
            score = self._bind_columns(cache, weighted=weighted, whole=whole)
        else:
            score = self._bind_codes(cache, weighted=weighted, whole=whole)
        if config.reallocates(G):
            self.values = self.values or RunningStatistics(cache.padding, spread=False)
        values = self.values if config.reallocates(G) else None
        if values is None:
            return score

        def with_mean(cache: SparseCache, S: int) -> dict[str, object]:
            values.extend(cache.value_rows, S)
            return score(cache, S) | {"value_mean": values.mean()}

        return with_mean

    def _bind_rows(self, D: int) -> Read:
        """Score the rows of a quantized KV cache, without a copy of the keys."""
        self.columns = self.codes = self.keys = None
        found: dict[str, object] = {"keys_t": None, "rank": D, "component_weight": None, "value_mean": None}
        return lambda cache, S: found

    def _bind_columns(self, cache: SparseCache, *, weighted: bool, whole: bool) -> Read:
        columns, self.codes = self.columns or Columns(), None
        statistics = self.keys or RunningStatistics(cache.padding, spread=True) if weighted else None
        self.columns, self.keys = columns, statistics or self.keys

        def read(cache: SparseCache, S: int) -> dict[str, object]:
            keys, weight = cache.key_rows, None
            columns.extend(keys, S)
            if statistics is not None:
                statistics.extend(keys, S)
                weight = statistics.deviation()
            return {"keys_t": columns.read(S, whole=whole), "component_weight": weight, "value_mean": None}

        return read

    def _bind_codes(self, cache: SparseCache, *, weighted: bool, whole: bool) -> Read:
        if self.codes is None or self.projection is not None:
            self.columns = self.keys = self.projection = None
            self.codes = Codes(cache.padding, cache.first_rows())
        codes = self.codes

        def read(cache: SparseCache, S: int) -> dict[str, object]:
            keys = cache.key_rows
            codes.extend(keys, S)
            weight = codes.spread(keys, S) if weighted else None
            return {"keys_t": codes.read(keys, whole=whole), "component_weight": weight, "value_mean": None}

        return read

    def _bind_projected(self, query_covariance: Callable[[], Array], rank: int, *, whole: bool) -> Read:
        self.columns = self.keys = None

        def read(cache: SparseCache, S: int) -> dict[str, object]:
            if self.projection is None:
                first_rows = cache.first_rows()
                known = self.projections or [None] * len(first_rows)
                C_q = query_covariance()
                fitted = [
                    own or fit(C_q, cache.key_rows[b : b + 1, :, first:S], rank)
                    for b, (own, first) in enumerate(zip(known, first_rows, strict=True))
                ]
                self.projections, self.projection, self.fitted_rows = [*fitted], stack(fitted), S
                self.codes = Codes(cache.padding, first_rows)
            assert self.codes is not None
            rows: Any = ProjectedRows(cache.key_rows, self.projection.keys)
            self.codes.extend(rows, S)
            found = {"keys_t": self.codes.read(rows, whole=whole), "projection": self.projection}
            return found | {"rank": rows.shape[3], "component_weight": None, "value_mean": None}

        return read


def _with_projections(projections: list[Projection | None], rows: int) -> SparQState | None:
    """Return a new state with only ``projections``, or None if no sequence has a projection."""
    if not any(projections):
        return None
    state = SparQState()
    state.projections, state.fitted_rows = projections, rows
    return state


class Columns:
    """Component-major keys (``key_bits=16``).

    Attributes:
        keys_t: ``(B, Hkv, D, capacity)`` array, of which columns ``[0, covered)`` are valid. None before the first
            decode step.
        covered: number of cache rows that have been copied to ``keys_t``.
    """

    def __init__(self) -> None:
        self.keys_t: mx.array | None = None
        self.covered = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.keys_t is None else self.keys_t.nbytes

    def rewind(self, length: int) -> None:
        """Forget the rows from index ``length`` on."""
        self.covered = min(self.covered, length)

    def extend(self, keys: Rows, S: int) -> None:
        """Copy rows of the buffer ``keys`` until ``keys_t`` covers the rows ``[0, S)``."""
        if S <= self.covered:
            self.covered = S
            return
        if self.keys_t is None or self.covered == 0:
            # Copy the whole buffer including its empty rows, so that the next decode steps need not enlarge `keys_t`.
            room = _capacity(keys.shape[2]) - keys.shape[2]
            self.keys_t = mx.contiguous(mx.pad(keys[:].swapaxes(-1, -2), [(0, 0)] * 3 + [(0, room)]))
        else:
            if S > self.keys_t.shape[-1]:
                grown = _capacity(keys.shape[2]) - self.covered
                blank = mx.zeros((*self.keys_t.shape[:-1], grown), keys.dtype)
                self.keys_t = mx.concatenate([self.keys_t[..., : self.covered], blank], axis=-1)
            self.keys_t[..., self.covered : S] = keys[..., self.covered : S, :].swapaxes(-1, -2)
        self.covered = S

    def read(self, S: int, *, whole: bool) -> mx.array:
        """Return ``keys_t``. If ``whole`` is False, return only the first ``S`` columns."""
        assert self.keys_t is not None
        return self.keys_t if whole else self.keys_t[..., :S]


class Codes:
    """Quantized scoring keys (int4) for all full groups of keys (sparq.17 to sparq.20).

    Attributes:
        coded: codes for all rows of the buffer. The codes of groups that are not full are invalid. None before the
            first full group.
        covered: number of rows that have been processed; all full groups in these rows are quantized.
    """

    def __init__(self, padding: mx.array | None, first_rows: list[int]) -> None:
        """Create an empty state. ``padding`` is ``first_rows`` as an array ``(B,)``; None if no row is padding."""
        self.coded: KeyCodes | None = None
        self.covered = 0
        self._padding = padding
        self._first = first_rows
        each = [(slice(b, b + 1), first) for b, first in enumerate(first_rows)]
        # Slices of the batch that are quantized together, with the first row of their sequences.
        self._slices = each if len(set(first_rows)) > 1 else [(slice(None), first_rows[0])]
        self._spread: mx.array | None = None
        self._until = 0  # number of rows at which the next group is full

    @property
    def nbytes(self) -> int:
        return 0 if self.coded is None else self.coded.nbytes

    def rewind(self, length: int) -> None:
        """Forget the rows from index ``length`` on."""
        if length >= self.covered:
            return
        before, self.covered, self._until = self.covered, length, 0
        left = [_full(length, first) for first in self._first]
        if self.coded is None or left == [_full(before, first) for first in self._first]:
            return
        self._spread = None
        # The first group of a sequence defines the center, so remove both together.
        self.coded = self.coded._replace(center=self.coded.center * (mx.array(left) > 0)[:, None, None])

    def extend(self, keys: Rows, S: int) -> None:
        """Quantize all new full groups in rows ``[0, S)`` of the buffer ``keys``."""
        if S < self.covered:
            self.rewind(S)
        if S < self._until:
            self.covered = S
            return
        for sequences, first in self._slices:
            old, new = _full(self.covered, first), _full(S, first)
            if new > old:
                self._spread = None
                self._code(keys, sequences, first, old, new)
        self.covered = S
        self._until = min(first + (_full(S, first) + 1) * GROUP for _, first in self._slices)

    def _code(self, keys: Rows, sequences: slice, first: int, old: int, new: int) -> None:
        """Quantize groups ``[old, new)`` of ``sequences``. In these sequences, group 0 begins at row ``first``."""
        if self.coded is None or self.coded.lo.shape[-1] < new:
            self._grow(keys)
        assert self.coded is not None
        for start in range(old, new, QUANTIZED_ROWS // GROUP):
            stop = min(start + QUANTIZED_ROWS // GROUP, new)
            made = code_groups(
                keys[sequences, :, first + start * GROUP : first + stop * GROUP],
                center=self.coded.center[sequences] if start else None,
            )
            self.coded.codes[sequences, ..., start * WORDS : stop * WORDS] = made.codes
            self.coded.lo[sequences, ..., start:stop] = made.lo
            self.coded.step[sequences, ..., start:stop] = made.step
            if start == 0:
                self.coded.center[sequences] = made.center
            if stop < new:
                mx.eval(*self.coded)

    def _grow(self, keys: Rows) -> None:
        B, Hkv, rows, D = keys.shape
        groups = -(-rows // (GROUP * GROUPS_MULTIPLE)) * GROUPS_MULTIPLE
        old = self.coded
        if old is None:
            blank = mx.zeros((B, Hkv, D, groups), mx.float16)
            words = mx.zeros((B, Hkv, D, groups * WORDS), mx.uint32)
            self.coded = KeyCodes(words, blank, mx.zeros_like(blank), mx.zeros((B, Hkv, D)))
            return
        more = groups - old.lo.shape[-1]
        codes, lo, step = (
            mx.pad(array, [(0, 0)] * 3 + [(0, more * array.shape[-1] // old.lo.shape[-1])]) for array in old[:3]
        )
        self.coded = KeyCodes(codes, lo, step, old.center)

    def read(self, keys: Rows, *, whole: bool) -> KeyCodes:
        """Return the codes. If ``whole`` is False, return only the groups in the first ``covered`` rows."""
        if self.coded is None:
            self._grow(keys)
        assert self.coded is not None
        if whole:
            return self.coded
        codes, lo, step, center = self.coded  # as in `ops.first_groups`, whose call would take time in each step
        groups = self.covered // GROUP
        return KeyCodes(codes[..., : groups * WORDS], lo[..., :groups], step[..., :groups], center)

    def spread(self, keys: Rows, S: int) -> mx.array:
        """Return the key spread (sparq.22) over rows ``[0, S)``, which is cached until another group becomes full."""
        if self._spread is not None:
            return self._spread
        found = key_spread(self.read(keys, whole=False), keys[..., :S, :], self._padding)
        # Before its first full group, the spread of a sequence changes with every row and is not cached.
        if S - max(self._first) >= GROUP:
            self._spread = found
        return found


def _full(length: int, first: int) -> int:
    """Return the number of full groups in rows ``[first, length)`` of a sequence."""
    return max(0, length - first) // GROUP


def _capacity(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
