"""What each contender has to move, from sizes alone, and what ratio that allows: ``--model`` prints it.

Foreign contenders are counted by the paper's formulae (`mlx_sparse.stats`), our kernels by what they read and write.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from mlx_sparse import stats
from mlx_sparse.bars import length

from ..select import block_size
from .cases import BARS, PAPER_SETTING, Case, Setting, Sizes

H200 = 4.3e12  # bytes a second that a large copy read and wrote on one


@dataclass(frozen=True)
class Part:
    """One launch of ours, and the bytes it moves."""

    name: str
    bytes: int


def dense_bytes(case: Sizes) -> int:
    """(sparq.11)"""
    return case.rows * case.item * stats.dense_elements(case.S, case.D)


def sparq_bytes(case: Case, setting: Setting) -> int:
    """(sparq.12)"""
    return case.rows * case.item * stats.sparq_elements(case.S, case.D, rank=setting.rank, top_k=setting.top_k)


def sparq_parts(case: Case, setting: Setting) -> list[Part]:
    """The three launches of `sparq_decode`.

    Left out as small: what the programs of a launch hand to the one that merges, but for the candidates of the choice.
    """
    logits = 4 * case.G * case.S
    block = block_size(case.S, setting.top_k)
    tiles = -(-case.S // block)
    candidates = 8 * tiles * min(setting.top_k, block) if tiles > 1 else 0
    chosen = 4 * setting.top_k
    return [
        Part("scores", case.rows * (case.S * setting.rank * case.item + logits)),
        Part("select", case.rows * (logits + 2 * candidates + chosen)),
        Part("attend", case.rows * (2 * setting.top_k * case.D * case.item + chosen)),
    ]


def bar_cases() -> list[Case]:
    """The cases that have a bar, with the paper's setting."""
    setting = Setting(*PAPER_SETTING)
    return [
        Case(B, Hq, Hkv, D, S, "float16", (setting,))
        for (Hq, Hkv, D), batches in BARS.items()
        for B, S in chain.from_iterable(((B, S) for S in wanted) for B, wanted in batches.items())
    ]


def table(bandwidth: float = H200) -> str:
    """Markdown: bytes per key and KV head, the ratio they allow, and the time that each bar leaves for all the rest."""
    lines = [
        "| batch | heads | S | dense, bytes per key | scores | select | attend | bytes allow | bar "
        "| dense, µs | bar, µs | SparQ's bytes, µs | left for launches, µs |",
        "|---" * 13 + "|",
    ]
    for case in bar_cases():
        (setting,), bar = case.settings, case.bar
        assert bar is not None
        parts = sparq_parts(case, setting)
        per_key = [f"{part.bytes / case.rows / case.S:.1f}" for part in parts]
        moved = sum(part.bytes for part in parts)
        dense = 1e6 * dense_bytes(case) / bandwidth
        ours = 1e6 * moved / bandwidth
        cells = [
            f"{case.B}",
            f"{case.Hq}/{case.Hkv}",
            length(case.S),
            f"{dense_bytes(case) / case.rows / case.S:.1f}",
            *per_key,
            f"{dense / ours:.2f}",
            f"{bar:g}",
            f"{dense:.0f}",
            f"{dense / bar:.0f}",
            f"{ours:.1f}",
            f"{dense / bar - ours:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
