"""Run the models of test_lm_context on one rank or in one process, and write their logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from tiny_models import build, prompt_of

import mlx_sparse

SPARQ = "sparq:rank=4,top_k=48,dense_below=0"
SAMPLE = "sample:block_size=64,alpha_column=0.6,alpha_slash=0.6,chunks=1,dense_below=0"
WINDOW = "recent_tokens=16,fold_every=4,dense_layers=0"

# Name: family, method, changes of the model configuration. The seeds avoid key components halfway between two int4
# codes, because the last bit decides how such a component is rounded.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("llama", "dense", {}),
    "sparq": ("llama", SPARQ, {}),
    "sparq, 16 bits": ("qwen3", f"{SPARQ},key_bits=16", {}),
    "sparq, paper": ("llama", f"{SPARQ},key_bits=16,component_score=query", {}),
    "sparq, mean value": ("llama", f"{SPARQ},component_score=query,reallocate=true", {"num_key_value_heads": 4}),
    "sparq, sinks": ("gpt_oss", SPARQ, {}),
    "sparq, sliding windows": ("gemma3_text", SPARQ, {}),
    "sparq, shared keys": ("gemma3n", f"{SPARQ},key_bits=16", {"seed": 1}),
    "sparq, experts": ("qwen3_moe", SPARQ, {"seed": 1}),
    "quest": ("llama", "quest:page_size=16,top_k=64,dense_below=0", {}),
    "streaming": ("llama", "streaming:sink_tokens=16,recent_tokens=80", {}),
    "saap": ("llama", f"saap:artefact={{folder}}/model.saap.safetensors,probes=2,{WINDOW}", {}),
    "saap, online": ("llama", f"saap:mode=online,buckets=8,probes=8,{WINDOW}", {}),
    "sample": ("llama", f"{SAMPLE}+{SPARQ}", {}),
    # With a top_k of all keys each of two ranks attends all of its own keys.
    "sparq, all of a rank's own": ("llama", "sparq:rank=4,top_k=300,dense_below=0", {}),
    "quest, all of a rank's own": ("llama", "quest:page_size=16,top_k=300,dense_below=0", {}),
}
LOCAL = [name for name in CASES if "own" in name]


def history(model: Any) -> mx.array:
    """Return the logits ``(n, V)`` of prefill in chunks, decode steps, a second turn, and trims to several lengths."""
    cache, found = make_prompt_cache(model), []
    rows = mx.array([prompt_of(900)])

    def call(tokens: mx.array) -> None:
        logits = model(tokens, cache=cache)
        mx.eval([one.state for one in cache])  # as mlx-lm does after a chunk
        mx.eval(logits)
        found.append(logits[0, -1].astype(mx.float32))

    def answer(n: int) -> None:
        for _ in range(n):
            call(mx.argmax(found[-1])[None, None])

    call(rows[:, :20])  # only the first rank has rows
    answer(2)
    model(rows[:, 20:21], cache=cache)  # not evaluated
    call(rows[:, 21:128])
    answer(2)  # the first rows of the second rank
    call(rows[:, 130:254])
    call(rows[:, 254:300])
    answer(8)
    call(rows[:, 300:340])
    answer(3)
    trim_prompt_cache(cache, 25)
    answer(3)
    trim_prompt_cache(cache, 200)
    call(rows[:, 340:384])
    answer(3)
    trim_prompt_cache(cache, cache_length(cache) - 30)  # less than a group of quantized keys
    answer(2)
    call(rows[:, 400 : 400 + 256 - cache_length(cache) % 128])
    call(rows[:, 600:856])  # a chunk that starts with a block
    answer(3)
    return mx.stack(found)


def cache_length(cache: list[Any]) -> int:
    """Return the number of positions."""
    return int(cache[-1].offset)


def run(name: str, shard: str | None, folder: Path) -> tuple[mx.array, mlx_sparse.Report]:
    """Run the history of a case."""
    family, attn, changes = CASES[name]
    model = build(family, **changes)
    report = mlx_sparse.enable(model, attn.format(folder=folder), shard=shard)
    return history(model), report


def refusals(rank: int) -> list[str]:
    """Return the errors of unsupported calls. Before the last one the ranks trim their caches to different lengths."""
    found = []
    for attn in ("quest:page_size=24", "h2o"):
        try:
            mlx_sparse.enable(build(), attn, shard="context")
        except mlx_sparse.ConfigError as error:
            found.append(str(error))
    model = build()
    mlx_sparse.enable(model, "dense", shard="context")
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt_of(40)]), cache=cache))
    trim_prompt_cache(cache, 1 + rank)
    try:
        model(mx.array([[1]]), cache=cache)
    except mlx_sparse.ConfigError as error:
        found.append(str(error))
    return found


def main(folder: Path, names: list[str]) -> None:
    rank = mx.distributed.init(strict=True).rank()
    for name in names or CASES:
        logits, report = run(name, "context:local" if name in LOCAL else "context", folder)
        counts = [
            report.sparse_calls,
            report.prefill.calls if report.prefill else 0,
            report.sent_bytes,
            report.messages,
        ]
        np.savez(folder / f"{name}.{rank}.npz", logits=np.array(logits), counts=counts)
    (folder / f"refusals.{rank}.json").write_text(json.dumps(refusals(rank)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
