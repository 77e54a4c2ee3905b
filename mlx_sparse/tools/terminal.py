"""Format tables and text for a terminal of `WIDTH` columns, or a log."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

WIDTH = 80
BREAK = re.compile(r".{1,19}(?:(?<=[,:+ ])|$)|.[^,:+ \n]{0,39}[,:+ ]?", re.MULTILINE)  # one line of a cell


def table(header: Sequence[str], rows: Iterable[Iterable[object]], keys: int = 1) -> str:
    """Return a table of at most `WIDTH` columns for a terminal or a log.

    Columns that do not fit follow in further tables. Every table repeats the first ``keys`` columns.
    """
    columns = []
    for name, *cells in zip(header, *rows, strict=True):
        lines = [[part.strip() for part in BREAK.findall(str(cell))] for cell in cells]
        width = max(cell_len(word) for words in (name.split(), *lines) for word in words or [""])
        columns.append((width, [textwrap.fill(name, max(width, 1)), *map("\n".join, lines)]))
    console = Console(width=WIDTH, markup=False, highlight=False, color_system=None)
    first, rest, tables = columns[:keys], columns[keys:], list[str]()
    while rest or not tables:
        part = [*first, *rest[:1]]
        while len(rest) > (used := len(part) - keys) and sum(w + 2 for w, _ in (*part, rest[used])) - 2 <= WIDTH:
            part.append(rest[used])
        rest = rest[len(part) - keys :]
        look = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for _, (name, *_) in part:
            look.add_column(name)
        for row in zip(*(cells for _, (_, *cells) in part), strict=True):
            look.add_row(*row)
        with console.capture() as text:
            console.print(look)
        tables.append("\n".join(line.rstrip() for line in text.get().splitlines()))
    return "\n\n".join(tables)


def fill(*paragraphs: str) -> str:
    """Return ``paragraphs`` with lines of at most `WIDTH` columns."""
    wrap = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrap.fill, paragraphs))
