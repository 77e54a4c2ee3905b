"""Survey every model family of the installed mlx-lm, and write docs/models.jsonl and the table of docs/models.md.

PYTHONPATH=tests/fixtures python tests/lm/models_table.py [FAMILY ...]    survey FAMILY only, and keep the rest
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import models_notes as notes
import models_survey as survey
from mlx_lm.utils import MODEL_REMAPPING
from models_survey import Facts

from mlx_sparse.lm.unfit_models import UNFIT
from mlx_sparse.tools.formats import table, write

ROOT = Path(__file__).parents[2]
FACTS, PAGE = ROOT / "docs" / "models.jsonl", ROOT / "docs" / "models.md"
SECTION = re.compile(r"(?<=<!-- models -->\n).*?(?=<!-- /models -->)", re.DOTALL)

HEADER = ["family of mlx-lm", "models", "`sparq`", "stays dense", "seen"]
# Reasons of the report, as the table writes them.
SHORT = {
    "with a sliding window (RotatingKVCache)": "sliding window",
    "that keep a state of fixed size and no keys": "state of fixed size",
    "with keys or values that are not the cache's (MLA)": "MLA",
    "with key and value head dims that differ (MLA)": "MLA",
    "that compute attention themselves or have none": "own attention",
}


def main(argv: Sequence[str]) -> int:
    """Write both files; return 1 if a family decodes wrongly."""
    known = {one.family: one for one in read(FACTS)[0]} if argv else {}
    for name in argv or survey.modules():
        print(name, file=sys.stderr)
        if (found := survey.facts(name)) is not None:
            known[name] = found
    every = [known[name] for name in sorted(known)]
    lines = [{"mlx-lm": survey.installed()}, *map(asdict, every)]
    write(FACTS, "\n".join(map(json.dumps, lines)))
    write(PAGE, page(PAGE.read_text(encoding="utf-8"), *read(FACTS)).rstrip("\n"))
    return 1 if any(one.exact is False or one.shows is False for one in every) else 0


def read(path: Path) -> tuple[list[Facts], str]:
    """Return the facts that were written, and the version of mlx-lm that they are of."""
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Facts(**line) for line in lines], head["mlx-lm"]


def page(text: str, facts: Sequence[Facts], mlx_lm: str) -> str:
    """Return the page with the table of these facts."""
    return SECTION.sub(lambda _: f"{markdown(facts, mlx_lm)}\n", text)


def markdown(facts: Sequence[Facts], mlx_lm: str) -> str:
    """Return the list and the table of docs/models.md."""
    known = {found.family for found in facts}
    simple = [one for one in facts if _simple(one)]
    known_as = {one.family: _models(one.family) for one in simple}
    names = "; ".join(f"`{family}`" + (f" ({models})" if models else "") for family, models in known_as.items())
    rest = [one for one in facts if one not in simple]
    rows = [[f"`{one.family}`", _models(one.family), *_cells(one), _seen(one)] for one in rest]
    for absent in notes.ABSENT:
        if absent.family not in known:
            said = f"[reported]({absent.source})"
            rows.append([f"not in mlx-lm {mlx_lm}", absent.models, "no", absent.attention, said])
    whole = f"**Every layer can be sparse**, and was run: {names}."
    return f"{_summary(facts, mlx_lm)}\n\n{whole}\n\n{table(HEADER, rows)}"


def _simple(one: Facts) -> bool:
    """Return True if every method serves all layers and nothing else is known of the family."""
    special = one.family in notes.REAL or one.family in notes.REPORTED or one.family in UNFIT
    served = one.how == "run" and set(one.served.values()) == {one.layers}
    return served and one.exact is True and one.shows is True and not special and not one.note


def _summary(facts: Sequence[Facts], mlx_lm: str) -> str:
    run = [one for one in facts if one.how == "run"]
    right = sum(bool(one.exact) for one in run)
    whole = sum(one.served.get("sparq") == one.layers for one in run)
    none = sum(one.how == "probed" and not one.served.get("sparq") for one in facts)
    read = sum(one.how == "read" for one in facts)
    return (
        f"mlx-lm {mlx_lm}: {len(facts)} families. Tiny models of {len(run)} were decoded sparsely, {whole} of them in "
        f"every layer. With every key selected, {right} of {len(run)} gave dense attention's logits. "
        f"No layer of {none} can be served. Of {read} only the source was read."
    )


def _models(family: str) -> str:
    """Names by which people know it, and those that a config.json may have in its place."""
    also = ", ".join(f"`{name}`" for name, target in MODEL_REMAPPING.items() if target == family)
    return "; ".join(filter(None, (notes.CHECKPOINTS.get(family, ""), also)))


def _cells(one: Facts) -> tuple[str, str]:
    """Return the layers served, and the reasons why the others are not."""
    if one.how == "read":
        return "not run", ""
    served = f"{one.served['sparq']} of {one.layers}"
    others = [f"`{name}` {count}" for name, count in one.served.items() if count != one.served["sparq"]]
    dense = "; ".join(f"{count} {SHORT.get(reason, reason)}" for reason, count in one.dense.items())
    return ", ".join([served, *others]), dense


def _seen(one: Facts) -> str:
    """Return how the row is known, if its tiny model was not simply run."""
    how = {"run": "run", "probed": "probed", "read": "source read"}[one.how]
    how += f" ({one.note})" if one.note else ""
    if one.exact is False or one.shows is False:
        how = "**run: wrong**"
    seen = [] if how == "run" else [how]
    if real := notes.REAL.get(one.family):
        seen.append(f"[{real[0]}]({real[1]})")
    if said := notes.REPORTED.get(one.family):
        seen.append(f"[{said[0]}]({said[1]})")
    elif one.family in UNFIT:
        seen.append(_warning(one.family))
    return "; ".join(seen)


def _warning(family: str) -> str:
    return f"**unfit**: {UNFIT[family]}" if family in UNFIT else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
