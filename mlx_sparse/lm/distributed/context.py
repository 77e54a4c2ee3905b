"""Run forward passes and save prompt caches of a model whose context is sharded over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from ...cache.sharded_cache import BLOCK, Shard, ShardedKVCache, shard_caches
from ...cache.sparse_cache import DecodeStep
from ...checks import ConfigError
from ...files import replace_file
from ...methods import NEVER, SAAP, Method, Sample, reasons
from ...methods.stats import dense_elements
from ..call import Call
from ..options import SHARDS
from ..plan import Plan, Probe
from . import rank_attention
from .exchange import Exchange


def share_context(plan: Plan, shard: str) -> None:
    """Configure ``plan`` to shard the context of its model over all ranks.

    Args:
        shard: "context" or "context:local", as in `mlx_sparse.lm.enable`.

    Raises:
        ConfigError: there is only one rank, or a method of the plan cannot run on a shard.
    """
    if shard not in SHARDS:
        raise ConfigError(f"shard: expected one of {', '.join(SHARDS)}, got {shard}.")
    exchange = Exchange()
    if exchange.size == 1:
        raise ConfigError("shard: expected several processes (mlx.launch -n 2 -- ...), got one.")
    served = [*rank_attention.STEPS, SAAP.name]
    if plan.decode is not None and plan.decode.name not in served:
        raise ConfigError(f"shard: expected one of {', '.join(served)} as decode method, got {plan.decode.name}.")
    if plan.decode is not None:
        plan.decode.require_fixed_budget("with --shard")
    if plan.decode is not None and BLOCK % plan.decode.unit:
        raise ConfigError(f"page_size: expected a divisor of {BLOCK} with shard, got {plan.decode.unit}.")
    if plan.prefill is not None and plan.prefill.name != Sample.name:
        raise ConfigError(f"shard: expected {Sample.name} as prefill method, got {plan.prefill.name}.")
    if plan.recall:
        raise ConfigError(
            "--attn-report: expected text, full, json or off with --shard, got recall, which ranks cannot measure."
        )
    _share_random_seed(exchange)
    plan.shards = exchange.size
    plan.new_call = functools.partial(ContextCall, exchange=exchange, exact=shard == "context")
    # These caches have no `merge`, so mlx-lm's server answers one request at a time.
    plan.new_caches = functools.partial(shard_caches, shard=Shard(exchange.rank, exchange.size))


def _share_random_seed(exchange: Exchange) -> None:
    """Set one random seed on all ranks if their random states differ. Then all ranks sample the same tokens."""
    state: Any = mx.random.state
    states: Any = exchange.gather(state[0]).tolist()
    if any(one != states[0] for one in states):
        mx.random.seed(states[0][-1])


class ContextCall(Call):
    """Context manager for one forward pass of a model over sharded caches.

    Unlike `Call`, this class runs dense attention itself. mlx-lm's attention would receive only the keys of the current
    tokens.

    Args:
        exchange: collectives over the ranks.
        exact: True to select the same keys as an unsharded model; False to select keys separately on each rank.
    """

    def __init__(
        self, plan: Plan, caches: Any, *, exchange: Exchange, exact: bool = True, probe: Probe | None = None
    ) -> None:
        if isinstance(caches, list):
            # Change the list in place, because the caller uses the list after this call.
            caches[:] = shard_caches(caches, Shard(exchange.rank, exchange.size))
        super().__init__(plan, caches, probe=probe)
        self._exchange, self._exact = exchange, exact
        exchange.begin()
        self._attended_caches: set[int] = set()
        self._sharded = [cache for cache in self.caches if isinstance(cache, ShardedKVCache)]
        for cache in self._sharded:
            cache.calls += 1

    def __exit__(self, error: type[BaseException] | None, *about: object) -> None:
        missed = [c for c in self._sharded if c.chunk is not None and id(c) not in self._attended_caches]
        for cache in self._sharded:
            cache.chunk, cache.agreed = None, cache.position
            cache.calls -= 1
        self.counts.sent_bytes, self.counts.messages = self._exchange.sent, self._exchange.messages
        super().__exit__(error, *about)
        if missed and error is None:
            raise ConfigError(
                f"--shard context: expected layers that attend the keys of their caches, got {len(missed)} in "
                f"{self.plan.report.model_type} that do not. Run without --shard."
            )

    def agreed(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``inputs``, the arguments of the model call, with the tokens replaced by the tokens of rank 0.

        Sampled tokens can differ between ranks, because machines may round differently.

        Raises:
            ConfigError: the ranks have prompts of different lengths.
        """
        if not inputs or not isinstance(inputs[0], mx.array) or self.probe is not None:
            return inputs
        tokens, before = inputs[0], max((cache.position for cache in self._sharded), default=0)
        first = tokens.flatten()[:1].astype(mx.int32)
        sent = self._exchange.gather(mx.concatenate([mx.array([tokens.size, before]), first]))
        if tokens.size == 1 and all(cache.agreed == cache.position for cache in self._sharded):
            # Do not compare lengths here, because every decode step would wait for the device.
            return (sent[0, 2:].reshape(tokens.shape).astype(tokens.dtype), *inputs[1:])
        lengths: Any = sent[:, :2].tolist()
        if any(length != lengths[0] for length in lengths):
            listed = " and ".join(f"{n:,} after {at:,} on rank {rank}" for rank, (n, at) in enumerate(lengths))
            raise ConfigError(f"--shard context: expected the same number of tokens on all ranks, got {listed}.")
        return (self._exchange.from_first(tokens), *inputs[1:])

    def attend(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array | None:
        # A layer that shares keys with another layer passes no cache or a different cache. Find the cache of the keys.
        owner = next((one for one in (cache, *self._sharded) if _wrote(one, keys, values)), None)
        if owner is None:
            # This cache is not sharded. Sparse attention would depend on measurements that differ between ranks.
            reason = reasons.NO_CACHE if cache is None else reasons.other_cache(type(cache).__name__)
            if self.probe is not None:
                self.probe.seen.append((cache, reason))
            else:
                self.counts.dense_calls[reason] += 1
            return None
        if keys.shape != values.shape:
            raise ConfigError(
                f"--shard context: expected equal key and value head dims, got {keys.shape[3]} and {values.shape[3]}."
            )
        self._attended_caches.add(id(owner))
        if not isinstance(mask, str) and not (mask is None and queries.shape[2] == 1):
            raise ConfigError("--shard context: expected causal attention, got an array mask.")
        if self.probe is not None:
            self.probe.seen.append((owner, self.probe_reason(queries, keys, owner, mask, sinks)))
            return mx.zeros_like(queries)
        owner.sent = self._exchange.so_far()
        if self.plan.decodes and self.hooks is not None:
            self.hooks.keys_written(owner)
        attend = self._attend_chunk if queries.shape[2] > 1 else self._attend_step
        out, lse = attend(queries, keys, owner, scale, sinks)
        if sinks is not None:
            out = out * mx.sigmoid(lse - sinks.astype(mx.float32)[None, :, None])[..., None]
        return out.astype(queries.dtype)

    def _attend_step(
        self, queries: mx.array, keys: mx.array, cache: ShardedKVCache, scale: float, sinks: mx.array | None
    ) -> rank_attention.Attended:
        """Run a decode step over the keys of all ranks, and count the call."""
        config, exchange = self.plan.decode, self._exchange
        reason = self.step_reason(queries, keys, cache, None, sinks) or self._length_reason(queries, keys, cache)
        self._steps = 0 if reason else cache.position
        if reason is not None:
            self.counts.dense_calls[reason] += 1
            return rank_attention.dense_step(queries, cache, scale=scale, exchange=exchange)
        assert config is not None
        backend = self.plan.resolve(config, queries, keys)
        self.counts.sparse_calls += 1
        B, Hkv, _, D = keys.shape
        everywhere = B * Hkv * cache.row_bytes * dense_elements(cache.position, D) // D
        self.counts.dense_bytes += everywhere // cache.shards
        hooks, position = self.hooks, cache.position
        moved = cache.step_bytes(config, position) if hooks is None else hooks.formula_bytes(cache, position)
        self.counts.formula_bytes += moved
        attended = self._sparse_step(queries, cache, config, scale, backend)
        self.count_recall(cache, self.layer_index(cache), list(range(B)))
        return attended

    def _sparse_step(
        self, queries: mx.array, cache: ShardedKVCache, config: Method, scale: float, backend: str
    ) -> rank_attention.Attended:
        exchange, hooks = self._exchange, self.hooks
        given: dict[str, Any] = {"scale": scale, "backend": backend, "exchange": exchange}
        if not self._exact and config.for_shard(exchange.size, 0) is not None:
            return rank_attention.local_step(queries, cache, config, **given)
        if (step := rank_attention.STEPS.get(config.name)) is not None:
            return step(queries, cache, config, **given)
        if cache.length == 0:
            return exchange.merge(*rank_attention.no_attention(queries))
        bound = DecodeStep.bind(config, queries.shape[1] // cache.key_rows.shape[1], backend)
        if hooks is None:
            out, lse = cache.take_step(queries, bound, scale)
        else:
            out, lse = hooks.step(queries, cache, bound, [0], scale)
        return exchange.merge(out.astype(mx.float32), lse)

    def _length_reason(self, queries: mx.array, keys: mx.array, cache: ShardedKVCache) -> str | None:
        """Return the reason why decode steps at the current context length are dense, or None.

        All ranks return the same reason.
        """
        plan, config = self.plan, self.plan.decode
        assert config is not None
        layer = plan.sizes(config, queries, keys, cache, plan.resolve(config, queries, keys), self.hooks)
        # Pass no length to `threshold`, because a measurement on one rank would make the other ranks wait.
        sizes = (queries.shape[1], *keys.shape[1::2])
        shortest = int(self._exchange.agree(sizes, int(plan.calibration.threshold(config, layer).value)))
        if shortest >= NEVER:
            return reasons.NOTHING_SAVED
        if config.measurable:
            shortest *= self._exchange.size  # the threshold is a number of keys on one rank
        return reasons.shorter_than(shortest) if cache.position < shortest else None

    def _attend_chunk(
        self, queries: mx.array, keys: mx.array, cache: ShardedKVCache, scale: float, sinks: mx.array | None
    ) -> rank_attention.Attended:
        """Run a prefill chunk over the keys of all ranks, and count the call."""
        L, S = queries.shape[2], cache.position
        plan = self.plan
        reason = self.chunk_reason(L, S, "causal")
        if reason is None:
            config: Any = plan.prefill and plan.prefill.at(S)
            backend = plan.resolve(config, queries, keys)
            sizes = plan.sizes(config, queries, keys, cache, backend, self.hooks)
            max_density = self._exchange.agree((config, "chunk"), plan.calibration.threshold(config, sizes).value)
            blocks = rank_attention.sample_select(queries, cache, config, scale=scale, exchange=self._exchange)
            layout = config.layout(L, S)
            kept: Any = (blocks >= 0).sum().item()
            if kept <= max_density * layout.causal_pairs * queries.shape[0] * queries.shape[1]:
                self.prefill_counts.add(self.layer_index(cache), blocks, layout)
                given: dict[str, Any] = {"block_size": config.block_size, "scale": scale, "backend": backend}
                return rank_attention.attend_blocks(queries, cache, blocks, **given, exchange=self._exchange)
            reason = reasons.TOO_FULL
        self.counts.dense_calls[reason] += 1
        return rank_attention.dense_chunk(queries, cache, scale=scale, exchange=self._exchange)

    def chunk_reason(self, L: int, S: int, mask: Any) -> str | None:
        reason, config = super().chunk_reason(L, S, mask), self.plan.prefill
        if reason is None and config is not None and not rank_attention.fits(config.at(S), L, S):
            return reasons.BETWEEN_RANKS
        return reason


def _wrote(cache: Any, keys: Any, values: Any) -> bool:
    """Return True if ``keys`` and ``values`` are the arrays that the last write to ``cache`` returned."""
    chunk = cache.chunk if isinstance(cache, ShardedKVCache) else None
    return chunk is not None and chunk[0] is keys and chunk[1] is values


def save(write: Callable[..., Any], file_name: str, cache: list[Any], *args: Any, **kwargs: Any) -> None:
    """Combine sharded caches on rank 0, and write them to the file ``file_name``. All ranks must call this function.

    During the call, rank 0 has the whole cache in memory.

    Args:
        write: mlx-lm's ``save_prompt_cache``. ``args`` and ``kwargs`` are passed to this function.

    Raises:
        ConfigError: rank 0 cannot write the file. All ranks raise this error. An existing file stays unchanged.
    """
    exchange = Exchange()
    whole = [_whole(one, exchange) if isinstance(one, ShardedKVCache) else one for one in cache]
    failure: Exception | None = None
    if exchange.rank == 0:
        path = Path(file_name)
        path = path if path.suffix == ".safetensors" else path.with_name(f"{path.name}.safetensors")
        try:
            replace_file(path, lambda new: write(str(new), whole, *args, **kwargs))
        except (OSError, RuntimeError) as error:
            failure = error
    failed = exchange.from_first(mx.array(int(failure is not None)))
    if failed.item():
        reason = "rank 0 could not write it" if failure is None else str(failure).splitlines()[0]
        raise ConfigError(f"--prompt-cache-file: expected a file that can be written, got {file_name} ({reason}).")


def _whole(cache: ShardedKVCache, exchange: Exchange) -> Any:
    """Return a `KVCache` with the rows of all ranks, sorted by position. On ranks above 0, the cache is empty."""
    found: Any = KVCache()
    if not cache.position:
        return found
    counts = cache.counts()
    # Row n of rank r is row r * longest + n of the gathered array.
    order = np.concatenate([Shard(rank, exchange.size).positions(0, n) for rank, n in enumerate(counts)])
    longest = max(counts)
    places = np.concatenate([rank * longest + np.arange(n) for rank, n in enumerate(counts)])
    rows = mx.array(places[np.argsort(order)].astype(np.int32))
    arrays = []
    for own in cache.own_rows():
        gathered = exchange.gather(mx.pad(own, [(0, 0), (0, 0), (0, longest - cache.length), (0, 0)]))
        B, H, _, D = own.shape
        gathered = gathered.transpose(1, 2, 0, 3, 4).reshape(B, H, -1, D)
        arrays.append(mx.take(gathered, rows, axis=2))
        mx.eval(arrays)  # evaluate one at a time to save memory
    if exchange.rank == 0:
        found.keys, found.values = arrays
        found.offset = cache.position
    return found
