#!/usr/bin/env python3
"""Compare SparQ with a fixed and with an adaptive budget (sparq.25) at the same mean number of attended keys.

python scripts/adaptive_budget.py [--model MODEL] [--tasks TASK ...] [--context N] [--limit N] [--out FILE | --cost]

For each budget, the script finds the `recall` that attends to about so many keys, on text that the tasks do not use.
It runs the adaptive budget on a task, and then a fixed budget with the mean number of keys that this run attended to.
Both have the same local window, so both move the same mean number of bytes. Prompts have a dense prefill. Columns:

keys      mean number of attended keys per KV head and decode step
fixed     mean result of the fixed budget; likewise "adaptive"
better    mean of the paired improvements of the adaptive budget, with its standard error
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm import load
from recall import step_times
from tqdm import tqdm

import mlx_sparse
from mlx_sparse.files import cache_directory
from mlx_sparse.tools.assets import blas
from mlx_sparse.tools.assets.models import find_model
from mlx_sparse.tools.evaluate import texts
from mlx_sparse.tools.evaluate.results import Outcome
from mlx_sparse.tools.evaluate.runner import Steps, log_softmax, position_scores
from mlx_sparse.tools.evaluate.tasks import TASKS, encode
from mlx_sparse.tools.formats import table

MEASURES = {"bits_per_byte": "bits", "repetition": "accuracy", "needle": "accuracy", "key_value": "accuracy"}
LOWER_IS_BETTER = ("bits", "kl")
TOKENS = 24  # decode steps of an example
MOST = 512  # `top_k` of the adaptive budget
TURNS = 4
HEADER = ("task", "measure", "keys", "recall", "dense", "fixed", "adaptive", "better")


def main() -> int:
    """Print a table for each task, or the step times, and return the exit code."""
    args = _parse()
    blas.restart_script(True)
    model, tokenizer, *_ = load(find_model(args.model, cache_directory(), args.accept_license))
    (text,) = texts.read([args.text])
    tokens = encode(tokenizer, text.text)

    def subject(task: str, limit: int, seed: int) -> Steps:
        made = TASKS[task](tokens, tokenizer, context=args.context, limit=limit, seed=seed)
        short = [dataclasses.replace(one, target=one.target[:TOKENS]) for one in made]
        return Steps(model, tokenizer, short, 512)

    held_out = subject("bits_per_byte", 4, seed=1)
    recalls = {keys: find_recall(held_out, keys) for keys in tqdm(args.keys, "recall", disable=None)}
    if args.cost:
        print(json.dumps({keys: cost(held_out, keys, recall) for keys, recall in recalls.items()}))
        return 0
    for task in args.tasks:
        rows = []
        examples = subject(task, args.limit, seed=0)
        dense, _ = run(examples, "dense")
        for keys, recall in tqdm(recalls.items(), task, disable=None):
            adaptive, mean = run(examples, attn(keys // 4, MOST, recall))
            fixed, _ = run(examples, attn(keys // 4, round(mean)))
            about = {"model": args.model or "smollm2-135m-instruct", "task": task, "context": args.context}
            about |= {"examples": len(adaptive), "keys": mean, "recall": recall}
            rows += [about | row for row in compare(dense, fixed, adaptive, MEASURES.get(task, "accuracy"))]
        if args.out:
            with args.out.open("a") as out:
                out.writelines(json.dumps(row) + "\n" for row in rows)
        print(table(HEADER, ([_cell(row, name) for name in HEADER] for row in rows)), flush=True)
    return 0


def attn(local_window: int, top_k: int, recall: float = 0.0) -> str:
    """Return SparQ with the given budget as text."""
    adaptive = f",recall={recall}" if recall else ""
    return f"sparq:top_k={top_k},local_window={local_window}{adaptive},dense_below=0"


def find_recall(subject: Steps, keys: int) -> float:
    """Return the `recall` with which decode steps attend to about ``keys`` keys, by bisection to 0.004."""
    low, high = 0.0, 1.0
    while high - low > 0.004:
        middle = (low + high) / 2
        low, high = (middle, high) if run(subject, attn(keys // 4, MOST, middle))[1] < keys else (low, middle)
    return round(low, 3)


def run(subject: Steps, method: str) -> tuple[list[Outcome], float]:
    """Decode the targets. Return the outcome of each example, and an adaptive budget's mean number of attended keys."""
    caches, scores = copy.deepcopy(subject.cache), []
    with mlx_sparse.sparse(subject.model, method) as report:
        for position in range(subject.inputs.shape[1]):
            logp = log_softmax(subject.model(subject.inputs[:, position : position + 1], cache=caches)[:, 0])
            scores.append(position_scores(logp, subject.reference[:, position], subject.targets[:, position]))
    keys = 0.0 if report.recall is None else report.recall.as_dict().get("keys", 0.0)
    return subject._outcomes(np.stack(scores, axis=1)), keys


def compare(dense: list[Outcome], fixed: list[Outcome], adaptive: list[Outcome], measure: str) -> list[dict[str, Any]]:
    """Return a row with means and the paired improvement for ``measure``, and a row for the KL divergence."""
    rows = []
    for name in (measure, "kl"):
        ours, theirs, best = (np.array([getattr(one, name) for one in found]) for found in (adaptive, fixed, dense))
        better = (theirs - ours) if name in LOWER_IS_BETTER else (ours - theirs)
        error = float(better.std(ddof=1) / len(better) ** 0.5)
        found = {"dense": best.mean(), "fixed": theirs.mean(), "adaptive": ours.mean(), "better": better.mean()}
        rows.append({"measure": name} | {key: float(value) for key, value in found.items()} | {"error": error})
    return rows


def cost(subject: Steps, keys: int, recall: float) -> dict[str, float]:
    """Return the mean number of keys, and the median time of adaptive steps relative to fixed steps."""
    mean = run(subject, attn(keys // 4, MOST, recall))[1]
    methods = [attn(keys // 4, MOST, recall), attn(keys // 4, round(mean))]
    times: dict[str, list[Any]] = {method: [] for method in methods}
    for turn in range(TURNS):
        for method in methods[:: 1 if turn % 2 else -1]:
            times[method].append(step_times(subject, method))
    adaptive, fixed = (np.array(times[method]) for method in methods)
    return {"keys": mean, "ratio": float(np.median(adaptive / fixed))}


def _cell(row: dict[str, Any], name: str) -> Any:
    if name == "better":
        return f"{row['better']:+.4f} ± {row['error']:.4f}"
    value = row[name]
    return value if isinstance(value, str) else f"{value:.0f}" if name == "keys" else f"{value:.3f}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or name of a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--accept-license", metavar="NAME", help="license of a model that needs consent")
    parser.add_argument("--text", default="shakespeare", help="file or name of a text")
    parser.add_argument("--tasks", nargs="+", default=list(MEASURES), choices=list(TASKS))
    parser.add_argument("--keys", nargs="+", type=int, default=[32, 64, 128, 256], help="mean numbers of keys")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--limit", type=int, default=50, help="number of examples, decoded as one batch")
    parser.add_argument("--out", type=Path, help="append one JSON line for each row to this file")
    parser.add_argument("--cost", action="store_true", help="time decode steps instead")
    args = parser.parse_args()
    if args.context <= MOST:
        parser.error(f"--context: expected more than {MOST} tokens, got {args.context}.")
    return args


if __name__ == "__main__":
    sys.exit(main())
