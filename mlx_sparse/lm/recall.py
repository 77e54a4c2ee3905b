"""Count the attention recall that a method estimates for its decode steps (sparq.24), for the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

RECALL_STEPS = 500  # the histogram of estimated recall has a bin for each multiple of 1 / RECALL_STEPS


@dataclass(frozen=True)
class RecallStatistics:
    """Attention recall that the method estimated (sparq.24), counted over all steps, sequences and KV heads.

    Attributes:
        histogram: ``(layers, RECALL_STEPS + 1)`` counts. ``histogram[i, n]`` is the number of estimates that round to
            ``n / RECALL_STEPS`` in the layer whose cache has the index i.
    """

    histogram: npt.NDArray[np.int64]

    def __add__(self, other: RecallStatistics) -> RecallStatistics:
        short, long = sorted((self.histogram, other.histogram), key=len)
        total = long.copy()
        total[: len(short)] += short
        return RecallStatistics(total)

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
        return {**_summary(total), "worst_layer": self.worst_layer, "layers": by_layer}

    @property
    def worst_layer(self) -> int | None:
        """Index of the layer with the lowest mean recall; None if there are no estimates."""
        layers = self.layers
        return min(layers, key=lambda index: layers[index]["mean"]) if layers else None

    def lines(self) -> list[str]:
        """Return the statistics as a list with one line of text; empty if there are no estimates."""
        found = self.as_dict()
        if found is None:
            return []
        worst = self.layers[found["worst_layer"]]
        return [
            f"  estimated attention recall: median {found['median']:.3f}, 5th percentile {found['low']:.3f}; "
            f"lowest in layer {found['worst_layer']}, median {worst['median']:.3f}"
        ]


def _summary(counts: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return the "mean", "median" and "low" (5th percentile) of the recall. ``counts`` is a row of the histogram."""
    below, mean = np.cumsum(counts), float(counts @ np.arange(len(counts))) / RECALL_STEPS / int(counts.sum())
    median, low = (int(np.searchsorted(below, share * below[-1])) / RECALL_STEPS for share in (0.5, 0.05))
    return {"mean": mean, "median": median, "low": low}


class RecallCounts:
    """Estimated recall of one forward pass. The estimates stay on the device until `read` is called."""

    total = "recalls"

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._recalls: list[mx.array] = []
        self._joined: mx.array | None = None

    def add(self, layer: int, recall: mx.array) -> None:
        """Add a decode step of the layer whose cache has the index ``layer``. ``recall`` is float32 ``(B, Hkv)``."""
        self._layers += [layer] * recall.size
        self._recalls.append(recall.flatten())

    def submit(self) -> RecallCounts | None:
        """Start computing the recall. Call this on the thread that ran the model. Return None if nothing was added."""
        if not self._recalls:
            return None
        # The product is a new array that belongs to no other graph, as `read` requires.
        self._joined = mx.concatenate(self._recalls) * RECALL_STEPS
        self._recalls = []
        mx.async_eval(self._joined)  # type: ignore[no-untyped-call]
        return self

    def read(self) -> RecallStatistics:
        """Wait for the recall and return it as plain numbers. For thread safety, see `BucketCounts.read`."""
        assert self._joined is not None
        # The estimate is NaN if the model overflows, and counts as 0.
        steps = np.clip(np.nan_to_num(np.array(self._joined.tolist()), nan=0.0), 0, RECALL_STEPS)
        size = max(self._layers) + 1
        places = np.array(self._layers) * (RECALL_STEPS + 1) + np.rint(steps).astype(np.int64)
        return RecallStatistics(np.bincount(places, minlength=size * (RECALL_STEPS + 1)).reshape(size, -1))
