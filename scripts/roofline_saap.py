"""The roofline model for a decode step of SAAP. Nothing here is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launches import ITEM, saap_launches
from roofline_sparq import CHIPS, KINDS, SHAPES, Chip, bracket, dense, span

from mlx_sparse.methods import NEVER, SAAP, Step
from mlx_sparse.tools.bench.core import Shape
from mlx_sparse.tools.bench.mlx.saap import BUCKETS, ROUTERS, UNEVEN, Network, network_of
from mlx_sparse.tools.formats import table

SHOWN = (32_768, 131_072, 524_288)


def saap(chip: Chip, shape: Shape, S: int, config: SAAP, router: Network) -> tuple[float, float]:
    """Bracket of a step of SAAP with all that the cache does for it."""
    share = min(UNEVEN * config.probes / router.buckets, 1.0)
    return bracket(chip, saap_launches(shape, S, config, router, share))


def advised(letter: str, shape: Shape, config: SAAP, router: Network) -> int | None:
    """Keys from which ``dense_below=auto`` lets a step run sparsely on chips of this kind; None if it never does."""
    network = router.weights(shape.D) * ITEM
    step = Step(shape.Hkv, shape.G, shape.D, ITEM, letter, buckets=router.buckets, network=network)
    first = config.shortest_context(step)
    return None if first >= NEVER else first


def rows(config: SAAP) -> list[dict[str, Any]]:
    """For each chip, shape and network: brackets of the time."""
    return [
        {
            "chip": chip.name,
            "letter": chip.letter,
            "bandwidth": chip.bandwidth,
            "shape": str(shape),
            "hidden": hidden,
            "advised_from": advised(chip.letter, shape, config, network_of(shape, hidden)),
            "microseconds": {
                S: {
                    "dense": dense(chip, shape, S),
                    "saap": saap(chip, shape, S, config, network_of(shape, hidden)),
                }
                for S in SHOWN
            },
        }
        for chip in CHIPS
        for shape in SHAPES
        for hidden in ROUTERS
    ]


def text(rows: Sequence[dict[str, Any]], config: SAAP) -> str:
    """The rows for people."""
    first = str(SHAPES[0])
    kind = {(row["shape"], row["hidden"], row["letter"]): row["advised_from"] for row in rows}
    advice = [
        [shape, hidden, *(f"{kind[shape, hidden, letter] or 0:,}" for letter in KINDS)]
        for shape, hidden in dict.fromkeys((row["shape"], row["hidden"]) for row in rows)
    ]
    times = [
        [row["chip"], row["hidden"], f"{S:,}", span(ends["dense"]), span(ends["saap"])]
        for row in rows
        if row["shape"] == first
        for S, ends in row["microseconds"].items()
    ]
    return "\n\n".join(
        [
            f"A model, not a measurement: one layer and decode step, {config}, float16, B = 1, {BUCKETS:,} buckets; "
            f"those visited hold {UNEVEN} times their share of the keys.",
            "Keys from which a step is sparse with dense_below=auto (0: never):",
            table(["heads x KV heads x D", "hidden units", *KINDS.values()], advice),
            f"Microseconds for {first}, best to worst:",
            table(["chip", "hidden units", "keys", "dense", "saap"], times),
        ]
    )
