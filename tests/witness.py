"""Watches the attention calls of a model and holds each to the float64 oracle.

It stands at the seam, so it sees what every layer hands to attention and what it gets back, whatever was done to the
caches before. It keeps the rows that each sequence has written, so it knows what a cache should hold; for H2O, which
cannot be rebuilt from them, also the attention that they have received, in float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from cases import Array
from witness_call import Seen

from mlx_sparse import oracle
from mlx_sparse.cache.h2o_state import STATES
from mlx_sparse.cache.kv_cache import SPARSE_CLASSES, SparseCache
from mlx_sparse.cache.saap_state import BucketIndex
from mlx_sparse.common.model_info import leaves
from mlx_sparse.lm import plan as plans
from mlx_sparse.lm import seam
from mlx_sparse.lm.plan import Call
from mlx_sparse.methods import H2O
from mlx_sparse.ops import baselines, sparq


@dataclass
class Sequence:
    """What one row of a cache should hold, by layer.

    Attributes:
        rows: keys and values ``(2, Hkv, length, D)``.
        scores: by number of rows, the attention that each has received, ``(Hkv, length)``; where it is known.
    """

    length: int = 0
    rows: dict[int, Array] = field(default_factory=dict)
    scores: dict[int, dict[int, Array]] = field(default_factory=dict)

    def copy(self, *, rebuilt: bool = False) -> Sequence:
        """One that goes on by itself; ``rebuilt`` from its rows, which lose the scores."""
        scores = {} if rebuilt else {layer: dict(known) for layer, known in self.scores.items()}
        return Sequence(self.length, dict(self.rows), scores)

    def trim(self, count: int) -> None:
        self.length -= count
        self.rows = {layer: rows[:, :, : self.length] for layer, rows in self.rows.items()}
        self.scores = {
            layer: {length: scores for length, scores in known.items() if length <= self.length}
            for layer, known in self.scores.items()
        }


class Witness:
    """Counts what it saw: sparse calls by method, dense ones, and choices that float32 may make otherwise."""

    def __init__(self) -> None:
        self.sparse: Counter[str] = Counter()
        self.dense = self.ties = self.unchecked = 0
        self.calls: list[Seen] = []
        self._caches: list[Any] = []
        self._chosen: list[Any] = []
        self._short: list[int] = []
        self._parts: list[Seen] = []

    @contextmanager
    def watching(self) -> Iterator[Witness]:
        """While inside, every call of an enabled model is noted."""
        attend, lists, prompt = Call.attend, BucketIndex.lists, SparseCache.attend_prompt
        attend_one, replace = Call._attend, plans.replace

        def noting(call: Call, *args: Any) -> Any:
            self._parts = []
            out = attend(call, *args)
            if call.probed is None:
                self._note(args)
            return out

        def noting_one(call: Call, *args: Any) -> Any:
            self._chosen, self._short = [], []
            out = attend_one(call, *args)
            self._note_part(call, args, out)
            return out

        def noting_short(out: mx.array, short: list[int], *args: Any) -> Any:
            self._short = short
            return replace(out, short, *args)

        def noting_lists(index: BucketIndex, queries: mx.array, S: int, *args: Any) -> Any:
            found = lists(index, queries, S, *args)
            self._chosen = [index.router, dict(index.network or {}), index.centroids, index.ids, index.covered]
            self._chosen += [mx.array(queries), *found]
            return found

        def noting_prompt(cache: SparseCache, *args: Any, **options: Any) -> Any:
            found = prompt(cache, *args, **options)
            self._chosen.append(found[2])
            return found

        def noting_choice(select: Any) -> Any:
            def choose(*args: Any, **options: Any) -> Any:
                self._chosen.append(select(*args, **options))
                return self._chosen[-1]

            return choose

        with ExitStack() as stack:
            stack.enter_context(patch.object(Call, "attend", noting))
            stack.enter_context(patch.object(Call, "_attend", noting_one))
            stack.enter_context(patch.object(plans, "replace", noting_short))
            stack.enter_context(patch.object(BucketIndex, "lists", noting_lists))
            stack.enter_context(patch.object(SparseCache, "attend_prompt", noting_prompt))
            for module in (sparq, baselines):
                stack.enter_context(patch.object(module, "top_k_select", noting_choice(module.top_k_select)))
            yield self

    @contextmanager
    def attending_densely(self, model: Any) -> Iterator[None]:
        """Note the calls of a model that is not enabled too."""
        names, token = seam.bind(model), seam.active.set(self)
        try:
            yield
        finally:
            seam.active.reset(token)
            seam.unbind(names)

    def attend(self, *args: Any) -> None:
        """As a listener at the seam: lets every call pass."""
        self._parts = []
        self._note(args)

    def _note(self, args: tuple[Any, ...]) -> None:
        """A call of a layer, and the calls that it was made of: one, or one of each sequence."""
        queries, keys, values, cache, scale, _, sinks = args
        if not isinstance(cache, (SparseCache, *SPARSE_CLASSES)):
            return
        layer = next(place for place, leaf in enumerate(self._caches) if leaf is cache)
        arrays = (queries, keys, values)
        if len(self._parts) == 1 and self._parts[0].cache is cache:
            (whole,) = self._parts
        else:
            config = self._parts[0].config if self._parts else None
            whole = Seen.of(layer, config, arrays, cache, scale, sinks, None)
        whole.parts = self._parts or [whole]
        self.calls.append(whole)

    def _note_part(self, call: Call, args: tuple[Any, ...], out: Any) -> None:
        queries, keys, cache, scale, _, sinks, layer, *_ = args
        if not isinstance(cache, (SparseCache, *SPARSE_CLASSES)):
            return
        prompt = queries.shape[2] > 1 and call.prefill is not None and out is not None
        config = call.prefill.at(keys.shape[2]) if prompt else call.decode
        values = cache.values[..., : keys.shape[2], :]
        seen = Seen.of(layer, config, (queries, keys, values), cache, scale, sinks, out)
        seen.chosen, seen.short = self._chosen, self._short
        self._parts.append(seen)

    def run(self, model: Any, tokens: Any, caches: list[Any], rows: list[Sequence], counts: list[int]) -> list[Seen]:
        """Call ``model`` and check what every layer did; ``counts`` of the tokens of each row are no padding.

        Raises:
            AssertionError: a cache holds other rows than were written, or a sparse call gave other than the oracle.
        """
        self._caches, self.calls = leaves(caches), []
        logits = model(mx.array(tokens), cache=caches)
        mx.eval(logits, [cache.state for cache in self._caches])
        assert mx.isfinite(logits).all().item(), "logits that are no numbers"
        for call in self.calls:
            call.settle()
            received = self._take_in(call, rows, counts)
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

    def _take_in(self, call: Seen, rows: list[Sequence], counts: list[int]) -> Array:
        """Compare the rows that were there and remember the new ones. For H2O, the scores before the call."""
        queries, *both = call.arrays
        keys = both[0]
        before = np.full(keys.shape[:3], -np.inf)
        for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
            start = 0 if call.padding is None else int(call.padding[b])
            held = np.stack([array[b, :, start : start + row.length + count] for array in both])
            if row.length:
                written = row.rows[call.layer]
                assert np.array_equal(held[:, :, : row.length], written), f"layer {call.layer}, row {b}: other rows"
            row.rows[call.layer] = held
            if isinstance(call.config, H2O):
                known = row.scores.setdefault(call.layer, {})
                scores = np.zeros((keys.shape[1], 0)) if row.length == 0 else known.get(row.length)
                if scores is None:
                    assert call.out is None, "h2o is sparse over rows whose attention is not known"
                    continue
                before[b, :, start:] = np.pad(scores, [(0, 0), (0, keys.shape[2] - start - row.length)])
                if call.out is None and row.length + count + start == keys.shape[2]:
                    known |= received(queries[b], held[0], scores, count, call.scale)
        if isinstance(call.config, H2O) and call.out is not None:
            self._receive(call, rows, before)
        return before

    @staticmethod
    def _receive(call: Seen, rows: list[Sequence], before: Array) -> None:
        """The scores after a step that attended the keys that it chose."""
        queries, keys, values = call.arrays
        listed = oracle.baselines.listed(np.array(call.chosen[0]), keys.shape[2])
        settings = {"top_k": keys.shape[2], "local_window": 0, "scale": call.scale, "left_padding": call.padding}
        _, after = oracle.h2o_attention(queries, keys, values, scores=np.where(listed, before, -np.inf), **settings)
        for b, row in enumerate(rows):
            start = 0 if call.padding is None else int(call.padding[b])
            row.scores[call.layer][row.length + 1] = after[b, :, start:]


def received(queries: Array, keys: Array, scores: Array, count: int, scale: float) -> dict[int, Array]:
    """H2O's scores after the dense ``queries (Hq, count, D)``, by number of rows: after each of a few, or after all."""
    found, length = {}, scores.shape[1]
    step = 1 if count <= STATES else count
    for stop in range(step, count + 1, step):
        seen = keys[None, :, : length + stop]
        added = oracle.h2o_scores(queries[None, :, stop - step : stop], seen, scale=scale)[0]
        scores = np.pad(scores, [(0, 0), (0, step)]) + added
        found[length + stop] = scores
    return found
