"""Read, measure or estimate the crossover length of sparse attention on this machine.

A measurement is stored as one JSON file for its method, layer shape and machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import __version__
from ..blas import in_use
from ..checks import ArtefactError
from ..core import reasons
from ..core.base import Method, Prefill
from ..core.decide import NEVER
from ..files import cache_directory, read_regular, replace_file
from . import timing
from .timing import Layer, Point, crossover, find

SECONDS = {"gpu": 3.0, "cpu": 10.0}  # longest time of a measurement
SHORT = 1024  # keys; a shorter context does not trigger a measurement
LONGEST = 65_536  # keys that are timed
BUSY, BUSY_SHARE = 1.5, 0.25  # a larger spread of the crossover (factor) or density (difference): busy machine

MeasurementKey = dict[str, str | int]
FORMAT, MAX_BYTES = 3, 1 << 16  # of a calibration file
WRITING = threading.Lock()  # held while a file is written, so that a program can end between two files

MEASURED, MODELED, GIVEN = "measured on this machine", "modeled", "given"


@dataclass(frozen=True)
class Threshold:
    """Threshold between dense and sparse attention in a layer.

    Attributes:
        value: crossover length in keys for decode steps; for prefill, the largest density at which sparse attention
            is faster.
        how: source of ``value``: `MEASURED`, `MODELED` or `GIVEN`.
        best: optimistic end of the measured range; None if there is no range. ``value`` is the conservative end.
        busy: True if the range is so wide that the next process measures again.
    """

    value: float
    how: str
    best: float | None = None
    busy: bool = False


def describe(config: Method, found: Threshold) -> str:
    """Describe the threshold ``found`` of the method ``config`` in one line, for reports."""
    how, value, best = found.how, found.value, found.best
    if best is not None:
        spread = f"{value:.0%} to {best:.0%}" if isinstance(config, Prefill) else f"{best:,.0f} to {value:,.0f} keys"
        how += f", spread {spread}"
    if found.busy:
        how += "; the machine was busy, so the next run measures again"
    if not isinstance(config, Prefill):
        return f"never sparse ({how})" if value >= NEVER else f"sparse at {value:,.0f} keys and longer ({how})"
    if config.shortest_context() >= NEVER:
        return f"dense {reasons.UNTUNED}"
    if value <= 0:
        return f"prefill never sparse ({how})"
    share = f" if at most {value:.0%} of the blocks are selected" if value < 1 else ""
    return f"prefill sparse at {config.shortest_context():,} keys and longer{share} ({how})"


class Calibration:
    """Thresholds of the layers on this machine, measured or estimated (docs/methods.md).

    Args:
        measures: if True, measure a missing threshold once a context is long enough; if False, estimate the threshold.
        seconds: time limit of a measurement in seconds; None means `SECONDS`.
        chunk: number of tokens in a prefill chunk. The default is mlx-lm's default.
        progress: callback that receives a line of text before and after each measurement.
    """

    def __init__(
        self,
        *,
        measures: bool = False,
        seconds: float | None = None,
        chunk: int = 2048,
        progress: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.measures, self.chunk, self._seconds, self._progress = measures, chunk, seconds, progress
        self._known: dict[tuple[Method, Layer], Threshold] = {}
        self._tried: set[tuple[Method, Layer]] = set()  # measured in this process, or failed

    def threshold(self, config: Method, layer: Layer, S: int = 0) -> Threshold:
        """Return the threshold of ``config`` for ``layer``.

        If `needs_measurement` is True and the context length ``S`` is large enough, measure the threshold first.
        """
        key = config, layer
        if key not in self._known:
            kept = self.look_up(config, layer) if config.measurable else None
            self._known[key] = kept or self.modeled(config, layer)
        if S >= self.shortest_measured(config) and self.needs_measurement(config, layer):
            self._tried.add(key)  # set first, so that a failed measurement is not repeated
            self._known[key] = self.measure(config, layer) or self._known[key]
        return self._known[key]

    def needs_measurement(self, config: Method, layer: Layer) -> bool:
        """Return True if the layer will be measured as soon as a context is long enough."""
        if not self.measures or not config.measurable or (config, layer) in self._tried:
            return False
        found = self.threshold(config, layer)
        return found.how == MODELED or found.busy

    def measure_now(self, layers: Iterable[tuple[Method, Layer]]) -> None:
        """Measure the missing thresholds of ``layers``. Later contexts do not start a measurement."""
        for config, layer in layers:
            if self.needs_measurement(config, layer):
                self._known[config, layer] = self.measure(config, layer) or self._known[config, layer]
        self.measures = False

    @staticmethod
    def shortest_measured(config: Method) -> int:
        """Return the shortest context in keys that is measured. In shorter contexts, sparse attention rarely wins."""
        if isinstance(config, Prefill):
            return max(SHORT, config.shortest_context())
        return max(SHORT, 2 * config.attended)

    @staticmethod
    def modeled(config: Method, layer: Layer) -> Threshold:
        """Return the threshold that ``config`` sets or estimates. Nothing is measured."""
        how = MODELED if getattr(config, "dense_below", 0) == "auto" and not config.experiment else GIVEN
        if isinstance(config, Prefill):
            return Threshold(config.max_density(layer.backend), how)
        return Threshold(config.shortest_context(layer.step), how)

    def look_up(self, config: Method, layer: Layer) -> Threshold | None:
        """Return the threshold from a stored measurement, or None if there is no valid measurement."""
        try:
            result = read_measurement(measurement_key(config, layer))
            return None if result is None else self.read(config, layer, result)
        except (ArtefactError, ValueError) as error:
            self._progress(f"a measurement is ignored, and replaced by the next: {error}")
            return None

    def read(self, config: Method, layer: Layer, result: Mapping[str, Any]) -> Threshold:
        """Compute the threshold from the content of a calibration file."""
        if isinstance(config, Prefill):
            low, high = result.get("share", -1), result.get("best", -1)
            if not all(type(share) in (int, float) and 0 <= share <= 1 for share in (low, high)):
                raise ValueError("expected shares from 0 to 1")
            value, best, busy = config.max_density(layer.backend, low), high, high - low > BUSY_SHARE
            return Threshold(value, MEASURED, best if best != value else None, busy)
        points = read_points(result)
        possible, won = crossover(points)
        # If dense attention won at the longest length, the model decides for longer contexts.
        keys = won or max(points[-1].S + 1, int(self.modeled(config, layer).value))
        value = config.shortest_context(replace(layer.step, measured=keys))
        best = None if possible is None else config.shortest_context(replace(layer.step, measured=possible))
        busy = possible is not None and keys > BUSY * possible
        return Threshold(value, MEASURED, best if best != value else None, busy)

    def measure(self, config: Method, layer: Layer) -> Threshold | None:
        """Time dense and sparse attention, store the result and return the threshold.

        Return None if not enough memory is free.
        """
        seconds = self._seconds or SECONDS[timing.device_kind()]
        limit = f"{layer}; up to {seconds:g} s, once"
        self._progress(f"calibrating: finding the context length at which {config.name} is faster ({limit}) ...")
        start = time.monotonic()
        mx.synchronize()
        try:
            if isinstance(config, Prefill):
                result = timing.time_prefill(config, layer, seconds)
            else:
                result = self._measure_steps(config, layer, seconds)
        except MemoryError as error:
            self._progress(f"not measured: {error}. The documented model decides instead.")
            return None
        finally:
            mx.clear_cache()  # free the memory of the measurement
        found = self.read(config, layer, json.loads(json.dumps(result)))
        self._progress(f"{describe(config, found)}; it took {time.monotonic() - start:.1f} s.")
        try:
            write_measurement(measurement_key(config, layer), result)
        except OSError as error:
            self._progress(f"the measurement cannot be saved: {error}. It is used for this run only.")
        return found

    def _measure_steps(self, config: Method, layer: Layer, seconds: float) -> dict[str, object]:
        # A method that is modeled as never faster is timed from the shortest length on.
        shortest, first = self.shortest_measured(config), int(self.modeled(config, layer).value) % NEVER
        longest = max(min(timing.most_keys(layer, shortest), LONGEST), shortest)
        measure = partial(timing.time_steps, config, layer, seconds=seconds / 10)
        points = find(measure, shortest=shortest, longest=longest, first=first, seconds=seconds)
        return {"points": points}


def measurement_key(config: Method, layer: Layer) -> MeasurementKey:
    """Return the key of a measurement: a dict of method, settings, layer shape, machine, system and versions."""
    info, step = mx.device_info(), layer.step
    packed: MeasurementKey = {"latent": 1} if step.latent else {"Dv": step.Dv} if step.Dv else {}
    packed |= {} if step.packed is None else {"kv_bits": step.packed[0], "kv_group_size": step.packed[1]}
    return {
        "format": FORMAT,
        "method": config.name,
        "settings": _settings(config, step.G),
        **{"heads": step.heads, "G": step.G, "D": step.D, "buckets": step.buckets, "network": step.network, **packed},
        **{"dtype": str(layer.dtype).rpartition(".")[2], "L": layer.L, "backend": layer.backend},
        "device": f"{info.get('device_name', '')} {info.get('architecture', '')} {mx.default_device()}",
        "processors": os.cpu_count() or 1,
        "BLAS": in_use() or "",  # a fast BLAS changes mainly dense attention
        **{"system": platform.platform(), "python": platform.python_version()},
        **{"mlx-sparse-attention": __version__, "mlx": version("mlx")},
    }


def _settings(config: Method, G: int) -> str:
    """Return a text with the settings of ``config`` that influence the time of a step."""
    settled = config.for_model(qk_norm=False)  # settings from models are already resolved
    # The alphas change the density, but not the time at a given density.
    settings = {name: value for name, value in settled.parameters(G).items() if not name.startswith("alpha")}
    settings |= {name: getattr(settled, name, None) for name in ("top_k", "component_score", "score")}
    return ",".join(f"{name}={value}" for name, value in sorted(settings.items()) if value not in (None, "rows"))


def folder() -> Path:
    """Return the folder of the calibration files."""
    return cache_directory() / "calibration"


def path_of(key: MeasurementKey) -> Path:
    """Return the path of the calibration file for the measurement that has the key ``key``."""
    return folder() / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"


def read_measurement(key: MeasurementKey) -> dict[str, object] | None:
    """Read the stored measurement that has the key ``key``, or return None if there is no file."""
    path = path_of(key)
    try:
        found = json.loads(read_regular(path, MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtefactError(f"{path}: expected a measurement, got {str(error)[:80]}.") from None
    if not isinstance(found, dict) or found.get("key") != key or not isinstance(found.get("result"), dict):
        raise ArtefactError(f"{path}: expected a measurement of this machine and version, got something else.")
    result: dict[str, object] = found["result"]
    return result


def write_measurement(key: MeasurementKey, result: Mapping[str, object]) -> None:
    """Store ``result`` in the calibration file for ``key``."""
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"key": key, "result": result}, indent=1)
    with WRITING:
        replace_file(path, lambda new: new.write_text(text + "\n", encoding="utf-8"))


def read_points(result: Mapping[str, Any]) -> list[Point]:
    """Validate the timed lengths in a calibration file, and return one `Point` per length in ascending order."""
    found: list[Any] = result.get("points") or [None]
    for point in found if isinstance(found, list) else [None]:
        whole = isinstance(point, list) and len(point) == 4 and type(point[0]) is int
        # Integers of `NEVER` or more may not fit into a float.
        if not whole or not all(type(number) in (int, float) and 0 < number < NEVER for number in point):
            raise ValueError("expected lengths with three ratios each")
    return sorted(Point(*point) for point in found)
