"""Define SparQ's auxiliary cache state for one context-parallel shard, with statistics over all ranks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...cache.running_statistics import RunningStatistics
from ...cache.sharded_cache import Shard, ShardedKVCache
from ...cache.sparq_state import Codes, Columns, SparQState
from ...methods import SparQ
from ...methods.scoring_keys import GROUP
from ...ops.key_codes import group_statistics
from ...ops.sparq import deviation
from .exchange import Exchange


class ShardedSparQ(SparQState):
    """SparQ's auxiliary cache state for the keys on one rank, with statistics over the keys on all ranks.

    The position alone determines which collectives a decode step runs. So all ranks run the same collectives.

    Attributes:
        center: float32 ``(B, Hkv, D)`` center of the key codes (sparq.17), from rank 0; None before the first full
            group.
        spread: ``(B, Hkv, D)`` key spread (sparq.22) over the groups on all ranks; None before the first use.
        groups: number of quantization groups that ``spread`` covers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.center: mx.array | None = None
        self.spread: mx.array | None = None
        self.groups = 0

    def shared(self, cache: ShardedKVCache, config: SparQ, exchange: Exchange) -> dict[str, Any]:
        """Return a dict of keyword arguments for a `Selection` among the keys on this rank.

        ``keys_t`` is None if the rank stores no keys.
        """
        lowest = cache.take_lowest()
        if lowest < GROUP:
            self.center, self.codes = None, None
        if lowest // GROUP < self.groups:
            self.spread, self.groups = None, 0
        weighted = config.component_score == "query_key"
        if config.key_bits == 16:
            return {"keys_t": self._columns(cache), "component_weight": self._deviation(cache, exchange, weighted)}
        codes = self._coded(cache, config, exchange)
        keys_t = codes.read(cache.key_rows, whole=False) if cache.length else None
        return {"keys_t": keys_t, "component_weight": self._spread(cache, codes, exchange) if weighted else None}

    def _columns(self, cache: ShardedKVCache) -> mx.array | None:
        if not cache.length:
            return None
        self.columns = self.columns or Columns()
        self.columns.extend(cache.key_rows, cache.length)
        return self.columns.read(cache.length, whole=False)

    def _coded(self, cache: ShardedKVCache, config: SparQ, exchange: Exchange) -> Codes:
        first = exchange.rank == 0
        self.codes = self.codes or Codes(None, [0])
        if first:
            self.codes.extend(cache.key_rows, cache.length)
        if self.center is None and cache.position >= GROUP:
            B, Hkv, _, D = cache.key_rows.shape
            own = self.codes.coded.center if first and self.codes.coded is not None else mx.zeros((B, Hkv, D))
            self.center = exchange.from_first(own)
            self.codes.set_center(self.center)
        if not first and cache.length:
            self.codes.extend(cache.key_rows, cache.length)
        return self.codes

    def _spread(self, cache: ShardedKVCache, codes: Codes, exchange: Exchange) -> mx.array:
        groups = cache.position // GROUP
        B, Hkv, _, D = cache.key_rows.shape
        if groups == 0:  # rank 0 has all keys
            own = deviation(cache.key_rows[..., : cache.length, :], None) if exchange.rank == 0 else None
            return exchange.from_first(mx.zeros((B, Hkv, D)) if own is None else own)
        if self.spread is None or self.groups != groups:
            # (sparq.22) from the statistics of each rank: variance within the ranks plus variance between the ranks.
            counts = [Shard(rank, exchange.size).before(groups * GROUP) // GROUP for rank in range(exchange.size)]
            n = counts[exchange.rank]
            coded = codes.read(cache.key_rows, whole=False) if n else None
            own = mx.zeros((3, B, Hkv, D)) if coded is None else group_statistics(coded)
            means, squares, widths = mx.moveaxis(exchange.gather(own), 1, 0)
            self.spread, self.groups = (
                mx.sqrt((_squares(means, squares, counts) + widths.sum(axis=0) / 16) / groups),
                groups,
            )
        return self.spread

    def _deviation(self, cache: ShardedKVCache, exchange: Exchange, weighted: bool) -> mx.array | None:
        """Return the standard deviation of the keys on all ranks (sparq.1), or None if ``weighted`` is False."""
        if not weighted:
            return None
        B, Hkv, _, D = cache.key_rows.shape
        own = mx.zeros((2, B, Hkv, D))
        if cache.length:
            self.keys = self.keys or RunningStatistics(None, spread=True)
            self.keys.extend(cache.key_rows, cache.length)
            own = mx.stack([self.keys.mean(), self.keys.deviation() ** 2 * cache.length])
        means, squares = mx.moveaxis(exchange.gather(own), 1, 0)
        return mx.sqrt(_squares(means, squares, cache.counts()) / cache.position)

    def value_mean(self, cache: ShardedKVCache) -> mx.array:
        """Return this rank's term ``(B, Hkv, D)`` of the mean value (sparq.9). The sum over all ranks is the mean."""
        B, Hkv, _, D = cache.key_rows.shape
        if not cache.length:
            return mx.zeros((B, Hkv, D))
        self.values = self.values or RunningStatistics(None, spread=False)
        self.values.extend(cache.value_rows, cache.length)
        return self.values.mean() * (cache.length / cache.position)


def _squares(means: mx.array, squares: mx.array, counts: list[int]) -> mx.array:
    """Return the sum of squared distances from the common mean, computed from the statistics of each rank.

    Args:
        means: ``(N, ...)`` means of the rows on each of N ranks.
        squares: ``(N, ...)`` sums of squared distances from the mean of each rank.
        counts: number of rows on each rank.
    """
    n = mx.array(counts, mx.float32).reshape(-1, *[1] * (means.ndim - 1))
    between = means - (n * means).sum(axis=0) / n.sum()
    return (squares + n * between**2).sum(axis=0)
