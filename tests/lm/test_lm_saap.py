"""SAAP in mlx-lm's models: dense where every bucket is visited, the oracle's keys where not, after any history."""

from __future__ import annotations

import copy
import gc
import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from lm_prompts import tiny_tokenizer
from mlx_lm import batch_generate, stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from saap_artefacts import BUCKETS, LAYERS, ONLINE, PROMPT, STEPS, artefact_of, attn, write_artefact
from tier import some
from tiny_models import FAMILIES, build, greedy, prompt_of

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.artefact import load
from mlx_sparse.cache.saap_state import BucketIndex
from mlx_sparse.lm import rope as rope_module
from mlx_sparse.lm import saap
from mlx_sparse.methods import SAAP
from mlx_sparse.methods.reasons import A_FEW, CHANGED_AFTER_ROPE
from mlx_sparse.methods.stats import dense_elements, saap_elements


@pytest.fixture
def model() -> Any:
    return build()


@pytest.fixture
def artefact(model: Any, tmp_path: Path) -> Path:
    return write_artefact(tmp_path / "model", model)


def close(a: mx.array, b: mx.array) -> bool:
    """Float32 through a few layers."""
    return bool((mx.abs(a - b).max() < 1e-4 * mx.abs(b).max()).item())


ALL_FAMILIES = [*FAMILIES, "cohere2", "starcoder2", "nemotron"]
# The modes differ in what routes, not in the model.
SOME_FAMILIES = ["llama", "qwen3", "phi3", "gpt_oss", "ministral3", "cohere2"]


@pytest.mark.parametrize(
    ("family", "mode"),
    [(family, "trained") for family in some(ALL_FAMILIES, 7)]
    + [(family, mode) for family in SOME_FAMILIES[::2] for mode in ("online",)],
)
def test_every_bucket_gives_the_dense_tokens(family: str, mode: str, tmp_path: Path):
    model, prompt = build(family), prompt_of(PROMPT)
    tokens, logits = greedy(model, prompt, STEPS)
    if mode == "online":
        config = SAAP(mode="online", buckets=BUCKETS, probes=BUCKETS, recent_tokens=16, merge_every=8, dense_layers=0)
    else:
        config = attn(write_artefact(tmp_path / "a", model))
    with mlx_sparse.sparse(model, config) as report:
        same_tokens, same_logits = greedy(model, prompt, STEPS)
    assert report.served_layers > 0
    assert report.sparse_calls == report.served_layers * STEPS
    assert same_tokens == tokens
    assert close(same_logits, logits)
    assert report.buckets.selectivity == 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "ministral3", "phi3", "smollm3"])
def test_few_probes_attend_the_oracles_keys(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[dict[str, Any]] = []
    lists, step = saap.attended_keys, saap.Indices.step

    def noting_lists(index: BucketIndex, queries: mx.array, S: int, *args: Any) -> Any:
        result = lists(index, queries, S, *args)
        seen.append(
            {"before": np.array(queries), "S": S, "lists": result, "index": index, "covered": index.lists.covered[0]}
        )
        return result

    def noting_step(self: Any, queries: mx.array, cache: Any, bound: Any, served: list[int], scale: float) -> Any:
        result = step(self, queries, cache, bound, served, scale)
        S = cache.length
        rows = [np.array(x[..., :S, :].astype(mx.float32), np.float64) for x in (cache.keys, cache.values)]
        ids = np.array(
            mx.concatenate(
                [cache.aux_states["saap"].ids, mx.zeros((1, 2, S - cache.aux_states["saap"].assigned), mx.int16)],
                axis=2,
            )
        )
        seen[-1] |= {"queries": np.array(queries, np.float64), "rows": rows, "ids": ids, "scale": scale, "out": result}
        return result

    monkeypatch.setattr(saap, "attended_keys", noting_lists)
    monkeypatch.setattr(saap.Indices, "step", noting_step)
    model = build(family)
    file = write_artefact(tmp_path / "a", model)
    with mlx_sparse.sparse(model, attn(file, 2)) as report:
        greedy(model, prompt_of(PROMPT), STEPS)
    assert len(seen) == report.sparse_calls == report.served_layers * STEPS
    attended = listed = 0
    routers = {id(call["index"]): call["index"].router for call in seen}
    assert len(routers) == report.served_layers
    made = load(file).layers
    assert len(made) == report.served_layers
    for call, layer in zip(seen, itertools.cycle(sorted(made)), strict=False):
        network = {name: np.array(array, np.float32) for name, array in made[layer].arrays().items()}
        network.pop("centroids")
        visited = oracle.saap_route(call["before"], probes=2, **network)
        indices, counts = (np.array(array) for array in call["lists"])
        keys, values = call["rows"]
        out, _ = (np.array(array.astype(mx.float32)) for array in call["out"])
        position = np.arange(call["S"])
        exact = (position < 1) | (position >= call["covered"])
        for h in range(2):
            chosen = exact | np.isin(call["ids"][0, h], visited[0, h])
            np.testing.assert_array_equal(np.sort(indices[0, h, : counts[0, h]]), position[chosen])
            G = call["queries"].shape[1] // 2
            for g in range(h * G, h * G + G):
                scores = np.where(chosen, keys[0, h] @ call["queries"][0, g, 0] * call["scale"], -np.inf)
                weights = np.exp(scores - scores.max())
                expected = weights / weights.sum() @ values[0, h]
                assert np.abs(out[0, g, 0] - expected).max() < 1e-5 * np.abs(values).max()
        attended += counts.sum()
        listed += 2 * (call["covered"] - 1)
    exactly = sum(2 * call["S"] for call in seen) - listed
    assert report.buckets.selectivity == pytest.approx((attended - exactly) / listed)
    assert 0 < report.buckets.selectivity < 0.8


def test_a_prompt_in_pieces_and_its_last_token_are_indexed(model: Any, artefact: Path):
    prompt = mx.array(prompt_of(500))
    expected = [token for token, _ in generate_step(prompt, build(), max_tokens=STEPS, prefill_step_size=64)]
    with mlx_sparse.sparse(model, attn(artefact)) as report:
        cache = make_prompt_cache(model)
        found = [t for t, _ in generate_step(prompt, model, max_tokens=STEPS, prefill_step_size=64, prompt_cache=cache)]
    assert found == expected
    assert report.sparse_calls == LAYERS * (STEPS + 1)  # mlx-lm works one token ahead
    assert cache[0].aux_states["saap"].length == cache[0].length


@pytest.mark.parametrize("text", ["sample:block_size=32,alpha_column=1,alpha_slash=1,dense_below=0", ""])
def test_it_decodes_after_sparse_prompts_and_after_dense_ones(model: Any, artefact: Path, text: str):
    tokens, logits = greedy(model, prompt_of(200), STEPS)
    methods = "+".join(filter(None, [text, str(attn(artefact))]))
    with mlx_sparse.sparse(model, methods) as report:
        same, same_logits = greedy(model, prompt_of(200), STEPS)
    assert same == tokens
    assert close(same_logits, logits)
    assert report.sparse_calls == LAYERS * STEPS


def test_a_layer_that_saap_refuses_still_has_its_sparse_prompts():
    model = build("hunyuan_v1_dense")
    sample = "sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0"
    with mlx_sparse.sparse(model, f"{sample}+{ONLINE},probes=2") as report:
        greedy(model, prompt_of(300), 4)
    assert report.prefill.calls == LAYERS
    assert (report.sparse_calls, report.dense_calls) == (0, {CHANGED_AFTER_ROPE: 4 * LAYERS})


@pytest.mark.parametrize("probes", [2, BUCKETS])
def test_a_cache_from_a_file_a_copy_and_one_reused_after_trim_give_the_same_tokens(
    model: Any, artefact: Path, tmp_path: Path, probes: int
):
    file = str(tmp_path / "cache.safetensors")
    with mlx_sparse.sparse(model, attn(artefact, probes)) as report:
        cache = make_prompt_cache(model)
        model(mx.array([prompt_of(PROMPT)]), cache=cache)
        save_prompt_cache(file, cache)
        twin = copy.deepcopy(cache)
        first = greedy(model, [7, 8, 9], STEPS, cache)[0]
        trim_prompt_cache(cache, 3 + STEPS)
        for again in (cache, twin, load_prompt_cache(file)):
            for layer in again:
                if getattr(layer, "index", None) is not None:
                    layer.aux_states[
                        "saap"
                    ].lists = None  # fold when the others do: what is pending is attended exactly
            assert greedy(model, [7, 8, 9], STEPS, again)[0] == first
    assert report.sparse_calls == 4 * LAYERS * STEPS


def test_a_batch_of_ragged_prompts_gives_what_each_gives_alone(model: Any, artefact: Path):
    tokenizer, prompts = tiny_tokenizer(), [prompt_of(length, length) for length in (80, 55, 70)]

    def texts(prompts: list[list[int]]) -> list[str]:
        return list(batch_generate(model, tokenizer, prompts, max_tokens=STEPS).texts)

    dense = texts(prompts)
    with mlx_sparse.sparse(model, attn(artefact)) as report:
        assert texts(prompts) == dense
        assert [texts([prompt])[0] for prompt in prompts] == dense
    assert report.sparse_calls >= 4 * LAYERS * STEPS
    assert "with an array mask" not in report.dense_calls
    with mlx_sparse.sparse(model, attn(artefact, 2)) as few:
        assert texts(prompts) != dense
    assert 0 < few.buckets.selectivity < 0.8


def test_requests_that_join_and_leave_a_batch_keep_their_text(model: Any, artefact: Path):
    tokenizer = tiny_tokenizer()
    prompts = [prompt_of(length, length) for length in (80, 55, 70, 44)]
    options = {"max_tokens": [6, 30, 14, 22], "completion_batch_size": 2, "prefill_batch_size": 2}
    dense = list(batch_generate(model, tokenizer, prompts, **options).texts)
    with mlx_sparse.sparse(model, attn(artefact)) as report:
        assert list(batch_generate(model, tokenizer, prompts, **options).texts) == dense
    assert report.sparse_calls > 0


@pytest.mark.parametrize("company", ["none", "another", "an empty one first"])
def test_centroids_fitted_to_a_prompt_stay_when_its_cache_joins_a_batch(company: str, model: Any):
    """Steps follow the fit, so that centroids fitted again would be others."""
    with mlx_sparse.sparse(model, f"{ONLINE},probes=2"):
        histories = []
        for length in (60, 75):
            cache = make_prompt_cache(model)
            greedy(model, prompt_of(length, length), 12, cache)
            histories.append(cache)
        others = {"none": [], "another": [histories[1]], "an empty one first": [make_prompt_cache(model)]}[company]
        alone = copy.deepcopy(histories[0])
        parts = [histories[0], *others] if company == "another" else [*others, histories[0]]
        batch = [layer[0].merge(list(layer)) for layer in zip(*parts, strict=True)]
        row = parts.index(histories[0])
        for token in range(12):
            expected = model(mx.array([[token]]), cache=alone)
            assert close(model(mx.array([[token]] * len(parts)), cache=batch)[row : row + 1], expected)
        taken_out = [layer.extract(row) for layer in batch]
        assert close(model(mx.array([[7]]), cache=taken_out), model(mx.array([[7]]), cache=alone))


def test_speculative_decoding_gives_the_dense_text(model: Any, artefact: Path):
    tokenizer, prompt = tiny_tokenizer(), prompt_of(PROMPT)
    expected = [token for token, _ in generate_step(mx.array(prompt), build(), max_tokens=STEPS)]
    draft = build(seed=1)
    with mlx_sparse.sparse(model, attn(artefact)) as report, mlx_sparse.sparse(draft, f"{ONLINE},probes=2") as drafts:
        responses = stream_generate(model, tokenizer, prompt, STEPS, draft_model=draft)
        assert [response.token for response in responses] == expected
    assert report.dense_calls[A_FEW] > 0
    assert drafts.sparse_calls > 0


def test_a_draft_as_good_as_the_model_is_accepted_through_trims(model: Any, artefact: Path):
    tokenizer, prompt = tiny_tokenizer(), prompt_of(PROMPT)
    draft = build()
    with mlx_sparse.sparse(draft, attn(artefact)) as drafts:
        responses = list(stream_generate(model, tokenizer, prompt, STEPS, draft_model=draft, num_draft_tokens=3))
    assert sum(response.from_draft for response in responses) == STEPS - STEPS // 4  # three of every four
    assert drafts.sparse_calls > 0


def test_a_text_that_grows_out_of_the_window_goes_on_sparsely(model: Any, artefact: Path):
    tokens, _ = greedy(model, prompt_of(10), 120)
    with mlx_sparse.sparse(model, attn(artefact)) as report:
        cache = make_prompt_cache(model)
        assert greedy(model, prompt_of(10), 120, cache)[0] == tokens
    assert report.sparse_calls == LAYERS * (120 - (17 - 10))
    assert len(cache[0].aux_states["saap"].pending) <= 8


def test_bytes_count_lists_rows_and_the_network(model: Any, artefact: Path):
    with mlx_sparse.sparse(model, attn(artefact)) as report:
        greedy(model, prompt_of(PROMPT), STEPS)
    heads, D, hidden, size = 2, 16, 24, 4
    network = (D * hidden + hidden + hidden * BUCKETS + BUCKETS) * size  # of float32 weights
    lengths = range(PROMPT + 1, PROMPT + STEPS + 1)
    moved = sum(saap_elements(D, S) * size + network for S in lengths)
    assert report.sparse_bytes == LAYERS * heads * moved
    assert report.dense_bytes == LAYERS * heads * size * sum(dense_elements(S, D) for S in lengths)
    assert report.as_dict()["sparse_bytes"] == report.sparse_bytes
    assert report.as_dict()["buckets"]["selectivity"] == 1
    assert "selectivity: 100.0% of the keys" in str(report)


def test_the_device_is_waited_for_once_per_fold_and_not_per_token(
    model: Any, artefact: Path, monkeypatch: pytest.MonkeyPatch
):
    folds: list[tuple[int, int]] = []
    rebuild_lists = saap.rebuild_lists

    def noting_fold(caches: list[Any], S: int, *args: Any) -> None:
        folds.append((S, len(caches)))
        rebuild_lists(caches, S, *args)

    monkeypatch.setattr(saap, "rebuild_lists", noting_fold)
    evaluations: list[int] = []
    evaluate = mx.eval
    with mlx_sparse.sparse(model, attn(artefact, 3)):
        cache = make_prompt_cache(model)
        logits = model(mx.array([prompt_of(PROMPT)]), cache=cache)[:, -1]
        monkeypatch.setattr(mx, "eval", lambda *args: evaluations.append(1) or evaluate(*args))
        for _ in range(STEPS):
            before = len(evaluations), len(folds)
            logits = model(mx.argmax(logits, axis=-1)[:, None], cache=cache)[:, -1]
            assert len(folds) > before[1] or len(evaluations) == before[0]
    assert folds == [(S, LAYERS) for S in (PROMPT + 1, *range(PROMPT + 4, PROMPT + STEPS + 1, 8))]


def test_nothing_but_the_index_stays_in_memory(model: Any, artefact: Path):
    prompt = mx.array([prompt_of(2000)])

    def left_behind() -> tuple[int, Any]:
        cache = make_prompt_cache(model)
        gc.collect()
        start = mx.get_active_memory()
        model(prompt, cache=cache)
        mx.eval([layer.state for layer in cache])  # what mlx-lm evaluates after a piece
        gc.collect()
        return mx.get_active_memory() - start, cache

    plain, _ = left_behind()
    with mlx_sparse.sparse(model, attn(artefact)):
        first, cache = left_behind()
        mx.synchronize()
        indexed = sum(layer.aux_states["saap"].nbytes for layer in cache)
    assert indexed == LAYERS * 2 * 2000 * 2
    # Allocations are rounded up.
    assert first <= plain + indexed + LAYERS * 16384


def test_disabled_models_are_as_before_and_their_caches_go_on(model: Any, artefact: Path):
    ropes = [type(rope) for rope in rope_module.ropes(model)]
    cache, plain = make_prompt_cache(model), make_prompt_cache(model)
    model(mx.array([prompt_of(PROMPT)]), cache=plain)
    with mlx_sparse.sparse(model, attn(artefact)):
        assert [type(rope) for rope in rope_module.ropes(model)] != ropes
        greedy(model, prompt_of(PROMPT), 3, cache)
        trim_prompt_cache(cache, 3)
    assert [type(rope) for rope in rope_module.ropes(model)] == ropes
    logits = [model(mx.array([[5]]), cache=each) for each in (cache, plain)]
    assert mx.array_equal(*logits)
    assert cache[0].aux_states["saap"].received is None


def test_a_cache_that_goes_on_with_another_artefact_is_indexed_anew(model: Any, tmp_path: Path):
    files = [write_artefact(tmp_path / str(C), model, buckets=C) for C in (8, 12)]
    tokens, _ = greedy(model, prompt_of(PROMPT), 21)
    cache, found = make_prompt_cache(model), []
    for file, config in zip(files, (attn(files[0], 8), attn(files[1], 12)), strict=True):
        with mlx_sparse.sparse(model, config) as report:
            first = prompt_of(PROMPT) if file is files[0] else [found[-1]]
            found += greedy(model, first, 10, cache)[0]
        assert report.sparse_calls >= LAYERS * 10
        assert cache[0].aux_states["saap"].lists.offsets.shape[-1] == load(file).buckets + 1
    assert found[:10] == tokens[:10]
    assert found[10:] == tokens[11:], "greedy does not return what it says after its prompt"


def test_artefacts_of_tests_are_artefacts(model: Any, artefact: Path):
    found, made = load(artefact), artefact_of(model)
    assert (found.buckets, found.hidden, set(found.layers)) == (made.buckets, made.hidden, set(made.layers))
