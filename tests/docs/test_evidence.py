"""Test that the numbers of README and docs equal the rows of the measurements, and that a wrong number is found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository_paths import ROOT

SCRIPT = "scripts/evidence.py"
KEY = "quality/tiny/copying/2k/sparq"
ROW = {
    **{"key": f"{KEY}/accuracy", "model": "tiny", "task": "copying", "method": "sparq", "metric": "accuracy"},
    **{"context": 2048, "examples": 20, "mean": 0.91234, "sem": 0.0051, "difference": -0.0132},
    **{"command": "mlx-sparse eval", "commit": "0000000", "machine": "none"},
}


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, root / SCRIPT, "check"], capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / SCRIPT, tmp_path / SCRIPT)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "quality.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "README.md").write_text("Nothing.\n")
    return tmp_path


def test_every_tagged_number_is_in_a_row() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"The share is 0.912 ± 0.005 at 2,048 tokens, 91 % of the tokens. <!-- {KEY} -->", None),
        (f"It loses 0.013 and -0.0132. <!-- {KEY}/accuracy -->", None),
        (f"The share is 0.913. <!-- {KEY} -->", "README.md:1: 0.913 is in no row of "),
        (f"The share rises by +0.013. <!-- {KEY} -->", "+0.013 is in no row of"),
        (f"It is 92 % or 1.5x. <!-- {KEY} -->", "92 % is in no row of"),
        (f"The share is 0.912. <!-- {KEY[:-1]} -->", f"no row has the key {KEY[:-1]}"),
    ],
)
def test_wrong_numbers_and_keys_are_found(project: Path, line: str, message: str | None) -> None:
    (project / "README.md").write_text(line + "\n")
    done = check(project)
    assert (done.returncode, done.stderr) == (message is not None, "")
    assert (message or "1 rows, 0 problems") in done.stdout


def test_table_of_results_needs_tags(project: Path) -> None:
    (project / "docs" / "results" / "quality.md").write_text("| method | 0.912 |\n")
    assert "quality.md:1: expected a tag in a table line with numbers, got none" in check(project).stdout


@pytest.mark.parametrize("change", [{"key": f"{KEY}/accuracy"}, {"key": "other", "mean": None}])
def test_incomplete_and_repeated_rows_are_errors(project: Path, change: dict[str, object]) -> None:
    with (project / "docs" / "results" / "quality.jsonl").open("a") as file:
        file.write(json.dumps(ROW | change) + "\n")
    assert "quality.jsonl:2: missing" in check(project).stderr
