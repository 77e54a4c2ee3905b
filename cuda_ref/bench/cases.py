"""What is measured: cases in the order of their importance, settings, bars, and the bytes that launches move."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mlx_sparse.methods import stats
from mlx_sparse.methods.block_layout import Layout
from mlx_sparse.tools.bench.core import Case, Shape
from mlx_sparse.tools.bench.inputs import network_weights

from ..launchers.saap import FOLD_EVERY
from ..launchers.sample import LIST_BYTES
from ..launchers.select import block_size

K = 1024
LLAMA = Shape(32, 8, 128)
ROTATIONS = 3  # so many times what an L2 cache holds is read before a step sees the same keys and values again
MOST_COPIES = 256  # of a case that is too small for that
REFERENCE_ELEMENTS = 1 << 27  # of keys that the reference takes up at a time, in float64
REFERENCE_BYTES = 4 * 8 * REFERENCE_ELEMENTS


@dataclass(frozen=True)
class StepCase(Case, ABC):
    """One decode step, and a method's settings; the first is held to the bar."""

    settings: tuple[Any, ...]

    @property
    @abstractmethod
    def bar(self) -> float | None:
        """The ratio over the fastest dense contender that the method is held to on an H200; None if to none."""

    @property
    @abstractmethod
    def least(self) -> int:
        """The fewest bytes that a contender reads."""

    @abstractmethod
    def memory(self, copies: int) -> int:
        """Bytes of everything alive at once with so many sets of caches."""

    @abstractmethod
    def parts(self, setting: Any) -> list[int]:
        """Bytes that each launch of ours moves."""

    def copies(self, l2: int) -> int:
        """Sets of caches, so that an L2 cache of ``l2`` bytes holds nothing of what a step reads when it starts."""
        return min(max(1, math.ceil(ROTATIONS * l2 / self.least)), MOST_COPIES)

    @property
    def papers(self) -> bool:
        """Whether it is the case of the SparQ paper's Table 4."""
        return (self.shape, self.B, self.S) == PAPER

    @property
    def dense_bytes(self) -> int:
        """Bytes that dense attention moves (sparq.11)."""
        return self.rows * self.item * stats.dense_elements(self.S, self.D)


def steps(made: Iterable[StepCase]) -> list[StepCase]:
    """Those with a bar first, and among both the smaller ones first."""
    return sorted(made, key=lambda case: (not case.papers, case.bar is None, case.keys))


# SparQ. Ratios with rank 32 and 128 keys, by shape, batch and number of keys.
PAPER_SETTING = (32, 128)
SPARQ_BARS = {
    LLAMA: {
        1: {32 * K: 1.3, 64 * K: 2.0, 128 * K: 3.0, 256 * K: 4.0, 512 * K: 5.0},
        8: {16 * K: 2.8, 64 * K: 4.5, 128 * K: 5.0},
        64: {16 * K: 5.0, 128 * K: 5.5},
    },
    Shape(32, 32, 128): {64: {4 * K: 4.5}},
}
# Table 4 of the SparQ paper: B = 64, 32 heads, D = 128, S = 4096, rank 32, 128 keys.
PAPER = (Shape(32, 32, 128), 64, 4 * K)
PAPER_A100, PAPER_THEORY = 3.02, 6.4


@dataclass(frozen=True)
class SparQSetting:
    """SparQ's rank and number of keys, and the bits of a component that scores are taken from."""

    rank: int
    top_k: int
    key_bits: int = 16

    @property
    def window(self) -> int:
        """Last keys among them, as by default."""
        return self.top_k // 4

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"rank": self.rank, "top_k": self.top_k, "key_bits": self.key_bits}

    def __str__(self) -> str:
        return f"r={self.rank}, k={self.top_k}" + (f", {self.key_bits} bits" if self.coded else "")

    @property
    def coded(self) -> bool:
        """Whether scores are taken from codes."""
        return self.key_bits < 16

    def scored(self, item: int) -> float:
        """Bytes of a key that scores are taken from, of components of ``item`` bytes: a code, 1/64 of lo and step."""
        return self.rank * ((2 * self.key_bits + 1) / 16 if self.coded else item)


def eighth(S: int, D: int) -> SparQSetting:
    """The setting of a compression ratio of 1/8, as the paper's authors divide it: half for components, half for keys.

    Dense moves ``2 S D`` elements. ``rank = D / 8`` moves an eighth of half of them; ``top_k = S / 16`` keys and values
    move the same, and 128 at least: what the authors' needle-in-a-haystack runs do (rank D/c, 0.5/c of the keys).
    """
    return SparQSetting(max(1, D // 8), max(128, S // 16))


@dataclass(frozen=True)
class SparQCase(StepCase):
    """One decode step of SparQ."""

    @property
    def bar(self) -> float | None:
        return SPARQ_BARS.get(self.shape, {}).get(self.B, {}).get(self.S)

    @property
    def least(self) -> int:
        """SparQ's: a few components of each key, and its chosen rows."""
        read = (self.S * s.scored(self.item) + 2 * s.top_k * self.D * self.item for s in self.settings)
        return int(self.rows * min(read))

    def memory(self, copies: int) -> int:
        """Caches, what contenders put aside, and what the reference takes.

        Our kernels put float32 logits aside. The plain SparQ of torch puts aside the components that it gathers, logits
        in the type of the keys, and three float32 arrays of their shape. Graphs share what they put aside.
        """
        logits = 4 * self.rows * self.G * self.S
        gathered = self.keys * max(s.rank for s in self.settings) // self.D
        codes = sum(
            self.rows * self.S * SparQSetting(self.D, 0, s.key_bits).scored(0) for s in self.settings if s.coded
        )
        aside = len(self.settings) * copies * logits + gathered + 4 * logits + (copies + 1) * codes
        return int(3 * copies * self.keys + aside + REFERENCE_BYTES)

    def parts(self, setting: SparQSetting) -> list[int]:
        """Scores, select, attend.

        Left out as small: what the programs of a launch hand to the one that merges, but for the candidates of the
        choice.
        """
        # Scores are held in 8 bits where they are of codes, but for reallocation, which one query head per KV head has.
        logits, chosen = (1 if setting.coded and self.G > 1 else 4) * self.G * self.S, 4 * setting.top_k
        block = block_size(self.S, setting.top_k)
        tiles = -(-self.S // block)
        candidates = 8 * tiles * min(setting.top_k, block) if tiles > 1 else 0
        scored = int(self.S * setting.scored(self.item))
        moved = [scored + logits, logits + 2 * candidates + chosen]
        return [self.rows * part for part in (*moved, 2 * setting.top_k * self.D * self.item + chosen)]

    def formula(self, setting: SparQSetting) -> int:
        """(sparq.12) in bytes."""
        elements = stats.sparq_elements(
            self.S, self.D, rank=setting.rank, top_k=setting.top_k, key_bits=setting.key_bits
        )
        return self.rows * self.item * elements


def sparq_cases(
    lengths: Iterable[int], batches: Iterable[int], shapes: Iterable[Shape], dtype: str, setting: SparQSetting
) -> list[StepCase]:
    """Every case, the paper's first, with keys of 16 bits too. A setting of as many keys as there are is dense."""
    whole = replace(setting, key_bits=16)
    return steps(
        SparQCase(
            dtype, shape, B, S, tuple(s for s in dict.fromkeys((whole, setting, eighth(S, shape.D))) if s.top_k < S)
        )
        for shape, B, S in product(shapes, batches, lengths)
    )


# SAAP. Ratios of a step of 5 %, its query network included, for one sequence of LLAMA's shape.
BUCKETS, HIDDEN = 1024, 1024  # of the paper
SINK_TOKENS, RECENT_TOKENS = 1, 2047
MOST_OF_A_HEAD = 0.9  # of the keys, in buckets that are visited
SAAP_BARS = {128 * K: 3.5, 171 * K: 4.5, 256 * K: 6.0, 512 * K: 8.0}
SAAP_PAPER = "50 to 18 µs, 2.78 x, at 171k with 4.4 % of the keys (an H100, one KV head, against FlashAttention-2)"
# The paper's Table 5: share of the keys in 32 of 1024 buckets, which would be 3.1 % if they were equal.
TABLE_5_PROBES = 32
TABLE_5 = {
    64 * K: ("En.QA", 0.041),
    128 * K: ("Math.F", 0.485),
    171 * K: ("Retr.N", 0.174),
    256 * K: ("Retr.KV", 0.287),
    512 * K: ("NIH 500k", 0.053),
}
OTHERWISE = ("NIH 128k", 0.040)


@dataclass(frozen=True)
class SaapSetting:
    """A query network, and how the keys are spread over the buckets that it visits.

    Attributes:
        hidden: size of its hidden layer.
        probes: buckets that are visited, of ``buckets``.
        share: of the keys outside the exact part, in these buckets, mean over the KV heads.
        column: of the paper's Table 5, whose share that is. There the visited buckets' sizes go like 1/rank, and one
            head's share is three times another's; "" for equal buckets.
    """

    hidden: int
    probes: int
    share: float
    column: str = ""
    buckets: int = BUCKETS

    def head_shares(self, heads: int) -> list[float]:
        """``share`` of each KV head."""
        if not self.column:
            return [self.share] * heads
        factors = [0.5 + h / (heads - 1) for h in range(heads)] if heads > 1 else [1.0]
        return [min(self.share * factor, MOST_OF_A_HEAD) for factor in factors]

    def bucket_shares(self, share: float) -> list[float]:
        """Of the visited buckets of one head that has ``share`` in all of them."""
        sizes = [1.0 / rank if self.column else 1.0 for rank in range(1, self.probes + 1)]
        return [share * size / sum(sizes) for size in sizes]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"hidden": self.hidden, "probes": self.probes, "share": self.share, "column": self.column}

    def __str__(self) -> str:
        filling = f"as in Table 5, {self.column}" if self.column else "equal buckets"
        return f"H={self.hidden}, {self.share:.1%}, {filling}"


def equal(share: float, hidden: int, buckets: int = BUCKETS) -> SaapSetting:
    """As many of equal buckets as hold about ``share``."""
    probes = max(1, round(share * buckets))
    return SaapSetting(hidden, probes, probes / buckets, "", buckets)


@dataclass(frozen=True)
class SaapCase(StepCase):
    """One decode step of SAAP."""

    sink_tokens: int = SINK_TOKENS
    recent_tokens: int = RECENT_TOKENS

    @property
    def bar(self) -> float | None:
        return SAAP_BARS.get(self.S) if (self.B, self.shape) == (1, LLAMA) else None

    @property
    def outside(self) -> int:
        """Keys outside the exact part."""
        return self.S - self.sink_tokens - self.recent_tokens

    def attended(self, setting: SaapSetting) -> float:
        """Keys of a KV head, mean over the heads."""
        shares = setting.head_shares(self.Hkv)
        return self.S - self.outside + self.outside * sum(shares) / len(shares)

    def network(self, setting: SaapSetting) -> int:
        """Bytes of all weights and biases, in two bytes each."""
        return 2 * self.Hkv * network_weights(self.D, setting.hidden, setting.buckets)

    @property
    def least(self) -> int:
        return min(sum(self.parts(setting)) for setting in self.settings)

    def memory(self, copies: int) -> int:
        """Caches, networks, indices and lists, and what the reference takes."""
        index = sum(4 * self.rows * (2 * self.S + FOLD_EVERY) for _ in self.settings)
        networks = sum(self.network(setting) for setting in self.settings)
        return copies * (2 * self.keys + networks + index) + 16 * self.rows * self.G * self.S + REFERENCE_BYTES

    def parts(self, setting: SaapSetting) -> list[int]:
        """Both layers of the network, the list, attention.

        Left out as small: what the programs of attention hand to the one that merges.
        """
        wide = 4 * self.G * (2 * setting.hidden + 2 * setting.buckets)  # hidden values and logits, written and read
        attended, exact = self.attended(setting), self.S - self.outside
        # The list has room for the largest buckets of any head, and for what comes until the index is made anew.
        slots = exact + FOLD_EVERY + self.outside * max(setting.head_shares(self.Hkv))
        listed = 4 * (slots + attended - exact)
        attending = round(self.rows * attended * (2 * self.D * self.item + 4))
        return [self.network(setting) + self.rows * wide, round(self.rows * listed), attending]


def saap_cases(lengths: Iterable[int], batches: Iterable[int], shapes: Iterable[Shape], dtype: str) -> list[StepCase]:
    """Every case with the paper's network, a smaller one, and the shares of its Table 5."""

    def settings(S: int) -> tuple[SaapSetting, ...]:
        column, share = TABLE_5.get(S, OTHERWISE)
        return equal(0.05, HIDDEN), equal(0.05, HIDDEN // 4), SaapSetting(HIDDEN, TABLE_5_PROBES, share, column)

    return steps(SaapCase(dtype, shape, B, S, settings(S)) for shape, B, S in product(shapes, batches, lengths))


# Prompts. Ratios at `HELD`, sampling included.
PROMPT_BARS = {32 * K: 4.0, 64 * K: 5.0, 128 * K: 6.0, 256 * K: 6.0}
HELD = 0.1
KERNEL_SHARE = 0.7  # of our dense kernel's operations a second, that listed blocks have to reach


@dataclass(frozen=True)
class Prompt(Case):
    """A prompt of S tokens in blocks."""

    block_size: int = 128

    @property
    def layout(self) -> Layout:
        return Layout(self.S, self.S, 1, self.block_size)

    @property
    def memory(self) -> int:
        """Bytes of everything alive at once, in two bytes an element: inputs, and results, lists and parts twice.

        They are made before a step is recorded, and when it is.
        """
        made = 2 * self.Hq * self.S * self.D + 12 * self.Hq * self.S + LIST_BYTES
        return 2 * self.S * self.D * (2 * self.Hkv + self.Hq) + 2 * made

    def flops(self, density: float = 1.0) -> float:
        """Of both products over the attended block pairs, whole blocks on the diagonal."""
        return 4.0 * self.Hq * self.D * self.block_size**2 * self.layout.causal_pairs * density

    @property
    def sampled_flops(self) -> float:
        """Of the sample's scores."""
        return 2.0 * self.Hq * self.D * self.block_size * self.S


@dataclass(frozen=True)
class Density:
    """A share of the blocks: what was asked for, and what those drawn have."""

    asked: float
    drawn: float

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {"asked": self.asked, "density": self.drawn}

    def __str__(self) -> str:
        return f"{self.asked:.0%}"
