"""Calls of a model whose context is shared out over ranks: what `lm.call.Call` is where one process has all keys."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...cache.shares import Shares
from ...cache.slice_cache import SlicedKVCache, slice_up
from ...cache.sparse_cache import DecodeStep
from ...checks import ConfigError
from ...methods import NEVER, reasons
from ...methods.stats import dense_elements
from ..call import Call
from ..plan import Plan, Probe
from . import prompts, steps
from .exchange import Exchange


class SliceCall(Call):
    """One call of a model over caches of which each rank holds its share of the rows.

    Nothing here is left to mlx-lm's attention, which would see the keys of the call's own tokens alone: dense calls are
    shared out as well.

    Args:
        exchange: with the ranks that share.
        exact: whether the keys are chosen that one process would choose, or each rank chooses of its own.
    """

    def __init__(
        self, plan: Plan, caches: Any, *, exchange: Exchange, exact: bool = True, probe: Probe | None = None
    ) -> None:
        if isinstance(caches, list):
            # In place: the caller goes on with these.
            caches[:] = slice_up(caches, Shares(exchange.rank, exchange.size))
        super().__init__(plan, caches, probe=probe)
        self._exchange, self._exact = exchange, exact
        exchange.begin()
        self._attended_caches: set[int] = set()
        sliced = [cache for cache in self.caches if isinstance(cache, SlicedKVCache)]
        self._sliced = sliced
        for cache in sliced:
            cache.calls += 1

    def __exit__(self, error: type[BaseException] | None, *about: object) -> None:
        missed = [cache for cache in self._sliced if cache.piece is not None and id(cache) not in self._attended_caches]
        for cache in self._sliced:
            cache.piece, cache.agreed = None, cache.position
            cache.calls -= 1
        self.counts.sent_bytes, self.counts.messages = self._exchange.sent, self._exchange.messages
        super().__exit__(error, *about)
        if missed and error is None:
            raise ConfigError(
                f"--shard context: expected layers that attend the keys of their caches, got {len(missed)} in "
                f"{self.plan.report.model_type} that do otherwise. Run it without."
            )

    def agreed(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """With the first rank's tokens: machines of several kinds may round, and so sample, differently.

        Raises:
            ConfigError: ranks were given prompts of several lengths.
        """
        if not inputs or not isinstance(inputs[0], mx.array) or self.probe is not None:
            return inputs
        tokens, before = inputs[0], max((cache.position for cache in self._sliced), default=0)
        first = tokens.flatten()[:1].astype(mx.int32)
        told = self._exchange.gather(mx.concatenate([mx.array([tokens.size, before]), first]))
        if tokens.size == 1 and all(cache.agreed == cache.position for cache in self._sliced):
            # Not looked at, which would wait for the device in every step.
            return (told[0, 2:].reshape(tokens.shape).astype(tokens.dtype), *inputs[1:])
        lengths: Any = told[:, :2].tolist()
        if any(length != lengths[0] for length in lengths):
            listed = " and ".join(f"{n:,} after {at:,} on rank {rank}" for rank, (n, at) in enumerate(lengths))
            raise ConfigError(f"--shard context: expected as many tokens on all ranks, got {listed}.")
        return (self._exchange.from_first(tokens), *inputs[1:])

    def attend(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array | None:
        # Layers that share keys pass another layer's.
        owner = next((one for one in (cache, *self._sliced) if _wrote(one, keys, values)), None)
        if owner is None:
            # Of a cache that is the same on all ranks. Sparse calls would go by what each has measured.
            reason = reasons.NO_CACHE if cache is None else reasons.other_cache(type(cache).__name__)
            if self.probe is not None:
                self.probe.found.append((cache, reason))
            else:
                self.counts.dense_calls[reason] += 1
            return None
        if keys.shape != values.shape:
            raise ConfigError(
                f"--shard context: expected keys and values of one head dim, got {keys.shape[3]} and {values.shape[3]}."
            )
        self._attended_caches.add(id(owner))
        if not isinstance(mask, str) and not (mask is None and queries.shape[2] == 1):
            raise ConfigError("--shard context: expected causal attention without further masks, got another mask.")
        if self.probe is not None:
            refusal = self.probing(queries, keys, owner, mask, sinks)
            self.probe.found.append((owner, refusal))
            return mx.zeros_like(queries)
        owner.told = self._exchange.so_far()
        if self.plan.decodes and self.hooks is not None:
            self.hooks.take_in(owner)
        out, lse = self._attended(queries, keys, owner, scale, sinks)
        if sinks is not None:
            out = out * mx.sigmoid(lse - sinks.astype(mx.float32)[None, :, None])[..., None]
        return out.astype(queries.dtype)

    def _attended(
        self, queries: mx.array, keys: mx.array, cache: SlicedKVCache, scale: float, sinks: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """The counted call over the keys of all ranks."""
        if queries.shape[2] > 1:
            return self._piece(queries, keys, cache, scale)
        decode = self.plan.decode
        reason = self.step_reason(queries, keys, cache, None, sinks) or self._length_reason(queries, keys, cache)
        self._steps = 0 if reason else cache.position
        if reason is not None:
            self.counts.dense_calls[reason] += 1
            return steps.dense(queries, cache, scale=scale, exchange=self._exchange)
        assert decode is not None
        backend = self.plan.resolve(decode, queries, keys)
        self.counts.sparse_calls += 1
        B, Hkv, _, D = keys.shape
        everywhere = B * Hkv * cache.row_bytes * dense_elements(cache.position, D) // D
        self.counts.dense_bytes += everywhere // cache.sharers
        hooks, position = self.hooks, cache.position
        moved = cache.step_bytes(decode, position) if hooks is None else hooks.formula_bytes(cache, position)
        self.counts.formula_bytes += moved
        given: dict[str, Any] = {"scale": scale, "backend": backend, "exchange": self._exchange}
        if not self._exact and decode.of_share(self._exchange.size, 0) is not None:
            return steps.local(queries, cache, decode, **given)
        if (step := steps.STEPS.get(decode.name)) is not None:
            return step(queries, cache, decode, **given)
        if cache.length == 0:
            return self._exchange.merge(*steps.nothing(queries))
        bound = DecodeStep.bind(decode, queries.shape[1] // Hkv, backend)
        if hooks is None:
            out, lse = cache.take_step(queries, bound, scale)
        else:
            out, lse = hooks.step(queries, cache, bound, [0], scale)
        return self._exchange.merge(out.astype(mx.float32), lse)

    def _length_reason(self, queries: mx.array, keys: mx.array, cache: SlicedKVCache) -> str | None:
        """Return the reason why a context of this length does not pay, the same on all ranks, or None."""
        plan, decode = self.plan, self.plan.decode
        assert decode is not None
        layer = plan.sizes(decode, queries, keys, cache, plan.resolve(decode, queries, keys), self.hooks)
        # Asked at the first step, for no keys yet: nothing is measured here, where others would wait for it.
        sizes = (queries.shape[1], *keys.shape[1::2])
        shortest = int(self._exchange.agree(sizes, int(plan.calibration.of(decode, layer).value)))
        if shortest >= NEVER:
            return reasons.NOTHING_SAVED
        if decode.measurable:
            shortest *= self._exchange.size  # what pays is a matter of the keys that one rank reads
        return reasons.shorter_than(shortest) if cache.position < shortest else None

    def _piece(
        self, queries: mx.array, keys: mx.array, cache: SlicedKVCache, scale: float
    ) -> tuple[mx.array, mx.array]:
        """A piece of a prompt."""
        L, S = queries.shape[2], cache.position
        plan = self.plan
        reason = self.chunk_reason(L, S, "causal")
        if reason is None:
            config: Any = plan.prefill and plan.prefill.at(S)
            backend = plan.resolve(config, queries, keys)
            sizes = plan.sizes(config, queries, keys, cache, backend, self.hooks)
            fullest = self._exchange.agree((config, "piece"), plan.calibration.of(config, sizes).value)
            blocks = prompts.sample_select(queries, cache, config, scale=scale, exchange=self._exchange)
            layout = config.layout(L, S)
            kept: Any = (blocks >= 0).sum().item()
            if kept <= fullest * layout.causal_pairs * queries.shape[0] * queries.shape[1]:
                self.figures.add(self.place(cache), blocks, layout)
                given: dict[str, Any] = {"block_size": config.block_size, "scale": scale, "backend": backend}
                return prompts.attend_blocks(queries, cache, blocks, **given, exchange=self._exchange)
            reason = reasons.TOO_FULL
        self.counts.dense_calls[reason] += 1
        return prompts.dense(queries, cache, scale=scale, exchange=self._exchange)

    def chunk_reason(self, L: int, S: int, mask: Any) -> str | None:
        reason, prefill = super().chunk_reason(L, S, mask), self.plan.prefill
        if reason is None and prefill is not None and not prompts.fits(prefill.at(S), L, S):
            return reasons.BETWEEN_RANKS
        return reason


def _wrote(cache: Any, keys: Any, values: Any) -> bool:
    """Whether these are what the last write of ``cache`` returned."""
    return (
        isinstance(cache, SlicedKVCache)
        and cache.piece is not None
        and cache.piece[0] is keys
        and cache.piece[1] is values
    )
