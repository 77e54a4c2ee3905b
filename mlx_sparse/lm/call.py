"""Run the sparse or dense attention of all layers in one forward pass of an enabled model."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import Enum
from typing import Any, Protocol

import mlx.core as mx
from mlx import nn

from ..api.call_report import Counts
from ..cache.kv_cache import SPARSE_CLASSES, Mask, SparseBatch, SparseQuantized, adopt, as_bias, is_padding_mask
from ..cache.sparse_cache import SparseCache
from ..core import reasons, registry
from ..core.decide import Facts, chunk_refusal, refusal
from ..core.packed_rows import PackedRows, Rows
from ..core.stats import attended_pairs
from ..model_info import leaves
from . import dense
from .plan import LayerPlan, Plan, Probe, layer_reason
from .statistics import PrefillStatistics, RecallStatistics, recall_arrays

# Every fourth decode step is counted, because MLX computes the estimate of a counted step only.
SAMPLED_STEPS = 4


class Listener(Protocol):
    """Object that receives a model's attention calls, for example the `Call` of an enabled model."""

    def attend(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        """Return the attention output, or None to let mlx-lm run dense attention."""


# Listener of the forward pass that is running on this thread.
active: ContextVar[Listener | None] = ContextVar("active", default=None)


def dispatching(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a function that calls the active listener.

    If there is no active listener, or if the listener returns None, the function calls ``original``.
    """

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
    ) -> mx.array:
        listener = active.get()
        if listener is not None:
            out = listener.attend(queries, keys, values, cache, scale, mask, sinks)
            if out is not None:
                return out
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return scaled_dot_product_attention


class Phase(Enum):
    """Phase of self-speculative decoding. Sparse attention drafts tokens, and dense attention checks the drafts."""

    DRAFT = "draft"
    CHECK = "check"


_phase: ContextVar[Phase | None] = ContextVar("phase", default=None)


@contextlib.contextmanager
def in_phase(phase: Phase) -> Iterator[None]:
    """Set ``phase`` for all forward passes that this thread runs inside the ``with`` block."""
    token = _phase.set(phase)
    try:
        yield
    finally:
        _phase.reset(token)


class Call:
    """Context manager that runs the attention of all layers in one forward pass of an enabled model.

    Inside the ``with`` block, this object receives all attention calls of the thread. Plain KV caches are converted to
    sparse caches in place. If the forward pass raises no exception, ``counts`` is added to the report at the end.

    Attributes:
        plan: `Plan` of the enabled model.
        probe: result of the trial call in `enable`; None if the forward pass is not the trial call.
        caches: the caches of all layers.
        hooks: `CallHooks` of the decode method; None if the method has no hooks.
        counts: numbers of sparse and dense attention calls in this forward pass, and of the bytes that the calls move.
        checks: True if the model is lossless and this forward pass checks draft tokens or is a dense decode step.
    """

    def __init__(self, plan: Plan, caches: list[object] | None, *, probe: Probe | None = None) -> None:
        self.plan, self.probe = plan, probe
        if not (isinstance(caches, list) and set(map(type, caches)).issubset(SPARSE_CLASSES.values())):
            adopt(caches or [])
            caches = leaves(caches or [])
        self.caches: list[object] = caches
        for cache in caches:
            if isinstance(cache, SparseCache):
                cache.drop_stale_states()
        if plan.calls:  # mlx-vlm, whose models may get batches of either library
            for cache in caches:
                if isinstance(cache, SparseBatch):
                    cache.sliced_masks = True
        self.counts = Counts()
        self.hooks = plan.hooks.of_call(caches) if plan.hooked else None
        if self.hooks is not None:
            self.hooks.counts = self.counts
        phase = _phase.get()
        self.checks = phase is Phase.CHECK
        self._drafts = plan.lossless is None or phase is Phase.DRAFT  # True if a decode step may be sparse
        self._planned = plan.decodes and self._drafts
        self._step_keys = 0  # number of keys of a decode step; 0 in other calls
        self.layer_index = -1  # index of the current layer's cache, which identifies the layer in the report

    @functools.cached_property
    def dense(self) -> dense.DenseAttention:
        """Dense attention of this package, for calls that no method serves."""
        return dense.DenseAttention(self.plan, self.caches, self.counts, checks=self.checks)

    def __enter__(self) -> Call:
        self._token = active.set(self)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        active.reset(self._token)
        for cache in self.caches:
            if isinstance(cache, SparseCache):
                cache.accept_arrays()
        counts, hooks, plan = self.counts, self.hooks, self.plan
        if hooks is not None:
            hooks.end()
        if error is None:
            if hooks is not None:
                hooks.submit()
            if counts.device:
                mx.async_eval(counts.device)  # type: ignore[no-untyped-call]
                if plan.prefill is not None:
                    counts.settle("prefill")  # mlx-lm waits for each chunk anyway
            if plan.calls:  # some models of mlx-vlm have kernels for batches, which never call the attention function
                sparse = counts.sparse_calls + (counts.prefill.calls if counts.prefill else 0)
                if (seen := sparse + counts.dense_calls.total()) < plan.calls:
                    counts.dense_calls[reasons.OWN_KERNEL] += plan.calls - seen
            plan.report.add(counts)
            if self._step_keys and plan.watch is not None:
                watch, plan.watch = plan.watch, None
                watch(self._step_keys, counts)

    def attend(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        """Return the attention output of one layer, or None to let mlx-lm run dense attention."""
        layer: LayerPlan | None = getattr(cache, "layer_plan", None)
        bias = None if layer is None or not layer.bias else as_bias(mask, queries, cache.length)
        if (
            layer is None
            or layer.plan is not self.plan
            or not layer.start <= cache.length < layer.stop
            or layer.queries != queries.shape
            or not self._planned
            or (bias is None if layer.bias else not (mask is None or is_padding_mask(mask, self.caches)))
        ):
            return self._decide(queries, keys, values, cache, scale, mask, sinks)
        reason = None
        if (hooks := self.hooks) is not None:
            hooks.keys_written(cache)
            if (reason := hooks.step_reason(cache)) is not None:
                self.counts.dense_calls[reason] += 1
        out = self._step(layer, queries, cache, scale, sinks, bias) if reason is None else None
        if out is not None:
            return out
        if hooks is not None:
            hooks.observe(queries, keys, cache, scale, mask, sinks)
        return self.dense.attend(queries, keys, values, cache, scale, mask, sinks)

    def _step(
        self,
        layer: LayerPlan,
        queries: mx.array,
        cache: SparseCache,
        scale: float,
        sinks: mx.array | None,
        bias: mx.array | None,
    ) -> mx.array | None:
        """Run a sparse decode step of a layer, or return None if the layer's plan selects dense attention."""
        counts = self.counts
        if layer.reason is not None:
            counts.dense_calls[layer.reason] += 1
            return None
        S, (fixed, per_key) = cache.length, layer.sparse_bytes
        counts.sparse_calls += 1
        counts.dense_bytes += layer.dense_bytes * (S + 1)  # S keys and values are read, one is written
        # Round for each head, so that tensor-parallel ranks together count the same bytes as one process.
        counts.modeled_bytes += layer.heads * round(fixed + per_key * S)
        more = {} if bias is None else {"bias": bias}
        out, lse, *estimate = layer.step(queries, cache, S, scale, self.hooks, **more)
        if estimate and layer.index >= 0 and S % SAMPLED_STEPS == 0:
            (recall,) = estimate
            if len(layer.served) < len(recall):  # MLX does not compute the estimates of other sequences
                recall = recall[mx.array(layer.served)]
            counts.later("recalls", RecallStatistics.read, layer.index, recall.flatten())
        if sinks is not None:
            out = dense.with_sinks(out, lse, sinks)
        if layer.short:
            counts.dense_calls[reasons.SHORT_SEQUENCES] += 1
            out = dense.replace_with_dense(out, layer.short, queries, cache, scale, sinks, bias)
        return out

    def _decide(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        """Run a prefill chunk, or a decode step if the layer has no valid plan. Return None for dense attention."""
        L = queries.shape[2]
        if L == 1 and isinstance(cache, SparseCache):
            cache.latent = keys is values and isinstance(keys, mx.array)
        if isinstance(cache, SparseQuantized) and not isinstance(keys, mx.array):
            keys, values = (PackedRows.from_parts(parts, cache.bits) for parts in (keys, values))
        reason = layer_reason(queries, keys, values, cache, self.plan.backend)
        if reason == reasons.LATENT and L > 1 and self.plan.prefill is None:
            reason = chunk_refusal(None, Facts(), L, keys.shape[2])
        if self.probe is not None:
            found: Any = reason
            if reason is None:  # the rest depends on `grouped`, which is known after the trial call
                facts = self.facts(queries, keys, cache, mask, sinks)
                self.probe.grouped |= facts.G > 1
                found = functools.partial(self.probe.reason, queries, keys, cache, facts, self.hooks)
            self.probe.seen.append((cache, found))
            return None
        if reason is not None:
            self.counts.dense_calls[reason] += 1
            return self.dense.attend_natively(queries, keys, values, None, scale, mask, sinks)
        if self.hooks is not None and self.plan.decodes:
            self.hooks.keys_written(cache)
        self.layer_index = next((index for index, own in enumerate(self.caches) if own is cache), -1)
        if isinstance(cache, SparseBatch) and self._differs_by_sequence(L, cache):
            out = self._attend_each(queries, cache, scale, mask, sinks)
        else:
            out = self.attend_one(queries, keys, cache, scale, mask, sinks)
        if out is None and self.hooks is not None:
            self.hooks.observe(queries, keys, cache, scale, mask, sinks)
        return self.dense.attend(queries, keys, values, cache, scale, mask, sinks) if out is None else out

    def attend_one(
        self, queries: mx.array, keys: Rows, cache: SparseCache, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        """Run and count one attention call of a layer, or return None to let mlx-lm run dense attention."""
        L, S = queries.shape[2], keys.shape[2]
        self._step_keys = S if L == 1 else 0
        facts = self.facts(queries, keys, cache, mask, sinks)
        if L > 1:
            reason = chunk_refusal(self.plan.prefill, facts, L, S)
            if reason is None:
                out = self._attend_chunk(queries, keys, cache, scale, sinks)
                if out is not None:
                    return out
                reason = reasons.TOO_FULL
        else:
            reason = refusal(self.plan.decode, facts)
            if reason is None:
                layer = self.plan.plan_layer(queries, keys, cache, self.caches, self.hooks, facts, self.layer_index)
                cache.layer_plan = layer
                bias = as_bias(mask, queries, S) if facts.bias else None
                return self._step(layer, queries, cache, scale, sinks, bias)
        self.counts.dense_calls[reason] += 1
        if reason == reasons.CHECKED and self.checks:
            self.counts.checked_bytes += keys.shape[0] * keys.shape[1] * sum(cache.row_bytes) * (S + 1)
        return None

    def facts(self, queries: mx.array, keys: Rows, cache: SparseCache, mask: Mask, sinks: mx.array | None) -> Facts:
        """Return the facts about an attention call that are known without its crossover length."""
        step, plan, hooks = queries.shape[2] == 1, self.plan, self.hooks
        # A comparison may wait for the device. Without a prefill method, chunks are dense under every mask.
        compared = mask is not None and (step or plan.prefill is not None)
        padding = compared and is_padding_mask(mask, self.caches)
        bias = step and not padding and as_bias(mask, queries, keys.shape[2]) is not None
        unready = None
        if hooks is not None and step:
            unready = hooks.step_reason(cache) if self.probe is None else hooks.refusal(cache)
        return Facts(
            G=queries.shape[1] // keys.shape[1],
            sinks=sinks is not None,
            latent=cache.latent and not (plan.latents and plan.lossless is None),
            bias=bias,
            other_mask=compared and not padding and not bias,
            causal=step or mask is not None,
            checked=not self._drafts if step else self.checks,
            prompts_only=not plan.decodes,
            unready=unready,
        )

    def _attend_chunk(
        self, queries: mx.array, keys: Rows, cache: SparseCache, scale: float, sinks: mx.array | None
    ) -> mx.array | None:
        """Run the prefill method on a prefill chunk. Return None if the selected blocks exceed the density limit."""
        plan = self.plan
        assert plan.prefill is not None
        L, S = queries.shape[2], keys.shape[2]
        config, backend = plan.prefill.at(S), plan.resolve(plan.prefill, queries, keys, cache)
        sizes = plan.sizes(config, queries, keys, cache, backend, self.hooks)
        blocks, max_density = None, plan.calibration.threshold(config, sizes, S).value
        if max_density <= 0:
            return None
        if max_density < 1:
            blocks = cache.select_prefill(queries, config, scale=scale, backend=backend, max_density=max_density)
            if blocks is None:
                return None
        options: dict[str, Any] = {"scale": scale, "backend": backend, "blocks": blocks, "sinks": sinks}
        out, lse, found, *estimate = cache.attend_prefill(queries, config, **options)
        arrays = {"attended": attended_pairs(found)}
        if estimate:
            arrays["estimate"] = estimate[0].mean()
        if plan.recall:
            dense_lse = registry.load("dense_lse", backend)(queries, keys, scale=scale, left_padding=None)
            arrays |= recall_arrays(mx.exp(lse - dense_lse))
        self.counts.later("prefill", PrefillStatistics.read, (self.layer_index, config.layout(L, S)), arrays)
        return out if sinks is None else dense.with_sinks(out, lse, sinks)

    def _differs_by_sequence(self, L: int, cache: SparseBatch) -> bool:
        """Return True if a call with ``L`` queries per sequence must process each sequence of a batch separately.

        One sequence may be long enough for sparse attention while another sequence is too short. A sequence
        that has only one token in the chunk needs a decode step, as it would outside of a batch.
        """
        if L == 1:
            return False
        prefills = self.plan.prefill is not None
        ends = cache.prompt_ends or [cache.length]
        if not prefills and len(cache.first_rows(self.caches)) == 1 and min(ends) >= cache.length:
            return False  # a single sequence without padding needs no separate cache
        before = cache.length - L
        return prefills or any(min(end - before, L) == 1 for end in ends)

    def _attend_each(
        self, queries: mx.array, cache: SparseBatch, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        """Run the prefill chunk of each sequence in a padded batch separately.

        mlx-lm splits each prompt of a batch into the same chunks as a single prompt. The selection for a chunk depends
        only on the rows of the chunk's sequence. So the output for a prompt does not depend on the other prompts.

        Return None if all sequences need dense attention.
        """
        before = cache.length - queries.shape[2]
        extents = cache.extents(self.caches)
        if extents is None:
            self.counts.dense_calls[reasons.UNKNOWN_PADDING] += 1
            return None
        found = []
        for sequence, (first, stop) in enumerate(extents):
            one = cache.select_rows(sequence, first, stop)
            start, end = max(first - before, 0), max(stop - before, 0)
            part, out = queries[sequence : sequence + 1, :, start:end], None
            if start < end:
                keys, _, _ = one.rows("ops")
                step: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
                if end - start == 1 and self.hooks is not None:
                    step = self.hooks.single_sequence(cache, sequence, one, first, queries, part)
                with step:
                    out = self.attend_one(part, keys, one, scale, mask, sinks)
                cache.store_full_sample(sequence, one)
            found.append((part, one, start, out))
        if all(out is None for *_, out in found):
            return None
        padded = []
        for part, one, start, out in found:
            rows = dense.attend_sequence(part, one, scale, sinks) if out is None else out
            after = queries.shape[2] - start - part.shape[2]
            padded.append(mx.pad(rows, [(0, 0), (0, 0), (start, after), (0, 0)]))
        return mx.concatenate(padded)


def under_plan(cls: type[nn.Module]) -> Callable[..., object]:
    """Wrap ``cls.__call__`` so that each model call runs inside a `Call`. The signature does not change."""
    signature = inspect.signature(cls.__call__)

    @functools.wraps(cls.__call__)
    def call(self: nn.Module, *args: object, **kwargs: Any) -> object:
        plan: Plan = self._mlx_sparse[0]
        caches = kwargs.get("cache")
        if caches is None:
            caches = signature.bind_partial(self, *args, **kwargs).arguments.get("cache")
        with Call(plan, caches):
            return cls.__call__(self, *args, **kwargs)

    return call
