"""Tables of the benchmark, the bars it is held to, and from how many keys on SparQ pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_sparse.methods import SparQ, Step, nvidia_kind
from mlx_sparse.tools.bench.core import Row
from mlx_sparse.tools.bench.thresholds import Bar, bar_table, length, ratio
from mlx_sparse.tools.formats import table

from . import cases, dense, prompts, saap, sparq

LARGE = 256_000_000  # bytes from which the first launch is held to the copy bandwidth
SHARE = 0.75
HELD = cases.SparQSetting(*cases.PAPER_SETTING)
EXPLAINED = "Medians in microseconds; floor: the bytes that have to be moved, at the speed of the copy."


class Race:
    """One setting of a method against the fastest dense contender of the same case; what is not known is None."""

    def __init__(self, case: Any, setting: Any, rows: Sequence[Row]) -> None:
        self.case, self.setting = case, setting
        self.rows = {row.name: row for row in rows if row.case == case and row.setting in (None, setting)}

    def row(self, name: str) -> Row | None:
        """A contender that was timed."""
        row = self.rows.get(name)
        return row if row is not None and row.turns else None

    def median(self, name: str) -> float | None:
        """Microseconds of a contender."""
        row = self.row(name)
        return row.median if row else None

    @property
    def dense(self) -> Row | None:
        """The fastest."""
        there = [row for row in map(self.row, (*dense.NAMES, *prompts.DENSE)) if row]
        return min(there, key=lambda row: row.median or 0.0, default=None)

    def ratio(self, name: str) -> float | None:
        """Time of the fastest dense contender over that of ``name``."""
        return ratio(self.dense.median, self.median(name)) if self.dense else None

    def added(self, names: Sequence[str], moved: Sequence[int]) -> list[tuple[int, float]]:
        """Bytes of each launch, and what it adds to those before it in microseconds; nothing unless all are known."""
        times = [self.median(name) for name in names]
        known = [time for time in times if time is not None]
        if len(known) < len(names):
            return []
        return [(part, now - before) for part, now, before in zip(moved, known, [0.0, *known], strict=False)]


def races(rows: Sequence[Row]) -> list[Race]:
    """One for each case and setting: of steps in the order of their sizes, of prompts as they were drawn."""
    found = dict.fromkeys((row.case, row.setting) for row in rows if row.setting)
    if all(isinstance(row.case, cases.StepCase) for row in rows):  # those that were left out too
        ordered = sorted({row.case for row in rows}, key=lambda case: (case.Hkv, case.B, case.S))
        found = dict.fromkeys((case, setting) for case in ordered for setting in case.settings)
    return [Race(case, setting, rows) for case, setting in found]


@dataclass(frozen=True)
class Report:
    """What is said of the rows of a method.

    Attributes:
        names: of the contenders, for people.
        bars, blocks: of the machine and the rows; the blocks stand below the machine and what failed.
        more: further lines for programs.
    """

    title: str
    names: Mapping[str, str]
    bars: Callable[[Mapping[str, Any], Sequence[Row]], list[Bar]]
    blocks: Callable[[Mapping[str, Any], Sequence[Row]], list[str]]
    more: Callable[[Mapping[str, Any], Sequence[Row]], list[dict[str, Any]]] = lambda machine, rows: []

    def lines(self, machine: Mapping[str, Any], rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        """For programs."""
        return [*(bar.as_dict() for bar in self.bars(machine, rows)), *self.more(machine, rows)]

    def text(self, machine: Mapping[str, Any], rows: Sequence[Row], repeat: int) -> str:
        """Markdown."""
        known = (f"{name} {machine[name]}" for name in ("torch", "triton", "cuda", "cudnn") if machine.get(name))
        speed = machine["copy_bytes_per_second"] / 1e12
        about = f"{machine['device']}; {', '.join(known)}. A large copy reads and writes {speed:.2f} TB/s."
        blocks = [f"### {self.title}", about]
        if machine.get("architecture") is None:
            blocks.append("**On the CPU, in Triton's interpreter: the times below say nothing of any GPU.**")
        if failures := [f"* {self._who(row)}, {row.case}: {row.note}" for row in rows if row.failed]:
            blocks.append("**Failed:**\n\n" + "\n".join(failures))
        return "\n\n".join(blocks + self.blocks(machine, rows) + self._left_out(rows, repeat))

    def _left_out(self, rows: Sequence[Row], repeat: int) -> list[str]:
        """Why something was not measured, and where time allowed fewer turns; the same reason once."""
        why: dict[str, list[str]] = {}
        for row in rows:
            if row.note and not row.failed:
                why.setdefault(f"{self._who(row)}: {row.note}", []).append(str(row.case))
            elif 0 < row.turns < repeat:
                why.setdefault(f"{row.turns} of {repeat} turns, for time", []).append(str(row.case))
        notes = []
        for note, where in why.items():
            found = list(dict.fromkeys(where))
            listed = "; ".join(found) if len(found) <= 3 else f"{found[0]} and {len(found) - 1} more"
            notes.append(f"* {note} ({listed})")
        return ["### Left out\n\n" + "\n".join(notes)] if notes else []

    def _who(self, row: Row) -> str:
        return self.names.get(row.name, "all") + (f" ({row.setting})" if row.setting else "")


def _group(case: Any) -> str:
    return f"B = {case.B}, {case.Hq}/{case.Hkv} heads, D = {case.D}"


def _with_floor(row: Row | None, *more: str) -> str:
    if row is None or row.median is None:
        return ""
    floor = f"{row.details['floor_us']:.1f}"
    return f"{row.median:.1f} ({', '.join([floor, *more])})"


def _ratio(found: float | None) -> str:
    return "" if found is None else f"{found:.2f}"


# SparQ


def sparq_bars(machine: Mapping[str, Any], rows: Sequence[Row]) -> list[Bar]:
    """Every bar of the cases that were asked for: ratios, and the first launch's share of the copy bandwidth."""
    held = [race for race in races(rows) if race.setting == HELD]
    made = [
        Bar(f"SparQ over the fastest dense, {_group(race.case)}", race.case.S, race.case.bar, race.ratio("sparq"))
        for race in held
        if race.case.bar
    ]
    for race in held:
        row = race.rows.get("scores")
        if row is not None and row.details["bytes"] >= LARGE:
            floor = 1e6 * row.details["bytes"] / machine["copy_bytes_per_second"]
            what = f"first launch over the copy bandwidth, {_group(race.case)}"
            made.append(Bar(what, race.case.S, SHARE, ratio(floor, row.median)))
    return made


def crossovers(machine: Mapping[str, Any], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """From how many keys on SparQ was faster, per batch, heads and setting; beside it, what `dense_below` says."""
    architecture = machine.get("architecture")
    kind = nvidia_kind(architecture) if architecture else ""
    groups: dict[tuple[str, str], list[Race]] = {}
    for race in races(rows):
        if race.ratio("sparq"):
            groups.setdefault((_group(race.case), _setting(race.case, race.setting)), []).append(race)
    made = []
    for (group, name), measured in groups.items():
        case, setting = measured[0].case, measured[0].setting
        config = SparQ(rank=setting.rank, top_k=setting.top_k, key_bits=setting.key_bits)
        rule = config.shortest_context(Step(case.rows, case.G, case.D, case.item, kind))
        made.append({"kind": "crossover", "what": group, "setting": name, "wins": wins(measured), "rule": rule})
    return made


def wins(measured: Sequence[Race]) -> str:
    """The number of keys at which the times cross, between two that were measured."""
    gains = [(race.dense.median or 0.0) - (race.median("sparq") or 0.0) if race.dense else 0.0 for race in measured]
    lengths = [race.case.S for race in measured]
    if gains[-1] < 0:
        return f"not up to {length(lengths[-1])}"
    first = max((i + 1 for i, gain in enumerate(gains) if gain < 0), default=0)
    if first == 0:
        return f"from {length(lengths[0])} or less"
    (lost, gained), (S0, S1) = gains[first - 1 : first + 1], lengths[first - 1 : first + 1]
    return f"from {S0 + (S1 - S0) * -lost / (gained - lost):,.0f} (between {length(S0)} and {length(S1)})"


def sparq_blocks(machine: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Tables of all that was measured."""
    made = sparq_bars(machine, rows)
    blocks = [f"### Bars\n\n{bar_table(made)}"] if made else []
    for race in races(rows):
        found = race.ratio("sparq") if race.case.papers and race.setting == HELD else None
        if found is not None:
            plain = race.ratio("plain-sparq")
            there = "" if plain is None else f", {plain:.2f} x of torch operations"
            blocks.append(
                f"### The paper's Table 4\n\nB = 64, 32 heads, S = 4096, {race.setting}: **{found:.2f} x**{there}. "
                f"The paper: {cases.PAPER_A100} x on an A100, {cases.PAPER_THEORY} x in theory."
            )
    if crossed := crossovers(machine, rows):
        lines = [[c["what"], c["setting"], c["wins"], f"{c['rule']:,}"] for c in crossed]
        found_at = table(["", "SparQ", "wins", "`dense_below=auto`"], lines)
        blocks.append(f"### From how many keys on SparQ pays\n\n{found_at}")
    blocks.append(f"### SparQ against the fastest dense\n\n{_against(machine, rows)}")
    for group in dict.fromkeys(_group(row.case) for row in rows if row.name):
        chosen = [row for row in rows if row.name and _group(row.case) == group]
        blocks.append(f"### {group}\n\n{_times(chosen)}")
    return blocks


def _against(machine: Mapping[str, Any], rows: Sequence[Row]) -> str:
    header = ["", "SparQ", "S", "fastest dense", "µs (floor)", "SparQ, µs (floor)", "ratio", "bytes allow"]
    lines = []
    for race in races(rows):
        fastest, ours = race.dense, race.row("sparq")
        if fastest is None or ours is None:
            continue
        cells = [_group(race.case), str(race.setting), length(race.case.S), dense.NAMES[fastest.name]]
        cells += [_with_floor(fastest), _with_floor(ours), _ratio(race.ratio("sparq"))]
        cells.append(f"{fastest.details['bytes'] / ours.details['bytes']:.2f}")
        added = race.added(sparq.LAUNCHES, race.case.parts(race.setting))
        lines.append([*cells, *(_part(*part, machine["copy_bytes_per_second"]) for part in added)])
    explained = f"{EXPLAINED} Each launch: what it adds to the step, the bytes it moves, and their speed as a share of "
    return f"{table([*header, 'scores', 'select', 'attend'], lines)}\n\n{explained}the copy's."


def _part(moved: int, time: float, bandwidth: float) -> str:
    share = f", {100 * moved / (time * 1e-6) / bandwidth:.0f} %" if time > 0 else ""
    return f"{time:.1f} ({moved / 1e6:.1f} MB{share})"


def _times(rows: Sequence[Row]) -> str:
    lengths = sorted({row.case.S for row in rows})
    found = {(row.name, _setting(row.case, row.setting), row.case.S): row.time for row in rows}
    lines = []
    names = dense.NAMES | sparq.NAMES
    for name, setting in sorted(dict.fromkeys(key[:2] for key in found), key=lambda key: list(names).index(key[0])):
        times = [found.get((name, setting, S)) for S in lengths]
        title = names[name] + (f", {setting}" if setting else "")
        lines.append([title, *(f"{time.median:.1f} ({time.least:.1f})" if time else "" for time in times)])
    return table(["µs: median (least)", *map(length, lengths)], lines)


def _setting(case: Any, setting: Any) -> str:
    """A setting as a table's row has it: that of 1/8 has other numbers at every length."""
    if setting is None:
        return ""
    return str(setting) if setting == case.settings[0] else "1/8"


# SAAP


def saap_bars(machine: Mapping[str, Any], rows: Sequence[Row]) -> list[Bar]:
    """Of the cases that were asked for."""
    what = "SAAP ({}), network included, over the fastest dense"
    return [
        Bar(what.format(race.setting), race.case.S, race.case.bar, race.ratio("saap"))
        for race in races(rows)
        if race.case.bar and race.setting == race.case.settings[0]
    ]


def saap_blocks(machine: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Tables of all that was measured."""
    made = saap_bars(machine, rows)
    blocks = [f"{bar_table(made)}\n\nThe paper: {cases.SAAP_PAPER}."] if made else []
    header = ["heads, D, batch", "S", "SAAP", "fastest dense, µs (floor)", "our dense", "SAAP, µs (floor)", "ratio"]
    lines = table([*header, "bytes allow", "network and choice", "list", "attend"], map(_saap_cells, races(rows)))
    return [*blocks, f"{lines}\n\n{EXPLAINED} Parts: what each adds to the step, and the bytes it moves."]


def _saap_cells(race: Race) -> list[str]:
    case, fastest, own = race.case, race.dense, race.median("dense")
    moved = case.parts(race.setting)
    added = race.added(saap.LAUNCHES, moved)
    return [
        f"{case.Hq}/{case.Hkv}, {case.D}, {case.B}",
        length(case.S),
        str(race.setting),
        _with_floor(fastest, fastest.name) if fastest else "",
        f"{own:.1f}" if own else "",
        _with_floor(race.row("saap")),
        _ratio(race.ratio("saap")),
        f"{case.dense_bytes / sum(moved):.2f}",
        *([f"{time:.1f} ({part / 1e6:.1f} MB)" for part, time in added] or [""] * len(moved)),
    ]


# Prompts


def _share(race: Race) -> float | None:
    """Operations a second over listed blocks, as a share of those of the same kernel over all."""
    found = ratio(race.median("dense"), race.median("attend"))
    return None if found is None else race.setting.drawn * found


def prompt_bars(machine: Mapping[str, Any], rows: Sequence[Row]) -> list[Bar]:
    """Of the cases that were asked for."""
    made = []
    for race in races(rows):
        case, wanted = race.case, cases.PROMPT_BARS.get(race.case.S)
        if race.setting.asked == cases.HELD and case.shape == cases.LLAMA and wanted:
            what = f"SampleAttention at {cases.HELD:.0%}, sampling included, over the fastest dense"
            made.append(Bar(what, case.S, wanted, race.ratio("included")))
            made.append(Bar("listed blocks over our dense kernel", case.S, cases.KERNEL_SHARE, _share(race)))
    return made


def prompt_blocks(machine: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Tables of all that was measured."""
    made = prompt_bars(machine, rows)
    header = ["heads, D", "S", "density", "fastest dense, ms", "our dense", "stage 1", "stage 2", "both", "ratio"]
    lines = map(_prompt_cells, races(rows))
    measured = table([*header, "flex_attention", "share of our dense kernel's speed"], lines)
    return [*([bar_table(made)] if made else []), measured]


def _prompt_cells(race: Race) -> list[str]:
    case, fastest, share = race.case, race.dense, _share(race)
    return [
        f"{case.Hq}/{case.Hkv}, {case.D}",
        length(case.S),
        f"{race.setting.drawn:.1%}",
        f"{_ms(fastest)} ({fastest.name})" if fastest else "",
        *(_ms(race.row(name)) for name in ("dense", "sampling", "attend", "included")),
        _ratio(race.ratio("included")),
        _ms(race.row("flex")),
        "" if share is None else f"{share:.0%}",
    ]


def _ms(row: Row | None) -> str:
    return "" if row is None or row.median is None else f"{row.median / 1e3:.3f}"


REPORTS = {
    "sparq": Report("Decode steps of SparQ", dense.NAMES | sparq.NAMES, sparq_bars, sparq_blocks, crossovers),
    "saap": Report("Steps of SAAP", dense.NAMES | saap.NAMES, saap_bars, saap_blocks),
    "sample": Report("Prompts", prompts.NAMES, prompt_bars, prompt_blocks),
}
