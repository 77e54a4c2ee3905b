"""What sparse calls kept: counted on the device by the thread that runs the model, plain numbers for everybody else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..methods.block_layout import Layout

BINS = 1000  # of the histogram of retained mass
LOW_QUANTILE = 0.01


@dataclass(frozen=True)
class LayerFigures:
    """Sums of one layer.

    Attributes:
        pairs: causal pairs of a row block and a key block, of all sequences.
        kept: attended pairs of each query head.
        low, high: smallest and largest density of a head in a call.
        rows: queries whose retained mass was measured.
        lost: sum of one less retained mass.
        least: smallest retained mass; NaN where one is.
    """

    pairs: int
    kept: tuple[int, ...]
    low: float
    high: float
    rows: int = 0
    lost: float = 0.0
    least: float = 1.0

    def __add__(self, other: LayerFigures) -> LayerFigures:
        return LayerFigures(
            self.pairs + other.pairs,
            tuple(a + b for a, b in zip(self.kept, other.kept, strict=True)),
            min(self.low, other.low),
            max(self.high, other.high),
            self.rows + other.rows,
            self.lost + other.lost,
            float(np.minimum(self.least, other.least)),  # which keeps NaN
        )

    @property
    def density(self) -> list[float]:
        return [count / self.pairs for count in self.kept]


@dataclass(frozen=True)
class PrefillFigures:
    """Counts of sparse prefill calls.

    Attributes:
        calls: sparse calls.
        queries: of them, one per position.
        sampled_queries: those of them that were scored to choose the blocks.
        layers: by the position of a layer's cache.
        histogram: queries by bin of retained mass.
    """

    calls: int = 0
    queries: int = 0
    sampled_queries: float = 0.0
    layers: Mapping[int, LayerFigures] = field(default_factory=dict)
    histogram: Counter[int] = field(default_factory=Counter)

    def __add__(self, other: PrefillFigures) -> PrefillFigures:
        layers = dict(self.layers)
        for index, layer in other.layers.items():
            layers[index] = layers[index] + layer if index in layers else layer
        return PrefillFigures(
            self.calls + other.calls,
            self.queries + other.queries,
            self.sampled_queries + other.sampled_queries,
            layers,
            self.histogram + other.histogram,
        )

    @property
    def density(self) -> dict[int, list[float]]:
        """The density of every query head over all calls, by layer: the position of its cache."""
        return {index: layer.density for index, layer in sorted(self.layers.items())}

    @property
    def sampled(self) -> float:
        """Share of the queries that were scored to choose the blocks."""
        return self.sampled_queries / self.queries if self.queries else 0.0

    @property
    def mass_mean(self) -> float | None:
        """Mean retained mass over layers, heads and queries; None if it was not measured."""
        rows = sum(layer.rows for layer in self.layers.values())
        return 1.0 - sum(layer.lost for layer in self.layers.values()) / rows if rows else None

    @property
    def mass_min(self) -> float | None:
        """Smallest retained mass of a query; None if it was not measured."""
        return min((layer.least for layer in self.layers.values() if layer.rows), default=None)

    @property
    def mass_low(self) -> float | None:
        """What 99 % of the queries keep at least, rounded down to 0.001; None if it was not measured."""
        left = LOW_QUANTILE * self.histogram.total()
        for index, count in sorted(self.histogram.items()):
            left -= count
            if left <= 0:
                return index / BINS
        return None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        layers = []
        for index, layer in sorted(self.layers.items()):
            heads = layer.density
            spread = _spread(_mean(heads), layer.low, layer.high)
            entry: dict[str, Any] = {"layer": index, "density": spread, "heads": heads}
            if layer.rows:
                entry["retained_mass"] = {"mean": 1.0 - layer.lost / layer.rows, "min": layer.least}
            layers.append(entry)
        found: dict[str, Any] = {"calls": self.calls, "sampled": self.sampled, "layers": layers}
        if layers:
            means, lows, highs = ([entry["density"][name] for entry in layers] for name in ("mean", "min", "max"))
            found["density"] = _spread(_mean(means), min(lows), max(highs))
        if self.mass_mean is not None:
            found["retained_mass"] = {"mean": self.mass_mean, "low": self.mass_low, "min": self.mass_min}
        return found

    def lines(self) -> list[str]:
        """The figures as text."""
        if not self.calls:
            return ["  sparse prefill calls: none"]
        figures = self.as_dict()
        layers = [entry["density"]["mean"] for entry in figures["layers"]]
        lines = [
            f"  sparse prefill calls: {self.calls:,}, {self.sampled:.1%} of the queries sampled",
            f"  density: {figures['density']['mean']:.1%}, by layer {min(layers):.1%} to {max(layers):.1%}, "
            f"by call and head {figures['density']['min']:.1%} to {figures['density']['max']:.1%}",
        ]
        if self.mass_mean is not None:
            lines.append(
                f"  retained mass: {self.mass_mean:.4f}, at least {self.mass_low:.3f} for 99% of the queries and "
                f"{self.mass_min:.4f} for all"
            )
        return lines


class PrefillCounts:
    """Sparse prefill calls of one call of the model, counted on the device until `figures` are asked for."""

    def __init__(self) -> None:
        self._layers: list[tuple[int, Layout, mx.array]] = []
        self._masses: list[tuple[int, int, list[mx.array]]] = []

    def add(self, layer: int, blocks: mx.array, layout: Layout) -> None:
        """Count a call of ``layer`` that attended ``blocks (B, Hq, R, N)``."""
        self._layers.append((layer, layout, (blocks >= 0).sum(axis=(2, 3))))

    def add_mass(self, layer: int, mass: mx.array) -> None:
        """Count retained mass ``(B, Hq, L)`` of a call that has been added."""
        # A model that overflows has NaN here: no number that a bin may have.
        bins = mx.clip(mx.where(mx.isnan(mass), 0.0, mass) * BINS, 0, BINS - 1).astype(mx.int32).flatten()
        counts = mx.zeros(BINS, mx.int32).at[bins].add(1)
        self._masses.append((layer, mass.size, [(1.0 - mass).sum(), mass.min(), counts]))

    def figures(self) -> PrefillFigures | None:
        """The counts as plain numbers, for which this waits; None where there are none.

        Only for the thread that counted. The wait costs a piece of a prompt nothing: mlx-lm waits for the same work
        when the call has returned, because it evaluates the caches after each piece.
        """
        if not self._layers:
            return None
        mx.eval([kept for *_, kept in self._layers], [arrays for *_, arrays in self._masses])
        found = PrefillFigures()
        for index, layout, array in self._layers:
            found += PrefillFigures(1, layout.L, layout.L * layout.sampled_share, {index: _of_call(array, layout)})
        for index, rows, (lost, least, counts) in self._masses:
            # No further pairs: the rest of the layer's sums stays as it is.
            mass = LayerFigures(0, (0,) * len(found.layers[index].kept), 1.0, 0.0, rows, _float(lost), _float(least))
            histogram = Counter({place: int(count) for place, count in enumerate(np.array(counts)) if count})
            found += PrefillFigures(layers={index: mass}, histogram=histogram)
        return found


def _of_call(array: mx.array, layout: Layout) -> LayerFigures:
    """Of the blocks ``(B, Hq)`` that a call attended."""
    kept = np.array(array)
    pairs = layout.causal_pairs
    heads = tuple(int(count) for count in kept.sum(axis=0, dtype=np.int64))
    return LayerFigures(kept.shape[0] * pairs, heads, float(kept.min() / pairs), float(kept.max() / pairs))


@dataclass(frozen=True)
class BucketFigures:
    """What SAAP's decode steps attended, of all sequences and KV heads together.

    Attributes:
        valid: keys there were, padding aside.
        listed: those of them that had a bucket to be visited in; the rest is attended exactly.
        attended: how many were attended.
        bytes: what reading the attended keys and values, and the lists of them, moved.
    """

    valid: int = 0
    listed: int = 0
    attended: int = 0
    bytes: int = 0

    def __add__(self, other: BucketFigures) -> BucketFigures:
        return BucketFigures(
            self.valid + other.valid,
            self.listed + other.listed,
            self.attended + other.attended,
            self.bytes + other.bytes,
        )

    @property
    def selectivity(self) -> float:
        """(saap.12) attended share of the keys that are not attended exactly; 0 where there were none."""
        visited = self.attended - (self.valid - self.listed)
        return visited / self.listed if self.listed else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"attended": self.attended, "keys": self.valid, "selectivity": self.selectivity}


class BucketCounts:
    """SAAP's steps in one call of the model, counted on the device until `figures` are asked for."""

    def __init__(self) -> None:
        self._lists: list[tuple[mx.array, int]] = []
        self._known = BucketFigures()  # what the host knows of them

    def add(self, counts: mx.array, key_bytes: int, *, valid: int, listed: int) -> None:
        """Count a step whose lists are ``counts (B, Hkv)`` long; an attended key moves ``key_bytes``."""
        # An array of its own over the same numbers, which costs the device nothing: see `figures`.
        self._lists.append((counts.flatten(), key_bytes))
        self._known += BucketFigures(valid, listed)

    def submit(self) -> BucketCounts | None:
        """Start computing the counts, without waiting, on the thread that counted; None where there are none."""
        if not self._lists:
            return None
        mx.async_eval([counts for counts, _ in self._lists])  # type: ignore[no-untyped-call]
        return self

    def figures(self) -> BucketFigures:
        """The counts as plain numbers, once the device has them.

        For any thread, but one at a time, and after `submit`: what has been submitted is waited for and not evaluated,
        and no graph that another thread may be evaluating has these arrays in it.
        """
        found = self._known
        for counts, key_bytes in self._lists:
            lengths: Any = counts.tolist()
            found += BucketFigures(attended=sum(lengths), bytes=sum(lengths) * key_bytes)
        return found


def _spread(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": mean, "min": low, "max": high}


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def _float(scalar: mx.array) -> float:
    number: Any = scalar.item()
    return float(number)
