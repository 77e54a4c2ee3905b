"""Store measurements: one JSON file for each method, layer shape and machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import __version__
from ..blas import in_use
from ..checks import ArtefactError
from ..core.base import Method
from ..core.decide import NEVER
from ..files import cache_directory, read_regular, replace_file
from .search import Point
from .timing import Layer

MeasurementKey = dict[str, str | int]
FORMAT = 3
MAX_BYTES = 1 << 16
WRITING = threading.Lock()  # held while a file is written, so that a program can end between two files


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
