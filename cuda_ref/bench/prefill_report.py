"""Prompts: tables of the benchmark, its bars, and what the numbers of operations allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_sparse.bars import Bar, length, table

from .prefill import BARS, BLOCK_SIZE, DENSE, DENSITIES, HELD, KERNEL_SHARE, NAMES, Case, Row

H200 = 790e12  # operations a second of a large bfloat16 product on one
LLAMA = (32, 8, 128)


class Race:
    """The rows of one case."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.case = rows[0].case
        self._rows = {(row.contender, row.asked): row for row in rows}

    def row(self, name: str, asked: float | None = None) -> Row | None:
        """A contender that was timed."""
        row = self._rows.get((name, asked))
        return row if row is not None and row.times else None

    @property
    def dense(self) -> Row | None:
        """The fastest."""
        there = [row for row in map(self.row, DENSE) if row]
        return min(there, key=lambda row: row.median or 0.0, default=None)

    @property
    def asked(self) -> list[float]:
        """Densities, each once."""
        return list(dict.fromkeys(asked for _, asked in self._rows if asked is not None))

    def ratio(self, name: str, asked: float) -> float | None:
        """Time of the fastest dense contender over that of ``name``."""
        dense, ours = self.dense, self.row(name, asked)
        return dense.median / ours.median if dense and ours and dense.median and ours.median else None

    def share(self, asked: float) -> float | None:
        """Operations a second over listed blocks, as a share of those of the same kernel over all."""
        ours, dense = self.row("attend", asked), self.row("dense")
        return ours.density * dense.median / ours.median if ours and dense and ours.median and dense.median else None


def races(rows: Sequence[Row]) -> list[Race]:
    """One for each case."""
    cases = dict.fromkeys(row.case for row in rows if row.contender)
    return [Race([row for row in rows if row.case == case]) for case in cases]


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Of the cases that were asked for."""
    made = []
    for race in races(rows):
        if race.case.S in BARS and HELD in race.asked and (race.case.Hq, race.case.Hkv, race.case.D) == LLAMA:
            what = f"SampleAttention at {HELD:.0%}, sampling included, over the fastest dense"
            made.append(Bar(what, race.case.S, BARS[race.case.S], race.ratio("included", HELD)))
            made.append(Bar("listed blocks over our dense kernel", race.case.S, KERNEL_SHARE, race.share(HELD)))
    return made


def text(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """Markdown."""
    blocks = ["### Prompts"]
    if machine.get("architecture") is None:
        blocks.append("**On the CPU, in Triton's interpreter: the times below say nothing of any GPU.**")
    if failures := [row for row in rows if row.failed]:
        blocks.append("**Failed:**\n\n" + "\n".join(f"* {_who(row)}, {row.case}: {row.note}" for row in failures))
    if made := bars(rows):
        blocks.append(table(made))
    lines = [
        "| heads, D | S | density | fastest dense, ms | our dense | stage 1 | stage 2 | both | ratio | flex_attention "
        "| share of our dense kernel's speed |",
        "|---" * 11 + "|",
    ]
    for race in races(rows):
        lines += [_line(race, asked) for asked in race.asked]
    blocks.append("\n".join(lines))
    if notes := [f"* {_who(row)}, {row.case}: {row.note}" for row in rows if row.note and not row.failed]:
        blocks.append("Left out:\n\n" + "\n".join(notes))
    return "\n\n".join(blocks)


def _line(race: Race, asked: float) -> str:
    case, dense, attend = race.case, race.dense, race.row("attend", asked)
    ratio, share = race.ratio("included", asked), race.share(asked)
    cells = [
        f"{case.Hq}/{case.Hkv}, {case.D}",
        length(case.S),
        f"{(attend.density if attend else asked):.1%}",
        f"{_ms(dense)} ({dense.contender})" if dense else "",
        _ms(race.row("dense")),
        _ms(race.row("sampling")),
        _ms(attend),
        _ms(race.row("included", asked)),
        "" if ratio is None else f"{ratio:.2f}",
        _ms(race.row("flex", asked)),
        "" if share is None else f"{share:.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


def _ms(row: Row | None) -> str:
    return "" if row is None or row.median is None else f"{row.median / 1e3:.3f}"


def _who(row: Row) -> str:
    return NAMES.get(row.contender, "all") + ("" if row.asked is None else f" at {row.asked:.0%}")


def model() -> str:
    """Markdown: operations and bytes of both stages, and the speed that a bar asks of stage 2."""
    lines = [
        "| S | density | dense, PFLOP | stage 1 | stage 2 | operations allow | bar | dense at 790 TFLOP/s, ms "
        "| keys and parts of stage 1, MB | share of dense speed for the bar |",
        "|---" * 10 + "|",
    ]
    for S in (8192, 32768, 65536, 131072, 262144, 1048576):
        for density in DENSITIES if S == 131072 else (HELD,):
            case = Case(*LLAMA, S, "float16")
            dense, sampled, listed = case.flops(), case.sampled_flops, case.flops(density)
            # Keys once from memory, and 8 bytes for a sampled query and key block, written once and read twice.
            moved = 2 * case.Hkv * S * case.D + 24 * case.Hq * BLOCK_SIZE * case.layout.key_blocks
            bar = BARS.get(S) if density == HELD else None
            cells = [
                length(S),
                f"{density:.0%}",
                f"{dense / 1e15:.3f}",
                f"{sampled / 1e15:.4f}",
                f"{listed / 1e15:.4f}",
                f"{dense / (sampled + listed):.1f}",
                "" if bar is None else f"{bar:g}",
                f"{1e3 * dense / H200:.1f}",
                f"{moved / 1e6:.0f}",
                "" if bar is None else f"{bar * (sampled + listed) / dense:.0%}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
