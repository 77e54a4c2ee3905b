"""From where on a method pays: measured on this machine once and kept, or else modelled. For any engine."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from . import crossing, measured
from .checks import ArtefactError
from .crossing import Crossing, Noisy, Pairs, Point

if TYPE_CHECKING:
    from .methods import Method, Step

SECONDS = {"gpu": 3.0, "cpu": 10.0}  # that a measurement takes at most
SHORT = 1024  # keys: for a shorter context nobody waits for a measurement
LONGEST = 65_536  # keys that are timed
KEPT = 4  # times the K and V of a layer that it needs: dense and sparse steps have their own, and there is more beside
FREE_SHARE = 0.25  # of the memory that is free, which a measurement may use
WORKING_SET = 128 << 20  # bytes of K and V that a step goes through if it can: more than most last-level caches
LEAST_LAYERS, MOST_LAYERS = 2, {"cpu": 8, "gpu": 32}  # that a step goes through: many make waiting for a GPU small

MEASURED, MODELLED, GIVEN = "measured on this machine", "modelled", "given"


@dataclass(frozen=True)
class Threshold:
    """When a layer is sparse.

    Attributes:
        value: keys from which a step is sparse; of prompts, the density up to which it pays.
        how: one of `MEASURED`, `MODELLED` and `GIVEN`.
    """

    value: float
    how: str


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer, and what runs it: what a threshold holds for.

    Attributes:
        step: with nothing measured.
        dtype: of keys and values, as the engine writes it.
        L: tokens of a prompt's piece; 1 for decode steps.
        device: where an engine has several.
    """

    backend: str
    step: Step
    dtype: Any
    L: int = 1
    device: Any = None

    @property
    def row(self) -> int:
        """Bytes of a key and its value, of all heads."""
        return 2 * self.step.heads * self.step.row_bytes

    @property
    def sizes(self) -> dict[str, str | int]:
        """For `measured.question`."""
        step = self.step
        sizes = {"heads": step.heads, "G": step.G, "D": step.D, "buckets": step.buckets, "network": step.network}
        packed = {} if step.packed is None else {"kv_bits": step.packed[0], "kv_group_size": step.packed[1]}
        return {**sizes, **packed, "dtype": str(self.dtype).rpartition(".")[2], "L": self.L}

    def __str__(self) -> str:
        return f"{self.backend}, {self.step.heads * self.step.G} x {self.step.heads} heads of {self.step.D}"


class Thresholds(ABC):
    """The thresholds of one user with one engine: those of this machine where they are known, or may be measured.

    Args:
        measures: whether what is not known is measured, when a context is long enough; otherwise the model decides.
        seconds: of a measurement; None for `SECONDS`.
        say: is told before and after a measurement.

    Attributes:
        longest: keys that are timed at most.
    """

    longest = LONGEST

    def __init__(
        self,
        *,
        measures: bool = False,
        seconds: float | None = None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.measures, self._seconds, self._say = measures, seconds, say
        self._known: dict[tuple[Method, Layer], Threshold] = {}
        self._asked: set[tuple[Method, Layer]] = set()  # what was measured, or tried, in this process
        self._said: set[str] = set()
        self._lock = threading.Lock()

    @abstractmethod
    def kind(self, layer: Layer) -> str:
        """What runs it: a key of `SECONDS`."""

    @abstractmethod
    def question(self, config: Method, layer: Layer) -> measured.Question:
        """What is asked of this machine."""

    @abstractmethod
    def free_memory(self, layer: Layer) -> int:
        """Bytes that nobody uses now, of what the engine can use."""

    @abstractmethod
    def pairs(self, config: Method, layer: Layer, S: int, seconds: float) -> Pairs:
        """Seconds of dense and sparse decode steps over ``S`` keys, in turns, as a model takes them: `in_turns`."""

    def answer(self, config: Method, layer: Layer, seconds: float) -> dict[str, Any]:
        """What `read` reads: decode steps are timed at several lengths.

        Raises:
            Noisy: steps took too different times.
            MemoryError: too little is free for the shortest context.
        """
        shortest, first = self.worth_asking(config), int(self.modelled(config, layer).value)
        most = int(FREE_SHARE * self.free_memory(layer)) // (LEAST_LAYERS * KEPT * layer.row)
        if most < shortest:
            raise MemoryError(f"{FREE_SHARE * self.free_memory(layer) / 1e6:.0f} MB of free memory are too few")
        measure = partial(self.pairs, config, layer, seconds=seconds / 10)
        longest = max(min(most, self.longest), shortest)
        found = crossing.find(measure, shortest=shortest, longest=longest, first=first, seconds=seconds)
        return found.as_dict()

    def layers(self, layer: Layer, S: int) -> int:
        """Layers that a step over ``S`` keys goes through."""
        fit = int(FREE_SHARE * self.free_memory(layer)) // (KEPT * layer.row * S)
        return max(LEAST_LAYERS, min(MOST_LAYERS[self.kind(layer)], WORKING_SET // (layer.row * S), fit))

    def modelled(self, config: Method, layer: Layer) -> Threshold:
        """What holds where nothing was measured."""
        how = MODELLED if getattr(config, "dense_below", 0) == "auto" and not config.experiment else GIVEN
        return Threshold(config.shortest_context(layer.step), how)

    def read(self, config: Method, layer: Layer, answer: Mapping[str, Any]) -> Threshold:
        """The threshold that a measurement tells.

        Raises:
            ValueError: it is none.
        """
        found = Crossing.of(answer)
        # Where dense attention won as far as was looked, the model decides beyond.
        keys = found.keys or max(found.up_to + 1, int(self.modelled(config, layer).value))
        return Threshold(config.shortest_context(replace(layer.step, measured=keys)), MEASURED)

    @staticmethod
    def worth_asking(config: Method) -> int:
        """The shortest context for which anybody waits: below, sparse attention hardly pays on any machine."""
        return max(SHORT, 2 * config.attended)

    def describe(self, config: Method, found: Threshold) -> str:
        """A threshold in words."""
        return describe(found)

    def of(self, config: Method, layer: Layer, S: int = 0, *, measures: bool | None = None) -> Threshold:
        """When ``config`` is sparse in a layer.

        Args:
            S: keys of the context; from `worth_asking` on it is measured, if this may.
            measures: whether it may; None for what was said for all.
        """
        may = self.measures if measures is None else measures
        known = self._known.get((config, layer))
        if known is None or (may and known.how == MODELLED and S >= self.worth_asking(config)):
            with self._lock:  # whoever comes second finds the answer
                known = self._find(config, layer, S, may)
        return known

    def waits(self, config: Method, layer: Layer) -> bool:
        """Whether a layer is still to be measured, in the first context that is long enough."""
        may = self.measures and config.measurable and (config, layer) not in self._asked
        return may and self.of(config, layer).how == MODELLED

    def _find(self, config: Method, layer: Layer, S: int, may: bool) -> Threshold:
        asked = (config, layer)
        found = self._known.get(asked)
        if found is None:
            kept = self.look_up(config, layer) if config.measurable else None
            found = self._known[asked] = kept or self.modelled(config, layer)
        may = may and found.how == MODELLED and asked not in self._asked
        if may and config.measurable and S >= self.worth_asking(config):
            with measured.alone() as free:
                if not free:
                    self._say_once("another process is measuring: the documented model decides until it has finished")
                    return found
                self._asked.add(asked)  # not again, if it fails
                found = self.look_up(config, layer) or self.measure(config, layer) or found
            self._known[asked] = found
        return found

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def look_up(self, config: Method, layer: Layer) -> Threshold | None:
        """What is kept from an earlier measurement."""
        try:
            answer = measured.read(self.question(config, layer))
            return None if answer is None else self.read(config, layer, answer)
        except (ArtefactError, ValueError) as error:
            self._say_once(f"a measurement is ignored, and replaced by the next: {error}")
            return None

    def timed(self, config: Method, layer: Layer) -> tuple[Point, ...]:
        """The lengths at which decode steps were timed on this machine before; none if that is not known."""
        try:
            answer = measured.read(self.question(config, layer))
            return () if answer is None else Crossing.of(answer).points
        except (ArtefactError, ValueError):
            return ()  # `look_up` says so

    def measure(self, config: Method, layer: Layer) -> Threshold | None:
        """Time dense and sparse attention now, and keep the answer; None if this machine is too noisy, or too full."""
        seconds = self._seconds or SECONDS[self.kind(layer)]
        self._say(f"measuring from where on {config.name} pays here ({layer}; up to {seconds:g} s, once) ...")
        start = time.monotonic()
        try:
            answer = self.answer(config, layer, seconds)
        except (Noisy, MemoryError) as error:
            self._say(f"not measured: {error}. The documented model decides instead.")
            return None
        found = self.read(config, layer, answer)
        self._say(f"{self.describe(config, found)}; it took {time.monotonic() - start:.1f} s.")
        try:
            measured.write(self.question(config, layer), answer)
        except OSError as error:
            self._say(f"the measurement cannot be kept: {error}. It holds for this run.")
        return found


def describe(found: Threshold) -> str:
    """The threshold of a decode step in words."""
    if found.value >= crossing.MOST:
        return f"never sparse ({found.how})"
    return f"sparse from {found.value:,.0f} keys on ({found.how})"


def settings_text(config: Method, G: int) -> str:
    """The settings that a step's time depends on, for `measured.question`."""
    settled = config.for_model(qk_norm=False)  # a model has settled it before, what is "auto" otherwise
    given = settled.parameters(G).items()
    # How much of a prompt is kept does not change what keeping it costs.
    settings = {name: value for name, value in given if value is not None and not name.startswith("alpha")}
    chosen = {name: getattr(settled, name, None) for name in ("component_score", "key_bits", "score")}
    more = {name: value for name, value in chosen.items() if value not in (None, "rows")}
    return ",".join(f"{name}={value}" for name, value in sorted((settings | more).items()))
