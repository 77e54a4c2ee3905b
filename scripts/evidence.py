"""Keep the numbers on the pages equal to the raw rows of the measurements in docs/results/*.jsonl.

    python scripts/evidence.py check           compare the tagged numbers of the pages with the rows
    python scripts/evidence.py add PAGE DIR    add the results of `mlx-sparse eval --out DIR` to docs/results/PAGE.jsonl
    python scripts/evidence.py add PAGE FILE   add the lines that `mlx-sparse bench --json` printed into FILE

A row is one number of one measurement, with `FIELDS`. A line of a page names the rows of its numbers in an HTML comment
with their keys, or with the first parts of their keys: ``0.943 <!-- quality/smollm2/copying/8k/sparq -->``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_sparse.tools import environment

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
HEAD = ["git", "rev-parse", "--short=8", "HEAD"]
FIELDS = {
    **{name: str for name in ("key", "model", "task", "method", "metric", "command", "commit", "machine")},
    **{name: int for name in ("context", "examples")},
    "mean": float,
}
TAG = re.compile(r"<!--((?: [a-z0-9_.-]+(?:/[a-z0-9_.@+-]+)+)+) -->")
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->")
NUMBER = re.compile(r"(?<![\w.,])[+-]?\d[\d,]*(?:\.\d+(?: ?%|x\b)?| ?%|x\b)")  # other integers are not compared
METRICS = {"accuracy": "accuracy", "bits_per_byte": "bits", "kl": "kl", "agreement": "agreement"}


def read_rows() -> dict[str, dict[str, Any]]:
    """Read all rows, by key. Raise `ValueError` for a row without a field of `FIELDS`, or with the key of another."""
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            wrong = [name for name, kind in FIELDS.items() if not isinstance(row.get(name), (kind, int))]
            if wrong or "sem" not in row or row["key"] in rows:
                raise ValueError(f"{path.name}:{number}: missing {', '.join(wrong) or 'sem, or its key is not unique'}")
            rows[row["key"]] = row
    return rows


def problems(rows: dict[str, dict[str, Any]], page: Path) -> Iterator[str]:
    """Yield a message for each wrong tag and each number of a tagged line of ``page`` that no named row contains.

    On pages of results, each line of a table that has a number with a decimal point needs a tag.
    """
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        keys = [key for tag in TAG.findall(line) for key in tag.split()]
        where, text = f"{page.relative_to(ROOT)}:{number}", CODE.sub("", line)
        if not keys and page.parent == RESULTS and line.startswith("|") and re.search(r"\d\.\d", text):
            yield f"{where}: expected a tag in a table line with numbers, got none"
        named = [row for key in keys for name, row in rows.items() if name == key or name.startswith(f"{key}/")]
        missing = [key for key in keys if not any(name == key or name.startswith(f"{key}/") for name in rows)]
        yield from (f"{where}: no row has the key {key}" for key in missing)
        values = [value for row in named for value in row.values() if isinstance(value, (int, float))]
        for printed in NUMBER.findall(text) if keys else []:
            if not any(matches(printed, value) for value in values):
                yield f"{where}: {printed} is in no row of {' '.join(keys)}"


def matches(printed: str, value: float) -> bool:
    """Return True if ``value`` rounds to the number ``printed``, which may end with % or x.

    A number without a sign also matches a negative value, as in "loses 0.013".
    """
    digits = printed.rstrip(" %x").replace(",", "")
    scaled = value * 100 if printed.endswith("%") else value
    scaled = scaled if digits[0] in "+-" else abs(scaled)
    return abs(scaled - float(digits)) <= 0.5000001 * 10.0 ** -len(digits.partition(".")[2])


def add(page: str, source: Path, commit: str) -> None:
    """Add a row for each metric of each result in ``source``, and replace rows of the same keys.

    The trials of an evaluation are stored too.
    """
    path = RESULTS / f"{page}.jsonl"
    old = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    found = evaluated(page, source, commit) if source.is_dir() else timed(page, source, commit)
    new = {row["key"]: row for row in found}
    kept = [row for row in old if row.get("key") not in new]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *new.values()]), encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(new)} rows")
    if source.is_dir():
        trials = RESULTS / "trials" / f"{page}-{source.name}.jsonl.gz"
        trials.parent.mkdir(exist_ok=True)
        trials.write_bytes(gzip.compress((source / "trials.jsonl").read_bytes(), mtime=0))


def evaluated(page: str, folder: Path, commit: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the results of an evaluation."""
    for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        run = found["run"]
        versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("mlx", "mlx-lm"))
        name = f"{found['method']}@{found['budget']}" if found["budget"] else found["method"]
        start = [page, short(run["model"]["name"]), found["task"], f"{found['context'] // 1000}k", short(name)]
        start += ["inside"] * found["prefill"]
        about = {
            **{name: found[name] for name in ("task", "method", "attn", "context", "examples", "budget")},
            **{"model": run["model"]["name"], "share": found["compression"], "formula": found["formula"]},
            "selectivity": found["selectivity"],
            **{"density": sum(found["density"]) / len(found["density"]) if found["density"] else None},
            **{"command": run["command"], "commit": commit, "machine": f"{run['machine']['chip']}; {versions}"},
        }
        for metric, field in METRICS.items():
            if metric not in ("bits_per_byte" if found["task"] != "bits_per_byte" else "accuracy",):
                dense = found["mean"][field] - found["delta"][field]
                yield {
                    **{"key": "/".join([*start, metric]), **about, "metric": metric},
                    **{"mean": found["mean"][field], "sem": found["mean_error"][field], "dense": dense},
                    **{"difference": found["delta"][field], "difference_sem": found["error"][field]},
                }
        for depth, mean in found["depths"].items():
            key = "/".join([*start, f"accuracy-at-{depth.rstrip('%')}"])
            yield {"key": key, **about, "metric": "accuracy", "depth": depth, "mean": mean, "sem": None}


def timed(page: str, file: Path, commit: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the lines of a benchmark: medians of times, speeds and ratios. A failed line has no rows."""
    for found in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        if found.get("kind") != "row" or found["failed"]:
            continue
        run, kind = found["run"], found["run"]["command"].split()[2]
        model = f"{found['shape']} {found['dtype']}" if "shape" in found else run["model"]
        name = f"{found['method']} {found['backend']}"
        versions = ", ".join(f"{name} {run['machine'][name]}" for name in ("mlx", "mlx-lm"))
        densities = ((found.get("report") or {}).get("prefill") or {}).get("density", {})
        density = found.get("density", densities.get("mean"))
        about = {
            **{"model": model, "task": kind, "method": name, "context": found["S"], "examples": found["turns"]},
            **{"command": run["command"], "commit": found.get("commit", commit), "sem": None},
            **{"machine": f"{run['machine']['chip']}; {versions}", "density": density},
        }
        times = {f"{name.removesuffix('_us')}_ms": found[name] for name in found if name.endswith("_us")}
        times = {name: value / 1000 for name, value in times.items() if isinstance(value, float)}
        ways = found.get("dense_ways_us", {})
        times |= {f"dense_{way}_ms": value / 1000 for way, value in ways.items()}
        times |= {"native_gain": ways["mlx"] / ways["cpu"]} if {"mlx", "cpu"} <= set(ways) else {}
        rates = [one for name in ("time_to_first_token", "prompt", "generation") for one in (name, f"{name}_ratio")]
        others = {name: found[name] for name in ("ratio", *rates, "peak_memory") if found.get(name) is not None}
        for metric, mean in (times | others).items():
            key = "/".join([page, kind, short(model), str(found["S"]), short(name), metric])
            limits = {end: found.get(f"{metric}_{end}") for end in ("low", "high")}
            yield {"key": key, **about, "metric": metric, "mean": mean, **limits}


def origin(script: str, arguments: Sequence[str], *packages: str) -> dict[str, str]:
    """Return the fields of a row that say how ``python scripts/SCRIPT ARGUMENTS`` made it."""
    versions = ", ".join(f"{package} {environment.version_of(package)}" for package in packages)
    return {
        "command": shlex.join(["python", f"scripts/{script}", *arguments]),
        "commit": subprocess.check_output(HEAD, text=True, cwd=ROOT).strip(),
        "machine": f"{environment.hardware()['chip']}, {os.cpu_count()} cores; {versions}",
    }


def short(name: str) -> str:
    """Return a part of a key: lower case, and other characters than letters and digits as dashes."""
    return re.sub(r"[^a-z0-9_.@+-]+", "-", name.lower()).strip("-")


def main() -> int:
    """Run the command, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="compare the pages with the rows")
    adding = commands.add_parser("add", help="add the results of an evaluation")
    adding.add_argument("page", metavar="PAGE")
    adding.add_argument("folder", metavar="DIR", type=Path)
    adding.add_argument("--commit", help="commit that ran the evaluation (default: HEAD)")
    args = parser.parse_args()
    if args.command == "add":
        add(args.page, args.folder, args.commit or subprocess.check_output(HEAD, text=True, cwd=ROOT).strip())
        return 0
    rows = read_rows()
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    wrong = [message for page in pages for message in problems(rows, page)]
    print(*wrong, f"{len(rows)} rows, {len(wrong)} problems", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
