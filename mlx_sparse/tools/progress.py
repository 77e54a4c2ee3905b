"""Show the progress of a long command: a spinner or a bar in a terminal, or one line for each stage in a log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Update = Callable[[int], object]  # called with the number of finished tokens


@contextlib.contextmanager
def stage(console: Console, name: str) -> Iterator[None]:
    """Show that the stage ``name`` is in progress while the ``with`` block runs."""
    if console.is_terminal:
        with console.status(name):
            yield
    else:
        console.print(f"{name} ...")
        yield


@contextlib.contextmanager
def token_bar(console: Console, name: str, total: int) -> Iterator[Update]:
    """Show a progress bar for ``total`` tokens, and yield a function that sets the number of finished tokens."""
    if not console.is_terminal:
        console.print(f"{name}: {total:,} tokens ...")
        yield lambda done: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.update(task, completed=done)
