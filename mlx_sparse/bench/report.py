"""What scripts/mac_check.sh found, as one JSON file: ``python -m mlx_sparse.bench.report FOLDER FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..forms import write
from ..machine import machine

RUNS = ("validated", "plain")  # pytest with Metal's validation, and without
MOST_MESSAGES, LAST_CHARACTERS = 100, 10_000


def main(argv: Sequence[str]) -> int:
    """Write FILE from what is in FOLDER; 0 if all ran and nothing failed."""
    folder, target = map(Path, argv)
    found = {
        "machine": machine() | facts(folder / "machine.txt"),
        "tests": {run: junit(folder / f"{run}.xml") for run in RUNS},
        "stderr": {run: text(folder / f"{run}.log")[-LAST_CHARACTERS:] for run in RUNS},
        "validation": messages(text(folder / "validated.log")),
        "benchmark": json.loads(text(folder / "bench.json") or "null"),
        "prefill benchmark": json.loads(text(folder / "prefill.json") or "null"),
    }
    wrong = problems(found)
    write(target, json.dumps(found | {"problems": wrong}, indent=1))
    print(f"Wrote {target}: " + ("; ".join(wrong) if wrong else "all tests passed, all results right"))
    return 1 if wrong else 0


def problems(found: dict[str, Any]) -> list[str]:
    """One sentence for each thing that is missing or wrong."""
    wrong = []
    for run, tests in found["tests"].items():
        if tests is None:
            wrong.append(f"tests ({run}) did not finish")
        elif tests["failed"]:
            wrong.append(f"{len(tests['failed'])} of {tests['tests']} tests ({run}) failed")
        elif tests["tests"] == tests["skipped"]:
            wrong.append(f"no test ({run}) ran")
    if found["validation"]:
        wrong.append(f"Metal's validation reports {len(found['validation'])} lines")
    for name in ("benchmark", "prefill benchmark"):
        if found[name] is None:
            wrong.append(f"the {name} did not finish")
        elif failed := sum(row["failed"] for row in found[name]["rows"]):
            wrong.append(f"{failed} results of the {name} are wrong")
    return wrong


def junit(path: Path) -> dict[str, Any] | None:
    """Counts and failures of a pytest run; None if it did not end."""
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
    """What Metal's validation layers had to say, without their announcing themselves."""
    lines = [line for line in log.splitlines() if "validation" in line.lower() or "invalid" in line.lower()]
    return [line for line in lines if "Validation Enabled" not in line][:MOST_MESSAGES]


def facts(path: Path) -> dict[str, str]:
    """The lines ``name: value`` of a file."""
    return dict(line.split(": ", 1) for line in text(path).splitlines() if ": " in line)


def text(path: Path) -> str:
    """What a file holds; nothing if it is not there."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
