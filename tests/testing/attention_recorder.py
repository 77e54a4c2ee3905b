"""Record the attention calls of a model and compare each call with the float64 oracle.

The recorder patches the functions that dispatch attention calls. It thus gets the inputs and outputs of every layer
after all cache operations. It stores the keys and values that each sequence appended and compares them with the cache.
For H2O, it stores in float64 how much attention each key received, which cannot be computed from the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import reference
from cases import Array
from recorded_call import RecordedCall

from mlx_sparse import oracle
from mlx_sparse.cache.kv_cache import SPARSE_CLASSES, SparseQuantized
from mlx_sparse.cache.sparse_cache import SparseCache
from mlx_sparse.core.packed_rows import PackedRows
from mlx_sparse.lm import dense, seam
from mlx_sparse.lm.call import Call, active
from mlx_sparse.lm.hooks import saap
from mlx_sparse.methods import H2O, SparQ
from mlx_sparse.methods.baselines import ops as baselines
from mlx_sparse.methods.baselines.state import STATES
from mlx_sparse.methods.saap.state import BucketIndex
from mlx_sparse.methods.sparq import ops as sparq
from mlx_sparse.model_info import leaves, logits_of


@dataclass
class Sequence:
    """Expected cache content for one sequence of a batch.

    Attributes:
        length: number of tokens in the cache.
        rows: dict from layer to keys and values ``(2, Hkv, length, D)``.
        scores: for H2O, ``scores[layer][length]`` is the attention ``(Hkv, length)`` that each key has received when
            the cache has ``length`` tokens. Unknown scores have no entry.
    """

    length: int = 0
    rows: dict[int, Array] = field(default_factory=dict)
    scores: dict[int, dict[int, Array]] = field(default_factory=dict)

    def copy(self, *, rebuilt: bool = False) -> Sequence:
        """Return an independent copy, which has no scores if the cache was ``rebuilt`` from keys and values alone."""
        scores = {} if rebuilt else {layer: dict(known) for layer, known in self.scores.items()}
        return Sequence(self.length, dict(self.rows), scores)

    def trim(self, count: int) -> None:
        self.length -= count
        self.rows = {layer: rows[:, :, : self.length] for layer, rows in self.rows.items()}
        self.scores = {
            layer: {length: scores for length, scores in known.items() if length <= self.length}
            for layer, known in self.scores.items()
        }


def place_of(call: Call, cache: Any) -> int:
    """Return the index of ``cache`` in the call's list of caches, or -1 if the list does not contain it."""
    return next((place for place, other in enumerate(call.caches) if other is cache), -1)


class AttentionRecorder:
    """Recorder of attention calls. It counts dense calls, the sparse calls of each method, and selections with ties."""

    def __init__(self) -> None:
        self.sparse: Counter[str] = Counter()
        self.dense = self.ties = self.unchecked = 0
        self.calls: list[RecordedCall] = []
        self.logits: list[mx.array] = []  # of the last token of each model call, and 0 for right padding
        self._caches: list[Any] = []
        self._chosen: list[Any] = []
        self._short: list[int] = []
        self._parts: list[RecordedCall] = []

    @contextmanager
    def recording_calls(self) -> Iterator[AttentionRecorder]:
        """Record all attention calls of enabled models inside the context."""
        attend, lists, prompt = Call.attend, saap.attended_keys, SparseCache.attend_prefill
        attend_one, take_step, attend_short = Call.attend_one, Call._step, dense.replace_with_dense

        def recording(call: Call, *args: Any) -> Any:
            self._parts = []
            out = attend(call, *args)
            if call.probe is None:
                self._record(args, call.plan.decode)
            return out

        def recording_one(call: Call, *args: Any) -> Any:
            self._chosen, self._short = [], []
            queries, keys, cache, scale, _, sinks = args
            parts = len(self._parts)
            out = attend_one(call, *args)
            if len(self._parts) == parts:
                self._record_part(call, queries, keys.shape[2], cache, scale, sinks, call.layer_index, out)
            return out  # `recording_step` records a planned step

        def recording_step(
            call: Call, layer: Any, queries: mx.array, cache: Any, scale: float, sinks: Any, bias: None
        ) -> Any:
            self._chosen, self._short = [], []
            out = take_step(call, layer, queries, cache, scale, sinks, bias)
            self._record_part(call, queries, cache.length, cache, scale, sinks, place_of(call, cache), out)
            return out

        def recording_short(out: mx.array, short: list[int], *args: Any) -> Any:
            self._short = short
            return attend_short(out, short, *args)

        def recording_lists(index: BucketIndex, queries: mx.array, S: int, *args: Any) -> Any:
            found = lists(index, queries, S, *args)
            self._chosen = [index.router, dict(index.network or {}), index.centroids, index.ids, index.lists.covered]
            self._chosen += [mx.array(queries), *found]
            return found

        def recording_prompt(cache: SparseCache, *args: Any, **options: Any) -> Any:
            found = prompt(cache, *args, **options)
            self._chosen.append(found[2])
            return found

        def recording_choice(select: Any) -> Any:
            def choose(*args: Any, **options: Any) -> Any:
                self._chosen.append(select(*args, **options))
                return self._chosen[-1]

            return choose

        with ExitStack() as stack:
            stack.enter_context(patch.object(Call, "attend", recording))
            stack.enter_context(patch.object(Call, "attend_one", recording_one))
            stack.enter_context(patch.object(Call, "_step", recording_step))
            stack.enter_context(patch.object(dense, "replace_with_dense", recording_short))
            stack.enter_context(patch.object(saap, "attended_keys", recording_lists))
            stack.enter_context(patch.object(SparseCache, "attend_prefill", recording_prompt))
            for module in (sparq, baselines):
                stack.enter_context(patch.object(module, "top_k_select", recording_choice(module.top_k_select)))
            yield self

    @contextmanager
    def attending_densely(self, model: Any) -> Iterator[None]:
        """Record the attention calls of a dense ``model`` inside the context. The model must not be enabled."""
        places, token = seam.bind(model), active.set(self)
        try:
            yield
        finally:
            active.reset(token)
            seam.unbind(places)

    def attend(self, *args: Any) -> None:
        """Record a dense call and return None, so that the model computes the attention itself."""
        self._parts = []
        self._record(args, None)

    def _record(self, args: tuple[Any, ...], config: Any) -> None:
        """Record a layer's attention call, including the calls for sequences that were computed separately."""
        queries, keys, values, cache, scale, _, sinks = args
        if not isinstance(cache, (SparseCache, *SPARSE_CLASSES)):
            return
        layer = next(place for place, leaf in enumerate(self._caches) if leaf is cache)
        arrays = (queries, *dequantized(cache, keys, values))
        if len(self._parts) == 1 and self._parts[0].cache is cache:
            (whole,) = self._parts
        else:
            whole = RecordedCall.of(layer, config, arrays, cache, scale, sinks, None)
        whole.parts = self._parts or [whole]
        self.calls.append(whole)

    def _record_part(
        self, call: Call, queries: mx.array, S: int, cache: Any, scale: float, sinks: Any, place: int, out: Any
    ) -> None:
        if not isinstance(cache, (SparseCache, *SPARSE_CLASSES)):
            return
        plan = call.plan
        prompt = queries.shape[2] > 1 and plan.prefill is not None and out is not None
        config = plan.prefill.at(S) if prompt else plan.decode
        keys, values = (rows[..., :S, :] for rows in dequantized(cache, cache.keys, cache.values))
        if isinstance(config, SparQ) and isinstance(cache, SparseQuantized) and config.scores_rows(packed=True):
            config = replace(config, rank=keys.shape[3], key_bits=16)  # all components score a key (quantized.2)
        seen = RecordedCall.of(place, config, (queries, keys, values), cache, scale, sinks, out)
        seen.chosen, seen.short = self._chosen, self._short
        self._parts.append(seen)

    def run(
        self, model: Any, tokens: Any, caches: list[Any], rows: list[Sequence], counts: list[int]
    ) -> list[RecordedCall]:
        """Call ``model`` and check every layer. ``counts`` has the number of new non-padding tokens per sequence.

        Raises:
            AssertionError: a cache has wrong keys or values, or the result of a sparse call differs from the oracle.
        """
        self._caches, self.calls = leaves(caches), []
        logits = logits_of(model, mx.array(tokens), caches)
        self.logits.append(mx.where(mx.array(counts)[:, None] < logits.shape[1], 0, logits[:, -1]))
        mx.eval(logits, [cache.state for cache in self._caches])
        assert mx.isfinite(logits).all().item(), "logits are not finite"
        for call in self.calls:
            call.settle()
            received = self._store_rows(call, rows, counts)
            for part in call.parts:
                part.settle()
                if part.out is None:
                    self.dense += 1
                else:
                    self.sparse[part.method] += 1
                    part.check(received)
                    self.ties += part.ties
                    self.unchecked += part.unchecked
        for row, count in zip(rows, counts, strict=True):
            row.length += count
        return self.calls

    def _store_rows(self, call: RecordedCall, rows: list[Sequence], counts: list[int]) -> Array:
        """Check the cache's earlier keys and values and store the new ones. Return H2O's scores before the call."""
        queries, *both = call.arrays
        keys = both[0]
        before = np.full(keys.shape[:3], -np.inf)
        for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
            start = 0 if call.padding is None else int(call.padding[b])
            held = np.stack([array[b, :, start : start + row.length + count] for array in both])
            if row.length:
                written = row.rows[call.layer]
                assert np.array_equal(held[:, :, : row.length], written), f"layer {call.layer}, row {b}: rows differ"
            row.rows[call.layer] = held
            if isinstance(call.config, H2O):
                known = row.scores.setdefault(call.layer, {})
                scores = np.zeros((keys.shape[1], 0)) if row.length == 0 else known.get(row.length)
                if scores is None:
                    assert call.out is None, "h2o is sparse over rows with unknown attention"
                    continue
                before[b, :, start:] = np.pad(scores, [(0, 0), (0, keys.shape[2] - start - row.length)])
                if call.out is None and row.length + count + start == keys.shape[2]:
                    known |= received(queries[b], held[0], scores, count, call.scale)
        if isinstance(call.config, H2O) and call.out is not None:
            self._receive(call, rows, before)
        return before

    @staticmethod
    def _receive(call: RecordedCall, rows: list[Sequence], before: Array) -> None:
        """Update H2O's scores after a step with selected keys. ``before`` has the scores before the step."""
        queries, keys, values = call.arrays
        listed = oracle.baselines.listed(np.array(call.chosen[0]), keys.shape[2])
        settings = {"top_k": keys.shape[2], "local_window": 0, "scale": call.scale, "left_padding": call.padding}
        *_, after = reference.run("h2o", queries, keys, values, scores=np.where(listed, before, -np.inf), **settings)
        for b, row in enumerate(rows):
            start = 0 if call.padding is None else int(call.padding[b])
            row.scores[call.layer][row.length + 1] = after[b, :, start:]


def dequantized(cache: Any, *rows: Any) -> list[mx.array]:
    """Return the ``rows`` of a cache as arrays."""
    return [part if isinstance(part, mx.array) else PackedRows.from_parts(part, cache.bits)[...] for part in rows]


def received(queries: Array, keys: Array, scores: Array, count: int, scale: float) -> dict[int, Array]:
    """Add the attention of ``count`` dense queries to H2O's ``scores``.

    Return a dict from cache length to new scores, with an entry for each query. If the chunk has more than `STATES`
    queries, the dict has only the entry for the last query.
    """
    found, length = {}, scores.shape[1]
    step = 1 if count <= STATES else count
    for stop in range(step, count + 1, step):
        seen = keys[None, :, : length + stop]
        added = oracle.h2o_scores(queries[None, :, stop - step : stop], seen, scale=scale)[0]
        scores = np.pad(scores, [(0, 0), (0, step)]) + added
        found[length + stop] = scores
    return found
