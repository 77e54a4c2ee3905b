"""Settings of a method for a share of dense attention's transfers, by the papers' formulae (methods/stats.py)."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from ... import artefact
from ...checks import ConfigError
from ...methods import Method, parse, stats


class OutOfReach(ConfigError):
    """No setting of the method moves as little as the budget."""


def read_budget(text: str) -> Fraction:
    """Read a share of dense attention's transfers: ``"1/8"`` or ``"0.125"``.

    Raises:
        ConfigError: not a number above 0 and below 1.
    """
    try:
        share = Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share < 1:
        raise ConfigError(f"--budget: expected shares such as 1/2,1/8, got {text!r}.")
    return share


def transfers(config: Method, S: int, D: int, buckets: int = 0) -> float | None:
    """Return the elements that a decode step moves over those of dense attention, at ``S`` keys of head dim ``D``.

    ``buckets`` 0 means those of the method's artefact. None for prefill methods, whose density is measured.
    """
    if config.stage != "decode":
        return None
    return config.elements(S, D, buckets or buckets_of(config)) / stats.dense_elements(S, D)


def settle(method: str, budget: Fraction, S: int, D: int) -> str | None:
    """Return ``method`` with its free settings such that it moves at most ``budget``, at ``S`` keys of head dim ``D``.

    Settings that ``method`` names stay. ``dense_below`` is 0 unless it is named, so that the method runs.

    Returns:
        None where nothing is free: a prefill method, or one whose settings are all named.

    Raises:
        OutOfReach: no setting moves as little.
    """
    parts, settled = method.split("+"), False
    for i, part in enumerate(parts):
        (config,) = parse(part)
        fixed, size = config.with_budget(budget, D, _named(part, config))
        if size:
            parts[i], settled = str(_largest(fixed, size, budget, S, D)), True
    return "+".join(parts) if settled else None


def _named(part: str, config: Method) -> set[str]:
    """Return the settings that the text of a method names, itself or by a preset."""
    pairs = [pair.partition("=") for pair in part.partition(":")[2].split(",") if pair]
    values = {key.strip(): value.strip() for key, _, value in pairs}
    return set(values) | set(config.presets.get(values.get("preset", ""), {}))


def _largest(config: Method, size: str, budget: Fraction, S: int, D: int) -> Method:
    """Return the method with the largest ``size`` within the budget, by bisection."""
    buckets = buckets_of(config)

    def moves(value: int) -> float:
        share = transfers(dataclasses.replace(config, **{size: value}), S, D, buckets)
        assert share is not None
        return share

    low = max(1, getattr(config, "local_window", None) or 1) if size == "top_k" else 1
    high = {"rank": D, "probes": buckets}.get(size, S)
    if low > high or moves(low) > budget:
        least = f"its least is {moves(low):.3f}" if low <= high else f"{size} cannot be below {low}"
        raise OutOfReach(f"--budget: expected a share within reach of {config} at {S:,} keys, got {budget}: {least}.")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if moves(middle) <= budget else (low, middle - 1)
    return dataclasses.replace(config, **{size: low})


def buckets_of(config: Method) -> int:
    """Return the number of buckets of a method with probes; 0 for others."""
    return config.fitted_buckets if config.file is None else artefact.load(config.file).buckets
