"""Settings of a method for a share of dense attention's transfers, by the papers' formulae (common/stats.py)."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from ... import artefact
from ...checks import ConfigError
from ...methods import Method, parse, stats


class OutOfReach(ConfigError):
    """No setting of the method moves as little as the budget."""


def read_budget(text: str) -> Fraction:
    """A share of dense attention's transfers: ``"1/8"`` or ``"0.125"``.

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
    """Elements that a decode step moves over those of dense attention, at ``S`` keys of head dim ``D``.

    ``buckets`` are those of an index; 0 asks its artefact. None for prefill methods, whose density their own choice
    decides.
    """
    if config.stage != "decode":
        return None
    return config.elements(S, D, buckets or buckets_of(config)) / stats.dense_elements(S, D)


def settle(method: str, budget: Fraction, S: int, D: int) -> str | None:
    """``method`` with its free settings such that it moves at most ``budget``, at ``S`` keys of head dim ``D``.

    What is named in ``method`` stays. ``dense_below`` is 0 unless it is named: the method is to run.

    Returns:
        The method as text; None where nothing is free: a prefill method, or one whose settings are all named.

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
    """The settings that the text of a method gives, itself or by a preset."""
    pairs = [pair.partition("=") for pair in part.partition(":")[2].split(",") if pair]
    values = {key.strip(): value.strip() for key, _, value in pairs}
    return set(values) | set(config.presets.get(values.get("preset", ""), {}))


def _largest(config: Method, size: str, budget: Fraction, S: int, D: int) -> Method:
    """The method with the largest ``size`` within the budget."""
    buckets = buckets_of(config)

    def at(value: int) -> Method:
        return dataclasses.replace(config, **{size: value})

    def moves(value: int) -> float:
        share = transfers(at(value), S, D, buckets)
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
    return at(low)


def buckets_of(config: Method) -> int:
    """Buckets that the probes are of; 0 for methods without."""
    file = config.file
    return config.fitted_buckets if file is None else artefact.load(file).buckets
