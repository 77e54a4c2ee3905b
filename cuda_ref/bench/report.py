"""Tables of the benchmark, the bars it is held to, and from how many keys on SparQ pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_sparse.bars import Bar, length, table
from mlx_sparse.config import SparQ, Step, nvidia_kind

from .cases import PAPER_A100, PAPER_SETTING, PAPER_THEORY, Case, Setting
from .contenders import DENSE, NAMES
from .run import REPEAT, Found, Row

LARGE = 256_000_000  # bytes from which the first launch is held to the copy bandwidth
SHARE = 0.75
Group = tuple[int, int, int, int]  # B, Hq, Hkv, D


@dataclass(frozen=True)
class Race:
    """SparQ with one setting against the fastest dense contender of the same case; what is not known is None."""

    case: Case
    setting: Setting
    rows: dict[str, Row]

    @property
    def dense(self) -> Row | None:
        """The fastest."""
        there = [row for name, row in self.rows.items() if name in DENSE and row.median]
        return min(there, key=lambda row: row.median or 0.0, default=None)

    def time(self, name: str) -> float | None:
        """Median of a contender."""
        return self.rows[name].median if name in self.rows else None

    def ratio(self, name: str = "sparq") -> float | None:
        """Time of the fastest dense contender over that of ``name``."""
        dense, ours = self.dense, self.time(name)
        return dense.median / ours if dense and dense.median and ours else None

    @property
    def parts(self) -> list[tuple[str, int, float]]:
        """Name, bytes and time of each launch: what it adds to those before it. None unless all are known."""
        runs = [self.rows.get(name) for name in ("scores", "scores+select", "sparq")]
        found, before, moved = [], 0.0, 0
        for name, row in zip(("scores", "select", "attend"), runs, strict=True):
            if row is None or row.median is None:
                return []
            found.append((name, row.bytes - moved, row.median - before))
            before, moved = row.median, row.bytes
        return found


def races(rows: Sequence[Row]) -> list[Race]:
    """One for each case and setting, in the order of the cases' sizes."""
    cases = sorted({row.case for row in rows}, key=lambda case: (case.Hkv, case.B, case.S))
    return [
        Race(case, s, {row.contender: row for row in rows if row.case == case and row.setting in (None, s)})
        for case in cases
        for s in case.settings
    ]


def bars(found: Found) -> list[Bar]:
    """Every bar of the cases that were asked for: ratios, and the first launch's share of the copy bandwidth."""
    held = [race for race in races(found.rows) if race.setting == Setting(*PAPER_SETTING)]
    bandwidth = found.machine["copy_bytes_per_second"]
    made = [
        Bar(f"SparQ over the fastest dense, {_group(race.case)}", race.case.S, race.case.bar, race.ratio())
        for race in held
        if race.case.bar
    ]
    for race in held:
        row = race.rows.get("scores")
        if row is not None and row.bytes >= LARGE:
            share = None if row.median is None else row.bytes / (row.median * 1e-6) / bandwidth
            what = f"first launch over the copy bandwidth, {_group(race.case)}"
            made.append(Bar(what, race.case.S, SHARE, share))
    return made


def crossovers(found: Found) -> list[dict[str, Any]]:
    """From how many keys on SparQ was faster, per batch, heads and setting; beside it, what `dense_below` says."""
    made = []
    architecture = found.machine.get("architecture")
    kind = nvidia_kind(architecture) if architecture else ""
    groups: dict[tuple[Group, str], list[Race]] = {}
    for race in races(found.rows):
        if race.ratio():
            groups.setdefault((_key(race.case), _setting(race.case, race.setting)), []).append(race)
    for (_, name), measured in groups.items():
        case, setting = measured[0].case, measured[0].setting
        config = SparQ(rank=setting.rank, top_k=setting.top_k)
        rule = config.shortest_context(Step(case.rows, case.G, case.D, case.item, kind))
        made.append({"kind": "crossover", "what": _group(case), "setting": name, "wins": wins(measured), "rule": rule})
    return made


def wins(measured: Sequence[Race]) -> str:
    """The number of keys at which the times cross, between two that were measured."""
    won = [(race.ratio() or 0.0) >= 1 for race in measured]
    if not won[-1]:
        return f"not up to {length(measured[-1].case.S)}"
    first = max((i + 1 for i, win in enumerate(won) if not win), default=0)
    if first == 0:
        return f"from {length(measured[0].case.S)} or less"
    (S0, lost), (S1, gained) = ((race.case.S, _gain(race)) for race in measured[first - 1 : first + 1])
    return f"from {S0 + (S1 - S0) * -lost / (gained - lost):,.0f} (between {length(S0)} and {length(S1)})"


def _gain(race: Race) -> float:
    """Microseconds that SparQ is faster."""
    dense, ours = race.dense, race.time("sparq")
    assert dense is not None
    assert ours is not None
    return (dense.median or 0.0) - ours


def text(found: Found) -> str:
    """Markdown."""
    machine = found.machine
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("torch", "triton", "cuda", "cudnn") if machine.get(name)
    )
    bandwidth = machine["copy_bytes_per_second"]
    blocks = [f"{machine['device']}; {versions}. A large copy reads and writes {bandwidth / 1e12:.2f} TB/s."]
    if machine.get("architecture") is None:
        blocks.append("**On the CPU, in Triton's interpreter: the times below say nothing of any GPU.**")
    if failures := [row for row in found.rows if row.failed]:
        lines = [f"* {_who(row)}, {row.case}: {row.note}" for row in failures]
        blocks.append("**Failed:**\n\n" + "\n".join(lines))
    if made := bars(found):
        blocks.append(f"### Bars\n\n{table(made)}")
    blocks += _paper(found)
    if crossed := crossovers(found):
        lines = ["| | SparQ | wins | `dense_below=auto` |", "|---|---|---|---|"]
        lines += [f"| {c['what']} | {c['setting']} | {c['wins']} | {c['rule']:,} |" for c in crossed]
        blocks.append("### From how many keys on SparQ pays\n\n" + "\n".join(lines))
    blocks.append(f"### SparQ against the fastest dense\n\n{_against(found)}")
    for key in dict.fromkeys(_key(row.case) for row in found.rows if row.contender):
        rows = [row for row in found.rows if row.contender and _key(row.case) == key]
        blocks.append(f"### {_group(rows[0].case)}\n\n{_times(rows)}")
    if notes := _notes(found):
        blocks.append("### Left out\n\n" + "\n".join(f"* {note}" for note in notes))
    return "\n\n".join(blocks)


def _paper(found: Found) -> list[str]:
    race = next((r for r in races(found.rows) if r.case.papers and r.setting == Setting(*PAPER_SETTING)), None)
    if race is None or race.ratio() is None:
        return []
    plain = race.ratio("plain-sparq")
    there = "" if plain is None else f", {plain:.2f} x of torch operations"
    return [
        f"### The paper's Table 4\n\nB = 64, 32 heads, S = 4096, {race.setting}: **{race.ratio():.2f} x**{there}. "
        f"The paper: {PAPER_A100} x on an A100, {PAPER_THEORY} x in theory."
    ]


def _against(found: Found) -> str:
    lines = [
        "| | SparQ | S | fastest dense | µs (floor) | SparQ, µs (floor) | ratio | bytes allow "
        "| scores | select | attend |",
        "|---" * 11 + "|",
    ]
    bandwidth = found.machine["copy_bytes_per_second"]
    for race in races(found.rows):
        dense, ratio = race.dense, race.ratio()
        if dense is None or ratio is None:
            continue
        ours = race.rows["sparq"]
        cells = [
            _group(race.case),
            str(race.setting),
            length(race.case.S),
            NAMES[dense.contender],
            _cell(dense),
            _cell(ours),
            f"{ratio:.2f}",
            f"{dense.bytes / ours.bytes:.2f}",
            *(_part(*part, bandwidth) for part in race.parts),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    explained = (
        "Medians in microseconds; floor: the bytes that have to be moved, at the speed of the copy. Each launch: what "
        "it adds to the step, the bytes it moves, and their speed as a share of the copy's."
    )
    return "\n".join(lines) + f"\n\n{explained}"


def _part(name: str, moved: int, time: float, bandwidth: float) -> str:
    del name
    share = f", {100 * moved / (time * 1e-6) / bandwidth:.0f} %" if time > 0 else ""
    return f"{time:.1f} ({moved / 1e6:.1f} MB{share})"


def _cell(row: Row) -> str:
    return f"{row.median:.1f} ({row.floor:.1f})"


def _times(rows: Sequence[Row]) -> str:
    lengths = sorted({row.case.S for row in rows})
    lines = ["| µs: median (least) | " + " | ".join(map(length, lengths)) + " |", "|---" * (len(lengths) + 1) + "|"]
    names = [(row.contender, _setting(row.case, row.setting)) for row in rows]
    for contender, setting in sorted(dict.fromkeys(names), key=lambda name: list(NAMES).index(name[0])):
        named = zip(names, rows, strict=True)
        found = {row.case.S: row for name, row in named if name == (contender, setting)}
        cells = [NAMES[contender] + (f", {setting}" if setting else "")]
        for S in lengths:
            row = found.get(S)
            cells.append(f"{row.median:.1f} ({min(row.times):.1f})" if row and row.median else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _setting(case: Case, setting: Setting | None) -> str:
    """A setting as a table's row has it: that of 1/8 has other numbers at every length."""
    if setting is None:
        return ""
    return str(setting) if setting == case.settings[0] else "1/8"


def _notes(found: Found) -> list[str]:
    """Why something was not measured, and where time allowed fewer turns; the same reason once."""
    why: dict[tuple[str, str], list[str]] = {}
    for row in found.rows:
        if row.note and not row.failed:
            why.setdefault((_who(row), row.note), []).append(str(row.case))
        elif 0 < len(row.times) < REPEAT:
            why.setdefault(("", f"{len(row.times)} of {REPEAT} turns, for time"), []).append(str(row.case))
    notes = []
    for (who, note), where in why.items():
        cases = list(dict.fromkeys(where))
        listed = "; ".join(cases) if len(cases) <= 3 else f"{cases[0]} and {len(cases) - 1} more"
        notes.append(": ".join(filter(None, (who, note))) + f" ({listed})")
    return notes


def _who(row: Row) -> str:
    if not row.contender:
        return ""
    return NAMES[row.contender] if row.setting is None else f"{NAMES[row.contender]} ({row.setting})"


def _key(case: Case) -> Group:
    return case.B, case.Hq, case.Hkv, case.D


def _group(case: Case) -> str:
    return f"B = {case.B}, {case.Hq}/{case.Hkv} heads, D = {case.D}"
