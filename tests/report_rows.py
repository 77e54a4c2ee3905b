"""Rows as an evaluation and a benchmark leave them, for the tests of the report."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

from mlx_sparse.tools.evaluate.report.read import SIDES
from mlx_sparse.tools.evaluate.results import Depth, Outcome, Row
from mlx_sparse.tools.evaluate.selection import SelectionRow

NAN = Outcome(*[math.nan] * 6)
ZERO = Outcome(*[0.0] * 6)
DENSE = Outcome(1.14, 0.9, 1.0, 0.0, 40.0, 0.5)
CALLS = 1000
MAP = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
HOSTILE = "<script src='http://x.example/'>alert(1)</script>&\"$\\frac$\x1b\x00"


def row(method: str, accuracy: float = 0.9, share: float = 1.0, **changes: Any) -> Row:
    mean = replace(DENSE, accuracy=accuracy, bits=2.04 - accuracy)
    delta = Outcome(*(a - b for a, b in zip(vars(mean).values(), vars(DENSE).values(), strict=True)))
    fields: dict[str, Any] = {
        "task": "repetition",
        "method": method,
        "attn": method,
        "budget": None,
        "context": 1024,
        "examples": 20,
        "mean": mean,
        "mean_error": Outcome(0.01, 0.02, 0.03, 0.004, 5.0, 0.06),
        "delta": delta,
        "error": ZERO if method == "dense" else Outcome(0.001, 0.003, 0.005, 0.0007, 0.9, 0.011),
        "formula": None if method == "dense" else share * 1.1,
        "compression": share,
        "sparse_calls": 0 if method == "dense" else CALLS,
        "dense_calls": 0,
    }
    return Row(**fields | changes)


SHORT = {"sparse_calls": 0, "dense_calls": CALLS, "dense_reasons": {"fewer than 2,048 keys": CALLS}}
HALF = {"dense_calls": CALLS, "dense_reasons": {"a sliding window": CALLS}}
DECODE = [
    row("dense"),
    row("sparq:rank=16", 0.89, 0.5, budget="1/2"),
    row("sparq:rank=16", 0.86, 0.124, budget="1/8", attn="sparq:rank=16,top_k=77"),
    row("h2o", 0.5, 0.25, **HALF),
    row("streaming", 0.9, 1.0, **SHORT),
]
PROMPT = [
    row("dense", context=4096, prefill=True),
    row("sample", 0.88, context=4096, prefill=True, density=MAP, sampled=0.06, mass=[0.01, 0.8, 0.95]),
]
DEPTHS = [Depth(0.0, 4, 0.25, 0.0), Depth(0.5, 4, 0.5, 0.25), Depth(1.0, 4, 1.0, 1.0)]
NEEDLE = [
    row("sparq", 0.6, 0.3, task="needle", context=context, depths=DEPTHS, **changes)
    for context, changes in ((1024, SHORT), (2048, {}))
]
ROWS = [*DECODE, *PROMPT, *NEEDLE]
SELECTION = [
    SelectionRow(score, rank, 64, 128, 2048, 30, 4, rank / 64, 0.01, rank / 80, 3, rank / 70, 0.02, 0.9, 0.1, 0.003)
    for score, rank in product(("query", "query_key"), (8, 32))
]


def speed_row(S: int, **changes: Any) -> dict[str, Any]:
    times = {"dense_us": S / 10, "sparse_us": S / 20, "plain_read_us": S / 30}
    spread = {f"{side}_{end}": value * by for side, value in times.items() for end, by in (("low", 0.9), ("high", 1.3))}
    sizes = {"shape": "8x2x64", "batch": 1, "S": S, "bytes_formula": 10 * S, "bytes_plain": 40 * S, "ratio": 2.0}
    about = {"method": "sparq", "backend": "ops", "dtype": "float16", "note": None, "failed": False}
    run = {"command": "mlx-sparse bench", "date": "2026-11-21", "machine": {"chip": "a chip"}}
    return about | sizes | times | spread | {"run": run} | changes


WRONG = {"failed": True, "note": "wrong", "ratio": None, **dict.fromkeys(SIDES)}
SPEED = [speed_row(1024), speed_row(2048), speed_row(4096, **WRONG)]
FACTS = {
    "command": "mlx-sparse eval --methods sparq",
    "date": "2026-11-21",
    "seed": 3,
    "prefill_step_size": 2048,
    "batch": 8,
    "versions": {"python": "3.11.7"},
    "machine": {"chip": "a chip", "memory": 1 << 34, "device": None},
    "model": {
        "name": "tiny",
        "type": "llama",
        "hash": "ab" * 32,
        "layers": 2,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": [16, 32],
    },
    "texts": [{"name": "a text", "sha256": "cd" * 32, "bytes": 10, "tokens": 3}],
}
