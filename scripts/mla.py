#!/usr/bin/env python3
"""Measure the attention recall of selected latents in a model that was converted to MLA.

python scripts/mla.py [--context 2048] [--texts 20] > rows.jsonl
python scripts/mla.py --host > rows.jsonl    # time in which Python prepares a decode step

The model is that of `tests/testing/mla_stand_in.py`. Each text has two tasks, to continue the text and to copy a part
of it. The script prints a row of JSON for each task, basis, method and number of keys. The rotated basis is a random
rotation of the latents, the absorbed queries and C_q. All selections include the exact RoPE scores. There is no local
window.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from evidence import origin
from mlx_lm.models import deepseek_v3
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load
from tqdm import tqdm

import mlx_sparse
from mlx_sparse import blas
from mlx_sparse.core.attend.ops import softmax_lse
from mlx_sparse.files import cache_directory
from mlx_sparse.methods.sparq import low_rank
from mlx_sparse.methods.sparq.config import Selection
from mlx_sparse.methods.sparq.ops import sparq_logits
from mlx_sparse.methods.sparq.scoring_keys import KeyCodes, Projection
from mlx_sparse.methods.sparq.state import Codes
from mlx_sparse.tools.evaluate import texts
from mlx_sparse.tools.evaluate.inputs import encode_texts
from mlx_sparse.tools.evaluate.tasks.text import COPY_PROMPT, bits_per_byte, copying

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "testing"))
import mla_stand_in

Array = np.ndarray
TOP_KS, RANKS = (64, 128, 256, 512), (32, 64)
STEPS, EVERY = 4, 6  # measured decode steps of each task; every sixth layer is measured
CHUNK = 512  # tokens of a prefill chunk
HOST_STEPS = 60  # decode steps whose preparation is timed


class Basis:
    """Scoring keys of one layer and one text, in the model's own basis of the latents or in a rotated basis."""

    def __init__(self, covariance: Array, rotation: Array, latents: mx.array) -> None:
        """Fit the low-rank projection. ``rotation (D, D)`` is orthogonal, and ``latents`` is ``(1, 1, n, D)``."""
        self.rotation, self.start = mx.array(rotation, mx.float32), latents.shape[2] - 1
        queries, keys, shares = low_rank.components(rotation.T @ covariance @ rotation, latents @ self.rotation)
        self.shares = {rank: float(shares[..., rank - 1].mean()) for rank in RANKS}
        self.projections = {
            rank: Projection(*(mx.array(array[..., :rank], mx.float32) for array in (queries, keys)), None)
            for rank in RANKS
        }
        self.codes, self.projected = Codes(None, [0]), Codes(None, [0])

    def logits(self, queries: mx.array, latents: mx.array, scale: float) -> Iterator[tuple[str, mx.array]]:
        """Yield each method and its approximate logits ``(1, 1, H, S)`` without RoPE scores."""
        queries, latents, S = queries @ self.rotation, latents @ self.rotation, latents.shape[2]
        rows = low_rank.project(self.projections[max(RANKS)], queries, latents)[1]
        for codes, keys in ((self.codes, latents), (self.projected, rows)):
            codes.rewind(min(S - 1, self.start))  # the tasks replace rows after the common part of their prompts
            codes.extend(keys, S)
        coded, projected = self.codes.read(latents, whole=False), self.projected.read(rows, whole=False)
        spread = self.codes.spread(latents, S)
        for rank in RANKS:
            for name, weight in (("query", None), ("query_key", spread)):
                selection = Selection(rank, 1, 0, scale, weight, keys_t=coded)
                yield f"{name}:rank={rank}", sparq_logits(queries, latents, selection)
            keys_t = KeyCodes(*(array[:, :, :rank] for array in projected))
            selection = Selection(rank, 1, 0, scale, keys_t=keys_t, projection=self.projections[rank])
            yield f"low_rank:rank={rank}", sparq_logits(queries, latents, selection)


class Recorder:
    """Replacement of mlx-lm's attention function, which measures decode steps.

    Attributes:
        found: for each pair of basis and method, the recalls ``(number of TOP_KS,)`` of all layers and steps.
        fitted: dict from layers to the two bases of the current text.
    """

    def __init__(self, model: Any) -> None:
        self.attend = deepseek_v3.scaled_dot_product_attention
        self.caches: list[object] = []
        self.found: dict[tuple[str, str], list[Array]] = defaultdict(list)
        self.fitted: dict[int, list[Basis]] = {}
        layers = [layer.self_attn for layer in model.layers]
        self.covariances = {i: low_rank.query_covariance(layers[i]) for i in range(0, len(layers), EVERY)}
        D = len(self.covariances[0])
        self.rotations = np.eye(D), np.linalg.qr(np.random.default_rng(0).standard_normal((D, D)))[0]

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **how: Any) -> mx.array:
        layer = self.caches.index(cache)
        if queries.shape[2] == 1 and layer in self.covariances:
            self.measure(layer, queries, keys, how["scale"], how["mask"].swapaxes(1, 2))
        return self.attend(queries, keys, values, cache=cache, **how)

    def measure(self, layer: int, queries: mx.array, latents: mx.array, scale: float, bias: mx.array) -> None:
        if layer not in self.fitted:
            self.fitted[layer] = [Basis(self.covariances[layer], turn, latents) for turn in self.rotations]
        exact = (queries * scale).swapaxes(1, 2) @ latents.swapaxes(-1, -2) + bias
        weights, _ = softmax_lse(exact, None)
        logits = [(("any", "oracle_top_k"), exact), (("any", "bias"), bias)]
        for name, basis in zip(("pca", "rotated"), self.fitted[layer], strict=True):
            logits += [((name, method), a + bias) for method, a in basis.logits(queries, latents, scale)]
        for method, approximate in logits:
            order = mx.argsort(-softmax_lse(approximate, None)[0].sum(axis=2), axis=-1)[0, 0, : max(TOP_KS)]
            recall = mx.cumsum(weights[0, 0][:, order], axis=1).mean(axis=0)
            self.found[method].append(np.array(recall)[np.array(TOP_KS) - 1])


def measure(model: Any, tokenizer: Any, tokens: list[int], context: int, limit: int) -> dict[str, list[Any]]:
    """Return a dict from each task to the results of each text, and the captured shares under "fit"."""
    record, results = Recorder(model), defaultdict(list)
    deepseek_v3.scaled_dot_product_attention = record
    options = {"context": context, "limit": limit, "seed": 0}
    pairs = zip(*(make(tokens, tokenizer, **options) for make in (bits_per_byte, copying)), strict=True)
    for examples in tqdm(pairs, total=limit, disable=None):
        record.caches, record.fitted = make_prompt_cache(model), {}
        _prefill(model, examples[0].prompt[:-COPY_PROMPT], record.caches)
        for task, example in zip(("text", "copying"), examples, strict=True):
            record.found.clear()
            for part in (example.prompt[-COPY_PROMPT:], *([token] for token in example.target[:STEPS])):
                _prefill(model, part, record.caches)
            trim_prompt_cache(record.caches, COPY_PROMPT + STEPS)
            results[task].append({method: np.mean(rows, axis=0) for method, rows in record.found.items()})
        shares = [basis.shares for bases in record.fitted.values() for basis in bases[:1]]
        results["fit"].append({("any", f"low_rank:rank={r}"): np.mean([share[r] for share in shares]) for r in RANKS})
    return results


def _prefill(model: Any, tokens: list[int], caches: list[Any]) -> None:
    for start in range(0, len(tokens), CHUNK):
        mx.eval(model.model(mx.array(tokens[start : start + CHUNK])[None], caches))  # logits are not needed


def host_times(model: Any, attn: str) -> tuple[Array, float]:
    """Return the microseconds per layer in which Python prepares each decode step, and the kernels per layer and step.

    ``attn`` is a method as text, or empty for dense attention. It prepares Metal kernels, but a stand-in of
    `mx.fast.metal_kernel` launches none and returns zeros.
    """
    kernels = 0

    def launch(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        nonlocal kernels
        kernels += 1
        return list(map(mx.zeros, output_shapes, output_dtypes))

    caches, times = make_prompt_cache(model), []
    _prefill(model, list(range(CHUNK)), caches)
    with (
        patch.object(mx.fast, "metal_kernel", lambda **_: launch),
        patch.object(mx.metal, "is_available", lambda: True),
        patch.object(mx, "default_device", lambda: mx.Device(mx.gpu, 0)),
        mlx_sparse.sparse(model, attn) if attn else nullcontext(),
    ):
        for _ in range(HOST_STEPS):
            start = time.perf_counter()
            out = model(mx.array([[0]]), cache=caches)
            times.append((time.perf_counter() - start) / len(model.layers) * 1e6)
            mx.eval(out, [cache.state for cache in caches])
    # The first steps start the scoring keys.
    return np.array(times[HOST_STEPS // 4 :]), kernels / (HOST_STEPS * len(model.layers))


def main() -> None:
    """Print a row of JSON for each number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a prompt (default: 2048)")
    parser.add_argument("--texts", type=int, default=20, help="number of texts (default: 20)")
    parser.add_argument("--text", nargs="+", default=["novels"], help="names or files (default: novels)")
    parser.add_argument("--host", action="store_true", help="measure the time of Python instead of the recall")
    args = parser.parse_args()
    blas.load(cache_directory())
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer, *_ = load(str(mla_stand_in.write(Path(folder) / "model")))
    (tokens,) = encode_texts(tokenizer, texts.read(args.text))
    about = {
        **{"model": "smollm2-135m-instruct as deepseek_v3", "context": args.context, "examples": args.texts},
        **origin("mla.py", sys.argv[1:], "mlx", "mlx-lm"),
    }
    if args.host:
        for attn in ("", "sparq:component_score=low_rank,top_k=64,dense_below=0"):
            times, kernels = host_times(model, attn)
            row = {"key": f"mla/smollm2/host/{'low_rank' if attn else 'dense'}/microseconds", **about, "task": "host"}
            row |= {"context": CHUNK, "examples": len(times), "method": attn or "dense", "metric": "microseconds"}
            print(json.dumps({**row, "mean": float(np.median(times)), "sem": None, "kernels": kernels}))
        return
    for task, results in measure(model, tokenizer, tokens, args.context, args.texts).items():
        for basis, method in results[0]:
            rows = np.stack([np.atleast_1d(result[basis, method]) for result in results])
            errors = rows.std(axis=0, ddof=1) / math.sqrt(len(rows))
            names = [f"recall-at-{k}" for k in TOP_KS] if task != "fit" else ["captured_share"]
            for metric, mean, sem in zip(names, rows.mean(axis=0), errors, strict=True):
                short = method.replace(":rank=", "-")
                key = f"mla/smollm2/{task}/{args.context // 1024}k/{basis}/{short}/{metric}"
                found = {"task": task, "basis": basis, "method": method, "metric": metric}
                print(json.dumps({"key": key, **about, **found, "mean": float(mean), "sem": float(sem)}))


if __name__ == "__main__":
    main()
