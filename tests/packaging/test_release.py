"""Test scripts/release.py: one version, and release notes from CHANGELOG.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from json_tables import read_tables

if sys.version_info < (3, 11):
    pytest.skip("scripts/release.py needs Python 3.11", allow_module_level=True)
import release

DATA = read_tables(__file__)

ROOT = Path(__file__).parents[2]
UNRELEASED = "# Changelog\n\n## [Unreleased]\n\n- Now.\n"
OLD = "\n## [1.2.2] - 2026-01-01\n\n- Then.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text('cff-version: 1.2.0\nversion: "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(UNRELEASED + OLD)
    return tmp_path


def test_version_is_defined_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main([]) == 0
    assert "### Added\n" in capsys.readouterr().out
    version = re.compile(rf"""["']{re.escape(release.version())}["']""")
    files = [path for room in ("mlx_sparse", "cuda_ref", "onnx_export") for path in (ROOT / room).rglob("*.py")]
    assert not [path.name for path in files if version.search(path.read_text())]


def test_notes_come_from_the_changelog(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main([], tree) == 0
    assert capsys.readouterr().out == "- Now.\n"
    heading = "## [Unreleased]\n\n- Next.\n\n## [1.2.3] - 2026-12-01\n"
    (tree / "CHANGELOG.md").write_text(UNRELEASED.replace("## [Unreleased]\n", heading) + OLD)
    for tag in ([], ["v1.2.3"]):
        assert release.main(tag, tree) == 0
        assert capsys.readouterr().out == "- Now.\n"


@pytest.mark.parametrize(("file", "old", "new", "tag", "message"), DATA["disagreements"])
def test_disagreements_are_one_line_errors(
    file: str, old: str, new: str, tag: str | None, message: str, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tree / file
    path.write_text(path.read_text().replace(old, new))
    assert release.main([tag] if tag else [], tree) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"release.py: error: {message}")
