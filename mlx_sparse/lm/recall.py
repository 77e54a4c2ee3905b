"""Count the attention recall that a method estimates for its decode steps (sparq.24), for the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .guard import PAUSE, Guard

RECALL_STEPS = 500  # the histogram of estimated recall has a bin for each multiple of 1 / RECALL_STEPS


@dataclass(frozen=True)
class RecallStatistics:
    """Attention recall that the method estimated (sparq.24), counted over all steps, sequences and KV heads.

    Attributes:
        histogram: ``(layers, RECALL_STEPS + 1)`` counts. ``histogram[i, n]`` is the number of estimates that round to
            ``n / RECALL_STEPS`` in the layer whose cache has the index i.
        keys: number of keys that these steps attended to, summed over KV heads; 0 without an adaptive budget.
        unread_bytes: bytes of the keys and values that an adaptive budget left out of ``top_k``.
        dense: dict from the index of each layer that a `Guard` made dense to the last recall that was too low.
    """

    histogram: npt.NDArray[np.int64]
    keys: int = 0
    unread_bytes: int = 0
    dense: Mapping[int, float] = field(default_factory=dict)

    def __add__(self, other: RecallStatistics) -> RecallStatistics:
        short, long = sorted((self.histogram, other.histogram), key=len)
        total = long.copy()
        total[: len(short)] += short
        return RecallStatistics(
            total, self.keys + other.keys, self.unread_bytes + other.unread_bytes, {**self.dense, **other.dense}
        )

    @property
    def layers(self) -> dict[int, dict[str, float]]:
        """Dict from the index of a layer's cache to the "mean", "median" and "low" (5th percentile) of the recall."""
        return {int(index): _summary(self.histogram[index]) for index in np.flatnonzero(self.histogram.sum(axis=1))}

    def as_dict(self) -> dict[str, Any] | None:
        """Return the statistics as plain data for JSON; None if there are no estimates."""
        layers, total = self.layers, self.histogram.sum(axis=0)
        if not layers:
            return None
        by_layer = [{"layer": index, **values} for index, values in layers.items()]
        keys = {"keys": self.keys / int(total.sum())} if self.keys else {}  # mean number per KV head and step
        dense = {"dense_layers": {str(layer): recall for layer, recall in self.dense.items()}} if self.dense else {}
        return {**_summary(total), **keys, **dense, "worst_layer": self.worst_layer, "layers": by_layer}

    @property
    def worst_layer(self) -> int | None:
        """Index of the layer with the lowest mean recall; None if there are no estimates."""
        layers = self.layers
        return min(layers, key=lambda index: layers[index]["mean"]) if layers else None

    def lines(self) -> list[str]:
        """Return the statistics as a list with one or two lines of text; empty if there are no estimates."""
        found = self.as_dict()
        if found is None:
            return []
        worst = self.layers[found["worst_layer"]]
        keys = f", {found['keys']:.0f} keys on average" if self.keys else ""
        lines = [
            f"  estimated attention recall: median {found['median']:.3f}, 5th percentile {found['low']:.3f}; "
            f"lowest in layer {found['worst_layer']}, median {worst['median']:.3f}{keys}"
        ]
        if self.dense:
            low = ", ".join(f"layer {layer} (recall {recall:.2f})" for layer, recall in sorted(self.dense.items()))
            lines.append(f"  dense for {PAUSE} steps at a time: {low}")
        return lines


def _summary(counts: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return the "mean", "median" and "low" (5th percentile) of the recall. ``counts`` is a row of the histogram."""
    below, mean = np.cumsum(counts), float(counts @ np.arange(len(counts))) / RECALL_STEPS / int(counts.sum())
    median, low = (int(np.searchsorted(below, share * below[-1])) / RECALL_STEPS for share in (0.5, 0.05))
    return {"mean": mean, "median": median, "low": low}


class RecallCounts:
    """Estimated recall of one forward pass. The estimates stay on the device until `read` is called."""

    total = "recalls"

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard
        self._layers: list[int] = []
        self._pauses: dict[int, int] = {}  # of each layer in this step
        self._recalls: list[mx.array] = []
        self._counts: list[mx.array] = []
        self._most: list[tuple[int, int]] = []  # `top_k`, and bytes of a key and a value, for each of the counts
        self._joined: mx.array | None = None

    def add(
        self, layer: int, recall: mx.array, counts: mx.array | None = None, *, top_k: int = 0, row_bytes: int = 0
    ) -> None:
        """Add a decode step of the layer with index ``layer``.

        Args:
            layer: index of the layer's cache.
            recall: float32 ``(B, Hkv)`` estimated attention recall.
            counts: int ``(B, Hkv)`` number of attended keys; None without an adaptive budget.
            top_k: largest number of attended keys.
            row_bytes: bytes of one key or value.
        """
        self._layers += [layer] * recall.size
        if self._guard is not None:
            self._pauses[layer] = self._guard.pauses(layer)
        self._recalls.append(recall.flatten())
        if counts is not None:
            self._counts.append(counts.flatten().astype(mx.float32))
            self._most += [(top_k, 2 * row_bytes)] * counts.size

    def submit(self) -> RecallCounts | None:
        """Start computing the recall. Call this on the thread that ran the model. Return None if nothing was added."""
        if not self._recalls:
            return None
        # The product is a new array that belongs to no other graph, as `read` requires.
        self._joined = mx.concatenate([mx.concatenate(self._recalls) * RECALL_STEPS, *self._counts])
        self._recalls, self._counts = [], []
        mx.async_eval(self._joined)  # type: ignore[no-untyped-call]
        return self

    def read(self) -> RecallStatistics:
        """Wait for the recall and return it as plain numbers. For thread safety, see `BucketCounts.read`."""
        assert self._joined is not None
        # The estimate is NaN if the model overflows, and counts as 0.
        found = np.array(self._joined.tolist())
        steps = np.clip(np.nan_to_num(found[: len(self._layers)], nan=0.0), 0, RECALL_STEPS)
        size = max(self._layers) + 1
        places = np.array(self._layers) * (RECALL_STEPS + 1) + np.rint(steps).astype(np.int64)
        histogram = np.bincount(places, minlength=size * (RECALL_STEPS + 1)).reshape(size, -1)
        keys = found[len(self._layers) :].astype(np.int64)
        unread = sum((most - attended) * size for attended, (most, size) in zip(keys.tolist(), self._most, strict=True))
        dense = {}
        if self._guard is not None:
            layers, recalls = np.array(self._layers), steps / RECALL_STEPS
            means = {layer: float(recalls[layers == layer].mean()) for layer in set(self._layers)}
            dense = self._guard.note({layer: (mean, self._pauses[layer]) for layer, mean in means.items()})
        return RecallStatistics(histogram, int(keys.sum()), unread, dense)
