"""What is measured of SAAP: its settings, cases, bars, and the bytes that its launches move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from mlx_sparse.tools.bench.core import Shape

from ..launchers.saap import FOLD_EVERY
from .sizes import REFERENCE_BYTES, K, Part, StepCase

BUCKETS, HIDDEN = 1024, 1024  # of the paper
SINK_TOKENS, RECENT_TOKENS = 1, 2047
MOST_OF_A_HEAD = 0.9  # of the keys, in buckets that are visited

# Ratios that a step of 5 %, its query network included, is held to on an H200, against the fastest dense contender of
# the same run, for 32 query heads on 8 KV heads of D = 128, one sequence.
LLAMA = Shape(32, 8, 128)
BARS = {128 * K: 3.5, 171 * K: 4.5, 256 * K: 6.0, 512 * K: 8.0}
PAPER = "50 to 18 µs, 2.78 x, at 171k with 4.4 % of the keys (an H100, one KV head, against FlashAttention-2)"
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
class Setting:
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
        """The share of the keys in each visited bucket of a head that has ``share`` in all of them."""
        sizes = [1.0 / rank if self.column else 1.0 for rank in range(1, self.probes + 1)]
        return [share * size / sum(sizes) for size in sizes]

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data for JSON."""
        return {"hidden": self.hidden, "probes": self.probes, "share": self.share, "column": self.column}

    def __str__(self) -> str:
        filling = f"as in Table 5, {self.column}" if self.column else "equal buckets"
        return f"H={self.hidden}, {self.share:.1%}, {filling}"


def equal(share: float, hidden: int, buckets: int = BUCKETS) -> Setting:
    """A setting that visits as many buckets of equal size as hold about ``share`` of the keys."""
    probes = max(1, round(share * buckets))
    return Setting(hidden, probes, probes / buckets, "", buckets)


@dataclass(frozen=True)
class SaapCase(StepCase):
    """One decode step, and SAAP's settings; the first is held to the bar."""

    settings: tuple[Setting, ...]
    sink_tokens: int = SINK_TOKENS
    recent_tokens: int = RECENT_TOKENS

    @property
    def bar(self) -> float | None:
        """The ratio that the first setting is held to; None if to none."""
        return BARS.get(self.S) if (self.B, self.shape) == (1, LLAMA) else None

    @property
    def outside(self) -> int:
        """Keys outside the exact part."""
        return self.S - self.sink_tokens - self.recent_tokens

    def attended(self, setting: Setting) -> float:
        """Keys of a KV head, mean over the heads."""
        shares = setting.head_shares(self.Hkv)
        return self.S - self.outside + self.outside * sum(shares) / len(shares)

    def network(self, setting: Setting) -> int:
        """Bytes of all weights and biases, in two bytes each."""
        D, H, C = self.D, setting.hidden, setting.buckets
        return 2 * self.Hkv * (D * H + H + H * C + C)

    @property
    def least(self) -> int:
        return min(sum(part.bytes for part in parts(self, setting)) for setting in self.settings)

    def memory(self, copies: int) -> int:
        """Bytes of everything alive at once: caches, networks, indices and lists, and what the reference takes."""
        index = sum(4 * self.rows * (2 * self.S + FOLD_EVERY) for _ in self.settings)
        networks = sum(self.network(setting) for setting in self.settings)
        return copies * (2 * self.keys + networks + index) + 16 * self.rows * self.G * self.S + REFERENCE_BYTES


def parts(case: SaapCase, setting: Setting) -> list[Part]:
    """A step's launches: both layers, the list, attention.

    Left out as small: what the programs of attention hand to the one that merges.
    """
    wide = 4 * case.G * (2 * setting.hidden + 2 * setting.buckets)  # hidden values and logits, written and read
    attended = case.attended(setting)
    exact = case.S - case.outside
    # The list has room for the largest buckets of any head, and for what comes until the index is made anew.
    slots = exact + FOLD_EVERY + case.outside * max(setting.head_shares(case.Hkv))
    listed = 4 * (slots + attended - exact)
    return [
        Part("network", case.network(setting) + case.rows * wide),
        Part("list", round(case.rows * listed)),
        Part("attend", round(case.rows * attended * (2 * case.D * case.item + 4))),
    ]


def plan(lengths: Sequence[int], batches: Sequence[int], shapes: Sequence[Shape], dtype: str) -> list[SaapCase]:
    """Every case, those with a bar first, and among both the smaller ones first."""

    def settings(S: int) -> tuple[Setting, ...]:
        column, share = TABLE_5.get(S, OTHERWISE)
        return equal(0.05, HIDDEN), equal(0.05, HIDDEN // 4), Setting(HIDDEN, TABLE_5_PROBES, share, column)

    found = [SaapCase(dtype, shape, B, S, settings(S)) for shape, B, S in product(shapes, batches, lengths)]
    return sorted(found, key=lambda case: (case.bar is None, case.keys))
