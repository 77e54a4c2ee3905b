#!/usr/bin/env python3
"""Compare SparQ's estimated attention recall (sparq.24) with the exact attention recall in each layer.

python scripts/recall.py [--attn ATTN ...] [--context N] [--json | --cost]

The script decodes text teacher-forced after a dense prefill. At each decode step it also computes the exact attention
recall, which takes a dense pass over the keys. The estimated and the exact recall are averaged over the query heads of
a KV head. Columns:

bias  mean of the estimate minus the exact recall
corr  correlation over all decode steps, sequences and KV heads
over  share of the decode steps in which the estimate is more than 0.02 too high
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load

import mlx_sparse
from mlx_sparse.cache.sparse_cache import DecodeStep, SparseCache
from mlx_sparse.files import cache_directory
from mlx_sparse.lm import call
from mlx_sparse.methods import registry
from mlx_sparse.tools.assets import blas
from mlx_sparse.tools.assets.models import find_model
from mlx_sparse.tools.evaluate import texts
from mlx_sparse.tools.evaluate.runner import Steps
from mlx_sparse.tools.evaluate.tasks import TASKS, encode
from mlx_sparse.tools.formats import table

HIGH = 0.02  # an estimate that exceeds the exact recall by more counts as too high
# Number of decode steps for each step that counts the estimate.
MODES = {"never": 1 << 40, "every fourth step": 4, "every step": 1}
TURNS = 6
HEADER = ("layer", "estimated", "exact", "bias", "corr", "over")


def main() -> int:
    """Print a table for each method, and return the exit code."""
    args = _parse()
    blas.restart_script(True)
    model, tokenizer, *_ = load(find_model(args.model, cache_directory(), args.accept_license))
    (text,) = texts.read([args.text])
    made = TASKS[args.task](encode(tokenizer, text.text), tokenizer, context=args.context, limit=args.limit, seed=0)
    subject = Steps(model, tokenizer, list(made), 2048)
    for attn in args.attn:
        if args.cost:
            print(attn, *(f"{mode}: {ratio:.3f}" for mode, ratio in cost(subject, attn).items()), sep="\n")
            continue
        pairs = measure(subject, attn)
        pairs["all"] = np.concatenate(list(pairs.values()), axis=1)
        rows = [{"layer": layer, **compare(pair)} for layer, pair in pairs.items()]
        about = {"attn": attn, "text": text.name, "task": args.task, "context": args.context, "limit": args.limit}
        if args.json:
            print("\n".join(json.dumps({**about, **row}) for row in rows), flush=True)
        else:
            print(*(f"{name}={value}" for name, value in about.items()))
            cells = ([row["layer"], *(f"{row[name]:.3f}" for name in HEADER[1:])] for row in rows)
            print(table(HEADER, cells))
    return 0


def cost(subject: Steps, attn: str) -> dict[str, float]:
    """Time decode steps in each of the `MODES`, and return a dict from mode to slowdown. Mode "never" is the baseline.

    In mode "never", no estimate is recorded, so MLX computes no estimate. The slowdown is the median ratio of a mode's
    time to the baseline's time. Each ratio compares the same four consecutive decode steps of two runs in one turn.
    """
    times: dict[str, list[Any]] = {mode: [] for mode in MODES}
    for turn in range(TURNS):
        for mode in list(MODES)[turn % len(MODES) :] + list(MODES)[: turn % len(MODES)]:
            call.SAMPLED_STEPS = MODES[mode]
            steps = step_times(subject, attn)
            times[mode].append(steps[: len(steps) // 4 * 4].reshape(-1, 4).sum(axis=1))
    never = np.array(times.pop("never"))
    return {mode: float(np.median(np.array(found) / never)) for mode, found in times.items()}


def step_times(subject: Steps, attn: str) -> Any:
    """Decode the targets of ``subject`` with ``attn``. Return the seconds of each decode step after the fourth."""
    caches, ends = copy.deepcopy(subject.cache), [time.perf_counter()]
    with mlx_sparse.sparse(subject.model, attn):
        for position in range(subject.inputs.shape[1]):
            mx.eval(subject.model(subject.inputs[:, position : position + 1], cache=caches))
            ends.append(time.perf_counter())
    return np.diff(ends)[4:]  # the first steps build the scoring keys


def measure(subject: Steps, attn: str) -> dict[Any, Any]:
    """Decode the targets of ``subject`` with ``attn``, and return a dict from layer to an array ``(2, n)``.

    Row 0 contains the estimated recall and row 1 the exact recall. ``n`` is the product of the numbers of decode steps,
    sequences and KV heads.
    """
    found: dict[int, list[Any]] = {}
    caches = copy.deepcopy(subject.cache)
    with mlx_sparse.sparse(subject.model, attn), recording(caches, found):
        for position in range(subject.inputs.shape[1]):
            mx.eval(subject.model(subject.inputs[:, position : position + 1], cache=caches))
    return {layer: np.concatenate(pairs, axis=1) for layer, pairs in sorted(found.items())}


@contextlib.contextmanager
def recording(caches: list[Any], found: dict[int, list[Any]]) -> Iterator[None]:
    """Append an array ``(2, n)`` to ``found[layer]`` for each decode step that a layer runs inside the ``with`` block.

    Row 0 contains the estimated recall and row 1 the exact recall. ``n`` is the number of sequences times the number of
    KV heads. If a step has no estimate, nothing is appended.
    """
    take_step = SparseCache.take_step

    def recorded(cache: SparseCache, queries: mx.array, step: DecodeStep, scale: float) -> tuple[mx.array, mx.array]:
        out, lse = take_step(cache, queries, step, scale)
        estimate = cache.aux_states[step.config.name].recall
        if estimate is not None:
            dense = registry.load("dense_lse", "ops")(queries, cache.rows("ops")[0], scale=scale, left_padding=None)
            exact = mx.exp(lse - dense).reshape(*estimate.shape, -1).mean(axis=-1)
            layer = next(index for index, one in enumerate(caches) if one is cache)
            found.setdefault(layer, []).append(np.array(mx.stack([estimate.flatten(), exact.flatten()])))
        return out, lse

    SparseCache.take_step = recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        SparseCache.take_step = take_step  # type: ignore[method-assign]


def compare(pair: Any) -> dict[str, float]:
    """Return a dict from the name of each column in the table to its value.

    ``pair (2, n)`` contains the estimated recall in row 0 and the exact recall in row 1.
    """
    estimate, exact = pair.astype(np.float64)
    values = {
        "estimated": estimate.mean(),
        "exact": exact.mean(),
        "bias": (estimate - exact).mean(),
        "corr": np.corrcoef(pair)[0, 1],
        "over": (estimate > exact + HIGH).mean(),
    }
    return {name: float(value) for name, value in values.items()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attn", nargs="+", default=["sparq:dense_below=0"], help="SparQ with its parameters")
    parser.add_argument("--model", help="folder or name of a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--accept-license", metavar="NAME", help="license of a model that needs consent")
    parser.add_argument("--text", default="shakespeare", help="file or name of a text")
    parser.add_argument("--task", default="bits_per_byte", choices=list(TASKS))
    parser.add_argument("--context", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--limit", type=int, default=4, help="number of prompts, decoded as one batch")
    parser.add_argument("--json", action="store_true", help="print one line for each layer")
    parser.add_argument("--cost", action="store_true", help="time decode steps with and without the estimate instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
