"""Survey every model family of the installed mlx-lm, and write docs/models.jsonl and the table of docs/models.md.

python scripts/models_table.py [FAMILY ...]    of others than FAMILY, what was found before stays
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_sparse.tools.formats import write
from mlx_sparse.tools.models import survey, table

ROOT = Path(__file__).parents[1]
FACTS, PAGE = ROOT / "docs" / "models.jsonl", ROOT / "docs" / "models.md"
SECTION = re.compile(r"(?<=<!-- models -->\n).*?(?=<!-- /models -->)", re.DOTALL)


def main(argv: Sequence[str]) -> int:
    """Write both files; 1 if a family decodes wrongly."""
    known = {one.family: one for one in read(FACTS)[0]} if argv else {}
    new = survey.survey(argv or None, lambda name: print(name, file=sys.stderr))
    known |= {one.family: one for one in new}
    found = [known[name] for name in sorted(known)]
    lines = [{"mlx-lm": survey.installed()}, *(one.as_dict() for one in found)]
    write(FACTS, "\n".join(json.dumps(line) for line in lines))
    write(PAGE, page(PAGE.read_text(encoding="utf-8"), *read(FACTS)).rstrip("\n"))
    return 1 if any(one.exact is False or one.shows is False for one in found) else 0


def read(path: Path) -> tuple[list[survey.Facts], str]:
    """The facts that were written, and the version of mlx-lm that they are of."""
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [survey.Facts(**line) for line in lines], head["mlx-lm"]


def page(text: str, facts: Sequence[survey.Facts], mlx_lm: str) -> str:
    """The page with the table of these facts."""
    return SECTION.sub(lambda _: f"{table.markdown(facts, mlx_lm, in_the_tests())}\n", text)


def in_the_tests() -> set[str]:
    """Families whose tiny models the tests decode with."""
    sys.path.insert(0, str(ROOT / "tests" / "fixtures"))
    try:
        from tiny_models import FAMILIES, MORE
    finally:
        sys.path.pop(0)
    return {*FAMILIES, *MORE}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
