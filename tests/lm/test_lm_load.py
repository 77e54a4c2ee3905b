"""Test that a batch gives the answers of single prompts while requests join and leave."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import covering
from lm_prompts import SAMPLE, SPARQ, tiny_tokenizer
from mlx_lm import batch_generate
from saap_artefacts import WINDOW, write_artefact
from short_methods import having, short
from tier import some
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.cache.kv_cache import SparseBatchKVCache
from mlx_sparse.lm import seam
from mlx_sparse.lm.call import Call
from mlx_sparse.lm.model import plan_of

pytestmark = pytest.mark.slow  # many requests at once

SHORT = "for the short sequences of a batch"
JOINING = {"prefill_step_size": 96, "prefill_batch_size": 2, "completion_batch_size": 4}


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


DECODE = {name: short(name) for name in having("dense_below")}
DECODE |= {
    "sample+sparq": f"{SAMPLE}+{SPARQ}",
    "saap trained": f"saap:artefact={{artefact}},probes=2,dense_layers=0,{WINDOW}",
}
METHODS = {
    **DECODE,
    **{f"{name} of long contexts": text.replace("dense_below=0", "dense_below=75") for name, text in DECODE.items()},
    "sample": SAMPLE,
    "sample+saap": f"{SAMPLE}+{short('saap')}",
    **{name: short(name) for name in ("streaming", "flexgen", "oracle_top_k")},
}


@pytest.fixture(scope="module")
def artefact(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artefact(tmp_path_factory.mktemp("load") / "model", model)


class Answers:
    """Tokens of each prompt with their log-probabilities."""

    def __init__(self, model: Any, prompts: list[list[int]], counts: list[int], **options: Any) -> None:
        options |= {"return_token_ids": True, "return_logprobs": True}
        found = batch_generate(model, tiny_tokenizer(), prompts, max_tokens=counts, **options)
        self.tokens, self.logprobs = found.token_ids, found.logprobs


@pytest.mark.parametrize(("name", "options"), covering(some(list(METHODS), 6), [{}, JOINING]), ids=str)
def test_answers_do_not_depend_on_load(name: str, options: dict[str, int], model: Any, artefact: Path):
    """Test lengths such as 98 = 96 + 2, for which the last chunk is one token, and therefore a decode step."""
    order = random.Random(0)
    lengths = [98, 194, 300, *(order.randrange(20, 200) for _ in range(3))]
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    counts = [order.randrange(10, 30) for _ in lengths]
    dense = Answers(model, prompts, counts, **options)
    with mlx_sparse.sparse(model, METHODS[name].format(artefact=artefact)) as report:
        together = Answers(model, prompts, counts, **options)
        alone = [Answers(model, [prompt], [count], **options) for prompt, count in zip(prompts, counts, strict=True)]
    assert "with an array mask" not in report.dense_calls
    assert together.tokens != dense.tokens
    assert together.tokens == [one.tokens[0] for one in alone]
    for logprobs, one in zip(together.logprobs, alone, strict=True):
        np.testing.assert_allclose(logprobs, one.logprobs[0], atol=1e-4)


@pytest.mark.parametrize("sinks", [None, mx.array([1.0, -2.0, 0.5, 3.0])], ids=["", "sinks"])
def test_only_long_sequences_of_a_batch_are_sparse(sinks: mx.array | None, model: Any):
    rows, padding = 200, [0, 120, 40]
    keys, values, queries = (
        mx.random.normal((3, H, rows, 16), key=mx.random.key(H + n)) for n, H in enumerate((2, 2, 4))
    )
    query = queries[:, :, -1:]
    with mlx_sparse.sparse(model, SPARQ.replace("dense_below=0", "dense_below=100")) as report:

        def attend(sequences: list[int], first: int, left_padding: list[int]) -> mx.array:
            cache = SparseBatchKVCache(left_padding)
            with Call(plan_of(model), [cache]) as call:
                cached = cache.update_and_fetch(*(array[mx.array(sequences), :, first:] for array in (keys, values)))
                out = call.attend(query[mx.array(sequences)], *cached, cache, 0.25, None, sinks)
            if out is None:
                out = seam.original(query[mx.array(sequences)], *cached, None, 0.25, None, sinks)
            return out

        together = attend([0, 1, 2], 0, padding)
        assert report.dense_calls == {SHORT: 1}
        alone = [attend([sequence], first, [0]) for sequence, first in enumerate(padding)]
    assert report.sparse_calls == 3
    assert report.dense_calls == {SHORT: 1, "over fewer than 100 keys": 1}
    assert mx.allclose(together, mx.concatenate(alone), rtol=1e-5, atol=1e-5)


def test_prepare_of_batch_caches_is_restored(model: Any, monkeypatch: pytest.MonkeyPatch):
    own = seam.LIBRARIES["mlx_lm"].prepare
    monkeypatch.setattr(seam.LIBRARIES["mlx_lm"], "bound", {})  # models of other tests may still be enabled
    monkeypatch.setattr(seam.LIBRARIES["mlx_lm"].caches.BatchKVCache, "prepare", own)
    with mlx_sparse.sparse(model, SAMPLE):
        assert seam.LIBRARIES["mlx_lm"].caches.BatchKVCache.prepare is not own
        with mlx_sparse.sparse(build(), SPARQ):
            pass
        assert seam.LIBRARIES["mlx_lm"].caches.BatchKVCache.prepare is not own
    assert seam.LIBRARIES["mlx_lm"].caches.BatchKVCache.prepare is own
