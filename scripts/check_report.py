"""Collect the results of scripts/mac_check.sh or scripts/gpu_check.sh in files that the user can send back.

python scripts/check_report.py mac|gpu FOLDER FILE
python scripts/check_report.py passed FILE.json      check that the tests of a Mac's report ran and passed
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

RUNS = ("validated", "plain")  # on a Mac: pytest with Metal's validation, and without
MAC = {"bench": "benchmark", "prefill": "prefill benchmark"}  # names of the benchmarks by file
GPU = {
    "bench": "the benchmark of decode steps",
    "saap": "the benchmark of SAAP's steps",
    "prefill": "the benchmark of prefill",
}
VIRTUAL = "meaningless: the GPU belongs to a virtual machine"
MOST_MESSAGES, LAST_CHARACTERS = 100, 10_000
MOST_FAILURES = 20  # failures in the Markdown file; the JSON lines have all


def main(argv: Sequence[str]) -> int:
    """Write the report of FOLDER, or check one file. Return 1 if something failed or is missing, otherwise 0."""
    kind, *paths = argv
    if kind in ("passed", "validation"):
        path = Path(paths[0])
        wrong = tests_failed(json.loads(text(path) or "{}")) if kind == "passed" else messages(text(path))
        print("\n".join(wrong) or f"{path}: no problems")
        return 1 if wrong else 0
    folder, target = map(Path, paths)
    return mac(folder, target) if kind == "mac" else gpu(folder, target)


def mac(folder: Path, target: Path) -> int:
    """Write the results of a Mac from ``folder`` to the JSON file ``target``. Return the exit code."""
    found = {
        "machine": machine() | facts(folder / "machine.txt"),
        "tests": {run: junit(folder / f"{run}.xml") for run in RUNS},
        "stderr": {run: text(folder / f"{run}.log")[-LAST_CHARACTERS:] for run in RUNS},
        "validation": messages(text(folder / "validated.log")),
        **{name: json.loads(text(folder / f"{file}.json") or "null") for file, name in MAC.items()},
    }
    wrong = mac_problems(found)
    if "paravirtual" in str(found["machine"]["chip"]).lower():
        found = {"timings": VIRTUAL} | found
    write(target, json.dumps(found | {"problems": wrong}, indent=1))
    print(f"Wrote {target}: " + ("; ".join(wrong) if wrong else "all tests passed, all results right"))
    return 1 if wrong else 0


def mac_problems(found: Mapping[str, Any]) -> list[str]:
    wrong = tests_failed(found)
    if found["validation"]:
        wrong.append(f"Metal's validation reports {len(found['validation'])} lines")
    for name in MAC.values():
        if found[name] is None:
            wrong.append(f"the {name} did not finish")
        elif failed := sum(row["failed"] for row in found[name]["rows"]):
            wrong.append(f"{failed} results of the {name} are wrong")
    return wrong


def tests_failed(found: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each pytest run in a Mac's report that is missing, has failures or ran no test."""
    wrong = []
    for run in RUNS:
        tests = found.get("tests", {}).get(run)
        wrong += [f"tests ({run}) did not finish"] if tests is None else _failures(tests, f" ({run})")
    return wrong


def gpu(folder: Path, target: Path) -> int:
    """Write the results of a GPU from ``folder`` to the JSON lines file ``target`` and to a Markdown file beside it.

    Return the exit code. This function does not need mlx.
    """
    untested = text(folder / "no_tests").strip()
    tests = None if untested else junit(folder / "tests.xml")
    if tests is not None:
        tests["status"] = int(facts(folder / "tests_status.txt").get("status", 0))
    measured = {name: _rows(folder, name) for name in GPU}
    rows = [row for found in measured.values() for row in found]
    wrong = gpu_problems(tests, untested, measured)
    check = {"kind": "check", "machine": facts(folder / "machine.txt"), "tests": tests, "note": untested or None}
    write(target, "\n".join(json.dumps(line) for line in (check | {"problems": wrong}, *rows)))
    summary = "; ".join(wrong) if wrong else "all results right" if untested else "all tests passed, all results right"
    unfinished = "{} did not finish; the other file has what it measured."
    tables = [_text(measured[name]) or unfinished.format(what) for name, what in GPU.items()]
    write(target.with_suffix(".md"), "\n\n".join([_head(check, summary), *tables]))
    print(f"Wrote {target} and {target.with_suffix('.md').name}: {summary}")
    return 1 if wrong else 0


def gpu_problems(
    tests: Mapping[str, Any] | None, untested: str, benchmarks: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[str]:
    """Return one sentence for each missing or wrong result of a GPU."""
    wrong = _failures(tests) if tests else [] if untested else ["the tests did not finish"]
    if tests and tests["status"] > 1:  # 1: tests failed
        wrong.append(f"the tests were ended after {tests['tests']} of them (status {tests['status']})")
    for name, rows in benchmarks.items():
        if not any(row["kind"] == "end" for row in rows):
            wrong.append(f"{GPU[name]} did not finish")
        measured = [row for row in rows if row["kind"] == "row"]
        if failed := sum(row["failed"] for row in measured):
            wrong.append(f"{failed} results of {GPU[name]} are wrong")
        elif measured and not any(row["turns"] for row in measured):
            wrong.append(f"{GPU[name]} measured nothing")
    return wrong


def _failures(tests: Mapping[str, Any], which: str = "") -> list[str]:
    if failed := len(tests["failed"]):
        return [f"{failed} of {tests['tests']} tests{which} failed"]
    return [f"no test{which} ran"] if tests["tests"] == tests["skipped"] else []


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    # A benchmark that was stopped may leave an incomplete last line.
    return [json.loads(line) for line in text(folder / f"{name}.jsonl").splitlines() if line.endswith("}")]


def _text(rows: Sequence[Mapping[str, Any]]) -> str:
    return next((f"    {row['run']['command']}\n\n{row['text']}" for row in rows if row["kind"] == "end"), "")


def _head(check: Mapping[str, Any], summary: str) -> str:
    about = ", ".join(f"{name} {value}" for name, value in check["machine"].items())
    lines = [f"`scripts/gpu_check.sh`: {summary}." + (f" {check['note']}" if check["note"] else ""), about]
    if tests := check["tests"]:
        lines.append(f"{tests['tests']} tests in {tests['seconds']:.0f} s, {tests['skipped']} of them skipped.")
        lines += [f"* {bad['test']}: {bad['message'].partition(chr(10))[0]}" for bad in tests["failed"][:MOST_FAILURES]]
    return "\n\n".join(filter(None, lines))


def junit(path: Path) -> dict[str, Any] | None:
    """Read the counts and failures of a pytest run from its JUnit XML file. Return None if the run did not finish."""
    try:
        suite = ElementTree.parse(path).getroot().find("testsuite")
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
    return counts | {"seconds": float(suite.get("time", 0)), "failed": failed}


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
