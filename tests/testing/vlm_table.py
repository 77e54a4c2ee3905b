"""Compare tiny models of mlx-vlm with the same models of mlx-lm, and write docs/models_vlm.jsonl and docs/models.md.

python tests/testing/vlm_table.py [FAMILY ...]    compare FAMILY only, and keep the other rows
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import family_models
import mlx.core as mx
import models_survey
import vlm_models

import mlx_sparse
from mlx_sparse.lm.model import NothingServed
from mlx_sparse.tools.formats import write

ROOT = Path(__file__).parents[2]
FACTS, PAGE = ROOT / "docs" / "models_vlm.jsonl", ROOT / "docs" / "models.md"
SECTION = re.compile(r"(?<=<!-- models of mlx-vlm -->\n).*?(?=<!-- /models of mlx-vlm -->)", re.DOTALL)
FEW = "sparq:rank=4,top_k=4,dense_below=0"
PROMPT, STEPS = 40, 4
CRASHES = {"phi3small": "not run: mlx-vlm's dense model ends Python with a segmentation fault on a CPU"}
PARTS = {"mistral4"}  # mlx-vlm loads this text model only inside mistral3: test_vlm_families.py

# For example, mlx-vlm reads the RoPE base of gemma3_text from another field, and always scales internlm's RoPE.
APART = "The libraries implement these families differently, so the dense logits differ too. Largest differences"


@dataclass
class Facts:
    """Result of one family that both libraries have.

    Attributes:
        family: name of the family in both libraries.
        layers, served: number of layers, and of layers that SparQ serves, in mlx-vlm's model.
        dense: number of dense layers by reason.
        dense_difference, sparse_difference: largest difference of the logits of the two libraries.
        shows: True if sparse logits differ from dense logits.
        restored: True if the logits after `disable` equal those of an untouched model.
        note: error that prevented a run, or the refusal.
    """

    family: str
    layers: int = 0
    served: int = 0
    dense: dict[str, int] = field(default_factory=dict)
    dense_difference: float | None = None
    sparse_difference: float | None = None
    shows: bool = False
    restored: bool = False
    note: str = ""

    @property
    def equal(self) -> bool:
        """True if both libraries give the same sparse logits bit for bit, unlike dense logits."""
        return self.sparse_difference == 0 and self.shows and self.restored


def families() -> list[str]:
    """Return the names of all families that both libraries have."""
    return sorted((set(vlm_models.families()) & set(models_survey.modules())) - PARTS)


def facts(family: str) -> Facts:
    """Compare the two models of a family."""
    found = Facts(family)
    if family in CRASHES:
        found.note = CRASHES[family]
        return found
    try:
        _compare(found)
    except NothingServed as error:
        reasons = ", ".join(f"{count} {reason}" for reason, count in error.report.dense_layers.items())
        found.note = f"dense: {reasons}" if reasons else "dense: own attention, or none"
    # The code of a family may raise any error for an invented configuration, or require a GPU.
    except Exception as error:
        found.note = f"not run: {textwrap.shorten(str(error) or type(error).__name__, 80, placeholder=' ...')}"
    return found


def _compare(found: Facts) -> None:
    ours, theirs = vlm_models.any_pair(found.family)

    prompt = family_models.prompt_of(PROMPT)

    def logits(model: Any) -> mx.array:
        return models_survey.step_logits(model, prompt, prompt[:STEPS])

    first, dense = logits(ours), logits(theirs)
    found.dense_difference = _difference(first, dense)
    with mlx_sparse.sparse(theirs, FEW) as report:
        sparse = logits(theirs)
    found.layers, found.served, found.dense = report.layers, report.served_layers, dict(report.dense_layers)
    with mlx_sparse.sparse(ours, FEW):
        found.sparse_difference = _difference(logits(ours), sparse)
    found.shows = _difference(sparse, dense) > 1e-2 * float(mx.abs(dense).max())
    found.restored = bool(mx.array_equal(logits(theirs), dense).item())


def _difference(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a - b).max())


def main(argv: Sequence[str]) -> int:
    """Write both files; return 1 if a family decodes wrongly."""
    known = {row.family: row for row in read()} if argv else {}
    for family in argv or families():
        print(family, file=sys.stderr)
        known[family] = facts(family)
    rows = [known[family] for family in sorted(known)]
    head = {"mlx-lm": version("mlx-lm"), "mlx-vlm": version("mlx-vlm")}
    write(FACTS, "\n".join(map(json.dumps, [head, *map(asdict, rows)])))
    text = SECTION.sub(lambda _: f"{markdown(rows, head)}\n", PAGE.read_text(encoding="utf-8"))
    write(PAGE, text.rstrip("\n"))
    return 1 if any(row.served and not row.restored for row in rows) else 0


def read() -> list[Facts]:
    """Return the saved facts."""
    return [Facts(**json.loads(line)) for line in FACTS.read_text(encoding="utf-8").splitlines()[1:]]


def markdown(rows: Sequence[Facts], head: dict[str, str]) -> str:
    """Return the section of docs/models.md."""
    equal = [row for row in rows if row.equal]
    whole = "; ".join(f"`{row.family}`" for row in equal if row.served == row.layers)
    part = "; ".join(f"`{row.family}` ({row.served} of {row.layers})" for row in equal if row.served != row.layers)
    lines: dict[str, list[str]] = {}
    for row in rows:
        if row.served and not row.equal:
            apart = f"{row.dense_difference:.0e} dense, {row.sparse_difference:.0e} sparse"
            lines.setdefault(APART, []).append(f"`{row.family}` ({apart})")
        elif not row.served:
            what = "Dense layers only" if row.dense or not row.note.startswith("not run") else "Not run here"
            lines.setdefault(what, []).append(f"`{row.family}`")
    rest = "".join(f"* {what}: {'; '.join(names)}.\n" for what, names in lines.items())
    return (
        f"mlx-vlm {head['mlx-vlm']} and mlx-lm {head['mlx-lm']} share {len(rows)} families. Tiny models of both "
        "libraries with the same weights were compared in float32 on a CPU. "
        f"For {len(equal)} families the sparse logits are equal **bit for bit**. After `disable`, mlx-vlm's model "
        "gives the logits of an untouched model.\n\n"
        f"**Every layer can be sparse**: {whole}.\n\n**Some layers can be sparse**: {part}.\n\n"
        f"**Other families**:\n\n{rest}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
