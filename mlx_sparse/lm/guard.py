"""Make a layer's decode steps dense for a while if its estimated attention recall is too low."""

from __future__ import annotations

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
        self._recalls: dict[int, list[float]] = {}
        self._dense: Counter[int] = Counter()

    def note(self, recalls: dict[int, float]) -> dict[int, float]:
        """Note the mean recall of each layer in one decode step, by index of the layer's cache.

        Returns:
            The layers whose next `PAUSE` steps are dense, with the mean recall that was too low.
        """
        low = {}
        for layer, recall in recalls.items():
            seen = self._recalls.setdefault(layer, [])
            seen.append(recall)
            if len(seen) < STEPS:
                continue
            mean = sum(seen) / len(seen)
            seen.clear()
            if mean < self.least:
                low[layer] = mean
                self._dense[layer] = PAUSE
        return low

    def takes_dense_step(self, layer: int) -> bool:
        """Return True if the next decode step of ``layer`` must be dense. Count this step."""
        if self._dense[layer] == 0:
            return False
        self._dense[layer] -= 1
        return True
