"""One call of an enabled model: what each of its attention calls does, sparse or dense, and why."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..cache.kv_cache import SparseBatchKVCache, SparseQuantizedKVCache, adopt, is_padding_mask
from ..cache.sparse_cache import SparseCache
from ..calibrate import Layer
from ..common import reasons
from ..common.call_report import Counts
from ..common.model_info import leaves
from ..common.packed_rows import PackedRows, Rows
from ..common.stats import dense_elements
from ..methods import NEVER, Dense, Method, Prefill, Step, registry
from . import seam
from .dense import attend_alone, attend_many, attend_packed, many_rows, replace, with_sinks
from .drafts.phase import Phase, current
from .figures import PrefillCounts

if TYPE_CHECKING:
    from .plan import Plan


class Call:
    """One call of an enabled model: what it knows until it returns, and what it counts.

    As a context manager it listens at the seam, for the thread that entered it alone. Its plain caches become ours.
    The report has its counts when it is left, unless by an exception.

    Attributes:
        probed: per attention call its cache and why the layer stays dense, None if it need not; None, but in a call
            that is made to find that out.
    """

    def __init__(self, plan: Plan, caches: Any, *, probing: bool = False) -> None:
        self.configs, self.prefill, self.decode = plan.configs, plan.prefill, plan.decode
        self.backend, self.mass, self.decodes = plan.backend, plan.mass, plan.decodes
        self.report, self.calibration = plan.report, plan.calibration
        self.probed: list[tuple[Any, str | None]] | None = [] if probing else None
        self.backends: set[str] = set()  # what probed layers resolve to
        self.layers: Counter[tuple[Method, Layer]] = Counter()  # probed ones, by method
        self._plan = plan
        if caches is not None:
            adopt(caches)
        # Once for all layers: every token comes by here.
        self._caches: list[Any] = [] if caches is None else leaves(caches)
        self._places = {id(cache): place for place, cache in enumerate(self._caches)}
        self.hooks = plan.hooks.of_call(self._caches)
        self._counts = Counts()
        self._figures = PrefillCounts()
        self._steps = 0  # keys of a step of a single query
        self._phase = current.get()
        self._drafts = plan.lossless is None or self._phase is Phase.DRAFT  # whether steps may be sparse

    def __enter__(self) -> Call:
        self._token = seam.active.set(self)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        seam.active.reset(self._token)
        self.hooks.end()
        if error is None:
            # The device computes what nothing else asks for; this waits for no more than `PrefillCounts.figures` does.
            self._counts.counting = self.hooks.submit()
            self._counts.prefill = self._figures.figures()
            self.report.add(self._counts)
            if self._steps and self._plan.watch is not None:
                watch, self._plan.watch = self._plan.watch, None
                watch(self._steps, self._counts)

    def agreed(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the call, tokens first, as all processes agree on them."""
        return inputs

    def attend(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array | None:
        """The sparse result of one attention call, or None to let mlx-lm attend densely."""
        if isinstance(cache, SparseQuantizedKVCache) and not isinstance(keys, mx.array):
            keys, values = (PackedRows.kept(parts, cache.bits) for parts in (keys, values))
        reason = self._layer_reason(keys, values, cache)
        if self.probed is not None:
            self.probed.append((cache, reason or self._probe(queries, keys, cache, mask, sinks)))
            return None
        if reason is None and self.decodes:
            self.hooks.take_in(cache)
        if reason is None and isinstance(cache, SparseBatchKVCache) and self._apart(queries.shape[2], cache):
            out = self._attend_each(queries, cache, scale, mask, sinks)
        else:
            out = self._attend(queries, keys, cache, scale, mask, sinks, self._layer(cache), reason)
        if out is None and reason is None:
            self.hooks.observe(queries, keys, cache, scale, mask, sinks)
            if isinstance(mask, str):
                out = self._dense(queries, keys, cache, scale, sinks)
        return out

    def _dense(self, queries: mx.array, keys: Any, cache: Any, scale: float, sinks: mx.array | None) -> mx.array | None:
        """Dense causal attention, where MLX's own would read keys more than once or unpack all of them; else None."""
        if self._phase is Phase.CHECK and many_rows(self.backend, queries, keys):
            return attend_many(queries, cache, scale, sinks)
        # In a lossless model MLX's own attention gives several queries the bits that its steps give them one by one.
        if self._plan.lossless is not None or sinks is not None or not isinstance(keys, PackedRows):
            return None
        return attend_packed(queries, cache, scale)

    def _attend(
        self,
        queries: mx.array,
        keys: Rows,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        layer: int,
        reason: str | None = None,
    ) -> mx.array | None:
        """The counted call of ``layer``, dense for ``reason`` if there is one."""
        L, backend = queries.shape[2], ""
        prompt = L > 1
        if reason is None:
            self._steps = keys.shape[2] if L == 1 else 0
            config = self.prefill if prompt else self.decode
            if config is not None:
                backend = self._resolve(config, queries, keys)
        attended = None
        short: list[int] = []
        if reason is None and prompt:
            reason = next(self._prompt_reasons(queries, keys.shape[2], mask), None)
            if reason is None:
                attended = self._prompt(queries, keys, cache, scale, backend, layer)
        elif reason is None:
            reason, attended, short = self._decode(queries, keys, cache, scale, mask, sinks, backend)
        if attended is None:
            self._counts.dense_calls[reason or reasons.TOO_FULL] += 1
            if reason == reasons.CHECKED and self._phase is Phase.CHECK:
                self._counts.checked_bytes += self._dense_bytes(keys, cache)
            return None
        out, lse = attended
        if sinks is not None:
            out = with_sinks(out, lse, sinks)
        if short:
            self._counts.dense_calls[reasons.SHORT_SEQUENCES] += 1
            out = replace(out, short, queries, cache, scale, sinks)
        return out

    def _decode(
        self,
        queries: mx.array,
        keys: Rows,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        backend: str,
    ) -> tuple[str | None, tuple[mx.array, mx.array] | None, list[int]]:
        """Why a call of the decode method is dense; else what was attended, and the sequences too short for it."""
        reason = next(self._step_reasons(queries, keys, cache, mask, sinks, backend), None)
        if reason is not None:
            return reason, None, []
        served, short = self._served(queries, keys, cache, backend)
        return None, self._step(queries, keys, cache, served, scale, backend), short

    def _apart(self, L: int, cache: SparseBatchKVCache) -> bool:
        """Return True if a call of ``L`` queries may be sparse for one sequence of a batch and dense for another.

        Without a method for prompts, chunks of a single token are: alone they are decode steps.
        """
        if L == 1:
            return False
        before = cache.length - L
        ends = cache.prompt_ends or [cache.length]
        if self.prefill is None and len(cache.first_rows(self._caches)) == 1 and min(ends) >= cache.length:
            return False  # what is kept beside the only sequence is kept
        pieces = [min(end - before, L) for end in ends]
        return self.prefill is not None or 1 in pieces

    def _attend_each(
        self, queries: mx.array, cache: SparseBatchKVCache, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array | None:
        """Prompts of a batch, each as it would be alone, so that no answer depends on others; None if all are dense.

        mlx-lm cuts the prompts of a batch into the pieces that each would have alone. What is chosen for a piece, and
        whether it is dense, then follows from the sequence's own rows.
        """
        before = cache.length - queries.shape[2]
        extents = cache.extents(self._caches)
        if extents is None:
            self._counts.dense_calls[reasons.UNKNOWN_PADDING] += 1
            return None
        layer = self._layer(cache)
        pieces = []
        outs: list[Any] = []
        for sequence, (first, stop) in enumerate(extents):
            one = cache.alone(sequence, first, stop)
            start, end = max(first - before, 0), max(stop - before, 0)
            piece, out = queries[sequence : sequence + 1, :, start:end], None
            if start < end:
                keys, _, _ = one.rows("ops")
                lending: Any = contextlib.nullcontext()
                if end - start == 1:
                    lending = self.hooks.lending(cache, sequence, one, first, queries, piece)
                with lending:
                    out = self._attend(piece, keys, one, scale, mask, sinks, layer)
                cache.keep(sequence, one)
            pieces.append((piece, one, start))
            outs.append(out)
        if all(out is None for out in outs):
            return None
        for sequence, (piece, one, start) in enumerate(pieces):
            n, out = piece.shape[2], outs[sequence]
            if out is None:
                out = attend_alone(piece, one, scale, sinks)
            outs[sequence] = mx.pad(out, [(0, 0), (0, 0), (start, queries.shape[2] - start - n), (0, 0)])
        return mx.concatenate(outs)

    def _probe(self, queries: mx.array, keys: Rows, cache: Any, mask: Any, sinks: mx.array | None) -> str | None:
        """Why a layer with a cache of ours stays dense in every stage.

        Raises:
            ConfigError: a parameter does not fit the head dim.
        """
        if mask is not None and not is_padding_mask(mask, self._caches):
            return reasons.ARRAY_MASK
        refusal = self.hooks.refusal(cache)
        if not self.configs:  # dense, over any cache that may come to be quantised
            self.backends.add(registry.resolve(self.backend, Dense.name, D=queries.shape[3], G=1))
            return None
        serving = [
            config for config in self.configs if sinks is None or config.serves_sinks(queries.shape[1] // keys.shape[1])
        ]
        serving = [config for config in serving if refusal is None or config is not self.decode]
        for config in serving:
            config.check_head_dim(queries.shape[-1])
            backend = self._resolve(config, queries, keys)
            self.backends.add(backend)
            self.layers[config, self._sizes(config, queries, keys, cache, backend)] += 1
        return None if serving else refusal or reasons.SINKS

    def _resolve(self, config: Method, queries: mx.array, keys: Rows) -> str:
        """The backend for these sizes."""
        Hq, D = queries.shape[1], queries.shape[3]
        # Prompts are attended over unpacked rows.
        bits = keys.bits if isinstance(keys, PackedRows) and not isinstance(config, Prefill) else None
        return registry.resolve(self.backend, config.name, D=D, G=Hq // keys.shape[1], bits=bits)

    def _layer(self, cache: Any) -> int:
        """The position of the layer's cache."""
        return self._places.get(id(cache), -1)

    def _layer_reason(self, keys: Any, values: Any, cache: Any) -> str | None:
        """Why this layer can never attend sparsely."""
        if cache is None:
            return reasons.NO_CACHE
        if not isinstance(cache, SparseCache):
            return reasons.other_cache(type(cache).__name__)
        if keys.shape != values.shape:
            return reasons.OTHER_HEAD_DIMS
        for rows, kept in ((keys, cache.key_rows), (values, cache.value_rows)):
            same = isinstance(rows, PackedRows) == isinstance(kept, PackedRows)
            if not same or rows.shape[1:] != (kept.shape[1], cache.length, kept.shape[3]):
                return reasons.OTHER_ROWS
        return None

    def _prompt_reasons(self, queries: mx.array, S: int, mask: Any) -> Iterator[str]:
        """Why this call of several queries attends ``S`` keys densely. The first reason counts, others may not hold."""
        L = queries.shape[2]
        if self._phase is Phase.CHECK and S > L and L <= reasons.VERIFY_QUERIES:
            yield reasons.CHECKED
        if L <= reasons.VERIFY_QUERIES and (S > L or self.prefill is not None):
            yield reasons.A_FEW
        if self.prefill is None:
            yield reasons.PROMPT
            return
        if mask is None:
            yield reasons.NOT_CAUSAL
        if not is_padding_mask(mask, self._caches):
            yield reasons.ARRAY_MASK
        shortest = self.prefill.shortest_context()
        if S < shortest:
            yield reasons.shorter_than(shortest)
        config = self.prefill.at(S)
        if (reason := config.dense_piece(L, S)) is not None:
            yield reason

    def _step_reasons(
        self, queries: mx.array, keys: Rows, cache: Any, mask: Any, sinks: mx.array | None, backend: str
    ) -> Iterator[str]:
        """Why this call of a single query attends densely. The first reason counts; others need not hold then."""
        if not self._drafts:
            yield reasons.CHECKED
        if not self.decodes:
            yield reasons.LAST_OF_PROMPT
        if self.decode is None:
            yield reasons.NO_DECODE
            return
        if sinks is not None and not self.decode.serves_sinks(queries.shape[1] // keys.shape[1]):
            yield reasons.SINKS
        if mask is not None and not is_padding_mask(mask, self._caches):
            yield reasons.ARRAY_MASK
        yield from self.hooks.step_reasons(cache)
        yield from self._length_reasons(queries, keys, cache, backend)

    def _length_reasons(self, queries: mx.array, keys: Rows, cache: Any, backend: str) -> Iterator[str]:
        """Why a context of this length does not pay."""
        first_rows = cache.first_rows(self._caches)
        longest = cache.length - min(first_rows)
        shortest = self._shortest(queries, keys, cache, backend, longest)
        if shortest >= NEVER:
            yield reasons.NOTHING_SAVED
        if longest < shortest:
            yield reasons.shorter_than(shortest)

    def _shortest(self, queries: mx.array, keys: Rows, cache: SparseCache, backend: str, S: int = 0) -> int:
        """Keys from which a step of one sequence is sparse, whatever batch it is in; ``S`` keys may ask for more."""
        assert self.decode is not None
        layer = self._sizes(self.decode, queries, keys, cache, backend)
        return int(self.calibration.of(self.decode, layer, S).value)

    def _sizes(self, config: Method, queries: mx.array, keys: Rows, cache: Any, backend: str) -> Layer:
        """What the threshold of a layer depends on."""
        Hkv, D = keys.shape[1], keys.shape[3]
        prompts = isinstance(config, Prefill)
        gpu = registry.gpu_kind() if backend == "metal" else ""
        more: dict[str, Any] = {} if prompts else self.hooks.sizes(cache)
        if isinstance(keys, PackedRows) and not prompts:
            more["packed"] = keys.bits, keys.group_size
        step = Step(Hkv, queries.shape[1] // Hkv, D, keys.itemsize, gpu, **more)
        return Layer(backend, step, keys.dtype, self.calibration.piece if prompts else 1)

    def _served(self, queries: mx.array, keys: Rows, cache: SparseCache, backend: str) -> tuple[list[int], list[int]]:
        """The sequences of a step that are long enough to be sparse, and those for which that would not be dense."""
        assert self.decode is not None
        shortest = self._shortest(queries, keys, cache, backend)
        lengths = [cache.length - first for first in cache.first_rows(self._caches)]
        served = [sequence for sequence, length in enumerate(lengths) if length >= shortest]
        return served, [b for b, length in enumerate(lengths) if self.decode.attended < length < shortest]

    def _prompt(
        self, queries: mx.array, keys: Rows, cache: SparseCache, scale: float, backend: str, layer: int
    ) -> tuple[mx.array, mx.array] | None:
        assert self.prefill is not None
        L, S = queries.shape[2], keys.shape[2]
        config = self.prefill.at(S)
        sizes = self._sizes(config, queries, keys, cache, backend)
        blocks, fullest = None, self.calibration.of(config, sizes, S).value
        if fullest <= 0:
            return None
        if fullest < 1:
            blocks = cache.select_prompt(queries, config, scale=scale, backend=backend, fullest=fullest)
            if blocks is None:
                return None
        out, lse, blocks = cache.attend_prompt(queries, config, scale=scale, backend=backend, blocks=blocks)
        self._figures.add(layer, blocks, config.layout(L, S))
        if self.mass:
            dense = registry.load("dense_lse", backend)(queries, keys, scale=scale, left_padding=None)
            self._figures.add_mass(layer, mx.exp(lse - dense))
        return out, lse

    def _step(
        self, queries: mx.array, keys: Rows, cache: SparseCache, served: list[int], scale: float, backend: str
    ) -> tuple[mx.array, mx.array]:
        self._counts.sparse_calls += 1
        self._counts.dense_bytes += self._dense_bytes(keys, cache)
        self._counts.formula_bytes += self.hooks.formula_bytes(cache)
        return self.hooks.step(queries, cache, served, scale=scale, backend=backend)

    def _dense_bytes(self, keys: Rows, cache: SparseCache) -> int:
        """What dense attention moves for a call that reads every key once."""
        B, Hkv, S, D = keys.shape
        return B * Hkv * cache.row_bytes * dense_elements(S, D) // D
