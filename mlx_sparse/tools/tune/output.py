"""The output of `tune-sample`: TOML for ``--attn-config``, a table, JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...checks import ConfigError
from ...files import replace_file
from ...methods import load_toml
from .. import formats
from .search import ENOUGH, RETRIEVAL, Measured, Tuned

FIRST_LINE = "# Written by mlx-sparse tune-sample"
HEADER = ["keys", "column", "slash", "chunks", *RETRIEVAL, "accuracy", "density", "sampled", "work", "seconds", ""]
NOT_LOSSLESS = "No setting is without loss; accuracy first is the one that loses least."


def check_own(option: str, path: Path | None, first_line: str) -> None:
    """Refuse a file that does not begin with ``first_line``, so that no file of the user is overwritten.

    Raises:
        ConfigError: ``path`` is such a file, does not end in .toml, or is in a folder that does not exist.
    """
    if path is None:
        return
    formats.check_folder(option, path)
    if path.suffix != ".toml":
        raise ConfigError(f"{option}: expected a file name in .toml, got {path}.")
    if path.exists() and path.read_bytes()[: len(first_line)] != first_line.encode():
        raise ConfigError(f"{option}: expected a new file or one of this command, got {path}. Choose another name.")


def write_toml(path: Path, text: str) -> None:
    """Write the file at once, after it was read back."""

    def write(new: Path) -> None:
        new.write_text(text, encoding="utf-8")
        load_toml(new)

    replace_file(path, write)


def toml(tuned: Sequence[Tuned], prefer: str, model: str, block_size: int) -> str:
    """Return the preferred setting of each range, with its figures and the other setting as comments."""
    # As JSON, a name cannot end its comment.
    lines = [
        f"{FIRST_LINE} for {json.dumps(model)}: {prefer} first.",
        "# Read it with --attn-config. Longer contexts than the last range use the last one.",
        "[sample]",
        f"block_size = {block_size}",
    ]
    for found in tuned:
        first, other = (found.accuracy_first, found.speed_first)[:: 1 if prefer == "accuracy" else -1]
        other_name = "speed" if prefer == "accuracy" else "accuracy"
        assert first.setting is not None
        lines += [
            "",
            f"# Tuned at {', '.join(f'{length:,}' for length in found.lengths)} keys.",
            f"# dense: {_figures(found.dense)}",
            f"# this: {_figures(first)}",
            f"# {other_name} first: {_figures(other)} with {other.setting}",
            *([] if found.lossless else [f"# {NOT_LOSSLESS}"]),
            "[[sample.ranges]]",
            f"up_to = {found.up_to}",
            *(f"{name} = {value}" for name, value in asdict(first.setting).items()),
        ]
    return "\n".join(lines) + "\n"


def _figures(row: Measured) -> str:
    shares = f"accuracy {row.accuracy:.3f}, density {row.density:.3f}, sampled {row.sampled:.3f}"
    return f"{shares}, {row.seconds:.2f} s a prompt"


def table(tuned: Sequence[Tuned]) -> str:
    """Return everything that was measured, and what was selected, as Markdown."""
    rows = []
    for found in tuned:
        for row in (found.dense, *found.measured):
            best = {"accuracy first": found.accuracy_first, "speed first": found.speed_first}
            chosen = ", ".join(name for name, one in best.items() if one is row)
            values = list(asdict(row.setting).values()) if row.setting else ["dense", "", ""]
            shares = [*row.tasks.values(), row.accuracy, row.density, row.sampled, row.work]
            cells = [f"< {found.up_to:,}", *values, *(f"{value:.3f}" for value in shares), f"{row.seconds:.2f}", chosen]
            rows.append(cells)
    lines = [
        formats.table(HEADER, rows),
        "",
        "work = density + sampled / 2: attention's multiply-adds over those of dense, which rank the settings.",
        f"Speed first has at least {ENOUGH:.0%} of dense attention's accuracy.",
    ]
    return "\n".join(lines + [f"Below {one.up_to:,} keys: {NOT_LOSSLESS}" for one in tuned if not one.lossless])


def as_dict(tuned: Sequence[Tuned], model: str, block_size: int) -> dict[str, Any]:
    """Return everything that was measured and selected as plain data for JSON."""
    ranges = [
        {name: getattr(found, name) for name in ("up_to", "lengths", "lossless")}
        | {name: getattr(found, name).as_dict() for name in ("dense", "accuracy_first", "speed_first")}
        | {"measured": [row.as_dict() for row in found.measured]}
        for found in tuned
    ]
    return {"model": model, "block_size": block_size, "ranges": ranges}
