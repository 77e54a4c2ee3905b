"""Survey every model family of the installed mlx-lm, and write docs/models.jsonl and the table of docs/models.md.

python tests/testing/models_table.py [FAMILY ...]    survey FAMILY only, and keep the other rows
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import models_survey as survey
from mlx_lm.utils import MODEL_REMAPPING
from models_survey import Facts

from mlx_sparse.core import reasons
from mlx_sparse.lm.loading import UNFIT
from mlx_sparse.tools.formats import table, write

ROOT = Path(__file__).parents[2]
FACTS, PAGE = ROOT / "docs" / "models.jsonl", ROOT / "docs" / "models.md"
SECTION = re.compile(r"(?<=<!-- models -->\n).*?(?=<!-- /models -->)", re.DOTALL)

# "checkpoints" helps readers to find a row, because the config.json of a checkpoint names its family. "real" lists
# weights that were run here, "reported" results of other people, and "absent" models that this mlx-lm does not have.
NOTES: dict[str, Any] = json.loads(Path(__file__).with_name("models_notes.json").read_text(encoding="utf-8"))

HEADER = ["family of mlx-lm", "models", "`sparq`", "stays dense", "seen"]
# The table's short form of each reason in the report.
SHORT = {
    "with a sliding window (RotatingKVCache)": "sliding window",
    "with a state of fixed size instead of keys": "state of fixed size",
    reasons.OTHER_ROWS: "keys or values that differ from the KV cache",
    "with custom attention code or without attention": "custom attention code",
}


def main(argv: Sequence[str]) -> int:
    """Write both files; return 1 if a family decodes wrongly."""
    known = {row.family: row for row in read(FACTS)[0]} if argv else {}
    for name in argv or survey.modules():
        print(name, file=sys.stderr)
        if (found := survey.facts(name)) is not None:
            known[name] = found
    every = [known[name] for name in sorted(known)]
    lines = [{"mlx-lm": survey.installed()}, *map(asdict, every)]
    write(FACTS, "\n".join(map(json.dumps, lines)))
    write(PAGE, page(PAGE.read_text(encoding="utf-8"), *read(FACTS)).rstrip("\n"))
    return 1 if any(row.exact is False or row.shows is False for row in every) else 0


def read(path: Path) -> tuple[list[Facts], str]:
    """Return the saved facts and their version of mlx-lm."""
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Facts(**line) for line in lines], head["mlx-lm"]


def page(text: str, facts: Sequence[Facts], mlx_lm: str) -> str:
    """Return the page with the table of these facts."""
    return SECTION.sub(lambda _: f"{markdown(facts, mlx_lm)}\n", text)


def markdown(facts: Sequence[Facts], mlx_lm: str) -> str:
    """Return the list and the table of docs/models.md."""
    known = {found.family for found in facts}
    simple = [row for row in facts if _simple(row)]
    models = [row.family for row in simple]
    dense: dict[str, list[str]] = {}
    for row in filter(_never, facts):
        reason = " and ".join(SHORT.get(reason, reason) for reason in row.dense)
        dense.setdefault(reason, []).append(row.family)
    latent = [row for row in facts if _latent(row)]
    rest = [row for row in facts if row not in simple and row not in latent and not _never(row)]
    rows = [[f"`{row.family}`", _models(row.family), *_cells(row), _seen(row)] for row in rest]
    for absent in NOTES["absent"]:
        if absent["family"] not in known:
            seen = f"[reported]({absent['source']})"
            rows.append([f"not in mlx-lm {mlx_lm}", absent["models"], "no", absent["attention"], seen])
    whole = f"**Every layer can be sparse**, and was run: {_list(models)}."
    mla = f"**Every MLA layer can be sparse**, if you set `component_score`: {_list(row.family for row in latent)}.\n\n"
    mla = mla if latent else ""
    none = "".join(f"* {reason}: {_list(families)}.\n" for reason, families in dense.items())
    return (
        f"{_summary(facts, mlx_lm)}\n\n{whole}\n\n{mla}**No layer can be sparse** (probed, not run), by the kind "
        f"of its layers:\n\n{none}\n**Other families**:\n\n{table(HEADER, rows)}"
    )


def _list(families: Iterable[str]) -> str:
    """Return a list of families with the names of their models."""
    return "; ".join(f"`{family}`" + (f" ({names})" if (names := _models(family)) else "") for family in families)


def _never(row: Facts) -> bool:
    """Return True if no layer can be served and nothing else is known of the family."""
    known = row.family in NOTES["reported"] or row.family in UNFIT or row.note
    return row.how == "probed" and not any(row.served.values()) and not known


def _latent(row: Facts) -> bool:
    """Return True if decode steps over latents were run."""
    return row.how == "run" and "MLA" in row.kinds


def _simple(row: Facts) -> bool:
    """Return True if all methods support all layers, and there is no further information about the family."""
    special = row.family in NOTES["real"] or row.family in NOTES["reported"] or row.family in UNFIT
    served = row.how == "run" and set(row.served.values()) == {row.layers}
    right = row.exact is True and row.shows is True
    return served and right and not special and not row.note and not _latent(row)


def _summary(facts: Sequence[Facts], mlx_lm: str) -> str:
    run = [row for row in facts if row.how == "run"]
    right = sum(bool(row.exact) for row in run)
    whole = sum(row.served.get("sparq") == row.layers for row in run)
    none = sum(row.how == "probed" and not row.served.get("sparq") for row in facts)
    rest = sum(row.how == "not run" for row in facts)
    return (
        f"mlx-lm {mlx_lm}: {len(facts)} families. Tiny models of {len(run)} were decoded sparsely, {whole} of them in "
        f"every layer. With every key selected, {right} of {len(run)} gave dense attention's logits. "
        f"In {none}, no layer can be sparse. {rest} families could not be run."
    )


def _models(family: str) -> str:
    """Return the names of checkpoints, and other names of the family in config.json files."""
    also = ", ".join(f"`{name}`" for name, target in MODEL_REMAPPING.items() if target == family)
    return "; ".join(filter(None, (NOTES["checkpoints"].get(family, ""), also)))


def _cells(row: Facts) -> tuple[str, str]:
    """Return the number of served layers, and the reasons of dense layers."""
    if row.how == "not run":
        return "not run", ""
    served = f"{row.served['sparq']} of {row.layers}"
    others = [f"`{name}` {count}" for name, count in row.served.items() if count != row.served["sparq"]]
    dense = "; ".join(f"{count} {SHORT.get(reason, reason)}" for reason, count in row.dense.items())
    return ", ".join([served, *others]), dense


def _seen(row: Facts) -> str:
    """Return the cell for the evidence; empty if the tiny model was run and nothing else is known."""
    how = row.how + (f" ({row.note})" if row.note else "")
    if row.exact is False or row.shows is False:
        how = "**run: wrong**"
    seen = [] if how == "run" else [how]
    if real := NOTES["real"].get(row.family):
        seen.append(f"[{real[0]}]({real[1]})")
    if reported := NOTES["reported"].get(row.family):
        seen.append(f"[{reported[0]}]({reported[1]})")
    elif row.family in UNFIT:
        seen.append(f"**unfit**: {UNFIT[row.family]}")
    return "; ".join(seen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
