"""One version, and release notes that are cut from CHANGELOG.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("scripts/release.py needs Python 3.11", allow_module_level=True)
import release

ROOT = Path(__file__).parent.parent
UNRELEASED = "# Changelog\n\n## [Unreleased]\n\n- Now.\n"
OLD = "\n## [1.2.2] - 2026-01-01\n\n- Then.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text('cff-version: 1.2.0\nversion: "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(UNRELEASED + OLD)
    return tmp_path


def test_the_version_stands_in_one_place_which_the_citation_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main([]) == 0
    assert "### Added\n" in capsys.readouterr().out
    version = re.compile(rf"""["']{re.escape(release.version())}["']""")
    files = [path for room in ("mlx_sparse", "cuda_ref", "onnx_export") for path in (ROOT / room).rglob("*.py")]
    assert not [path.name for path in files if version.search(path.read_text())]


def test_the_notes_are_the_section_of_a_tag_or_what_is_unreleased(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main([], tree) == 0
    assert capsys.readouterr().out == "- Now.\n"
    heading = "## [Unreleased]\n\n- Next.\n\n## [1.2.3] - 2026-12-01\n"
    (tree / "CHANGELOG.md").write_text(UNRELEASED.replace("## [Unreleased]\n", heading) + OLD)
    for tag in ([], ["v1.2.3"]):
        assert release.main(tag, tree) == 0
        assert capsys.readouterr().out == "- Now.\n"


@pytest.mark.parametrize(
    ("file", "old", "new", "tag", "message"),
    [
        ("pyproject.toml", "1.2.3", "1.2.4", None, "CITATION.cff: expected version 1.2.4, as "),
        ("CITATION.cff", "1.2.3", "1.2.2", "v1.2.3", "CITATION.cff: expected version 1.2.3, as "),
        ("CITATION.cff", "", "", "v1.2.4", "tag: expected v1.2.3, as in pyproject.toml, got v1.2.4."),
        ("CITATION.cff", "", "", "1.2.3", "tag: expected v1.2.3, as in pyproject.toml, got 1.2.3."),
        ("CHANGELOG.md", "", "", "v1.2.3", "CHANGELOG.md: expected a section [1.2.3], got none."),
        ("CHANGELOG.md", "[Unreleased]", "New", None, "CHANGELOG.md: expected a section [Unreleased] or [1.2.3]"),
    ],
)
def test_what_disagrees_is_one_line(
    file: str, old: str, new: str, tag: str | None, message: str, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tree / file
    path.write_text(path.read_text().replace(old, new))
    assert release.main([tag] if tag else [], tree) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"release.py: error: {message}")
