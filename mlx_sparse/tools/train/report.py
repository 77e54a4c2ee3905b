"""What a training achieved, per KV head on held-out text: figures, a table, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from .. import formats
from .recall import SELECTIVITIES
from .train import FEWEST_ROWS

ROUTERS = ("trained", "kmeans")


@dataclass(frozen=True)
class HeadReport:
    """One KV head.

    Attributes:
        rows: long-range queries that it was trained on; too few, and the k-means router is what it keeps.
        long_range: share of the collected queries that are long-range.
        loss: KL divergence of each router from the targets of held-out queries, nats; empty without such queries.
        recall: of each router, at `recall.SELECTIVITIES`.
        imbalance: (saap.13) of the held-out keys.
    """

    layer: int
    head: int
    rows: int
    long_range: float
    loss: dict[str, float]
    recall: dict[str, list[float]]
    imbalance: float


def table(heads: Sequence[HeadReport]) -> str:
    """Markdown: a line per head, and their mean."""
    at = [f"{share:.0%}" for share in SELECTIVITIES]
    header = ["layer", "head", "rows", *(f"loss {name}" for name in ROUTERS)]
    header += [f"{name} {share}" for name in ROUTERS for share in at] + ["imbalance"]
    lines = []
    for found in heads:
        cells = [str(found.layer), str(found.head), f"{found.rows:,}"]
        cells += [f"{found.loss[name]:.3f}" if name in found.loss else "" for name in ROUTERS]
        cells += [f"{value:.3f}" for name in ROUTERS for value in found.recall[name]]
        lines.append([*cells, f"{found.imbalance:.2f}"])
    means = summary(heads)
    cells = ["mean", "", f"{means['rows']:,.0f}", *(f"{means['loss'].get(name, 0):.3f}" for name in ROUTERS)]
    cells += [f"{value:.3f}" for name in ROUTERS for value in means["recall"][name]]
    notes = [
        f"rows: queries trained on, which look far away; a head with fewer than {FEWEST_ROWS} routes by its centroids.",
        "The rest is of text that was not trained on. loss: KL divergence from where long-range attention goes.",
        "ROUTER N%: what share of that attention is found by visiting N% of the keys that are not attended anyway;",
        "kmeans routes by the centroids, the baseline. imbalance: 1 if all buckets are equal.",
    ]
    return "\n".join([formats.table(header, [*lines, [*cells, ""]]), "", *notes])


def summary(heads: Sequence[HeadReport]) -> dict[str, Any]:
    """The means of rows, losses and recall over the heads."""
    losses = {name for found in heads for name in found.loss}
    return {
        "rows": mean(found.rows for found in heads),
        "loss": {name: mean(found.loss[name] for found in heads if name in found.loss) for name in sorted(losses)},
        "recall": {
            name: [mean(found.recall[name][i] for found in heads) for i in range(len(SELECTIVITIES))]
            for name in heads[0].recall
        },
    }


def as_dict(heads: Sequence[HeadReport]) -> dict[str, Any]:
    """The heads and their means as plain data for JSON."""
    return {"selectivities": list(SELECTIVITIES), "mean": summary(heads), "heads": [asdict(found) for found in heads]}
