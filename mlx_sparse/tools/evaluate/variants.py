"""Parse the methods of an evaluation, and fit their settings to a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from ...checks import ConfigError
from ...core import stats
from ...core.base import Method, Prefill
from ...files import file_hash
from ...lm.model import select_methods
from ...methods import parse, split_methods
from ...methods.saap import artefact


class BudgetTooSmall(ConfigError):
    """No setting of the method meets the budget."""


def read_budget(text: str) -> Fraction:
    """Parse a share of dense attention's transfers, such as ``"1/8"`` or ``"0.125"``."""
    try:
        share = Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share < 1:
        raise ConfigError(f"--budget: expected shares such as 1/2,1/8, got {text!r}.")
    return share


def transfers(config: Method, S: int, D: int, buckets: int = 0) -> float | None:
    """Return the share of dense attention's elements that a decode step moves at ``S`` keys with head dim ``D``.

    If ``buckets`` is 0, use the number of buckets in the method's artefact. If ``config`` is a prefill method, return
    None, because the share of a prefill method can only be measured.
    """
    if config.stage != "decode":
        return None
    return config.elements(S, D, buckets or buckets_of(config)) / stats.dense_elements(S, D)


def fit_budget(method: str, budget: Fraction, S: int, D: int) -> str | None:
    """Select the settings that ``method`` omits, so that the method meets ``budget`` at ``S`` keys with head dim ``D``.

    Settings in the text of ``method`` are kept. If ``dense_below`` is not set, its value becomes 0, so that the method
    is sparse.

    Returns:
        The method as text, or None if the text of ``method`` omits no setting.
    """
    parts, changed = method.split("+"), False
    for i, part in enumerate(parts):
        (config,) = parse(part)
        fixed, size = config.with_budget(budget, D, _named(part, config))
        if size:
            parts[i], changed = str(_largest(fixed, size, budget, S, D)), True
    return "+".join(parts) if changed else None


def _named(part: str, config: Method) -> set[str]:
    """Return the names of the settings that ``part``, the text of a method, sets directly or with a preset."""
    pairs = [pair.partition("=") for pair in part.partition(":")[2].split(",") if pair]
    values = {key.strip(): value.strip() for key, _, value in pairs}
    return set(values) | set(config.presets.get(values.get("preset", ""), {}))


def _largest(config: Method, size: str, budget: Fraction, S: int, D: int) -> Method:
    """Return ``config`` with the largest value of the setting ``size`` that meets ``budget``. Search by bisection."""
    buckets = buckets_of(config)

    def moves(value: int) -> float:
        share = transfers(dataclasses.replace(config, **{size: value}), S, D, buckets)
        assert share is not None
        return share

    low = max(1, getattr(config, "local_window", None) or 1) if size == "top_k" else 1
    high = {"rank": D, "probes": buckets}.get(size, S)
    if low > high or moves(low) > budget:
        least = f"its minimum is {moves(low):.3f}" if low <= high else f"{size} cannot be below {low}"
        raise BudgetTooSmall(f"--budget: expected a share that {config} can meet at {S:,} keys, got {budget}: {least}.")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if moves(middle) <= budget else (low, middle - 1)
    return dataclasses.replace(config, **{size: low})


def buckets_of(config: Method) -> int:
    """Return the number of buckets that a method has, or 0 if the method has no buckets."""
    return config.fitted_buckets if config.file is None else artefact.load(config.file).buckets


@dataclass(frozen=True)
class Variant:
    """A method and the settings of its run.

    Attributes:
        method: the method as the user wrote it.
        attn: the method with the settings that the budget determines.
        budget: the budget, such as "1/8"; None if no setting depends on a budget.
        kv_bits: bits per element of the KV cache in the decode steps; None if the cache is not quantized.
    """

    method: str
    attn: str
    budget: str | None = None
    kv_bits: int | None = None

    def __str__(self) -> str:
        return self.method if self.kv_bits is None else f"{self.method} --kv-bits {self.kv_bits}"

    @property
    def stages(self) -> tuple[Prefill | None, Method | None]:
        """The prefill method and the decode method. A stage with dense attention has None."""
        return (None, None) if self.attn == "dense" else select_methods(parse(self.attn))

    @property
    def key(self) -> str:
        """Key of the variant's stored results. The key includes the hash of the artefact."""
        decode = self.stages[1]
        file = "" if decode is None or decode.file is None else f"@{file_hash(Path(decode.file))}"
        return self.attn + file + ("" if self.kv_bits is None else f" --kv-bits {self.kv_bits}")

    def formula(self, S: int, D: int) -> float | None:
        """Return the share of dense attention's elements that a decode step moves; None if decoding is dense."""
        decode = self.stages[1]
        return None if decode is None else transfers(decode, S, D)


DENSE = Variant("dense", "dense")


def read_methods(texts: Sequence[str]) -> list[str]:
    """Parse and check methods from the command line. Omit dense attention, which always runs."""
    methods = [method for text in texts for method in split_methods(text)]
    found = list(dict.fromkeys(method for method in methods if method != "dense"))
    for method in found:
        _, decode = select_methods(parse(method))
        if decode is not None and decode.file is not None:
            artefact.load(decode.file)  # raises errors before the dense runs
    return found


def quantized_variants(variants: Sequence[Variant], bits: Sequence[int]) -> list[Variant]:
    """Return a variant of dense attention and of each decode method for each number of ``bits`` in the KV cache.

    The KV cache is quantized after a dense prefill.
    """
    steps = [variant for variant in (DENSE, *variants) if variant.stages[0] is None]
    return [replace(variant, kv_bits=each) for each in bits for variant in steps]


def variants_of(methods: Sequence[str], budgets: Sequence[Fraction], S: int, D: int) -> tuple[list[Variant], list[str]]:
    """Return a variant of every method at every budget, and a message for each budget that a method cannot meet."""
    variants, left_out = [], []
    for method in methods:
        if not budgets:
            variants.append(Variant(method, method))
        for budget in budgets:
            try:
                attn = fit_budget(method, budget, S, D)
            except BudgetTooSmall as error:
                left_out.append(f"{error} Left out.")
            else:
                variants.append(Variant(method, attn, str(budget)) if attn else Variant(method, method))
    return list(dict.fromkeys(variants)), left_out
