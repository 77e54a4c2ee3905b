"""A model of the time per token on one, two and four Macs, by what is shared out. Nothing here is measured.

python scripts/roofline_machines.py [--attn METHOD] [-o FORM] [--out FILE]

A decode step of one sequence takes

    bytes read / memory bandwidth + steps * latency + bytes sent / bandwidth of the link

Bytes read are the weights of a token's layers and experts, and what attention reads: of the slowest machine where all
work at once (tensor, context), of all together where one works at a time (pipeline). Steps are messages that wait for
each other, and bytes sent those of one machine over one cable:

    link   collective     steps      bytes sent
    ring   all-reduce     2 (N - 1)  2 (N - 1) / N of the array
    ring   all-gather     N - 1      N - 1 times the machine's part
    JACCL  all-reduce     1          the array
    JACCL  all-gather     1          the machine's part
    both   send           1          the array

What a machine computes, launches and waits for otherwise is left out: it is the same for every way, but for a share of
it that tensor parallelism divides. Best and worst are the ends of what is published of a link.
docs/results/machines_model.md names the sources and says what follows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import by_method
from machines_model import (
    CHIPS,
    EXACT,
    JACCL,
    LENGTHS,
    LINKS,
    MACHINES,
    MEASURED,
    MEASURED_AT,
    MODELS,
    SCOUT,
    SHOWN,
    USABLE,
    Bracket,
    Chip,
    Link,
    Model,
    Way,
    indifferent,
    longest,
    rows,
    time,
    ways,
    wire,
)

from mlx_sparse.methods import Method
from mlx_sparse.tools.formats import table


def text(found: Sequence[dict[str, Any]], config: Method) -> str:
    """The rows of `SHOWN` for people."""
    mine = [row for row in found if row["chip"] == SHOWN.name]
    at, crossings = ([row for row in mine if key in row] for key in ("held", "pays_from"))
    of = f"{config}, weights of 4 bits, keys and values of 16, one sequence"
    return "\n\n".join(
        [
            f"A model, not a measurement: a decode step on machines with {SHOWN.name}, "
            f"{SHOWN.bandwidth / 1e9:.0f} GB/s; {of}.",
            f"GB that each machine holds: weights + keys and values + what {config.name} keeps; "
            "a pipeline holds what tensor does:",
            _memory(at, config),
            f"Thousands of tokens that fit ({USABLE:.0%} of the memory) with {config.name} (dense):",
            _longest(config),
            "Messages of a token: collectives, steps that wait for each other, and kB that a machine sends over one "
            "cable:",
            _wire(config),
            *(part for link in LINKS for part in _times(at, link, config)),
            f"Context from which context sharding is faster, with the best of a link (the worst), up to "
            f"{LENGTHS[-1]:,}; whether it fits is another matter:",
            _pays(crossings),
            "Steps of at least so many microseconds make dense context sharding faster than tensor parallelism, "
            "whatever the context:",
            _indifferent(),
            f"{SCOUT.name} with JACCL on machines with {CHIPS[2].name}, milliseconds of a token as "
            "exo-explore/exo#1780 measured them and as modelled:",
            _check(),
        ]
    )


def _memory(at: Sequence[dict[str, Any]], config: Method) -> str:
    names = [f"{sharing}, {config.name}" for sharing in ("one", "tensor")] + [f"context, {config.name} local"]
    one, tensor, context = names
    cells: dict[tuple[str, int], list[str]] = {}
    for row in at:
        cell = cells.setdefault((row["model"], row["context"]), [_gb(row["held"][one])])
        cell += [_gb(row["held"][name]) for name in (tensor, context)]
    head = ["model", "tokens", "one machine", *(f"{w} on {n}" for n in MACHINES for w in ("tensor", "context"))]
    return table(head, [[model, f"{S:,}", *cell] for (model, S), cell in cells.items()])


def _gb(parts: Sequence[float]) -> str:
    return " + ".join(f"{part / 1e9:.1f}" for part in parts)


def _longest(config: Method) -> str:
    cases = [("one", 1), *((sharing, n) for n in MACHINES for sharing in ("tensor", "context"))]
    lines = [
        [chip.name, model.name]
        + [" ".join(_fit(chip, model, sharing, n, method) for method in (config, None)) for sharing, n in cases]
        for chip in CHIPS
        for model in MODELS
    ]
    head = ["machine", "model", *("one machine" if n == 1 else f"{sharing} on {n}" for sharing, n in cases)]
    return table(head, lines)


def _fit(chip: Chip, model: Model, sharing: str, machines: int, config: Method | None) -> str:
    found = f"{longest(chip, model, Way(sharing, config), machines):,}"
    return found if config else f"({found})"


def _wire(config: Method) -> str:
    shared = [way for way in ways(config) if way.sharing != "one"]
    distinct = [way for way in shared if way.sharing == "context" or way.config is None]
    distinct = [way for way in distinct if way.config is None or way.exact]  # local sends what dense does
    lines = [
        [model.name, machines, _label(way, config), *_sent(model, way, machines)]
        for model in MODELS
        for machines in MACHINES
        for way in distinct
    ]
    head = ["model", "machines", "shared", "collectives", *(f"{unit}, {link.name}" for link in LINKS for unit in UNITS)]
    return table(head, lines)


UNITS = ("steps", "kB")


def _label(way: Way, config: Method) -> str:
    if way.sharing != "context":
        return way.sharing
    return way.name if way.exact else f"context, dense or {config.name} local"


def _sent(model: Model, way: Way, machines: int) -> list[str]:
    cells = [f"{wire(LINKS[0], model, way, machines)[0]:,}"]
    for link in LINKS:
        _, steps, sent = wire(link, model, way, machines)
        cells += [f"{steps:,}", f"{sent / 1e3:,.0f}"]
    return cells


def _times(at: Sequence[dict[str, Any]], link: Link, config: Method) -> Iterator[str]:
    names = [way.name for way in ways(config)]
    lines = [
        [row["model"], row["machines"], f"{row['context']:,}"]
        + [_ms(row["milliseconds"][link.name][name]) if row["fits"][name] else "-" for name in names]
        for row in at
    ]
    yield f"Milliseconds of a token over {link.name}, best to worst; - where a machine's memory is too small:"
    yield table(["model", "machines", "tokens", *names], lines)


def _ms(bracket: Bracket) -> str:
    best, worst = (f"{end:.1f}" for end in bracket)
    return best if best == worst else f"{best} to {worst}"


def _pays(crossings: Sequence[dict[str, Any]]) -> str:
    names = list(crossings[0]["pays_from"])
    lines = [
        [row["model"], row["machines"], row["link"], *(_first(row["pays_from"][name]) for name in names)]
        for row in crossings
    ]
    return table(["model", "machines", "link", *names], lines)


def _first(ends: dict[str, int | None]) -> str:
    best, worst = (
        "never" if S is None else "any" if S == LENGTHS[0] else f"{S:,}" for S in (ends["best"], ends["worst"])
    )
    return best if best == worst else f"{best} ({worst})"


def _indifferent() -> str:
    cases = [(link, n) for link in LINKS for n in MACHINES]
    lines = [
        [chip.name, model.name, *(f"{1e6 * indifferent(chip, link, model, n):.0f}" for link, n in cases)]
        for chip in CHIPS
        for model in MODELS
    ]
    return table(["machine", "model", *(f"{link.name} on {n}" for link, n in cases)], lines)


def _check() -> str:
    chip = CHIPS[2]
    lines = []
    for machines, rate in MEASURED.items():
        way = Way("one" if machines == 1 else "tensor")
        modelled = time(chip, JACCL, SCOUT, way, machines, MEASURED_AT)
        lines.append([machines, f"{1e3 / rate:.1f}", _ms(modelled)])
    return table(["machines, tensor parallel", "measured", "modelled"], lines)


def modelled(config: Method) -> by_method.Found:
    """Rows and text."""
    found = list(rows(config))
    return found, text(found, config)


def main(argv: Sequence[str]) -> int:
    about = (__doc__ or "").partition("\n")[0]
    return by_method.main(argv, __file__, about, {"apple": dict.fromkeys(EXACT, modelled)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
