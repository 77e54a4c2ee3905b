"""Test the workflows of .github: syntax, pinned actions and the scripts that they run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from require import absent

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BIN = Path(sys.executable).parent
by_workflow = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)


def lint(*files: Path) -> subprocess.CompletedProcess[str]:
    """Run actionlint, with shellcheck for the steps."""
    if not (BIN / "actionlint").exists():
        absent("actionlint", "not installed beside this Python")
    command = [BIN / "actionlint", "-no-color", f"-shellcheck={BIN / 'shellcheck'}", *files]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_actionlint_passes() -> None:
    assert [path.name for path in WORKFLOWS], "no workflows"
    done = lint(*WORKFLOWS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_scripts_import_from_folders_of_tests_that_exist() -> None:
    for script in (ROOT / "scripts").glob("*.py"):
        for folder in re.findall(r'(?:"tests"|TESTS) / "(\w+)"', script.read_text()):
            assert (ROOT / "tests" / folder).is_dir(), f"{script.name}: tests/{folder}"


@by_workflow
def test_actions_are_pinned_and_permissions_read_only(workflow: Path) -> None:
    text = workflow.read_text()
    for action in re.findall(r"\buses:\s*(.+)", text):
        assert re.search(r"@(?:v\d[\w.]*|[0-9a-f]{40} # v\d[\w.]*)$|^\./", action.strip()), action
    allowed = re.search(r"^permissions:(.*(?:\n[ \t]+.*)*)", text, re.M)
    assert allowed, "a workflow without permissions gives its token all rights"
    assert "write" not in allowed[1], "give write permissions to single jobs"


@by_workflow
def test_pipes_run_with_pipefail(workflow: Path) -> None:
    """Test that steps with pipes set `shell: bash`. Without it a step ignores failures before a pipe."""
    text = workflow.read_text()
    piped = [line for line in text.splitlines() if re.search(r"[^|]\|\s*(?:tee|grep|tail|head|jq)\b", line)]
    assert not piped or re.search(r"^defaults:\n  run:\n    shell: bash\b", text, re.M), piped


@by_workflow
def test_referenced_scripts_exist(workflow: Path) -> None:
    text = workflow.read_text()
    for before, name in re.findall(r"(\S*\s)?\b((?:scripts|tests|examples)/[\w./-]+\.\w+)", text):
        path = ROOT / name
        assert path.is_file(), name
        if path.suffix == ".sh" and "bash" not in before:
            assert path.stat().st_mode & 0o111, f"{name} is not executable"


def test_metal_runs_on_three_systems() -> None:
    text = (ROOT / ".github" / "workflows" / "metal.yml").read_text()
    gpu = text[text.index("\n  gpu:") : text.index("\n  texts:")]
    assert "os: [macos-14, macos-15, macos-26]" in gpu
    assert re.search(r"MLX_SPARSE_REQUIRE: metal\b", gpu)  # read by tests/testing/fixtures_msl.py
    runs = dict(re.findall(r"run: scripts/metal_tests\.sh (\w+) (.*)$", gpu, re.M))
    assert runs["kernels"].endswith(" -k metal")
    folders = [ROOT / name for name in runs["kernels"].split()[:-2]]
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "\nfrom adapters import " in path.read_text():
            assert any(path.is_relative_to(folder) for folder in folders), f"Metal runs no test of {path}"
    assert all(any(ROOT.glob(paths)) for paths in runs["lm"].split())
    assert "metal_device.py" in gpu
    assert "continue-on-error" not in text
