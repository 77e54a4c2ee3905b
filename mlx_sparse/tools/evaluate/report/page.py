"""The report as one HTML file that needs nothing else: what its template, ``page.html.jinja``, is filled with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..metadata import Facts
from ..results import Row
from .style import REPLACEMENT, title
from .tables import Table, tables


@dataclass(frozen=True)
class Section:
    """A heading, and what stands below it: ``pictures`` are SVG."""

    heading: str
    pictures: list[str]
    tables: list[Table] = field(default_factory=list)


def page(facts: Facts, rows: Sequence[Row], pictures: Mapping[str, str], sections: Sequence[Section]) -> str:
    """The file: the tasks of ``rows``, then those of ``sections`` in which there is anything.

    Args:
        pictures: SVG by name, of which this takes those of tasks.
    """
    tasks = dict.fromkeys(row.task for row in rows)
    every = [
        Section(title(task), chosen(pictures, f"quality-{task}", f"depths-{task}"), tables(rows, task))
        for task in tasks
    ]
    every += [section for section in sections if section.pictures or section.tables]
    machine, memory = facts.machine, facts.machine.get("memory")
    where = [machine.get(key) for key in ("chip", "architecture", "device", "platform")]
    where.append(f"{memory / 1e9:.0f} GB" if memory else None)
    loader = PackageLoader(__package__, ".")
    environment = Environment(
        loader=loader, autoescape=True, finalize=_printable, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["listed"] = lambda value: ", ".join(map(str, value)) if isinstance(value, list) else value
    template = environment.get_template("page.html.jinja")
    return template.render(facts=facts, machine=list(filter(None, where)), sections=every)


def chosen(pictures: Mapping[str, str], *names: str) -> list[str]:
    """Those ``pictures`` of these ``names`` that there are, from their first tag on; matplotlib escapes text."""
    found = [pictures[name] for name in names if name in pictures]
    return [Markup(picture[picture.index("<svg") :]) for picture in found]


def _printable(value: Any) -> Any:
    """A text without the control characters that no page may hold."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(letter if letter.isprintable() or letter == "\n" else REPLACEMENT for letter in value)
