"""Describe the numbers that methods add to the report, and read them from the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..core.blocks.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

Histogram = npt.NDArray[np.int64]

BINS = 1000  # bins in the histogram of attention recall
LOW_QUANTILE = 0.01
RECALL_STEPS = 500  # the histogram of estimated recall has a bin for each multiple of 1 / RECALL_STEPS


class Sums:
    """Base class of statistics that are summed over calls. Tuples and dicts are added entry by entry."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(_added, vars(self).values(), vars(other).values()))


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, tuple):
        return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
    if isinstance(one, dict):
        return {**one, **other, **{key: one[key] + other[key] for key in one.keys() & other.keys()}}
    return one + other


def _quantile(counts: Histogram, share: float) -> int:
    """Return the first bin of a histogram at which the bins so far have ``share`` of all ``counts``."""
    return int(np.searchsorted(np.cumsum(counts), share * int(counts.sum())))


@dataclass(frozen=True)
class LayerStatistics(Sums):
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
        least = float(np.minimum(self.least, other.least))  # keeps NaN
        return replace(super().__add__(other), least=least)


@dataclass(frozen=True)
class PrefillStatistics(Sums):
    """Statistics of sparse prefill calls.

    Attributes:
        calls: number of sparse calls.
        queries: number of query positions in the sparse calls.
        sampled_queries: number of query positions that were scored to select blocks or keys.
        estimated: sum over the query positions of the attention recall that the method estimates from its samples.
        layers: dict from the index of a layer's cache to the sums of the layer.
        histogram: for each of `BINS` bins of attention recall, the number of queries whose recall is in the bin.
    """

    calls: int = 0
    queries: int = 0
    sampled_queries: float = 0.0
    estimated: float = 0.0
    layers: Mapping[int, LayerStatistics] = field(default_factory=dict)
    histogram: Histogram = field(default_factory=lambda: np.zeros(BINS, np.int64))

    @property
    def density(self) -> dict[int, list[float]]:
        """Dict from the index of a layer's cache to the density of each query head over all calls."""
        layers = sorted(self.layers.items())
        return {index: [count / layer.pairs for count in layer.attended] for index, layer in layers}

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
        low = _quantile(self.histogram, LOW_QUANTILE) / BINS
        return {"mean": mean, "low": low, "min": min(layer.least for layer in measured)}

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as plain data for JSON."""
        layers: list[dict[str, Any]] = []
        for index, heads in self.density.items():
            layers.append({"layer": index, "density": fmean(heads), "heads": heads})
            if (layer := self.layers[index]).rows:
                layers[-1]["recall"] = {"mean": 1.0 - layer.lost / layer.rows, "min": layer.least}
        found: dict[str, Any] = {"calls": self.calls, "sampled": self.sampled, "layers": layers}
        if self.estimated:
            found["estimated_recall"] = self.estimated / self.queries
        if layers:
            by_layer, by_head = [entry["density"] for entry in layers], [d for entry in layers for d in entry["heads"]]
            found["density"] = {"mean": fmean(by_layer), "min": min(by_head), "max": max(by_head)}
        return found if self.recall is None else found | {"recall": self.recall}

    def lines(self) -> list[str]:
        """Return the statistics as lines of text."""
        if not self.calls:
            return ["  sparse prefill calls: none"]
        densities = [fmean(heads) for heads in self.density.values()]
        lines = [
            f"  sparse prefill calls: {self.calls:,}, {self.sampled:.1%} of the queries sampled",
            f"  density: {fmean(densities):.1%}, by layer {min(densities):.1%} to {max(densities):.1%}",
        ]
        if self.estimated:
            lines[-1] += f"; estimated attention recall {self.estimated / self.queries:.3f}"
        if (recall := self.recall) is not None:
            lines.append(
                f"  attention recall: mean {recall['mean']:.4f}, at least {recall['low']:.3f} for 99% of the queries "
                f"and {recall['min']:.4f} for all queries"
            )
        return lines

    @classmethod
    def read(cls, entries: list[tuple[tuple[int, Layout], dict[str, mx.array]]]) -> PrefillStatistics:
        """Return the statistics of calls. The data of an entry are the index of the layer's cache and the layout.

        The arrays are the numbers of attended block pairs ``(B, Hq)``, the mean of the method's estimated recall if the
        method makes an estimate, and the result of `recall_arrays` if the recall was measured.
        """
        found = cls()
        for (index, layout), arrays in entries:
            attended = np.array(arrays["attended"])
            pairs, heads = len(attended) * layout.causal_pairs, attended.sum(axis=0, dtype=np.int64).tolist()
            measured: list[Any] = []
            if "lost" in arrays:
                measured = [attended.size * layout.L, float(arrays["lost"]), float(arrays["least"])]
                found = replace(found, histogram=found.histogram + np.array(arrays["histogram"]))
            layer = LayerStatistics(pairs, tuple(heads), *measured)
            estimated = layout.L * float(arrays.get("estimate", 0.0))
            found += cls(1, layout.L, layout.L * layout.sampled_share, estimated, {index: layer})
        return found


def recall_arrays(recall: mx.array) -> dict[str, mx.array]:
    """Return the sum of 1 - ``recall (B, Hq, L)``, the smallest recall, and the histogram of the recall."""
    # The recall is NaN if the model overflows. The histogram counts NaN as 0.
    bins = mx.clip(mx.where(mx.isnan(recall), 0.0, recall) * BINS, 0, BINS - 1).astype(mx.int32).flatten()
    histogram = mx.zeros(BINS, mx.int32).at[bins].add(1)
    return {"lost": (1.0 - recall).sum(), "least": recall.min(), "histogram": histogram}


@dataclass(frozen=True)
class BucketStatistics(Sums):
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

    @property
    def selectivity(self) -> float:
        """Share of the listed keys that the decode steps attended to (saap.12); 0 if no key was in a bucket list."""
        visited = self.attended - (self.valid - self.listed)
        return visited / self.listed if self.listed else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as plain data for JSON."""
        return {"attended": self.attended, "keys": self.valid, "selectivity": self.selectivity}

    @classmethod
    def read(cls, entries: list[tuple[tuple[int, int, int], mx.array]]) -> BucketStatistics:
        """Return the statistics of decode steps from the numbers of attended keys of each step.

        The data of an entry are the numbers of valid and of listed keys, and the bytes of an attended key.
        """
        found = cls()
        for (valid, listed, key_bytes), counts in entries:
            attended = int(np.array(counts).sum())
            found += cls(valid, listed, attended, attended * key_bytes)
        return found


@dataclass(frozen=True)
class RecallStatistics:
    """Attention recall that the method estimated (sparq.24), counted over all steps, sequences and KV heads.

    Attributes:
        histogram: ``(layers, RECALL_STEPS + 1)`` counts. ``histogram[i, n]`` is the number of estimates that round to
            ``n / RECALL_STEPS`` in the layer whose cache has the index i.
    """

    histogram: Histogram

    def __add__(self, other: RecallStatistics) -> RecallStatistics:
        short, long = sorted((self.histogram, other.histogram), key=len)
        total = long.copy()
        total[: len(short)] += short
        return RecallStatistics(total)

    def as_dict(self) -> dict[str, Any] | None:
        """Return the mean, median and 5th percentile of the recall as plain data; None if there are no estimates."""
        layers = [{"layer": i, **_summary(counts)} for i, counts in enumerate(self.histogram) if counts.any()]
        if not layers:
            return None
        worst = min(layers, key=lambda layer: layer["mean"])["layer"]
        return {**_summary(self.histogram.sum(axis=0)), "worst_layer": worst, "layers": layers}

    def lines(self) -> list[str]:
        """Return the statistics as a list with one line of text; empty if there are no estimates."""
        found = self.as_dict()
        if found is None:
            return []
        worst = _summary(self.histogram[found["worst_layer"]])
        return [
            f"  estimated attention recall: median {found['median']:.3f}, 5th percentile {found['low']:.3f}; "
            f"lowest in layer {found['worst_layer']}, median {worst['median']:.3f}"
        ]

    @classmethod
    def read(cls, entries: list[tuple[int, mx.array]]) -> RecallStatistics:
        """Return the statistics of a decode step. An entry is the index of a layer's cache, and its estimates."""
        layers = np.concatenate([np.full(recall.size, layer) for layer, recall in entries])
        found = np.concatenate([np.array(recall.tolist(), np.float32) for _, recall in entries])
        # The estimate is NaN if the model overflows, and counts as 0.
        steps = np.clip(np.nan_to_num(found * np.float32(RECALL_STEPS), nan=0.0), 0, RECALL_STEPS)
        size = int(layers.max()) + 1
        places = layers * (RECALL_STEPS + 1) + np.rint(steps).astype(np.int64)
        return cls(np.bincount(places, minlength=size * (RECALL_STEPS + 1)).reshape(size, -1))


def _summary(counts: Histogram) -> dict[str, Any]:
    """Return the "mean", "median" and "low" (5th percentile) of the recall. ``counts`` is a row of the histogram."""
    mean = float(counts @ np.arange(len(counts))) / RECALL_STEPS / int(counts.sum())
    return {"mean": mean} | {name: _quantile(counts, q) / RECALL_STEPS for name, q in (("median", 0.5), ("low", 0.05))}


@dataclass(frozen=True)
class DraftStatistics(Sums):
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
