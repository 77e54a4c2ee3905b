"""Steps of SAAP: tables of the benchmark, its bars, and what bytes allow."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_sparse.bars import Bar, length, table

from .contenders import DENSE
from .model import H200, dense_bytes
from .run import REPEAT, Found, Row
from .saap import NAMES
from .saap_cases import BARS, LLAMA, PAPER, Case, Setting, parts, plan

LAUNCHES = ("network", "network+list", "saap")  # each with those before it


class Race:
    """One setting against the fastest dense contender of the same case; what is not known is None."""

    def __init__(self, case: Case, setting: Setting, rows: Sequence[Row]) -> None:
        self.case, self.setting = case, setting
        self._rows = {row.contender: row for row in rows if row.case == case and row.setting in (None, setting)}

    def row(self, name: str) -> Row | None:
        """A contender that was timed."""
        row = self._rows.get(name)
        return row if row is not None and row.times else None

    @property
    def dense(self) -> Row | None:
        """The fastest."""
        there = [row for row in map(self.row, DENSE) if row]
        return min(there, key=lambda row: row.median or 0.0, default=None)

    @property
    def ratio(self) -> float | None:
        """Time of the fastest dense contender over that of a whole step."""
        dense, ours = self.dense, self.row("saap")
        return dense.median / ours.median if dense and ours and dense.median and ours.median else None

    @property
    def added(self) -> list[str]:
        """What each part adds to the step: microseconds, and the bytes it moves."""
        cells, before = [], 0.0
        for name, part in zip(LAUNCHES, parts(self.case, self.setting), strict=True):
            row = self.row(name)
            if row is None or row.median is None:
                return [""] * len(LAUNCHES)
            cells.append(f"{row.median - before:.1f} ({part.bytes / 1e6:.1f} MB)")
            before = row.median
        return cells


def races(rows: Sequence[Row]) -> list[Race]:
    """One for each case and setting, in the order of the cases' sizes."""
    cases = sorted({row.case for row in rows}, key=lambda case: (case.Hkv, case.B, case.S))
    return [Race(case, setting, rows) for case in cases for setting in case.settings]


def bars(found: Found) -> list[Bar]:
    """Of the cases that were asked for."""
    return [
        Bar(f"SAAP ({race.setting}), network included, over the fastest dense", race.case.S, race.case.bar, race.ratio)
        for race in races(found.rows)
        if race.case.bar and race.setting == race.case.settings[0]
    ]


def text(found: Found) -> str:
    """Markdown."""
    blocks = ["### Steps of SAAP"]
    if found.machine.get("architecture") is None:
        blocks.append("**On the CPU, in Triton's interpreter: the times below say nothing of any GPU.**")
    if failures := [row for row in found.rows if row.failed]:
        blocks.append("**Failed:**\n\n" + "\n".join(f"* {_who(row)}, {row.case}: {row.note}" for row in failures))
    if made := bars(found):
        blocks.append(f"{table(made)}\n\nThe paper: {PAPER}.")
    lines = [
        "| heads, D, batch | S | SAAP | fastest dense, µs (floor) | our dense | SAAP, µs (floor) | ratio | bytes allow "
        "| network and choice | list | attend |",
        "|---" * 11 + "|",
    ]
    lines += [_line(race) for race in races(found.rows)]
    explained = (
        "Medians in microseconds; floor: the bytes that have to be moved, at the speed of the copy. Parts: what each "
        "adds to the step, and the bytes it moves."
    )
    blocks.append("\n".join(lines) + f"\n\n{explained}")
    notes = dict.fromkeys(f"* {_who(row)}, {row.case}: {row.note}" for row in found.rows if row.note and not row.failed)
    short = {len(row.times) for row in found.rows if 0 < len(row.times) < REPEAT}
    notes |= dict.fromkeys(f"* {turns} of {REPEAT} turns in some cases, for time" for turns in sorted(short))
    if notes:
        blocks.append("Left out:\n\n" + "\n".join(notes))
    return "\n\n".join(blocks)


def _line(race: Race) -> str:
    case, dense, ours, own = race.case, race.dense, race.row("saap"), race.row("dense")
    cells = [
        f"{case.Hq}/{case.Hkv}, {case.D}, {case.B}",
        length(case.S),
        str(race.setting),
        f"{dense.median:.1f} ({dense.floor:.1f}, {dense.contender})" if dense else "",
        f"{own.median:.1f}" if own else "",
        f"{ours.median:.1f} ({ours.floor:.1f})" if ours else "",
        "" if race.ratio is None else f"{race.ratio:.2f}",
        f"{dense_bytes(case) / sum(part.bytes for part in parts(case, race.setting)):.2f}",
        *race.added,
    ]
    return "| " + " | ".join(cells) + " |"


def _who(row: Row) -> str:
    return NAMES.get(row.contender, "all") + (f" ({row.setting})" if row.setting else "")


def model(bandwidth: float = H200) -> str:
    """Markdown: bytes of a step against dense, the ratio they allow, and the time that a bar leaves for the rest."""
    lines = [
        "| S | SAAP | keys attended | network, MB | list | attend | dense | bytes allow | bar | dense, µs | bar, µs "
        "| SAAP's bytes, µs | left for launches, µs |",
        "|---" * 13 + "|",
    ]
    B, Hq, Hkv, D = LLAMA
    cases = plan([64 * 1024, *BARS], [B], [(Hq, Hkv, D)], "float16")
    for case in sorted(cases, key=lambda case: case.S):
        for setting in case.settings:
            moved = [part.bytes for part in parts(case, setting)]
            dense, ours = dense_bytes(case), sum(moved)
            bar = case.bar if setting == case.settings[0] else None
            cells = [
                length(case.S),
                str(setting),
                f"{case.attended(setting):,.0f}",
                *(f"{part / 1e6:.1f}" for part in moved),
                f"{dense / 1e6:.0f}",
                f"{dense / ours:.1f}",
                "" if bar is None else f"{bar:g}",
                f"{1e6 * dense / bandwidth:.0f}",
                "" if bar is None else f"{1e6 * dense / bandwidth / bar:.0f}",
                f"{1e6 * ours / bandwidth:.1f}",
                "" if bar is None else f"{1e6 * (dense / bar - ours) / bandwidth:.0f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
