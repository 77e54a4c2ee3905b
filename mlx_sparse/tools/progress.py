"""Show the progress of a long command: a spinner or a bar in a terminal, or lines with the finished number in a log."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

STDERR = Console(stderr=True, highlight=False, markup=False)
INTERVAL = 30.0  # seconds between two lines of a stage in a log


@contextlib.contextmanager
def stage(console: Console, name: str) -> Iterator[None]:
    """Show that the stage ``name`` is in progress while the ``with`` block runs."""
    if console.is_terminal:
        with console.status(name):
            yield
    else:
        console.print(f"{name} ...")
        yield


class Bar:
    """Progress of ``total`` units on ``console`` (default: standard error), shown in a ``with`` block.

    In a terminal, the clock also runs while no unit is finished. In a log, a line is printed when a stage begins, and
    every `INTERVAL` seconds.
    """

    def __init__(self, name: str, total: int, unit: str, console: Console = STDERR) -> None:
        self._console = console
        times = TimeElapsedColumn(), TextColumn("remaining"), TimeRemainingColumn()
        columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TextColumn(unit), *times
        terminal = self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not terminal)
        self._task = self._bar.add_task(name, total=total)
        self._name, self._total, self._unit, self._done = name, total, unit, 0
        self._start, self._ended = time.monotonic(), threading.Event()

    def __enter__(self) -> Bar:
        self._bar.start()
        if not self._console.is_terminal:
            self._print()
            threading.Thread(target=self._print_regularly, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        self._ended.set()

    def stage(self, name: str) -> None:
        """Show ``name`` as the current stage."""
        if name != self._name:
            self._name = name
            self._bar.update(self._task, description=name)
            self._print()

    def update(self, more: int = 1) -> None:
        """Add ``more`` finished units."""
        self._done += more
        self._bar.update(self._task, completed=self._done)

    def _print_regularly(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._print()

    def _print(self) -> None:
        if self._name and not self._console.is_terminal:
            done = f"{self._done:,} of " if self._done else ""
            took = f", {time.monotonic() - self._start:.0f} s" if self._done else ""
            self._console.print(f"{self._name}: {done}{self._total:,} {self._unit}{took} ...")
