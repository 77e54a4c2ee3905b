"""SmolLM2 exported, on a real prompt."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load
from mlx_sparse.onnx_export.exporter.export import Exported
from mlx_sparse.onnx_export.runtime.runner import Runner

import mlx_sparse

TEXT = (
    "The lighthouse keeper's name was Marta. Every evening at six she climbed the ninety stairs, lit the lamp, and "
    "wrote one line about the weather in a green book. In winter the line was short. One evening a boy came to the "
    "door and asked her who wrote the green book. She told him that"
)
STEPS = 16


def test_smollm2_says_what_it_says_under_mlx(smollm2: Path, smollm2_exported: Exported) -> None:
    model, tokenizer = load(str(smollm2))
    prompt = tokenizer.encode(TEXT)
    assert 60 < len(prompt) < 76, "the text turns sparse after some steps"
    expected: list[int] = []
    with mlx_sparse.sparse(model, smollm2_exported.method) as report:
        cache = make_prompt_cache(model)
        logits = model(mx.array([prompt]), cache=cache)[:, -1]
        for _ in range(STEPS):
            expected.append(int(logits.argmax()))
            logits = model(mx.array([expected[-1:]]), cache=cache)[:, -1]
    assert report.sparse_calls == report.layers * (len(prompt) + STEPS - 75)
    agreement = smollm2_exported.agreement
    assert agreement.dense < 1e-5 * agreement.largest
    assert list(Runner(smollm2_exported.folder, native="off").generate(prompt, STEPS)) == expected
