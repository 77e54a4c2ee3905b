"""Test that the tools run dense attention on native kernels, except the plain dense steps of `mlx-sparse try`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from commands import Progress
from mlx_lm.utils import load
from require import absent
from rich.console import Console
from text_tokenizers import WordTokenizer
from tiny_models import build, prompt_of, write

from mlx_sparse.calibrate import Calibration
from mlx_sparse.calibrate.timing import Layer, time_prefill, time_steps
from mlx_sparse.core import native_call, registry
from mlx_sparse.core.base import Step
from mlx_sparse.methods import Sample, SparQ, parse
from mlx_sparse.tools.comparison import TURNS, Length, compare, encode_prompt
from mlx_sparse.tools.environment import hardware
from mlx_sparse.tools.evaluate.runner import Prompt, Steps
from mlx_sparse.tools.evaluate.tasks import Example, Passage
from mlx_sparse.tools.train.collect import Collection, collect, find_layer_shapes
from mlx_sparse.tools.tune import Search

if reason := registry.unavailable("cpu"):
    absent("cpu", reason)

TOKENS = prompt_of(130)
PASSAGE = Passage(TOKENS, list(range(100, 120)))
Calls = Counter[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Count the dense calls of the native kernels and of MLX, for prefill chunks and decode steps.

    Traces with one or two tokens, which evaluate no arrays, are not counted.
    """
    found: Calls = Counter()
    run, fused = native_call.run, mx.fast.scaled_dot_product_attention

    def stage(L: int) -> str:
        return "chunk" if L > 1 else "step"

    def native(function: str, call: Any, *arguments: Any) -> None:
        if function == "dense":
            found["native", stage(call.L)] += 1
        run(function, call, *arguments)

    def plain(queries: mx.array, keys: mx.array, *arguments: Any, **options: Any) -> mx.array:
        if keys.shape[2] > 2:
            found["mlx", stage(queries.shape[2])] += 1
        return fused(queries, keys, *arguments, **options)

    monkeypatch.setattr(native_call, "run", native)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", plain)
    return found


def evaluate_steps(folder: Path) -> None:
    _ = Steps(build(), WordTokenizer(), [Example(TOKENS[:100], TOKENS[100:120])], 512).reference


def evaluate_observed_steps(folder: Path) -> None:
    examples = [Example(TOKENS[:100], TOKENS[100:120])]
    _ = Steps(build(), WordTokenizer(), examples, 512, observed="h2o").reference


def evaluate_prompt(folder: Path) -> None:
    _ = Prompt(build(), WordTokenizer(), PASSAGE, 64).reference


def tune(folder: Path) -> None:
    Search(build(), WordTokenizer(), TOKENS, [], step=64)._try(None, PASSAGE)


def train(folder: Path) -> None:
    model = build(num_hidden_layers=3)
    found = Collection(folder, find_layer_shapes(model, 1), 1, 130, queries=10, first=100, seed=3)
    collect(model, found, [TOKENS], key="k", progress=Progress())


def time_decode_steps(folder: Path) -> None:
    for Dv in (0, 8):
        time_steps(SparQ(rank=4), Layer("cpu", Step(2, 2, 16, 4, Dv=Dv), mx.float32), 300, 0.0)


def time_a_chunk(folder: Path) -> None:
    time_prefill(Sample(block_size=32, dense_below=0), Layer("cpu", Step(2, 2, 16, 4), mx.float32, 64), 0.0)


@pytest.mark.parametrize(
    "run",
    [evaluate_steps, evaluate_observed_steps, evaluate_prompt, tune, train, time_decode_steps, time_a_chunk],
    ids=lambda run: run.__name__,
)
def test_dense_attention_is_native(run: Callable[[Path], None], calls: Calls, tmp_path: Path):
    run(tmp_path)
    assert calls.total() == calls["native", "chunk"] + calls["native", "step"] > 0
    assert hardware()["dense"] == "cpu"


def test_only_the_plain_dense_steps_of_try_are_those_of_mlx(calls: Calls, tmp_path: Path):
    model, tokenizer = load(str(write(tmp_path)))  # type: ignore[misc]
    text = " ".join(f"w{i % 90}" for i in range(200))
    (config,) = parse("sparq:rank=4,top_k=16,dense_below=0")
    given: dict[str, Any] = {"max_tokens": 6, "calibration": Calibration(), "console": Console(quiet=True)}
    compare(model, tokenizer, encode_prompt(tokenizer, text, " w1"), config, Length(100, 3, 90.0), **given)
    steps = TURNS * 6 * len(model.layers)
    assert calls["mlx", "step"] == calls["native", "step"] >= steps
    assert calls["native", "chunk"] > 0 and not calls["mlx", "chunk"]
