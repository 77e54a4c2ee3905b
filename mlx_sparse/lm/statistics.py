"""Count sparse calls on the device, and convert the counts to plain numbers for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.blocks.layout import Layout

BINS = 1000  # bins in the histogram of attention recall
LOW_QUANTILE = 0.01


@dataclass(frozen=True)
class LayerStatistics:
    """Sums over the sparse prefill calls of one layer.

    Attributes:
        pairs: number of causal pairs of a row block and a key block, summed over sequences.
        attended: for each query head, the number of causal pairs that the head attended to.
        rows: number of queries whose attention recall was measured, summed over sequences and query heads.
        lost: sum of 1 - recall over the queries in ``rows``.
        least: smallest attention recall; NaN if any recall is NaN.
    """

    pairs: int
    attended: tuple[int, ...]
    rows: int = 0
    lost: float = 0.0
    least: float = 1.0

    def __add__(self, other: LayerStatistics) -> LayerStatistics:
        return LayerStatistics(
            self.pairs + other.pairs,
            tuple(a + b for a, b in zip(self.attended, other.attended, strict=True)),
            self.rows + other.rows,
            self.lost + other.lost,
            float(np.minimum(self.least, other.least)),  # keeps NaN
        )

    @property
    def density(self) -> list[float]:
        """Shares of the causal block pairs that the query heads attended to, one share per query head."""
        return [count / self.pairs for count in self.attended]


@dataclass(frozen=True)
class PrefillStatistics:
    """Statistics of sparse prefill calls.

    Attributes:
        calls: number of sparse calls.
        queries: number of query positions in the sparse calls.
        sampled_queries: number of query positions that were scored to select blocks.
        layers: dict from the index of a layer's cache to the sums of the layer.
        histogram: for each of `BINS` bins of attention recall, the number of queries whose recall is in the bin.
    """

    calls: int = 0
    queries: int = 0
    sampled_queries: float = 0.0
    layers: Mapping[int, LayerStatistics] = field(default_factory=dict)
    histogram: Counter[int] = field(default_factory=Counter)

    def __add__(self, other: PrefillStatistics) -> PrefillStatistics:
        layers = dict(self.layers)
        for index, layer in other.layers.items():
            layers[index] = layers[index] + layer if index in layers else layer
        return PrefillStatistics(
            self.calls + other.calls,
            self.queries + other.queries,
            self.sampled_queries + other.sampled_queries,
            layers,
            self.histogram + other.histogram,
        )

    @property
    def density(self) -> dict[int, list[float]]:
        """Dict from the index of a layer's cache to the density of each query head over all calls."""
        return {index: layer.density for index, layer in sorted(self.layers.items())}

    @property
    def sampled(self) -> float:
        """Share of the queries that were scored to select blocks."""
        return self.sampled_queries / self.queries if self.queries else 0.0

    @property
    def recall(self) -> dict[str, float] | None:
        """Attention recall over all layers, heads and queries; None if it was not measured.

        The keys are "mean", "min" and "low". "low" is the recall that 99 % of the queries reach, rounded down to 0.001.
        """
        measured = [layer for layer in self.layers.values() if layer.rows]
        if not measured:
            return None
        mean = 1.0 - sum(layer.lost for layer in measured) / sum(layer.rows for layer in measured)
        bins = sorted(self.histogram)
        below = accumulate(self.histogram[place] for place in bins)
        enough = LOW_QUANTILE * self.histogram.total()
        low = next(place for place, count in zip(bins, below, strict=True) if count >= enough)
        return {"mean": mean, "low": low / BINS, "min": min(layer.least for layer in measured)}

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as plain data for JSON."""
        layers = []
        for index, layer in sorted(self.layers.items()):
            entry: dict[str, Any] = {"layer": index, "density": _mean(layer.density), "heads": layer.density}
            if layer.rows:
                entry["recall"] = {"mean": 1.0 - layer.lost / layer.rows, "min": layer.least}
            layers.append(entry)
        found: dict[str, Any] = {"calls": self.calls, "sampled": self.sampled, "layers": layers}
        if layers:
            by_layer, by_head = [entry["density"] for entry in layers], [d for entry in layers for d in entry["heads"]]
            found["density"] = {"mean": _mean(by_layer), "min": min(by_head), "max": max(by_head)}
        if (recall := self.recall) is not None:
            found["recall"] = recall
        return found

    def lines(self) -> list[str]:
        """Return the statistics as lines of text."""
        if not self.calls:
            return ["  sparse prefill calls: none"]
        densities = [_mean(layer.density) for layer in self.layers.values()]
        lines = [
            f"  sparse prefill calls: {self.calls:,}, {self.sampled:.1%} of the queries sampled",
            f"  density: {_mean(densities):.1%}, by layer {min(densities):.1%} to {max(densities):.1%}",
        ]
        if (recall := self.recall) is not None:
            lines.append(
                f"  attention recall: mean {recall['mean']:.4f}, at least {recall['low']:.3f} for 99% of the queries "
                f"and {recall['min']:.4f} for all queries"
            )
        return lines


class PrefillCounts:
    """Counts of sparse prefill calls in one forward pass. The counts stay on the device until `read` is called."""

    def __init__(self) -> None:
        self._layers: list[tuple[int, Layout, mx.array]] = []
        self._recalls: list[tuple[int, int, list[mx.array]]] = []

    def add(self, layer: int, blocks: mx.array, layout: Layout) -> None:
        """Count a call in which the layer with index ``layer`` attended to ``blocks (B, Hq, R, N)``."""
        self._layers.append((layer, layout, (blocks >= 0).sum(axis=(2, 3))))

    def add_recall(self, layer: int, recall: mx.array) -> None:
        """Add the attention recall ``(B, Hq, L)`` of a sparse call that `add` has counted."""
        # The recall is NaN if the model overflows. The histogram counts NaN as 0.
        bins = mx.clip(mx.where(mx.isnan(recall), 0.0, recall) * BINS, 0, BINS - 1).astype(mx.int32).flatten()
        counts = mx.zeros(BINS, mx.int32).at[bins].add(1)
        self._recalls.append((layer, recall.size, [(1.0 - recall).sum(), recall.min(), counts]))

    def read(self) -> PrefillStatistics | None:
        """Wait for the counts and return them as plain numbers, or None if no call was added.

        Only the thread that ran the model may call this method. The wait adds no delay, because mlx-lm waits for the
        forward pass after each chunk anyway.
        """
        if not self._layers:
            return None
        mx.eval([attended for *_, attended in self._layers], [arrays for *_, arrays in self._recalls])
        found = PrefillStatistics()
        for index, layout, array in self._layers:
            found += PrefillStatistics(
                1, layout.L, layout.L * layout.sampled_share, {index: _layer_statistics(array, layout)}
            )
        for index, rows, (lost, least, counts) in self._recalls:
            # `add` has already counted the pairs of this call.
            heads = (0,) * len(found.layers[index].attended)
            recall = LayerStatistics(0, heads, rows, _float(lost), _float(least))
            histogram = Counter({place: int(count) for place, count in enumerate(np.array(counts)) if count})
            found += PrefillStatistics(layers={index: recall}, histogram=histogram)
        return found


def _layer_statistics(array: mx.array, layout: Layout) -> LayerStatistics:
    """Return the sums of one call. ``array (B, Hq)`` contains the number of attended block pairs per query head."""
    attended = np.array(array)
    heads = tuple(int(count) for count in attended.sum(axis=0, dtype=np.int64))
    return LayerStatistics(attended.shape[0] * layout.causal_pairs, heads)


@dataclass(frozen=True)
class BucketStatistics:
    """Statistics of SAAP's decode steps, summed over steps, sequences and KV heads.

    Attributes:
        valid: number of keys that are not padding.
        listed: number of keys in bucket lists. Every decode step attends to the keys outside the lists.
        attended: number of keys that the decode steps attended to.
        bytes: number of bytes of the attended keys, the values of these keys and their list entries.
    """

    valid: int = 0
    listed: int = 0
    attended: int = 0
    bytes: int = 0

    def __add__(self, other: BucketStatistics) -> BucketStatistics:
        return BucketStatistics(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def selectivity(self) -> float:
        """Share of the listed keys that the decode steps attended to (saap.12); 0 if no key was in a bucket list."""
        visited = self.attended - (self.valid - self.listed)
        return visited / self.listed if self.listed else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as plain data for JSON."""
        return {"attended": self.attended, "keys": self.valid, "selectivity": self.selectivity}


class BucketCounts:
    """Counts of SAAP's decode steps in one forward pass. The counts stay on the device until `read` is called."""

    total = "counted"

    def __init__(self) -> None:
        self._lists: list[tuple[mx.array, int]] = []
        self._known = BucketStatistics()  # the counts that the host computes

    def add(self, counts: mx.array, key_bytes: int, *, valid: int, listed: int) -> None:
        """Count a decode step that attended to ``counts (B, Hkv)`` keys and moved ``key_bytes`` bytes per key."""
        # `flatten` returns a new array that belongs to no other graph, as `read` requires.
        self._lists.append((counts.flatten(), key_bytes))
        self._known += BucketStatistics(valid, listed)

    def submit(self) -> BucketCounts | None:
        """Start computing the counts. Call this on the thread that ran the model. Return None if no step was added."""
        if not self._lists:
            return None
        mx.async_eval([counts for counts, _ in self._lists])  # type: ignore[no-untyped-call]
        return self

    def read(self) -> BucketStatistics:
        """Wait for the counts and return them as plain numbers.

        After `submit`, any thread may call this method, but only one thread at a time. This is safe because the arrays
        are already submitted and belong to no graph that another thread evaluates.
        """
        found = self._known
        for counts, key_bytes in self._lists:
            lengths: Any = counts.tolist()
            found += BucketStatistics(attended=sum(lengths), bytes=sum(lengths) * key_bytes)
        return found


@dataclass(frozen=True)
class DraftStatistics:
    """Statistics of self-speculative decoding.

    Attributes:
        checks: number of dense calls that checked draft tokens. A check returns the accepted tokens and one new token.
        alone: number of tokens from dense decode steps.
        examined: for each position in a draft, the number of draft tokens whose predecessors were all accepted.
        accepted: for each position in a draft, the number of accepted draft tokens.
        drafted: number of draft tokens.
        draft_seconds, check_seconds: total time in seconds of drafting and of checking in the timed checks.
        timed: number of checks that were timed.
        alone_seconds: total time in seconds of the timed dense decode steps.
        timed_alone: number of timed dense decode steps.
        pauses: number of times that drafting was paused because it was slower than dense decoding.
    """

    checks: int = 0
    alone: int = 0
    examined: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    drafted: int = 0
    draft_seconds: float = 0.0
    check_seconds: float = 0.0
    timed: int = 0
    alone_seconds: float = 0.0
    timed_alone: int = 0
    pauses: int = 0

    def __add__(self, more: DraftStatistics) -> DraftStatistics:
        def added(one: Any, other: Any) -> Any:
            if isinstance(one, tuple):
                return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
            return one + other

        return DraftStatistics(*(added(a, b) for a, b in zip(vars(self).values(), vars(more).values(), strict=True)))

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return self.alone + self.checks + sum(self.accepted)

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as plain data for JSON."""
        return {**vars(self), "tokens": self.tokens}

    def lines(self) -> list[str]:
        """Return the statistics as lines of text."""
        found = []
        if self.checks:
            taken = sum(self.accepted)
            by_position = ", ".join(f"{a / e:.0%}" for a, e in zip(self.accepted, self.examined, strict=True) if e)
            found.append(
                f"  drafts: {taken:,} of {self.drafted:,} accepted ({by_position} by position), "
                f"{(self.checks + taken) / self.checks:.1f} tokens per check in {self.checks:,} checks"
            )
        if self.alone:
            pauses = f"; drafting was slower and was paused {self.pauses:,} times" if self.pauses else ""
            found.append(f"  without drafts: {self.alone:,} tokens{pauses}")
        if self.timed:
            parts = {
                "drafts": self.draft_seconds * self.checks / self.timed,
                "checks": self.check_seconds * self.checks / self.timed,
                "steps without drafts": self.alone_seconds * self.alone / max(self.timed_alone, 1),
            }
            whole = sum(parts.values())
            shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts.items() if seconds)
            found.append(f"  time: {shares} (measured in {self.timed:,} checks)")
        return found


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def _float(scalar: mx.array) -> float:
    number: Any = scalar.item()
    return float(number)
