"""Process prompts of the tiny models in chunks, and record the arguments and results of sparse prefill calls."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm import batch_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import EOS, prompt_of, tokenizer_json
from transformers import PreTrainedTokenizerFast

from mlx_sparse import oracle
from mlx_sparse.cache.sparse_cache import SparseCache
from mlx_sparse.core.base import Prefill
from mlx_sparse.core.blocks.layout import Layout

Array = npt.NDArray[Any]
LAYERS, BLOCK = 2, 32
SAMPLE = "sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0"
SPARQ = "sparq:rank=4,top_k=4,dense_below=0"
EVERY_BLOCK = "streaming_prefill:window=1,block_size=32"


def tiny_tokenizer() -> TokenizerWrapper:
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer_json()), eos_token_ids=[EOS])


def process(model: Any, tokens: list[int], step: int, cache: list[Any] | None = None) -> list[Any]:
    """Process a prompt in chunks of ``step`` tokens, like `generate_step`, and return the cache."""
    cache = make_prompt_cache(model) if cache is None else cache
    for start in range(0, len(tokens), step):
        model(mx.array(tokens[start : start + step])[None], cache=cache)
        mx.eval([entry.state for entry in cache])
    return cache


def prompt_logits(model: Any, tokens: list[int], step: int) -> mx.array:
    """Return the logits of all tokens of a prompt that is processed in chunks of ``step`` tokens."""
    cache = make_prompt_cache(model)
    steps = [mx.array([tokens[start : start + step]]) for start in range(0, len(tokens), step)]
    return mx.concatenate([model(inputs, cache=cache) for inputs in steps], axis=1)


def last_logits(model: Any, cache: list[Any], token: int = 5) -> mx.array:
    """Return the logits of a decode step that continues ``cache``."""
    logits: mx.array = model(mx.array([[token]]), cache=cache)[:, -1]
    return logits


def generated(model: Any, prompt: list[int], count: int = 6, **options: Any) -> list[int]:
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count, **options)]


def batch(model: Any, tokenizer: TokenizerWrapper, lengths: list[int], **options: Any) -> list[str]:
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    return list(batch_generate(model, tokenizer, prompts, max_tokens=6, **options).texts)


class PrefillCall:
    """Arguments and results of one sparse prefill call."""

    def __init__(
        self, cache: SparseCache, queries: mx.array, config: Prefill, result: tuple[mx.array, ...], options: Any
    ) -> None:
        self.cache, self.config, self.options = cache, config, options
        rows = (every[:, :, : cache.length] for every in (cache.key_rows, cache.value_rows))
        self.q, self.k, self.v = map(np.array, (queries, *rows))
        self.out, self.lse, self.blocks, *_ = (np.array(array) for array in result)

    @property
    def L(self) -> int:
        return self.q.shape[2]

    @property
    def S(self) -> int:
        return self.k.shape[2]

    def expected(self, **options: Any) -> Any:
        return getattr(oracle, f"{self.config.name}_attention")(
            self.q, self.k, self.v, **self.config.parameters(), **options
        )


def record_prefill_calls(monkeypatch: pytest.MonkeyPatch) -> list[PrefillCall]:
    """Return a list to which all later sparse prefill calls of the test are appended."""
    found: list[PrefillCall] = []
    attend_prefill = SparseCache.attend_prefill

    def recording(cache: SparseCache, queries: mx.array, config: Any, **options: Any) -> Any:
        result = attend_prefill(cache, queries, config, **options)
        found.append(PrefillCall(cache, queries, config, result, options))
        return result

    monkeypatch.setattr(SparseCache, "attend_prefill", recording)
    return found


def causal_pairs(call: PrefillCall) -> int:
    return Layout(call.L, call.S, 1, call.config.block_size).causal_pairs
