"""SmolLM2 exported, on a real prompt."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load
from mlx_sparse.onnx_export import export
from mlx_sparse.onnx_export.runner import Runner

import mlx_sparse

TEXT = (
    "The lighthouse keeper's name was Marta. Every evening at six she climbed the ninety stairs, lit the lamp, and "
    "wrote one line about the weather in a green book. In winter the line was short. One evening a boy came to the "
    "door and asked her who wrote the green book. She told him that"
)
STEPS = 16


@pytest.fixture(scope="module")
def prompted(smollm2: Path) -> tuple[Any, list[int], Any, mx.array]:
    """The model, the prompt, and cache and logits after it."""
    model, tokenizer = load(str(smollm2))
    prompt = tokenizer.encode(TEXT)
    cache = make_prompt_cache(model)
    return model, prompt, cache, model(mx.array([prompt]), cache=cache)[:, -1]


@pytest.mark.parametrize("method", ["dense", "sparq:top_k=24,dense_below=76"], ids=["dense", "sparq"])
def test_smollm2_says_what_it_says_under_mlx(smollm2: Path, prompted: Any, tmp_path: Path, method: str) -> None:
    model, prompt, cache, logits = prompted
    assert 60 < len(prompt) < 76, "the text turns sparse after some steps"
    cache = copy.deepcopy(cache)
    expected = []
    with contextlib.nullcontext() if method == "dense" else mlx_sparse.sparse(model, method) as report:
        for _ in range(STEPS):
            expected.append(int(logits.argmax()))
            logits = model(mx.array([expected[-1:]]), cache=cache)[:, -1]
    if report is not None:
        assert report.sparse_calls == report.layers * (len(prompt) + STEPS - 75)
    made = export(str(smollm2), tmp_path / "out", method=method, max_length=512)
    assert made.agreement.dense < 1e-5 * made.agreement.largest
    assert list(Runner(tmp_path / "out", native="off").generate(prompt, STEPS)) == expected
