"""What scripts/gpu_check.sh found, as FILE.jsonl and FILE.md: ``python -m mlx_sparse.bench.gpu_report FOLDER FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..forms import write
from .report import facts, junit, text

BENCHMARKS = {  # by file
    "bench": "the benchmark of decode steps",
    "saap": "the benchmark of SAAP's steps",
    "prefill": "the benchmark of prompts",
}
MOST_FAILURES = 20  # that the Markdown lists; the other file has all


def main(argv: Sequence[str]) -> int:
    """Write FILE.jsonl and FILE.md from what is in FOLDER; 0 if nothing failed."""
    folder, target = map(Path, argv)
    untested = text(folder / "no_tests").strip()
    tests = None if untested else junit(folder / "tests.xml")
    if tests is not None:
        tests["status"] = int(facts(folder / "tests_status.txt").get("status", 0))
    measured = {name: _rows(folder, name) for name in BENCHMARKS}
    rows = [row for found in measured.values() for row in found]
    wrong = problems(tests, untested, measured)
    check = {"kind": "check", "machine": facts(folder / "machine.txt"), "tests": tests, "note": untested or None}
    write(target, "\n".join(json.dumps(line) for line in (check | {"problems": wrong}, *rows)))
    summary = "; ".join(wrong) if wrong else "all results right" if untested else "all tests passed, all results right"
    unfinished = "{} did not finish; the other file has what it measured."
    tables = [_text(measured[name]) or unfinished.format(what) for name, what in BENCHMARKS.items()]
    write(target.with_suffix(".md"), "\n\n".join([_head(check, summary), *tables]))
    print(f"Wrote {target} and {target.with_suffix('.md').name}: {summary}")
    return 1 if wrong else 0


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    # A benchmark that was ended may have left half a line.
    return [json.loads(line) for line in text(folder / f"{name}.jsonl").splitlines() if line.endswith("}")]


def _text(rows: Sequence[dict[str, Any]]) -> str:
    """The report of a benchmark that came to its end, under its command."""
    found = {row["kind"]: row for row in rows}
    return f"    {found['command']['command']}\n\n{found['end']['text']}" if "end" in found else ""


def problems(
    tests: dict[str, Any] | None, untested: str, benchmarks: Mapping[str, Sequence[dict[str, Any]]]
) -> list[str]:
    """One sentence for each thing that is missing or wrong."""
    wrong = []
    if tests is None and not untested:
        wrong.append("the tests did not finish")
    elif tests and tests["failed"]:
        wrong.append(f"{len(tests['failed'])} of {tests['tests']} tests failed")
    elif tests and tests["tests"] == tests["skipped"]:
        wrong.append("no test ran")
    if tests and tests["status"] > 1:  # 1: tests failed
        wrong.append(f"the tests were ended after {tests['tests']} of them (status {tests['status']})")
    for name, rows in benchmarks.items():
        if not any(row["kind"] == "end" for row in rows):
            wrong.append(f"{BENCHMARKS[name]} did not finish")
        measured = [row for row in rows if row["kind"] == "row"]
        if failed := sum(row["failed"] for row in measured):
            wrong.append(f"{failed} results of {BENCHMARKS[name]} are wrong")
        elif measured and not any(row["turns"] for row in measured):
            wrong.append(f"{BENCHMARKS[name]} could measure nothing")
    return wrong


def _head(check: dict[str, Any], summary: str) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in check["machine"].items())
    lines = [f"`scripts/gpu_check.sh`: {summary}." + (f" {check['note']}" if check["note"] else ""), machine]
    if tests := check["tests"]:
        lines.append(f"{tests['tests']} tests in {tests['seconds']:.0f} s, {tests['skipped']} of them skipped.")
        lines += [f"* {bad['test']}: {bad['message'].partition(chr(10))[0]}" for bad in tests["failed"][:MOST_FAILURES]]
    return "\n\n".join(filter(None, lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
