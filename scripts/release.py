#!/usr/bin/env python3
"""Check that all files have the same version, and print the section of this version in CHANGELOG.md.

  python scripts/release.py           check the version in pyproject.toml; print its section or [Unreleased]
  python scripts/release.py v0.1.0    also check that the tag is that version and has its own section

The section goes to standard output. An error is one line on standard error, and the exit status is 1.
This script needs Python 3.11.
"""

import argparse
import re
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent


def version(root=ROOT):
    """Return the version in pyproject.toml. All other files must have the same version."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]


def notes(changelog, name):
    """Return the section of ``changelog`` with the heading ``## [name]``, or None. The heading may end with a date."""
    found = re.search(rf"^## \[{re.escape(name)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found and found[1].strip()


def problem(root, tag):
    """Return the reason why ``tag`` or the source tree in ``root`` cannot be released, or None."""
    wanted = version(root)
    if tag is not None and tag != f"v{wanted}":
        return f"tag: expected v{wanted}, as in pyproject.toml, got {tag}."
    cited = re.search(r'^version: "(.*)"$', (root / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1] != wanted:
        return f"CITATION.cff: expected version {wanted}, as in pyproject.toml, got {cited and cited[1]}."
    changelog = (root / "CHANGELOG.md").read_text()
    if tag is not None and not notes(changelog, wanted):
        return f"CHANGELOG.md: expected a section [{wanted}], got none. Rename [Unreleased] and give it the date."
    if notes(changelog, wanted) is None and notes(changelog, "Unreleased") is None:
        return f"CHANGELOG.md: expected a section [Unreleased] or [{wanted}], got neither."
    return None


def main(argv=None, root=ROOT):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag", nargs="?", help="release tag, such as v0.1.0")
    tag = parser.parse_args(argv).tag
    if found := problem(root, tag):
        print(f"release.py: error: {found}", file=sys.stderr)
        return 1
    changelog = (root / "CHANGELOG.md").read_text()
    print(notes(changelog, version(root)) or notes(changelog, "Unreleased"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
