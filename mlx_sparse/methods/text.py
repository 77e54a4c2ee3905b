"""Parse methods from text and TOML files."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ..checks import ConfigError, did_you_mean
from ..core.base import Dense, Method, read_value
from .baselines.config import BASELINES
from .gather.config import Gather
from .patterns.config import PATTERNS
from .saap.config import SAAP
from .sample.config import Sample
from .sparq.config import SparQ

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10
    import tomli as tomllib

MAX_TOML_BYTES = 1 << 20  # a larger file is probably a model file that was named by mistake

METHODS: Mapping[str, type[Method]] = {
    method.name: method for method in (Dense, SparQ, SAAP, Sample, Gather, *BASELINES, *PATTERNS)
}


def parse(text: str, base: Mapping[str, Method] | None = None) -> tuple[Method, ...]:
    """Parse the text form METHOD[:key=value,...][+METHOD...] and return the methods.

    Args:
        text: text form such as ``"sparq:rank=16,top_k=64"`` or ``"sparq:preset=paper"``. Other keys override a preset.
        base: dict from name to method, for example from a TOML file. The keys in ``text`` override the settings of
            these methods.

    Raises:
        ConfigError: a method, key or preset is unknown, a value is invalid, or a method is named twice.
    """
    configs: dict[str, Method] = {}
    for part in text.split("+"):
        name, colon, options = part.partition(":")
        name = name.strip()
        head, _, rest = name.partition(",")
        if head.strip() in METHODS and "=" in rest:
            written = f"{head.strip()}:{rest.strip()}"
            raise ConfigError(f"attn: expected ':' before the first key, got {name!r}. Write {written!r}.")
        _class(name)
        if colon and not options.strip():
            raise ConfigError(f"{name}: expected key=value after ':', got nothing.")
        pairs = [_split_pair(name, pair) for pair in options.split(",")] if colon else []
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{name}: expected each key once, got {key!r} {keys.count(key)} times.")
        if name in configs:
            raise ConfigError(f"attn: expected each method once, got {name} twice.")
        configs[name] = _build(name, dict(pairs), (base or {}).get(name))
    return tuple(configs.values())


def split_methods(text: str) -> list[str]:
    """Split a comma-separated list of methods. A comma before ``key=value`` does not start a new method.

    ``"sparq:rank=16,top_k=64,streaming"`` has two methods: ``sparq:rank=16,top_k=64`` and ``streaming``.

    Raises:
        ConfigError: the text between two commas is empty, or the list starts with ``key=value``.
    """
    methods: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        continues = re.match(r"\w+\s*=", piece)
        if not piece or (continues and not methods):
            raise ConfigError(f"methods: expected a list such as sparq:rank=16,streaming, got {text!r}.")
        if continues:
            methods[-1] += f",{piece}"
        else:
            methods.append(piece)
    return methods


def load_toml(path: str | Path, base: Mapping[str, Method] | None = None) -> dict[str, Method]:
    """Read a TOML file with `read_toml`, and return only the dict from name to method."""
    return read_toml(path, base)[0]


def read_toml(path: str | Path, base: Mapping[str, Method] | None = None) -> tuple[dict[str, Method], bool]:
    """Read a TOML file with one table per method, for example ``[sparq]`` with ``rank = 16``.

    Args:
        base: dict from name to method. The tables override the settings of these methods.

    Returns:
        A dict from name to method, and the value of the key ``calibrate``. The value is True (default) if ``--attn``
        may measure crossover lengths.

    Raises:
        ConfigError: the file is missing, too large, not TOML, or has an unknown method, key or value.
    """
    file = Path(path)
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_TOML_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"attn-config: expected a readable TOML file, got {file} ({error.strerror}).") from None
    if len(text) > MAX_TOML_BYTES:
        raise ConfigError(f"attn-config: expected a TOML file of at most 1 MiB, got {file}.")
    try:
        tables = tomllib.loads(text.decode("utf-8-sig"))
        _check_integers(tables)
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, an integer too long, brackets too deep
        raise ConfigError(f"attn-config: expected valid TOML, got {file} ({error}).") from None
    empty = not tables
    calibrate = tables.pop("calibrate", True)
    if not isinstance(calibrate, bool):
        raise ConfigError(f"attn-config: expected calibrate to be true or false, got {calibrate!r}.")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"attn-config: expected one table per method such as [sparq], got the key {name!r}.")
    if empty:
        raise ConfigError(f"attn-config: expected a table such as [sparq], got an empty file {file}.")
    return {name: _build(name, table, (base or {}).get(name)) for name, table in tables.items()}, calibrate


def _check_integers(value: object) -> None:
    """Raise `ValueError` if an integer needs more than 64 bits. Python may refuse to print long integers."""
    if isinstance(value, int) and value.bit_length() > 63:
        raise ValueError("an integer of more than 64 bits")
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(entry)


def _class(name: str) -> type[Method]:
    if name not in METHODS:
        raise ConfigError(f"attn: expected one of {', '.join(METHODS)}, got {name!r}.{did_you_mean(name, METHODS)}")
    return METHODS[name]


def _build(name: str, options: Mapping[str, object], base: Method | None) -> Method:
    """Build a method. ``options`` override the preset, which overrides ``base``, which overrides the defaults."""
    cls = _class(name)
    known = [field.name for field in dataclasses.fields(cls)]
    settings = dict(options)
    preset = settings.pop("preset", None)
    if preset is not None and preset not in list(cls.presets):
        listed = ", ".join(cls.presets) or "none"
        raise ConfigError(
            f"{name}: expected one of the presets {listed}, got {preset!r}.{did_you_mean(preset, cls.presets)}"
        )
    for key in settings:
        if key not in known:
            keys = [*known, "preset"]
            raise ConfigError(
                f"{name}: expected one of the keys {', '.join(keys)}, got {key!r}.{did_you_mean(key, keys)}"
            )
    inherited = {key: getattr(base, key) for key in known} if base is not None else {}
    return cls(**{**inherited, **cls.presets.get(preset or "", {}), **settings})


def _split_pair(method: str, pair: str) -> tuple[str, object]:
    key, equals, value = (piece.strip() for piece in pair.partition("="))
    if not equals or not key or not value:
        raise ConfigError(f"{method}: expected key=value, got {pair.strip()!r}.")
    return key, read_value(value)
