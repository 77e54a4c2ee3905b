"""`verify=sparse` in mlx-lm's models: calls of 2 to 16 queries make one choice of keys, the oracle's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from lm_prompts import tiny_tokenizer
from mlx_lm import batch_generate, stream_generate
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache, trim_prompt_cache
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.common import reasons
from mlx_sparse.common.packed_rows import PackedRows
from mlx_sparse.lm.call import Call
from mlx_sparse.lm.model import plan_of
from mlx_sparse.methods import registry

PROMPT = 70
METHODS = {
    "sparq": "rank=4,top_k=16,key_bits=16,dense_below=0",
    "sparq-coded": "rank=4,top_k=16,key_bits=4,dense_below=0",
    "quest": "page_size=4,top_k=16,dense_below=0",
    "streaming": "sink_tokens=2,recent_tokens=14",
}
BUCKETS = "saap:mode=online,buckets=8,probes=2,recent_tokens=8,fold_every=1,dense_below=0,dense_layers=0,verify=sparse"


def attn(name: str) -> str:
    return f"{name.partition('-')[0]}:{METHODS[name]},verify=sparse"


class Seen:
    """Every sparse call of a model: its queries and rows, and what came out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[mx.array, Any, Any, mx.array]] = []
        attend = Call.attend

        def listen(call: Call, queries: mx.array, keys: Any, values: Any, cache: Any, *more: Any) -> Any:
            out = attend(call, queries, keys, values, cache, *more)
            if out is not None:
                if not isinstance(keys, mx.array):
                    keys, values = (PackedRows.kept(parts, cache.bits)[:] for parts in (keys, values))
                self.calls.append((queries, keys, values, out))
            return out

        monkeypatch.setattr(Call, "attend", listen)

    def compare(self, model: Any, lengths: list[int], *, quantised: bool) -> None:
        """The sparse calls had so many queries, and are the oracle's."""
        config = plan_of(model).decode
        assert config is not None
        assert [queries.shape[2] for queries, *_ in self.calls] == lengths
        for queries, keys, values, out in self.calls:
            G = queries.shape[1] // keys.shape[1]
            settings = config.parameters(G) | {"verify": "sparse"}
            if config.name == "sparq":
                settings["component_score"] = config.component_score
            if config.name == "sparq" and quantised:  # keys are scored by all of their rows
                settings |= {"rank": keys.shape[3], "key_bits": 16}
            arrays = [np.array(array.astype(mx.float32)) for array in (queries, keys, values)]
            wanted = getattr(oracle, f"{config.name}_attention")(*arrays, **settings)
            np.testing.assert_allclose(np.array(out.astype(mx.float32)), wanted, rtol=0, atol=2e-5)
        self.calls.clear()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    yield Seen(monkeypatch)


def call(model: Any, L: int, cache: Any, seed: int = 2) -> mx.array:
    logits = model(mx.array([prompt_of(L, seed=seed)]), cache=cache)
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("quantised", [False, True], ids=["", "8-bits"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("method", METHODS)
def test_calls_between_steps_and_trims_choose_as_the_oracle(
    method: str, family: str, kv_heads: int, quantised: bool, seen: Seen
):
    """One query head per KV head mixes in the mean value, of several queries too."""
    changes = {"num_key_value_heads": kv_heads} | ({"head_dim": 32} if quantised else {})
    with mlx_sparse.sparse(model := build(family, **changes), attn(method)) as report:
        cache = make_prompt_cache(model)
        if quantised:
            cache = [QuantizedKVCache(group_size=32, bits=8) for _ in cache]
        call(model, PROMPT, cache)
        seen.calls.clear()
        for L, rejected in [(4, 2), (1, 0), (2, 1), (16, 0), (3, 3), (1, 0)]:
            call(model, L, cache, seed=L)
            trim_prompt_cache(cache, rejected)
        layers = report.served_layers
        seen.compare(model, [L for L in (4, 1, 2, 16, 3, 1) for _ in range(layers)], quantised=quantised)
        assert report.sparse_calls == 6 * layers
        assert reasons.A_FEW not in report.dense_calls


@pytest.mark.parametrize(
    ("attn", "L", "reason"),
    [
        ("sparq:rank=4,top_k=16,dense_below=0", 4, reasons.A_FEW),
        (attn("sparq"), 17, reasons.PROMPT),
        ("sparq:rank=4,top_k=70,dense_below=0,verify=sparse", 4, reasons.shorter_than(71)),
        ("h2o:top_k=16", 4, reasons.A_FEW),
    ],
)
def test_a_call_that_is_not_asked_too_long_or_over_too_few_keys_is_dense(attn: str, L: int, reason: str):
    """The first query sees 70 keys and its own."""
    with mlx_sparse.sparse(model := build(), attn) as report:
        cache = make_prompt_cache(model)
        call(model, PROMPT - 1, cache)
        before = dict(report.dense_calls)
        call(model, L, cache)
        assert report.sparse_calls == 0
        assert report.dense_calls[reason] - before.get(reason, 0) == report.served_layers


def test_a_group_of_more_rows_than_the_kernels_take_is_dense(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "unfit", lambda *sizes: "too many" if sizes[3] > 8 else None)
    with mlx_sparse.sparse(model := build(), attn("sparq")) as report:
        cache = make_prompt_cache(model)
        call(model, PROMPT, cache)
        call(model, 5, cache)
        assert report.dense_calls[reasons.MANY_ROWS] == report.served_layers
        call(model, 4, cache)
        assert report.sparse_calls == report.served_layers


def test_the_report_counts_the_bytes_of_the_calls_own_keys():
    with mlx_sparse.sparse(model := build(), attn("sparq")) as report:
        cache = make_prompt_cache(model)
        call(model, PROMPT, cache)
        call(model, 16, cache)
        q, kv = mx.zeros((1, 4, 16, 16)), mx.zeros((1, 2, PROMPT + 16, 16))
        settings = {"rank": 4, "top_k": 16, "verify": "sparse", "return_stats": True}
        _, stats = mlx_sparse.sparq_attention(q, kv, kv, **settings)
        assert report.formula_bytes == report.served_layers * 2 * 4 * stats.elements


@pytest.mark.parametrize("mode", ["every", "few"])
def test_buckets_are_visited_for_all_queries_of_a_call(mode: str):
    """With every bucket visited that is dense attention."""
    text = BUCKETS.replace("probes=2", "probes=8") if mode == "every" else BUCKETS
    dense, model = build(), build()
    with mlx_sparse.sparse(model, text) as report:
        caches = make_prompt_cache(model), make_prompt_cache(dense)
        for L, rejected in [(PROMPT, 0), (1, 0), (4, 2), (1, 0), (3, 0), (1, 0)]:
            found, wanted = (call(one, L, cache, L) for one, cache in zip((model, dense), caches, strict=True))
            for cache in caches:
                trim_prompt_cache(cache, rejected)
        assert report.sparse_calls == 5 * report.served_layers
        assert bool(mx.allclose(found, wanted, atol=1e-4)) == (mode == "every")


@pytest.mark.parametrize("method", [attn("sparq-coded"), BUCKETS], ids=["sparq", "saap"])
def test_the_tokens_of_a_draft_model_are_checked_sparsely(method: str):
    tokenizer = tiny_tokenizer()
    with mlx_sparse.sparse(model := build(), method) as report:
        responses = list(
            stream_generate(model, tokenizer, prompt_of(PROMPT), 12, draft_model=build(), num_draft_tokens=3)
        )
    assert len(responses) == 12
    assert report.sparse_calls > 0
    assert reasons.A_FEW not in report.dense_calls


def test_a_short_turn_in_a_batch_is_that_turn_alone():
    tokenizer, options = tiny_tokenizer(), {"max_tokens": 3, "return_prompt_caches": True}
    with mlx_sparse.sparse(model := build(), attn("sparq-coded")) as report:
        first = batch_generate(model, tokenizer, [prompt_of(n, seed=n) for n in (70, 90)], **options)
        turns = [prompt_of(n, seed=n) for n in (5, 9)]
        together = batch_generate(model, tokenizer, turns, first.caches, max_tokens=4)
        before = report.sparse_calls
        alone = [
            batch_generate(model, tokenizer, [turn], [cache], max_tokens=4).texts[0]
            for turn, cache in zip(turns, first.caches, strict=True)
        ]
    assert together.texts == alone
    assert report.sparse_calls > before


def test_what_is_asked_for_is_checked():
    with pytest.raises(mlx_sparse.ConfigError, match=r"verify: expected one of dense, sparse, got 'exact'"):
        mlx_sparse.enable(build(), "sparq:verify=exact")
