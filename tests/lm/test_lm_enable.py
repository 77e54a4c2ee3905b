"""Test `enable`, `disable`, `sparse` and `report`, and all ways to call an enabled model."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import sys
import threading
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import batch_generate, stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model
from require import absent
from tiny_models import FAMILIES, EveryStepSparQ, build, greedy, prompt_of, write

import mlx_sparse
from mlx_sparse.api.call_report import Counts
from mlx_sparse.cache.kv_cache import SparseKVCache
from mlx_sparse.core import registry
from mlx_sparse.lm import seam
from mlx_sparse.lm.call import SAMPLED_STEPS, Call, active
from mlx_sparse.lm.model import plan_of

generate = importlib.import_module("mlx_lm.generate")  # the package has a function of this name
SPARSE = "sparq:rank=4,top_k=4,dense_below=0"
EVERY_KEY = EveryStepSparQ(rank=4, top_k=1000)
PROMPT, STEPS, LAYERS = 24, 8, 2
A_FEW = "in multi-token decode (verification step or short prompt)"


@pytest.fixture
def dense() -> list[int]:
    return greedy(build(), prompt_of(PROMPT), STEPS)[0]


def tokens_of(model: Any, steps: int = STEPS, cache: list[Any] | None = None) -> list[int]:
    return greedy(model, prompt_of(PROMPT), steps, cache)[0]


@pytest.mark.parametrize("leave", [mlx_sparse.disable, None])
def test_mlx_lm_functions_are_restored_after_the_last_lossless_model(leave: Any):
    models = [build(), build()]
    for one in models:
        mlx_sparse.enable(one, SPARSE, lossless=True)
    for left in (1, 0):
        one = models.pop()
        if leave is not None:
            leave(one)
        del one
        gc.collect()
        assert (generate.generate_step is generate_step) == (left == 0)
        assert (llama.scaled_dot_product_attention is seam.original) == (left == 0)


@pytest.mark.parametrize(
    "changes", [{}, {"scaled_dot_product_attention": "attend"}], ids=["by name", "by another name"]
)
def test_a_model_with_an_architecture_file_of_its_own_is_sparse(changes: dict[str, str], tmp_path: Path):
    source = Path(llama.__file__).read_text(encoding="utf-8").replace("from .", "from mlx_lm.models.")
    for name, other in changes.items():
        source = source.replace(name, other).replace(f", {other}", f", {name} as {other}")
    folder = write(tmp_path / "model", model_file="architecture.py")
    (folder / "architecture.py").write_text(source, encoding="utf-8")
    trusted = {name: True for name in inspect.signature(load_model).parameters if name == "trust_remote_code"}
    own, other = (load_model(folder, **trusted)[0] for _ in range(2))
    attention = type(own.layers[0].self_attn).__call__.__globals__
    untouched, dense = dict(attention), tokens_of(own)
    with mlx_sparse.sparse(own, EVERY_KEY) as report:
        assert tokens_of(own) == dense == tokens_of(other)
    assert report.sparse_calls == LAYERS * STEPS
    assert attention == untouched


# In the first 64 keys, the spread of the keys is computed in every step, with array operations.
@pytest.mark.parametrize(("backend", "prompt"), [("cpu", 64), ("ops", PROMPT)])
@pytest.mark.parametrize(
    "attn", ["sparq:dense_below=0,top_k=16,rank=8", "sparq:dense_below=0,top_k=16,rank=8,key_bits=16"]
)
def test_a_decoded_token_visits_six_of_our_files_and_makes_eighty_calls(
    model: Any, attn: str, backend: str, prompt: int
):
    if reason := registry.unavailable(backend):
        absent(backend, reason)
    home, seen = str(Path(mlx_sparse.__file__).parent), Counter[str]()

    def trace(frame: Any, event: str, _: object) -> None:
        if frame.f_code.co_filename.startswith(home):
            seen[frame.f_code.co_filename.removeprefix(home)] += 1

    with mlx_sparse.sparse(model, attn, backend=backend) as report:
        tokens = generate_step(mx.array(prompt_of(prompt)), model, max_tokens=STEPS)
        for _ in range(3):
            next(tokens)
        others = sys.gettrace()
        for _ in range(SAMPLED_STEPS):  # one of these steps also counts the estimated recall
            sparse_calls = report.sparse_calls
            seen.clear()
            sys.settrace(trace)
            try:
                next(tokens)
            finally:
                sys.settrace(others)
            assert report.sparse_calls == sparse_calls + LAYERS
            assert len(seen) <= 6, sorted(seen)
            assert seen.total() <= 80, seen


def test_enable_returns_a_live_report(model: Any):
    report = mlx_sparse.enable(model, SPARSE)
    assert report is mlx_sparse.report(model)
    assert report.sparse_calls == 0
    tokens_of(model)
    assert report.sparse_calls == LAYERS * STEPS
    assert report.as_dict()["dense_calls"] == {"in prefill": LAYERS}
    backend = registry.resolve("auto", "sparq", D=32, G=2)
    assert str(report).startswith(f"sparq:rank=4,top_k=4,dense_below=0 on {backend}: 2 of 2 layers")


def test_threshold_is_the_smallest_sparse_context(model: Any):
    with mlx_sparse.sparse(model, f"sparq:rank=4,top_k=4,dense_below={PROMPT + 3}") as report:
        tokens_of(model, 6)  # over PROMPT + 1 to PROMPT + 6 keys
    assert report.dense_calls[f"over fewer than {PROMPT + 3} keys"] == LAYERS * 2
    assert report.sparse_calls == LAYERS * 4


def test_enabling_twice_is_refused_and_changes_nothing(model: Any):
    report = mlx_sparse.enable(model, SPARSE)
    with pytest.raises(mlx_sparse.ConfigError, match=r"got an enabled model\. Call mlx_sparse\.disable\.$"):
        mlx_sparse.enable(model, "streaming")
    assert mlx_sparse.report(model) is report


def test_disable_is_idempotent(model: Any, dense: list[int]):
    mlx_sparse.disable(model)
    mlx_sparse.enable(model, SPARSE)
    mlx_sparse.disable(model)
    mlx_sparse.disable(model)
    assert mlx_sparse.report(model) is None
    assert tokens_of(model) == dense


def test_an_exception_in_the_with_block_restores_the_model(model: Any, dense: list[int]):
    cls = type(model)
    with pytest.raises(KeyError), mlx_sparse.sparse(model, SPARSE):
        raise KeyError
    assert type(model) is cls
    assert tokens_of(model) == dense


def test_exception_in_the_model_resets_the_active_call(model: Any):
    with mlx_sparse.sparse(model, SPARSE):
        with pytest.raises(ValueError, match="dtype"):
            model(mx.zeros((1, 2)), cache=make_prompt_cache(model))  # tokens must be integers
        assert active.get() is None


def test_two_models_of_one_module_use_their_own_methods(model: Any):
    other, untouched = build(seed=1), build()
    alone = [tokens_of(build()), tokens_of(build(seed=1))]
    with mlx_sparse.sparse(model, SPARSE) as first:
        only_first = tokens_of(model)
        with mlx_sparse.sparse(other, "streaming:sink_tokens=1,recent_tokens=3") as second:
            assert tokens_of(other) != alone[1]
            assert tokens_of(untouched) == alone[0]
            assert tokens_of(model) == only_first != alone[0]
        assert second.sparse_calls == LAYERS * STEPS
        # The module of the first model stays patched after the second model is disabled.
        assert tokens_of(model) == only_first
        assert tokens_of(other) == alone[1]
        assert first.sparse_calls == 3 * LAYERS * STEPS
    assert tokens_of(model) == alone[0]


def test_cache_made_before_enable_is_adopted(model: Any):
    cache = make_prompt_cache(model)
    model(mx.array([prompt_of(PROMPT)]), cache=cache)
    with mlx_sparse.sparse(model, SPARSE) as report:
        model(mx.array([[5]]), cache=cache)
    assert report.sparse_calls == LAYERS
    assert isinstance(cache[0], SparseKVCache)


def test_speculative_decoding_verifies_densely(model: Any, tokenizer: TokenizerWrapper):
    draft, prompt = build(seed=1), prompt_of(PROMPT)
    expected = [token for token, _ in generate_step(mx.array(prompt), build(), max_tokens=STEPS)]
    with mlx_sparse.sparse(model, SPARSE) as report, mlx_sparse.sparse(draft, SPARSE) as drafts:
        responses = stream_generate(model, tokenizer, prompt, STEPS, draft_model=draft)
        assert [response.token for response in responses] == expected
    assert report.sparse_calls == 0
    assert report.dense_calls[A_FEW] > 0
    assert drafts.sparse_calls > 0


def test_a_call_without_a_cache_is_dense_and_counted(model: Any):
    with mlx_sparse.sparse(model, SPARSE, backend="ops") as report:
        logits = model(mx.array([prompt_of(PROMPT)]))
    assert report.dense_calls == {"without a KV cache": LAYERS}
    assert mx.array_equal(logits, build()(mx.array([prompt_of(PROMPT)])))


def test_an_array_mask_is_dense_and_counted(model: Any):
    cache = make_prompt_cache(model)
    embeddings = mx.random.normal((1, 1, 64), key=mx.random.key(3))
    mask = mx.arange(PROMPT + 1)[None] != 5

    def layer(x: mx.array, cache: list[Any]) -> mx.array:
        out: mx.array = model.layers[0](x, mask, cache[0])
        return out

    with mlx_sparse.sparse(model, SPARSE) as report:
        model(mx.array([prompt_of(PROMPT)]), cache=cache)
        with Call(plan_of(model), cache):
            masked = layer(embeddings, cache)
    assert report.dense_calls["with an array mask"] == 1
    assert report.sparse_calls == 0
    trim_prompt_cache(cache[:1], 1)
    assert mx.array_equal(masked, layer(embeddings, cache))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copy_of_an_enabled_model_is_not_enabled(duplicate: Any, model: Any, dense: list[int]):
    with mlx_sparse.sparse(model, SPARSE) as report:
        sparse = tokens_of(model)
        calls = report.sparse_calls
        twin = duplicate(model)
        assert mlx_sparse.report(twin) is None
        assert tokens_of(twin) == dense
        with mlx_sparse.sparse(twin, SPARSE):
            assert tokens_of(twin) == sparse
        assert report.sparse_calls == calls
        assert tokens_of(model) == sparse
        assert report.sparse_calls == 2 * calls
    assert tokens_of(model) == tokens_of(twin) == dense


RAGGED = [24, 9, 17, 30]


def token_ids(response: Any) -> list[list[int]]:
    """Return the token ids of the texts, whose words are ``w1``, ``w2``, .... mlx-lm 0.31 returns no ids."""
    return [[int(word.removeprefix("w")) for word in text.split()] for text in response.texts]


def batch(model: Any, tokenizer: TokenizerWrapper, lengths: list[int]) -> list[list[int]]:
    prompts = [prompt_of(length, seed=length) for length in lengths]
    return token_ids(batch_generate(model, tokenizer, prompts, max_tokens=STEPS))


# mlx-lm 0.31 cannot batch internlm2: its rope takes one offset only.
BATCHED = [
    family for family in (*FAMILIES, "deepseek_v2") if family != "internlm2" or metadata.version("mlx-lm") >= "0.32"
]


@pytest.mark.parametrize("family", BATCHED)
def test_a_ragged_batch_over_every_key_gives_the_dense_tokens(family: str, tokenizer: TokenizerWrapper):
    expected = batch(build(family), tokenizer, RAGGED)
    with mlx_sparse.sparse(model := build(family), EVERY_KEY) as report:
        assert batch(model, tokenizer, RAGGED) == expected
    assert report.sparse_calls == report.served_layers * (STEPS + 1)
    assert not [reason for reason in report.dense_calls if "mask" in reason]


def test_a_rank_above_the_head_dim_is_refused_and_leaves_the_model_alone(model: Any, dense: list[int]):
    with pytest.raises(mlx_sparse.ConfigError, match=r"^rank: expected at most the head dim D=16, got 17\.$"):
        mlx_sparse.enable(model, "sparq:rank=17")
    assert mlx_sparse.report(model) is None
    assert tokens_of(model) == dense


@pytest.mark.parametrize("attn", ["dense+sparq", "sample+h2o", "flash", "sparq+streaming", "", "sparq:preset=none"])
def test_unsupported_methods_of_a_model_are_refused(attn: str, model: Any):
    with pytest.raises(mlx_sparse.ConfigError, match=r"expected .*, got .*\.$"):
        mlx_sparse.enable(model, attn)
    assert mlx_sparse.report(model) is None


@pytest.mark.parametrize("backend", ["oracle", "cuda"])
def test_a_backend_that_cannot_run_a_model_is_refused(backend: str, model: Any):
    with pytest.raises(
        mlx_sparse.BackendUnavailable, match=rf"^backend: expected auto(, ops)? or \w+, got {backend} \(.*\)\.$"
    ):
        mlx_sparse.enable(model, backend=backend)


def other_parameters(queries: Any, keys: Any, values: Any, mask: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("owner", "name", "moved", "problem"),
    [
        (seam.LIBRARIES["mlx_lm"], "original", other_parameters, "scaled_dot_product_attention has other parameters"),
        (KVCache, "make_mask", None, "KVCache.make_mask is missing"),
        (KVCache, "state", property(lambda _: (None, None)), "KVCache"),
    ],
)
def test_changed_interface_of_mlx_lm_raises_with_the_version(
    owner: Any, name: str, moved: Any, problem: str, model: Any, monkeypatch: pytest.MonkeyPatch
):
    if moved is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, moved)
    with pytest.raises(mlx_sparse.BackendUnavailable, match=r"mlx-lm 0\.31\.3 or 0\.32") as error:
        mlx_sparse.enable(model)
    assert problem in str(error.value)


def test_threads_use_the_methods_of_their_own_models(dense: list[int]):
    results: dict[str, Any] = {}

    def work(name: str, attn: str | None) -> None:
        model = build()
        if attn is not None:
            mlx_sparse.enable(model, attn)
        results[name] = [tokens_of(model) for _ in range(5)], mlx_sparse.report(model)
        mx.synchronize()

    threads = [threading.Thread(target=work, args=job) for job in (("sparse", SPARSE), ("dense", None))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results["dense"] == ([dense] * 5, None)
    tokens, report = results["sparse"]
    assert tokens == [tokens[0]] * 5 != [dense] * 5
    assert report.sparse_calls == 5 * LAYERS * STEPS


def test_a_report_of_an_earlier_plan_takes_every_fact_and_counts_later_calls():
    first, again = build(), build()
    report = mlx_sparse.enable(first, SPARSE)
    tokens_of(first)
    report.model = "mine"
    later, facts = mlx_sparse.enable(again, SPARSE), set(vars(report)) - set(vars(Counts())) - {"model", "_counting"}
    plan_of(again).count_in(report)
    assert facts > {"crossovers", "part", "weight_bytes"}
    assert all(getattr(report, name) == getattr(later, name) for name in facts)
    tokens_of(again)
    assert (report.model, report.sparse_calls, later.sparse_calls) == ("mine", 2 * LAYERS * STEPS, 0)
