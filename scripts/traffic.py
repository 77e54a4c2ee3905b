#!/usr/bin/env python3
"""Count the bytes that one call of the Metal kernels moves, in the harness of tests/msl.

python scripts/traffic.py [METHOD ...] > docs/results/traffic.jsonl

METHOD is sparq (16 bits, 128 keys), sparq4 (the default of `--attn sparq`), saap, sample, or a layer with multi-head
latent attention and `component_score=low_rank`: glm (GLM-4.7-Flash) or deepseek (DeepSeek V3). gather has no kernel:
its rows count MLX's array operations. The default is all methods.
The harness runs on Linux and needs clang, which the `test` extra installs.
In each launch, a cache line of 128 bytes counts once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any

import mlx.core as mx
from evidence import origin
from tqdm import tqdm

import mlx_sparse
from mlx_sparse.core import registry
from mlx_sparse.core.attend.ops import take_rows
from mlx_sparse.core.stats import Stats
from mlx_sparse.methods import Gather, SparQ
from mlx_sparse.methods.gather.ops import gather_scores, gather_select
from mlx_sparse.methods.sparq.low_rank import project
from mlx_sparse.methods.sparq.scoring_keys import Projection

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import msl

KV_HEADS, GROUP, D, ITEM = 2, 4, 128, 2
KEYS, PROMPT = 16_384, (256, 1024)  # decode: S; prefill: L, S
BUCKETS, PROBES = 128, 8
LATENT, ROPE, LATENT_HEADS, LATENT_KEYS = 512, 64, {"glm": 20, "deepseek": 128}, (32_768, 131_072)
LOW_RANK = SparQ(component_score="low_rank", reallocate=False)
GATHER = Gather(dense_below=0)
GATHER_KEYS = (8_192, 32_768, 131_072)
# Operations of MLX that launch no kernel. With contiguous arrays, all of them only change the shape.
VIEWS = ("Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unflatten")
MB = 1e6


def random(heads: int, length: int, width: int = D) -> mx.array:
    return mx.random.normal((1, heads, length, width), dtype=mx.float16)


def decode_inputs() -> tuple[mx.array, mx.array, mx.array]:
    return random(KV_HEADS * GROUP, 1), random(KV_HEADS, KEYS), random(KV_HEADS, KEYS)


def sparq(config: SparQ) -> Any:
    q, k, v = decode_inputs()
    keys_t = mx.contiguous(k.swapaxes(-1, -2)) if config.key_bits == 16 else mlx_sparse.code_keys(k)
    settings: dict[str, Any] = {"key_bits": config.key_bits, "keys_t": keys_t, "top_k": config.at(KEYS).top_k}
    return mlx_sparse.sparq_attention(q, k, v, **settings, backend="metal", return_stats=True)


def saap() -> Any:
    buckets = {
        "bucket_ids": mx.random.randint(0, BUCKETS, (1, KV_HEADS, KEYS)),
        "visited": mx.broadcast_to(mx.arange(PROBES, dtype=mx.int32), (1, KV_HEADS, PROBES)),
    }
    return mlx_sparse.saap_attention(*decode_inputs(), **buckets, backend="metal", return_stats=True)


def sample() -> Any:
    L, S = PROMPT
    q, k, v = random(KV_HEADS * GROUP, L), random(KV_HEADS, S), random(KV_HEADS, S)
    return mlx_sparse.sample_attention(q, k, v, backend="metal", return_stats=True)


def latents(G: int, S: int) -> Any:
    config = LOW_RANK.at(S)
    q, k, bias = random(G, 1, LATENT), random(1, S, LATENT), random(G, 1, S)
    projection = Projection(*(mx.random.normal((1, 1, LATENT, config.rank)) for _ in range(2)), None)
    given: dict[str, Any] = {**config.parameters(G), "bias": bias, "left_padding": None, "value_mean": None}
    given |= {"projection": projection, "keys_t": mlx_sparse.code_keys(project(projection, q, k)[1][:])}
    out, *_ = registry.load("sparq", "metal")(q, k, k, scale=LATENT**-0.5, **given)
    # The latents are keys and values, and are read once. Both formulas contain the bias.
    return out, Stats(config.elements(S, LATENT) - config.rows(S) // 2 * LATENT + G * S, S * (LATENT + G), 0)


CONFIGS = {"sparq": SparQ(key_bits=16, top_k=128, reallocate=False), "sparq4": SparQ(reallocate=False)}
METHODS: dict[str, Callable[[], Any]] = {
    **{name: partial(sparq, config) for name, config in CONFIGS.items()},
    "saap": saap,
    "sample": sample,
}


def traced(function: Any, *arrays: mx.array) -> tuple[int, int]:
    """Count the launches and bytes of MLX's array operations: each reads its inputs once and writes its outputs."""
    seen: list[dict[str, Any]] = []
    mx.export_function(seen.append, function, *arrays)
    launches, moved, sizes = 0, 0, dict[str, int]()
    for each in (event for event in seen if event["type"] == "primitive"):
        inputs = [sizes.get(name, prod(shape) * dtype.size) for name, shape, dtype in each["inputs"]]
        outputs = {name: prod(shape) * dtype.size for name, shape, dtype in each["outputs"]}
        sizes |= dict.fromkeys(outputs, inputs[0]) if each["name"] == "Broadcast" else outputs
        if each["name"] not in VIEWS:
            launches, moved = launches + 1, moved + sum(inputs) + sum(outputs.values())
    return launches, moved


def latent_costs(G: int, S: int) -> dict[str, float]:
    """Return the other costs of a decode step over ``S`` latents with ``G`` query heads.

    ``unfused``: MB of MLX's dense attention. Its fused kernel does not support an array mask with 512 components.
    ``dense_gflop``, ``gflop``: floating-point operations of a dense and of a sparse step, RoPE scores included.
    """
    dense = partial(mx.fast.scaled_dot_product_attention, scale=LATENT**-0.5)
    arrays = random(G, 1, LATENT), random(1, S, LATENT), random(G, 1, S)
    _, moved = traced(lambda q, k, bias: [dense(q, k, k, mask=bias)], *arrays)
    config = LOW_RANK.at(S)
    multiplied = S * (ROPE + config.rank) + config.rank * LATENT + LATENT * config.rows(S)
    return {
        "unfused": moved / MB,
        "dense_gflop": 2 * G * S * (ROPE + 2 * LATENT) / 1e9,
        "gflop": 2 * G * multiplied / 1e9,
    }


def count(method: str, S: int | None = None) -> dict[str, Any]:
    """Call ``method`` once in the harness, and return a row of docs/results/traffic.jsonl, in MB.

    The row also has the kernels, the bytes moved in each buffer, the MB according to the formulas of ``method`` and of
    dense attention, and the MB that reports of `--attn` print ("modeled"). ``S`` is the number of latents, if any.
    """
    mx.random.seed(0)
    with msl.emulated(strict=False) as metal:
        out, stats = latents(LATENT_HEADS[method], S) if S else METHODS[method]()
        mx.eval(out)
        moved: Counter[str] = Counter()
        for report in metal.launches:
            for buffers in (report.reads, report.writes):
                moved.update({name: traffic.dispatch for name, traffic in buffers.items()})
        heads = KV_HEADS * (GROUP if method == "sample" else 1)  # formulas count per KV head, in prefill per query head
        shape, context = f"{KV_HEADS * GROUP}x{KV_HEADS}x{D}", PROMPT[1] if method == "sample" else KEYS
        if S:
            heads, shape, context = 1, f"{LATENT_HEADS[method]}x1x{LATENT}", S
            moved.pop("values")  # the same buffer as the keys
        sizes: dict[str, Any] = {"itemsize": ITEM, "row_bytes": D * ITEM, "G": GROUP, "backend": "metal"}
        config = CONFIGS.get(method)
        return {
            "key": f"traffic/{method}/{shape}/{f'{S}/' if S else ''}megabytes",
            "model": f"{shape} float16",
            "task": "prefill" if method == "sample" else "decode",
            "method": method,
            "context": context,
            "examples": 1,
            "metric": "megabytes",
            "mean": moved.total() / MB,
            "sem": None,
            "kernels": [report.kernel for report in metal.launches],
            "bytes": dict(moved.most_common()),
            "formula": heads * stats.elements * ITEM / MB,
            "modeled": config and KV_HEADS * config.step_bytes(KEYS, D, **sizes) / MB,
            "dense": heads * stats.dense_elements * ITEM / MB,
            **(latent_costs(LATENT_HEADS[method], S) if S else {}),
            **origin("traffic.py", [method], "mlx"),
        }


def gathered(q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
    """Select and gather the keys and values of one chunk, as `gather_attention` does before the dense kernel."""
    M = k.shape[2] - q.shape[2]
    scores, _ = gather_scores(q, k, samples=GATHER.samples, scale=D**-0.5)
    lists = gather_select(scores, ceil(GATHER.share * M), GATHER.neighbors)
    return [mx.concatenate([take_rows(rows, lists), rows[:, :, M:]], axis=2) for rows in (k, v)]


def count_gather(S: int) -> dict[str, Any]:
    """Return a row about the last chunk of ``S`` tokens for one KV head, in MB.

    ``dense`` is dense attention over all keys, ``work`` the share of dense attention's multiplications in the whole
    prompt, and ``break_even`` the number of saved operations per added byte.
    """
    layout = GATHER.layout(S, S)
    last = layout.pieces[-1]
    q, k, v = (mx.zeros((1, heads, n, D), mx.float16) for heads, n in ((GROUP, GATHER.chunk), (1, S), (1, S)))
    launches, moved = traced(gathered, q, k, v)
    moved += 2 * D * ITEM * (GROUP * GATHER.chunk + last.kept + GATHER.chunk)  # the dense kernel
    saved = sum(piece.sparse * (piece.earlier - piece.kept) for piece in layout.pieces)
    sampled = sum(min(GATHER.samples, piece.stop - piece.start) * piece.earlier for piece in layout.pieces)
    dense = 2 * D * ITEM * (GROUP * GATHER.chunk + S)
    fewer = 2 * D * GROUP * (2 * last.sparse * (last.earlier - last.kept) - GATHER.samples * S)
    return {
        "key": f"traffic/gather/{GROUP}x1x{D}/{S}/megabytes",
        "model": f"{GROUP}x1x{D} float16",
        "task": "prefill",
        "method": str(GATHER),
        "context": S,
        "examples": 1,
        "metric": "megabytes",
        "mean": moved / MB,
        "sem": None,
        "launches": launches + 1,
        "dense": dense / MB,
        "break_even": fewer / (moved - dense),
        "work": 1 - (saved - sampled / 2) / layout.causal_pairs,
        **origin("traffic.py", ["gather"], "mlx"),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*METHODS, *LATENT_HEADS, "gather"]
    parser.add_argument("methods", nargs="*", metavar="METHOD", choices=[*names, []], help=", ".join(names))
    args = parser.parse_args(argv)
    if sys.platform != "linux":
        parser.error(f"expected Linux, where the harness of tests/msl runs, got {sys.platform}.")
    for method in tqdm(args.methods or names, unit="method", disable=None):
        lengths = {"gather": GATHER_KEYS, **dict.fromkeys(LATENT_HEADS, LATENT_KEYS)}.get(method, (None,))
        for S in lengths:
            print(json.dumps(count_gather(S) if method == "gather" else count(method, S)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
