"""Collect the results of scripts/mac_check.sh or scripts/gpu_check.sh in two files that the user can send back.

python scripts/check_report.py mac|gpu FOLDER FILE.jsonl
python scripts/check_report.py passed FILE.jsonl     check that the tests of a Mac's report ran and passed
python scripts/check_report.py validation FILE.log   check that Metal's validation reported nothing
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from mlx_sparse.tools.environment import machine
from mlx_sparse.tools.formats import write

RUNS = {"mac": ("validated", "plain"), "gpu": ("tests",)}  # pytest runs; validated: with Metal's validation
STEPS, PREFILL = "the benchmark of decode steps", "the benchmark of prefill"
BENCHMARKS = {  # names by file
    "mac": {"bench": STEPS, "prefill": PREFILL},
    "gpu": {"bench": STEPS, "saap": "the benchmark of SAAP's steps", "prefill": PREFILL},
}
VIRTUAL = "The times are meaningless, because the GPU belongs to a virtual machine."
MOST_MESSAGES, LAST_CHARACTERS = 100, 10_000
MOST_FAILURES = 20  # failures in the Markdown file; the JSON lines have all


def main(argv: Sequence[str]) -> int:
    """Write the report of FOLDER, or check one file. Return 1 if something failed or is missing, otherwise 0."""
    kind, *paths = argv
    if kind in RUNS:
        return report(kind, *map(Path, paths))
    path = Path(paths[0])
    check = json.loads((text(path).splitlines() or ["{}"])[0]) if kind == "passed" else {}
    wrong = tests_failed(check.get("tests", {}), "mac") if kind == "passed" else messages(text(path))
    print("\n".join(wrong) or f"{path}: no problems")
    return 1 if wrong else 0


def report(kind: str, folder: Path, target: Path) -> int:
    """Write the results in ``folder`` to the JSON lines file ``target`` and to a Markdown file beside it.

    Return the exit code. Without a Mac, this function does not need mlx.
    """
    untested = text(folder / "no_tests").strip()
    hardware = machine() if kind == "mac" else {}
    notes = [untested, VIRTUAL if "paravirtual" in str(hardware.get("chip")).lower() else ""]
    check = {
        "kind": "check",
        "machine": hardware | facts(folder / "machine.txt"),
        "tests": {} if untested else {run: junit(folder, run) for run in RUNS[kind]},
        "stderr": {run: log[-LAST_CHARACTERS:] for run in RUNS[kind] if (log := text(folder / f"{run}.log"))},
        "validation": messages(text(folder / "validated.log")),
        "note": " ".join(filter(None, notes)) or None,
    }
    measured = {name: _rows(folder, name) for name in BENCHMARKS[kind]}
    rows = [row for found in measured.values() for row in found]
    wrong = [] if untested else tests_failed(check["tests"], kind)
    if check["validation"]:
        wrong.append(f"Metal's validation reports {len(check['validation'])} lines")
    wrong += [problem for name, what in BENCHMARKS[kind].items() for problem in _benchmark(what, measured[name])]
    write(target, "\n".join(json.dumps(line) for line in (check | {"problems": wrong}, *rows)))
    summary = "; ".join(wrong) if wrong else "all results right" if untested else "all tests passed, all results right"
    unfinished = "{} did not finish; the other file has what it measured."
    tables = [_text(measured[name]) or unfinished.format(what) for name, what in BENCHMARKS[kind].items()]
    write(target.with_suffix(".md"), "\n\n".join([_head(kind, check, summary), *tables]))
    print(f"Wrote {target} and {target.with_suffix('.md').name}: {summary}")
    return 1 if wrong else 0


def tests_failed(tests: Mapping[str, Any], kind: str) -> list[str]:
    """Return one sentence for each pytest run that is missing, was ended, has failures or ran no test."""
    wrong = []
    for run in RUNS[kind]:
        found, which = tests.get(run), f" ({run})" if len(RUNS[kind]) > 1 else ""
        if found is None:
            wrong.append(f"the tests{which} did not finish")
            continue
        if failed := len(found["failed"]):
            wrong.append(f"{failed} of {found['tests']} tests{which} failed")
        elif found["tests"] == found["skipped"]:
            wrong.append(f"no test{which} ran")
        if found["status"] > 1:  # 1: tests failed
            wrong.append(f"the tests{which} were ended after {found['tests']} of them (status {found['status']})")
    return wrong


def _benchmark(what: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each missing or wrong result of the benchmark ``what``."""
    wrong = [] if any(row["kind"] == "end" for row in rows) else [f"{what} did not finish"]
    measured = [row for row in rows if row["kind"] == "row"]
    if failed := sum(row["failed"] for row in measured):
        wrong.append(f"{failed} results of {what} are wrong")
    elif measured and not any(row["turns"] for row in measured):
        wrong.append(f"{what} measured nothing")
    return wrong


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    # A benchmark that was stopped may leave an incomplete last line.
    return [json.loads(line) for line in text(folder / f"{name}.jsonl").splitlines() if line.endswith("}")]


def _text(rows: Sequence[Mapping[str, Any]]) -> str:
    return next((f"    {row['run']['command']}\n\n{row['text']}" for row in rows if row["kind"] == "end"), "")


def _head(kind: str, check: Mapping[str, Any], summary: str) -> str:
    about = ", ".join(f"{name} {value}" for name, value in check["machine"].items())
    lines = [f"`scripts/{kind}_check.sh`: {summary}." + (f" {check['note']}" if check["note"] else ""), about]
    for found in filter(None, check["tests"].values()):
        lines.append(f"{found['tests']} tests in {found['seconds']:.0f} s, {found['skipped']} of them skipped.")
        lines += [f"* {bad['test']}: {bad['message'].partition(chr(10))[0]}" for bad in found["failed"][:MOST_FAILURES]]
    return "\n\n".join(filter(None, lines))


def junit(folder: Path, run: str) -> dict[str, Any] | None:
    """Read the counts, failures and exit status of a pytest run. Return None if the run did not finish."""
    try:
        suite = ElementTree.parse(folder / f"{run}.xml").getroot().find("testsuite")
    except (OSError, ElementTree.ParseError):
        return None
    if suite is None:
        return None
    failed = [
        {"test": f"{case.get('classname')}::{case.get('name')}", "message": (bad.get("message") or "")[:2000]}
        for case in suite.iter("testcase")
        for bad in (*case.findall("failure"), *case.findall("error"))
    ]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "skipped")}
    status = int(facts(folder / f"{run}_status.txt").get("status", 0))
    return counts | {"seconds": float(suite.get("time", 0)), "failed": failed, "status": status}


def messages(log: str) -> list[str]:
    """Return the messages of Metal's validation layers in ``log``. Lines that announce the layers are omitted."""
    lines = [line for line in log.splitlines() if "validation" in line.lower() or "invalid" in line.lower()]
    return [line for line in lines if "Validation Enabled" not in line][:MOST_MESSAGES]


def facts(path: Path) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text(path).splitlines() if ": " in line)


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
