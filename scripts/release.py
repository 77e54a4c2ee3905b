#!/usr/bin/env python3
"""Check that all places agree on the version, and print what CHANGELOG.md says of it.

  python scripts/release.py           the version in pyproject.toml; until it has a section, what is [Unreleased]
  python scripts/release.py v0.1.0    a tag: it has to be that version, with a section of its own in CHANGELOG.md

The notes go to standard output. What disagrees is one line on standard error, and exit status 1. Needs Python 3.11.
"""

import argparse
import re
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent


def version(root=ROOT):
    """The version: pyproject.toml has it, and every other place is held to that."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]


def notes(changelog, name):
    """What stands under the heading ``## [name]``, with or without a date behind it; None without the heading."""
    found = re.search(rf"^## \[{re.escape(name)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found and found[1].strip()


def problem(root, tag):
    """What keeps this tree, or this tag of it, from being released; None if nothing does."""
    wanted = version(root)
    if tag is not None and tag != f"v{wanted}":
        return f"tag: expected v{wanted}, as pyproject.toml says, got {tag}."
    cited = re.search(r'^version: "(.*)"$', (root / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1] != wanted:
        return f"CITATION.cff: expected version {wanted}, as pyproject.toml says, got {cited and cited[1]}."
    changelog = (root / "CHANGELOG.md").read_text()
    if tag is not None and not notes(changelog, wanted):
        return f"CHANGELOG.md: expected a section [{wanted}], got none. Rename [Unreleased] and give it the date."
    if notes(changelog, wanted) is None and notes(changelog, "Unreleased") is None:
        return f"CHANGELOG.md: expected a section [Unreleased] or [{wanted}], got neither."
    return None


def main(argv=None, root=ROOT):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag", nargs="?", help="v and the version")
    tag = parser.parse_args(argv).tag
    if found := problem(root, tag):
        print(f"release.py: error: {found}", file=sys.stderr)
        return 1
    changelog = (root / "CHANGELOG.md").read_text()
    print(notes(changelog, version(root)) or notes(changelog, "Unreleased"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
