"""What sparse calls kept: counted on the device, read when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..layout import Layout

BINS = 1000  # of the histogram of retained mass
LOW_QUANTILE = 0.01


@dataclass
class _Layer:
    """Sums of one layer; arrays have one element per query head unless they are named otherwise.

    Attributes:
        pairs: causal pairs of a row block and a key block, of all sequences.
        kept: attended pairs, int64.
        low, high: smallest and largest density of a head in a call, scalars.
        rows: queries whose retained mass was measured.
        lost: sum of one less retained mass, float32 scalar.
        least: smallest retained mass, scalar.
    """

    pairs: int
    kept: mx.array
    low: mx.array
    high: mx.array
    rows: int = 0
    lost: mx.array | None = None
    least: mx.array | None = None


class PrefillFigures:
    """Counts of the sparse prefill calls of one model.

    Attributes:
        calls: sparse calls.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._queries = self._sampled = 0.0
        self._layers: dict[int, _Layer] = {}
        self._histogram: mx.array | None = None
        self._submitted = True

    def add(self, layer: int, blocks: mx.array, layout: Layout) -> None:
        """Count a call of ``layer`` that attended ``blocks (B, Hq, R, N)``."""
        kept = (blocks >= 0).sum(axis=(2, 3))
        density = kept / layout.causal_pairs
        kept, low, high = kept.sum(axis=0).astype(mx.int64), density.min(), density.max()
        pairs = blocks.shape[0] * layout.causal_pairs
        known = self._layers.get(layer)
        if known is None:
            self._layers[layer] = _Layer(pairs, kept, low, high)
        else:
            known.pairs += pairs
            known.kept = known.kept + kept
            known.low, known.high = mx.minimum(known.low, low), mx.maximum(known.high, high)
        self._submitted = False
        self.calls += 1
        self._queries += layout.L
        self._sampled += layout.L * layout.sampled_share

    def add_mass(self, layer: int, mass: mx.array) -> None:
        """Count retained mass ``(B, Hq, L)`` of a call that has been added."""
        known = self._layers[layer]
        lost, least = (1.0 - mass).sum(), mass.min()
        known.rows += mass.size
        known.lost = lost if known.lost is None else known.lost + lost
        known.least = least if known.least is None else mx.minimum(known.least, least)
        # A model that overflows has NaN here: no number that a bin may have.
        bins = mx.clip(mx.where(mx.isnan(mass), 0.0, mass) * BINS, 0, BINS - 1).astype(mx.int32).flatten()
        counts = mx.zeros(BINS, mx.int32).at[bins].add(1).astype(mx.int64)
        self._histogram = counts if self._histogram is None else self._histogram + counts

    def submit(self) -> None:
        """Start computing what was added, without waiting.

        mlx-lm evaluates only the caches after a piece of a prompt, so nothing else would compute the last layer's
        figures, and they would hold on to that piece's keys.
        """
        if self._submitted:
            return
        self._submitted = True
        arrays = [self._histogram]
        for layer in self._layers.values():
            arrays += [layer.kept, layer.low, layer.high, layer.lost, layer.least]
        mx.async_eval([array for array in arrays if array is not None])  # type: ignore[no-untyped-call]

    @property
    def density(self) -> dict[int, list[float]]:
        """By layer, the position of its cache: the density of every query head over all calls."""
        return {index: self._density(layer) for index, layer in sorted(self._layers.items())}

    @property
    def sampled(self) -> float:
        """Share of the queries that were scored to choose the blocks."""
        return self._sampled / self._queries if self._queries else 0.0

    @property
    def mass_mean(self) -> float | None:
        """Mean retained mass over layers, heads and queries; None if it was not measured."""
        rows = sum(layer.rows for layer in self._layers.values())
        lost = sum(_float(layer.lost) for layer in self._layers.values() if layer.lost is not None)
        return 1.0 - lost / rows if rows else None

    @property
    def mass_min(self) -> float | None:
        """Smallest retained mass of a query; None if it was not measured."""
        return min((_float(layer.least) for layer in self._layers.values() if layer.least is not None), default=None)

    @property
    def mass_low(self) -> float | None:
        """What 99 % of the queries keep at least, rounded down to 0.001; None if it was not measured."""
        if self._histogram is None:
            return None
        counts: Any = self._histogram.tolist()
        left = LOW_QUANTILE * sum(counts)
        for index, count in enumerate(counts):
            left -= count
            if left <= 0:
                return index / BINS
        raise AssertionError

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        layers = []
        for index, heads in self.density.items():
            layer = self._layers[index]
            low, high = _float(layer.low), _float(layer.high)
            entry: dict[str, Any] = {"layer": index, "density": _spread(_mean(heads), low, high), "heads": heads}
            if layer.lost is not None:
                mass = {"mean": 1.0 - _float(layer.lost) / layer.rows, "min": _float(layer.least)}
                entry["retained_mass"] = mass
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

    @staticmethod
    def _density(layer: _Layer) -> list[float]:
        kept: Any = layer.kept.tolist()
        return [count / layer.pairs for count in kept]


class BucketFigures:
    """What SAAP's decode steps attended, of all sequences and KV heads together.

    Attributes:
        valid: keys there were, padding aside.
        listed: those of them that had a bucket to be visited in; the rest is attended exactly.
    """

    SETTLED_AT = 1024  # counts that are held before their sum replaces them

    def __init__(self) -> None:
        self.valid = self.listed = 0
        self._counts: dict[int, list[mx.array]] = {}

    def add(self, counts: mx.array, key_bytes: int, *, valid: int, listed: int) -> None:
        """Count a step whose lists are ``counts (B, Hkv)`` long; an attended key moves ``key_bytes``."""
        held = self._counts.setdefault(key_bytes, [])
        held.append(counts)  # as it is: attending evaluates it, and would no array made of it
        if len(held) > self.SETTLED_AT:
            total = mx.concatenate([one.flatten() for one in held]).astype(mx.int64).sum().reshape(1, 1)
            mx.async_eval(total)  # type: ignore[no-untyped-call]
            self._counts[key_bytes] = [total]
        self.valid += valid
        self.listed += listed

    def _attended(self) -> dict[int, int]:
        """By bytes of a key, how many were attended."""
        # Summed here: another thread than the model's may ask, where the device computes nothing with them.
        lists: dict[int, Any] = {size: [counts.tolist() for counts in held] for size, held in self._counts.items()}
        return {size: sum(sum(row) for rows in held for row in rows) for size, held in lists.items()}

    @property
    def bytes(self) -> int:
        """What reading the attended keys and values, and the lists of them, moved."""
        return sum(key_bytes * count for key_bytes, count in self._attended().items())

    @property
    def selectivity(self) -> float:
        """(saap.12) attended share of the keys that are not attended exactly; 0 where there were none."""
        visited = sum(self._attended().values()) - (self.valid - self.listed)
        return visited / self.listed if self.listed else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"attended": sum(self._attended().values()), "keys": self.valid, "selectivity": self.selectivity}


def _spread(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": mean, "min": low, "max": high}


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def _float(scalar: mx.array | None) -> float:
    assert scalar is not None
    number: Any = scalar.item()
    return float(number)
