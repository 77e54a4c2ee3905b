"""What an evaluation runs: methods as they were asked for, with the settings that a budget gives them."""

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
class Arm:
    """A method to run.

    Attributes:
        method: as it was asked for.
        attn: with every setting that a budget decides.
        budget: such as "1/8"; None where it decides nothing.
        kv_bits: of the cache that its steps go on from; None where it stays as it is.
    """

    method: str
    attn: str
    budget: str | None = None
    kv_bits: int | None = None

    def __str__(self) -> str:
        return self.method if self.kv_bits is None else f"{self.method} --kv-bits {self.kv_bits}"

    @property
    def stages(self) -> tuple[Prefill | None, Method | None]:
        """The method for prompts and the one that decodes; neither for dense attention."""
        return (None, None) if self.attn == "dense" else select_methods(parse(self.attn))

    @property
    def key(self) -> str:
        """What its results are kept under: with what its artefact holds, which a file name does not tell."""
        decode = self.stages[1]
        file = "" if decode is None or decode.file is None else f"@{file_hash(Path(decode.file))}"
        return self.attn + file + ("" if self.kv_bits is None else f" --kv-bits {self.kv_bits}")

    def formula(self, S: int, D: int) -> float | None:
        """Elements moved by a step over those of dense attention, where there is a formula."""
        decode = self.stages[1]
        return None if decode is None else transfers(decode, S, D)


DENSE = Arm("dense", "dense")


def read_methods(texts: Sequence[str]) -> list[str]:
    """The methods of a command line, each checked; dense attention, which always runs, is not one of them.

    Raises:
        ConfigError, ArtefactError: a method, a setting or an artefact that cannot be run.
    """
    methods = [method for text in texts for method in split_methods(text)]
    found = list(dict.fromkeys(method for method in methods if method != "dense"))
    for method in found:
        _, decode = select_methods(parse(method))
        if decode is not None and decode.file is not None:
            artefact.load(decode.file)  # a mistake is to show now, not after the dense runs
    return found


def quantised(arms: Sequence[Arm], bits: Sequence[int]) -> list[Arm]:
    """Dense attention and those of ``arms`` that leave prompts dense, over caches that are quantised after prompts."""
    steps = [arm for arm in (DENSE, *arms) if arm.stages[0] is None]
    return [replace(arm, kv_bits=of_one) for of_one in bits for arm in steps]


def arms_of(methods: Sequence[str], budgets: Sequence[Fraction], S: int, D: int) -> tuple[list[Arm], list[str]]:
    """Every method at every budget, for ``S`` keys of head dim ``D``; and one line for each pair that cannot be."""
    arms, left_out = [], []
    for method in methods:
        for budget in budgets:
            try:
                attn = settle(method, budget, S, D)
            except OutOfReach as error:
                left_out.append(f"{error} Left out.")
                continue
            arms.append(Arm(method, method) if attn is None else Arm(method, attn, str(budget)))
        if not budgets:
            arms.append(Arm(method, method))
    return list(dict.fromkeys(arms)), left_out
