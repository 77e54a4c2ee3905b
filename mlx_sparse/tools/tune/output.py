"""What `tune-sample` writes: TOML for ``--attn-config``, a table, JSON."""

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
from ..evaluate.tasks import RETRIEVAL
from .search import ENOUGH, Measured, Tuned

FIRST_LINE = "# Written by mlx-sparse tune-sample"
HEADER = ["keys", "column", "slash", "chunks", *RETRIEVAL, "accuracy", "density", "sampled", "work", "seconds", ""]


def check_target(path: Path, force: bool) -> None:
    """Refuse to overwrite what `tune-sample` did not write, unless forced to.

    Raises:
        ConfigError: ``path`` is somebody else's file, no file, or in a folder that is not there.
    """
    if path.suffix != ".toml" or not path.parent.is_dir():
        raise ConfigError(f"--out: expected a file name in .toml in a folder that exists, got {path}.")
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"--out: expected a file, got {path}.")
    with path.open("rb") as file:
        ours = file.read(len(FIRST_LINE)) == FIRST_LINE.encode()
    if not ours and not force:
        raise ConfigError(f"--out: expected a new file or one of tune-sample's, got {path}. --force overwrites it.")


def write_toml(path: Path, text: str) -> None:
    """Write the file whole, once it has been read back."""

    def write(new: Path) -> None:
        new.write_text(text, encoding="utf-8")
        load_toml(new)

    replace_file(path, write)


def toml(tuned: Sequence[Tuned], prefer: str, model: str, block_size: int) -> str:
    """The preferred setting of each range, with what was measured and the other setting as comments."""
    # As JSON, a name cannot end the comment it stands in.
    lines = [
        f"{FIRST_LINE} for {json.dumps(model)}: {prefer} first.",
        "# Read it with --attn-config. Longer contexts than the last range use the last one.",
        "# What stays dense all the same: see dense_below and dense_above, which are not set here.",
        "",
        "[sample]",
        f"block_size = {block_size}",
    ]
    for found in tuned:
        first, other = (found.accuracy_first, found.speed_first)[:: 1 if prefer == "accuracy" else -1]
        other_name = "speed" if prefer == "accuracy" else "accuracy"
        lengths = ", ".join(f"{length:,}" for length in found.lengths)
        assert first.setting is not None
        lines += [
            "",
            f"# Tuned at {lengths} keys.",
            f"# dense: {_figures(found.dense)}",
            f"# this:  {_figures(first)}",
            f"# {other_name} first would be {_numbers(other)}: {_figures(other)}",
            *([] if found.lossless else ["# No setting was without loss; accuracy first is the one that loses least."]),
            "[[sample.ranges]]",
            f"up_to = {found.up_to}",
            *(f"{name} = {value}" for name, value in asdict(first.setting).items()),
        ]
    return "\n".join(lines) + "\n"


def table(tuned: Sequence[Tuned]) -> str:
    """Markdown: everything that was measured, and what was chosen."""
    rows = []
    for found in tuned:
        for row in (found.dense, *found.measured):
            chosen = [
                name
                for name, best in (("accuracy first", found.accuracy_first), ("speed first", found.speed_first))
                if best is row
            ]
            values = list(asdict(row.setting).values()) if row.setting else ["dense", "", ""]
            cells = [f"< {found.up_to:,}", *map(str, values), *(f"{row.tasks[task]:.3f}" for task in RETRIEVAL)]
            cells += [f"{value:.3f}" for value in (row.accuracy, row.density, row.sampled, row.work)]
            rows.append([*cells, f"{row.seconds:.2f}", ", ".join(chosen)])
    lines = [
        formats.table(HEADER, rows),
        "",
        "work = density + sampled / 2: attention's multiply-adds over those of dense. The settings are ranked by",
        f"it, not by the seconds. Speed first: at least {ENOUGH:.0%} of dense attention's accuracy.",
    ]
    lines += [
        f"Fewer than {found.up_to:,} keys: no setting was without loss; accuracy first is the one that loses least."
        for found in tuned
        if not found.lossless
    ]
    return "\n".join(lines)


def as_dict(tuned: Sequence[Tuned], model: str, block_size: int) -> dict[str, Any]:
    """Everything that was measured and chosen as plain data for JSON."""
    ranges = [
        {
            "up_to": found.up_to,
            "lengths": found.lengths,
            "dense": found.dense.as_dict(),
            "lossless": found.lossless,
            "accuracy_first": found.accuracy_first.as_dict(),
            "speed_first": found.speed_first.as_dict(),
            "measured": [row.as_dict() for row in found.measured],
        }
        for found in tuned
    ]
    return {"model": model, "block_size": block_size, "ranges": ranges}


def _numbers(row: Measured) -> str:
    assert row.setting is not None
    return ", ".join(f"{name} = {value}" for name, value in asdict(row.setting).items())


def _figures(row: Measured) -> str:
    shares = f"accuracy {row.accuracy:.3f}, density {row.density:.3f}, sampled {row.sampled:.3f}"
    return f"{shares}, {row.seconds:.2f} s a prompt"
