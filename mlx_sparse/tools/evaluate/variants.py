"""The variants that an evaluation runs: methods as the user wrote them, with the settings that a budget gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from ... import artefact
from ...lm.model import select_methods
from ...methods import Method, Prefill, parse, split_methods
from ..assets.store import file_hash
from .budget import OutOfReach, settle, transfers


@dataclass(frozen=True)
class Variant:
    """A method to run.

    Attributes:
        method: as the user wrote it.
        attn: with every setting that a budget decides.
        budget: such as "1/8"; None where it decides nothing.
        kv_bits: of the KV cache that its decode steps read; None if it is not quantized.
    """

    method: str
    attn: str
    budget: str | None = None
    kv_bits: int | None = None

    def __str__(self) -> str:
        return self.method if self.kv_bits is None else f"{self.method} --kv-bits {self.kv_bits}"

    @property
    def stages(self) -> tuple[Prefill | None, Method | None]:
        """The prefill and the decode method; neither for dense attention."""
        return (None, None) if self.attn == "dense" else select_methods(parse(self.attn))

    @property
    def key(self) -> str:
        """The name of its results, with the content of its artefact, which a file name does not tell."""
        decode = self.stages[1]
        file = "" if decode is None or decode.file is None else f"@{file_hash(Path(decode.file))}"
        return self.attn + file + ("" if self.kv_bits is None else f" --kv-bits {self.kv_bits}")

    def formula(self, S: int, D: int) -> float | None:
        """Return the elements that a decode step moves over those of dense attention, where there is a formula."""
        decode = self.stages[1]
        return None if decode is None else transfers(decode, S, D)


DENSE = Variant("dense", "dense")


def read_methods(texts: Sequence[str]) -> list[str]:
    """Read and check the methods of a command line, without dense attention, which always runs.

    Raises:
        ConfigError, ArtefactError: a method, a setting or an artefact that cannot be run.
    """
    methods = [method for text in texts for method in split_methods(text)]
    found = list(dict.fromkeys(method for method in methods if method != "dense"))
    for method in found:
        _, decode = select_methods(parse(method))
        if decode is not None and decode.file is not None:
            artefact.load(decode.file)  # a mistake is reported now, not after the dense runs
    return found


def quantised(variants: Sequence[Variant], bits: Sequence[int]) -> list[Variant]:
    """Return dense attention and the ``variants`` with dense prompts, over KV caches quantized after the prompt."""
    steps = [variant for variant in (DENSE, *variants) if variant.stages[0] is None]
    return [replace(variant, kv_bits=each) for each in bits for variant in steps]


def variants_of(methods: Sequence[str], budgets: Sequence[Fraction], S: int, D: int) -> tuple[list[Variant], list[str]]:
    """Return every method at every budget, for ``S`` keys of head dim ``D``; and a line for each pair out of reach."""
    variants, left_out = [], []
    for method in methods:
        if not budgets:
            variants.append(Variant(method, method))
        for budget in budgets:
            try:
                attn = settle(method, budget, S, D)
            except OutOfReach as error:
                left_out.append(f"{error} Left out.")
            else:
                variants.append(Variant(method, attn, str(budget)) if attn else Variant(method, method))
    return list(dict.fromkeys(variants)), left_out
