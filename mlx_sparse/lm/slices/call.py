"""Calls of a model whose context is shared out over ranks: what `lm.call.Call` is where one process has all keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ...cache.slice_cache import SlicedKVCache, slice_up
from ...checks import ConfigError
from ...common import reasons
from ...common.shares import Shares
from ...common.stats import dense_elements
from ...methods import NEVER
from ..call import Call
from ..plan import Plan
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
        self, plan: Plan, caches: Any, *, exchange: Exchange, exact: bool = True, probing: bool = False
    ) -> None:
        if isinstance(caches, list):
            # In place: the caller goes on with these.
            caches[:] = slice_up(caches, Shares(exchange.rank, exchange.size))
        super().__init__(plan, caches, probing=probing)
        self._exchange, self._exact = exchange, exact
        exchange.begin()
        self._attended_caches: set[int] = set()
        sliced = [cache for cache in self._caches if isinstance(cache, SlicedKVCache)]
        self._sliced = sliced
        for cache in sliced:
            cache.calls += 1

    def __exit__(self, error: type[BaseException] | None, *about: object) -> None:
        missed = [cache for cache in self._sliced if cache.piece is not None and id(cache) not in self._attended_caches]
        for cache in self._sliced:
            cache.piece, cache.agreed = None, cache.position
            cache.calls -= 1
        self._counts.sent_bytes, self._counts.messages = self._exchange.sent, self._exchange.messages
        super().__exit__(error, *about)
        if missed and error is None:
            raise ConfigError(
                f"--shard context: expected layers that attend the keys of their caches, got {len(missed)} in "
                f"{self.report.model_type} that do otherwise. Run it without."
            )

    def agreed(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """With the first rank's tokens: machines of several kinds may round, and so sample, differently.

        Raises:
            ConfigError: ranks were given prompts of several lengths.
        """
        if not inputs or not isinstance(inputs[0], mx.array) or self.probed is not None:
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
            if self.probed is not None:
                self.probed.append((cache, reason))
            else:
                self._counts.dense_calls[reason] += 1
            return None
        if keys.shape != values.shape:
            raise ConfigError(
                f"--shard context: expected keys and values of one head dim, got {keys.shape[3]} and {values.shape[3]}."
            )
        self._attended_caches.add(id(owner))
        if not isinstance(mask, str) and not (mask is None and queries.shape[2] == 1):
            raise ConfigError("--shard context: expected causal attention without further masks, got another mask.")
        if self.probed is not None:
            refusal = self._probe(queries, keys, owner, mask, sinks)
            self.probed.append((owner, refusal))
            return mx.zeros_like(queries)
        owner.told = self._exchange.so_far()
        if self.decodes:
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
        backend = "" if self.decode is None else self._resolve(self.decode, queries, keys)
        reason = next(self._step_reasons(queries, keys, cache, None, sinks, backend), None)
        self._steps = 0 if reason else cache.position
        if reason is not None:
            self._counts.dense_calls[reason] += 1
            return steps.dense(queries, cache, scale=scale, exchange=self._exchange)
        assert self.decode is not None
        self._counts.sparse_calls += 1
        B, Hkv, _, D = keys.shape
        everywhere = B * Hkv * cache.row_bytes * dense_elements(cache.position, D) // D
        self._counts.dense_bytes += everywhere // cache.sharers
        self._counts.formula_bytes += self.hooks.formula_bytes(cache)
        given: dict[str, Any] = {"scale": scale, "backend": backend, "exchange": self._exchange}
        if not self._exact and self.decode.of_share(self._exchange.size, 0) is not None:
            return steps.local(queries, cache, self.decode, **given)
        if (step := steps.STEPS.get(self.decode.name)) is not None:
            return step(queries, cache, self.decode, **given)
        if cache.length == 0:
            return self._exchange.merge(*steps.nothing(queries))
        out, lse = self.hooks.step(queries, cache, [0], scale=scale, backend=backend)
        return self._exchange.merge(out.astype(mx.float32), lse)

    def _length_reasons(self, queries: mx.array, keys: Any, cache: Any, backend: str) -> Iterator[str]:
        """Why a context of this length does not pay: the same on all ranks, so it goes by positions."""
        assert self.decode is not None
        # Asked at the first step, for no keys yet: nothing is measured here, where others would wait for it.
        sizes = (queries.shape[1], *keys.shape[1::2])
        shortest = int(self._exchange.agree(sizes, self._shortest(queries, keys, cache, backend)))
        if shortest >= NEVER:
            yield reasons.NOTHING_SAVED
        if self.decode.measurable:
            shortest *= self._exchange.size  # what pays is a matter of the keys that one rank reads
        if cache.position < shortest:
            yield reasons.shorter_than(shortest)

    def _piece(
        self, queries: mx.array, keys: mx.array, cache: SlicedKVCache, scale: float
    ) -> tuple[mx.array, mx.array]:
        """A piece of a prompt."""
        L, S = queries.shape[2], cache.position
        reason = next(self._prompt_reasons(queries, S, "causal"), None)
        if reason is None:
            config: Any = self.prefill and self.prefill.at(S)
            backend = self._resolve(config, queries, keys)
            sizes = self._sizes(config, queries, keys, cache, backend)
            fullest = self._exchange.agree((config, "piece"), self.calibration.of(config, sizes).value)
            blocks = prompts.sample_select(queries, cache, config, scale=scale, exchange=self._exchange)
            layout = config.layout(L, S)
            kept: Any = (blocks >= 0).sum().item()
            if kept <= fullest * layout.causal_pairs * queries.shape[0] * queries.shape[1]:
                self._figures.add(self._layer(cache), blocks, layout)
                given: dict[str, Any] = {"block_size": config.block_size, "scale": scale, "backend": backend}
                return prompts.attend_blocks(queries, cache, blocks, **given, exchange=self._exchange)
            reason = reasons.TOO_FULL
        self._counts.dense_calls[reason] += 1
        return prompts.dense(queries, cache, scale=scale, exchange=self._exchange)

    def _prompt_reasons(self, queries: mx.array, S: int, mask: Any) -> Iterator[str]:
        yield from super()._prompt_reasons(queries, S, mask)
        if self.prefill is not None and not prompts.fits(self.prefill.at(S), queries.shape[2], S):
            yield reasons.BETWEEN_RANKS


def _wrote(cache: Any, keys: Any, values: Any) -> bool:
    """Whether these are what the last write of ``cache`` returned."""
    return (
        isinstance(cache, SlicedKVCache)
        and cache.piece is not None
        and cache.piece[0] is keys
        and cache.piece[1] is values
    )
