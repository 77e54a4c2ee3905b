"""Make a layer's decode steps dense for a while if its estimated attention recall is too low."""

from __future__ import annotations

import threading
from collections import Counter

STEPS = 8  # counted decode steps over which the recall of a layer is averaged
PAUSE = 256  # decode steps of a layer that are dense, before the layer is tried again
IN_FLIGHT = 4  # counted steps whose recall the guard does not wait for


class Guard:
    """Switch between sparse and dense decode steps, for each layer of an enabled model.

    The report notes the recall of a decode step when it reads this recall from the device, a few steps later. So the
    guard never waits for the device.

    Args:
        least: lowest mean recall of `STEPS` counted steps with which a layer remains sparse.
    """

    def __init__(self, least: float) -> None:
        self.least = least
        self._lock = threading.Lock()
        self._recalls: dict[int, list[float]] = {}
        self._dense: Counter[int] = Counter()
        self._pauses: Counter[int] = Counter()

    def pauses(self, layer: int) -> int:
        """Return how often ``layer`` has become dense. `note` ignores recalls of steps before the last time."""
        return self._pauses[layer]

    def note(self, recalls: dict[int, tuple[float, int]]) -> dict[int, float]:
        """Note a decode step: the mean recall of each layer, and the value of `pauses` in that step.

        Returns:
            A dict from the index of each layer whose next `PAUSE` steps are dense to its mean recall.
        """
        low = {}
        with self._lock:
            for layer, (recall, pauses) in recalls.items():
                if pauses != self._pauses[layer]:
                    continue
                seen = self._recalls.setdefault(layer, [])
                seen.append(recall)
                if len(seen) < STEPS:
                    continue
                mean = sum(seen) / len(seen)
                seen.clear()
                if mean < self.least:
                    low[layer] = mean
                    self._dense[layer] = PAUSE
                    self._pauses[layer] += 1
        return low

    def takes_dense_step(self, layer: int) -> bool:
        """Return True if the next decode step of ``layer`` must be dense. Count this step."""
        if not self._dense[layer]:
            return False
        with self._lock:
            self._dense[layer] -= self._dense[layer] > 0
        return True
