"""``mlx-sparse report``: the pictures and the report of results that are there, drawn again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ....checks import Parser
from . import check, write
from .read import RESULTS, read_results, read_speed


def main(argv: Sequence[str]) -> int:
    """Draw a report; return the exit code."""
    args = _parser().parse_args(argv)
    check()
    found = read_results(args.folder)
    speed = [row for path in args.speed for row in read_speed(path)]
    write(args.folder, found.rows, found.facts, selection=found.selection, speed=speed)
    print(args.folder / "report.html")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse report",
        description="Write report.html and its pictures again, from the results of mlx-sparse eval --out DIR. Nothing "
        "is run.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help=f"the folder, with {RESULTS} in it")
    parser.add_argument(
        "--speed",
        metavar="FILE.jsonl",
        type=Path,
        nargs="+",
        default=[],
        help="times that mlx-sparse bench -o jsonl printed, for a section on speed",
    )
    return parser
