"""Test self-speculative decoding: it must give the tokens and caches of dense decoding."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import family_models
import mlx.core as mx
import pytest
import tiny_models
from cases import covering
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_tables import read_tables
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from msl import Metal
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.checks import ConfigError
from mlx_sparse.core import reasons
from mlx_sparse.core.packed_rows import PackedRows
from mlx_sparse.lm.dense import large_group
from mlx_sparse.lm.model import plan_of
from mlx_sparse.lm.speculative import generation
from mlx_sparse.lm.speculative.draft_length import MAX_DRAFTS
from mlx_sparse.lm.speculative.generation import UNEVEN, check_options, make_lossless
from mlx_sparse.model_info import leaves

DATA = read_tables(__file__)

SPARQ = "sparq:rank=2,top_k=8,dense_below=0"
GOOD = "sparq:rank=16,top_k=96,key_bits=16,dense_below=0"  # most drafts are accepted
# Sliding windows: gemma3_text and gpt_oss, which also has sinks. lfm2 has convolutions, whose states cannot be trimmed.
FAMILIES = ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", "lfm2"]
# Sampling options of mlx-lm's commands.
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "temperature": lambda: {"sampler": make_sampler(0.8, top_p=0.9, min_p=0.02)},
    "xtc and penalties": lambda: {
        "sampler": make_sampler(1.0, xtc_probability=0.4, xtc_threshold=0.01, top_k=20),
        "logits_processors": make_logits_processors(repetition_penalty=1.4, presence_penalty=0.2),
    },
}


def generate(
    steps_of: Any, model: Any, prompt: list[int], count: int, **options: Any
) -> tuple[list[int], list[mx.array]]:
    """Return ``count`` tokens and their log-probabilities."""
    found = list(itertools.islice(steps_of(mx.array(prompt), model, max_tokens=-1, **options), count))
    return [token for token, _ in found], [logprobs for _, logprobs in found]


def rows(cache: list[Any]) -> list[mx.array]:
    """Return the arrays of the caches of all layers."""
    return [array for entry in cache for array in entry.state if isinstance(array, mx.array)]


def contents(caches: list[Any]) -> list[mx.array]:
    """Return copies of all arrays in use, and of the random state."""
    found = [mx.random.state[0]]
    for cache in leaves(caches):
        arrays = [array for _, array in tree_flatten(list(cache.state)) if isinstance(array, mx.array)]
        grows = hasattr(cache, "offset") and not isinstance(cache, RotatingKVCache)
        found += [array[:, :, : cache.offset] if grows else array for array in arrays]
        found.append(mx.array([getattr(cache, "offset", 0), getattr(cache, "_idx", 0)]))
    copies = [mx.array(array) + 0 for array in found]
    mx.eval(copies)
    return copies


@pytest.fixture
def enabled() -> Iterator[Callable[..., Any]]:
    models = []

    def enable(model: Any, attn: str = SPARQ, draft_tokens: int | None = None) -> Any:
        models.append(model)
        return mlx_sparse.enable(model, attn, lossless=True, draft_tokens=draft_tokens)

    yield enable
    for model in models:
        mlx_sparse.disable(model)


@pytest.mark.parametrize(("family", "sampler"), covering(FAMILIES, list(SAMPLERS)))
def test_every_token_equals_dense_decoding(family: str, sampler: str, enabled: Callable[..., Any]) -> None:
    model, prompt = build(family), prompt_of(150)
    mx.random.seed(5)
    expected, logprobs = generate(generation.original, model, prompt, 40, **SAMPLERS[sampler]())
    after = mx.random.uniform().item()
    report = enabled(model, SPARQ, 3)
    mx.random.seed(5)
    found, ours = generate(generation.generate_step, model, prompt, 40, **SAMPLERS[sampler]())
    assert found == expected
    assert mx.random.uniform().item() == after
    for row, (ours_of, theirs) in enumerate(zip(ours, logprobs, strict=True)):
        assert mx.allclose(ours_of, theirs, rtol=1e-3, atol=1e-3), row
    drafts = report.drafts
    assert drafts.checks > 8 and 0 < sum(drafts.accepted) < drafts.drafted == 3 * drafts.checks
    assert report.sparse_calls == drafts.drafted * report.served_layers


def test_good_drafts_are_accepted(enabled: Callable[..., Any]) -> None:
    model, prompt = build(), prompt_of(100)
    expected, _ = generate(generation.original, model, prompt, 40)
    report = enabled(model, GOOD, 4)
    assert generate(generation.generate_step, model, prompt, 40)[0] == expected
    drafts = report.drafts
    assert sum(drafts.accepted) > 0.9 * drafts.drafted
    assert drafts.checks < 12
    # Each verification reads the rows of each layer once.
    dense = report.dense_bytes / report.sparse_calls * report.layers
    assert report.checked_bytes == pytest.approx((drafts.checks + drafts.alone + 1) * dense, rel=0.05)


def test_the_same_numbers_are_drawn_for_a_draft_and_its_check(enabled: Callable[..., Any]) -> None:
    """Test sampled drafts, because independent draws from 95 tokens at a high temperature would rarely agree."""
    model, prompt = build(), prompt_of(100)
    report = enabled(model, GOOD, 4)
    mx.random.seed(1)
    generate(generation.generate_step, model, prompt, 40, sampler=make_sampler(5.0))
    assert sum(report.drafts.accepted) > 0.6 * report.drafts.drafted


@pytest.mark.parametrize("family", [*FAMILIES, "quantized"])
def test_cache_and_random_state_at_each_token_equal_dense_decoding(family: str, enabled: Callable[..., Any]) -> None:
    quantized = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0} if family == "quantized" else {}
    model = build("llama", head_dim=32) if quantized else build(family)

    def states(steps_of: Any) -> list[list[mx.array]]:
        mx.random.seed(3)
        cache = make_prompt_cache(model)
        options = {"prompt_cache": cache, "sampler": make_sampler(1.0), "max_tokens": 16, **quantized}
        return [contents(cache) for _ in steps_of(mx.array(prompt_of(100)), model, **options)]

    expected = states(generation.original)
    report = enabled(model, GOOD, 4)
    for token, (found, dense) in enumerate(zip(states(generation.generate_step), expected, strict=True)):
        for ours, theirs in zip(found, dense, strict=True):
            assert ours.shape == theirs.shape and mx.allclose(ours, theirs, rtol=1e-3, atol=1e-3), token
    assert sum(report.drafts.accepted) > 0


def stop_nothing(generator: Any) -> None:
    """Keep the generator without an end, as a program does that only leaves its loop."""


def stop_by_close(generator: Any) -> None:
    generator.close()


def stop_by_exception(generator: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        generator.throw(KeyboardInterrupt())


@pytest.mark.parametrize(
    ("family", "stop"), covering(["llama", "gemma3_text", "lfm2"], [stop_nothing, stop_by_close, stop_by_exception])
)
def test_a_reader_may_stop_within_accepted_drafts(
    family: str, stop: Callable[[Any], None], enabled: Callable[..., Any], tmp_path: Path
) -> None:
    """Test that later turns, also over a saved cache, do not depend on when Python finalizes the first generator."""
    model = build(family)

    def turns(steps_of: Any) -> list[Any]:
        cache = make_prompt_cache(model)
        generator = steps_of(mx.array(prompt_of(100)), model, prompt_cache=cache, max_tokens=-1)
        found: list[Any] = [[token for token, _ in itertools.islice(generator, 2)]]
        stop(generator)
        save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
        saved = load_prompt_cache(str(tmp_path / "cache.safetensors"))
        for turn, own in ((2, saved), (2, cache), (3, cache)):
            found.append(generate(steps_of, model, prompt_of(20, seed=turn), 10, prompt_cache=own)[0])
            generator = None  # finalize the first generator after the second turn
        return [*found, [getattr(entry, "offset", None) for entry in cache]]

    expected = turns(generation.original)
    enabled(model, GOOD, 4)
    assert turns(generation.generate_step) == expected


HISTORIES = 4
# A turn: prompt tokens, generated tokens, draft length, and True to sample at random.
TURNS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 24), st.sampled_from([None, 1, 3, MAX_DRAFTS]), st.booleans()),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_turns_on_one_cache_equal_dense_decoding(family: str) -> None:
    """Test an answer that ends within accepted drafts: the cache must equal the cache of dense decoding."""
    model = build(family)

    @settings(max_examples=HISTORIES, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(TURNS)
    def history(turns: list[tuple[int, int, int | None, bool]]) -> None:
        ours, theirs = make_prompt_cache(model), make_prompt_cache(model)
        for turn, (prompt, count, drafts, random) in enumerate(turns):
            tokens = prompt_of(prompt, seed=turn + 1)
            found = []
            for caches, lossless in ((theirs, False), (ours, True)):
                mx.random.seed(turn)
                options = {"prompt_cache": caches, **SAMPLERS["temperature" if random else "greedy"]()}
                if not lossless:
                    found.append(generate(generation.original, model, tokens, count, **options)[0])
                    continue
                with mlx_sparse.lossless(model, SPARQ, draft_tokens=drafts):
                    found.append(generate(generation.generate_step, model, tokens, count, **options)[0])
            assert found[0] == found[1]
        assert [cache.offset for cache in ours if hasattr(cache, "offset")] == [
            cache.offset for cache in theirs if hasattr(cache, "offset")
        ]

    history()


def test_direct_calls_of_the_model_are_dense(enabled: Callable[..., Any]) -> None:
    model, prompt = build(), prompt_of(100)

    def logits() -> mx.array:
        cache = make_prompt_cache(model)
        model(mx.array([prompt]), cache=cache)
        return model(mx.array([[7]]), cache=cache)

    expected = logits()
    report = enabled(model)
    assert mx.array_equal(logits(), expected)
    assert report.sparse_calls == 0 and report.dense_calls[reasons.CHECKED] == 2


def test_exception_in_a_draft_restores_the_cache(enabled: Callable[..., Any]) -> None:
    model, prompt = build("gemma3_text"), prompt_of(60)
    cache = make_prompt_cache(model)

    def sampler(logprobs: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) == 4:  # after the first token and three drafts
            raise KeyboardInterrupt
        return mx.random.categorical(logprobs)

    calls: list[int] = []
    mx.random.seed(1)
    mx.random.categorical(mx.zeros((1, 4)))
    following = mx.random.uniform().item()
    enabled(model, SPARQ, 5)
    mx.random.seed(1)
    with pytest.raises(KeyboardInterrupt):
        generate(generation.generate_step, model, prompt, 10, sampler=sampler, prompt_cache=cache)
    assert all(entry.offset == len(prompt) for entry in cache)
    assert mx.random.uniform().item() == following


def test_exception_of_the_progress_callback_leaves_the_state_of_dense_decoding(enabled: Callable[..., Any]) -> None:
    model, prompt = build(), prompt_of(60)

    def interrupted(steps_of: Any) -> tuple[int, float]:
        def progress(done: int, whole: int) -> None:
            if done == whole:
                raise KeyboardInterrupt

        cache = make_prompt_cache(model)
        options = {"prompt_cache": cache, "prompt_progress_callback": progress, "sampler": make_sampler(0.8)}
        mx.random.seed(1)
        with pytest.raises(KeyboardInterrupt):
            generate(steps_of, model, prompt, 10, **options)
        return cache[0].offset, mx.random.uniform().item()

    expected = interrupted(generation.original)
    enabled(model, SPARQ, 5)
    assert interrupted(generation.generate_step) == expected


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_tokens_give_the_progress_and_counts_of_mlx_lm(count: int, enabled: Callable[..., Any]) -> None:
    model, prompt = build(), prompt_of(60)

    def outcome(steps_of: Any) -> Any:
        progress: list[tuple[int, int]] = []
        cache = make_prompt_cache(model)
        options = {"prompt_cache": cache, "prefill_step_size": 25, "max_tokens": count}
        generator = steps_of(
            mx.array(prompt), model, prompt_progress_callback=lambda *at: progress.append(at), **options
        )
        return [token for token, _ in itertools.islice(generator, count + 1)], progress, cache[0].offset

    expected = outcome(generation.original)
    report = enabled(model, SPARQ, 5)
    assert outcome(generation.generate_step) == expected
    assert (report.drafts.drafted if report.drafts else 0) == max(count - 1, 0)  # at most as many as can be returned


def test_logits_processors_may_use_random_numbers(enabled: Callable[..., Any]) -> None:
    model, prompt = build(), prompt_of(60)
    options = {"logits_processors": [lambda tokens, logits: logits + mx.random.gumbel(logits.shape)]}
    mx.random.seed(3)
    expected = generate(generation.original, model, prompt, 20, **options)[0], mx.random.uniform().item()
    enabled(model, SPARQ, 3)
    mx.random.seed(3)
    assert (generate(generation.generate_step, model, prompt, 20, **options)[0], mx.random.uniform().item()) == expected


def test_interpreter_exits_cleanly_during_an_answer() -> None:
    script = (
        "import mlx.core as mx, mlx_sparse, tiny_models as tiny\n"
        "from mlx_sparse.lm.speculative.generation import generate_step\n"
        "model = tiny.build()\n"
        f"mlx_sparse.enable(model, {SPARQ!r}, lossless=True, draft_tokens=3)\n"
        "answer = generate_step(mx.array(tiny.prompt_of(60)), model)\n"
        "next(answer)\n"
        "tiny.answer = answer  # outlives the modules that it uses\n"
    )
    folder = str(Path(tiny_models.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": folder}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_another_thread_can_use_trimmed_windows(enabled: Callable[..., Any]) -> None:
    model, cache = build("gemma3_text"), []

    def answer() -> None:
        cache.extend(make_prompt_cache(model))
        generate(generation.generate_step, model, prompt_of(60), 2, prompt_cache=cache)

    enabled(model, SPARQ, 5)
    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    mx.eval(rows(cache))
    assert len(rows(cache)) == 2 * len(cache)


def test_short_contexts_and_caches_before_quantization_are_not_drafted(enabled: Callable[..., Any]) -> None:
    model, prompt = build("llama", head_dim=32), prompt_of(60)
    report = enabled(model, "sparq:rank=4,top_k=16,dense_below=80", 4)
    generate(generation.generate_step, model, prompt, 40)
    assert 18 <= report.drafts.alone <= 22 and report.drafts.checks > 0
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 90}
    mlx_sparse.disable(model)
    expected, _ = generate(generation.original, model, prompt, 60, **options)
    report = enabled(model, SPARQ, 4)
    assert generate(generation.generate_step, model, prompt, 60, **options)[0] == expected
    assert 28 <= report.drafts.alone <= 32 and report.drafts.checks > 0
    # A cache that is quantized from the start counts all its keys.
    mlx_sparse.disable(model)
    report = enabled(model, "sparq:rank=4,top_k=16,dense_below=40", 4)
    generate(generation.generate_step, model, prompt, 20, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    assert report.drafts.alone == 0 and report.drafts.checks > 0


@pytest.mark.parametrize(("start", "count"), [(160, 140), (160, 143), (160, 160), (0, 20)])
def test_cache_quantized_during_an_answer_equals_dense_decoding(
    start: int, count: int, enabled: Callable[..., Any]
) -> None:
    """Compare bitwise, because another rounding of a key may change its 4-bit value."""
    model, prompt = build("llama", head_dim=32), prompt_of(17 if start else 90)
    options = {"prefill_step_size": 16, "kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": start}
    caches = []
    for steps_of in (generation.original, generation.generate_step):
        if steps_of is generation.generate_step:
            enabled(model, "oracle_top_k:top_k=8", 1)
        caches.append(make_prompt_cache(model))
        generate(steps_of, model, prompt, count, prompt_cache=caches[-1], **options)
    for layers in zip(*caches, strict=True):
        assert [hasattr(layer, "bits") for layer in layers] == [len(prompt) + count >= start] * 2
        dense, ours = (
            [array[:, :, : layer.offset] for _, array in tree_flatten([layer.keys, layer.values])] for layer in layers
        )
        assert all(mx.array_equal(*pair) for pair in zip(dense, ours, strict=True))


@pytest.mark.parametrize(("attn", "options", "message"), DATA["methods"])
def test_unsupported_methods_are_refused_in_one_line(attn: str, options: dict[str, Any], message: str) -> None:
    model = build()
    with pytest.raises(ConfigError) as error:
        mlx_sparse.enable(model, attn, **{"lossless": True, **options})
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(("options", "generates", "message"), DATA["options"])
def test_conflicting_options_are_refused_in_one_line(options: dict[str, Any], generates: bool, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_options(argparse.Namespace(**options), "mlx_lm.evaluate", generates=generates)
    assert str(error.value) == message


def test_a_part_of_a_model_is_refused(enabled: Callable[..., Any]) -> None:
    model = build()
    enabled(model)
    plan = plan_of(model)
    assert plan is not None
    model.model.pipeline_size, model.model.start_idx, model.model.end_idx = 2, 0, 1
    with pytest.raises(ConfigError, match="lossless: expected a whole model on one process, got a part of a model"):
        make_lossless(plan, model, None)


@pytest.mark.parametrize("family", sorted(UNEVEN))
def test_families_with_other_masks_for_multi_token_decode_are_refused(family: str) -> None:
    model = family_models.build(family)
    with pytest.raises(ConfigError, match=f"lossless: expected a model with equal masks .*, got {family}\\.$"):
        mlx_sparse.enable(model, SPARQ, lossless=True)
    mlx_sparse.enable(model, SPARQ)
    mlx_sparse.disable(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_kv_size": 16}, "lossless: expected a cache that stores all keys, got max_kv_size=16."),
        ({"input_embeddings": mx.zeros((4, 64))}, "lossless: expected a prompt of tokens, got embeddings."),
        (
            {"prompt_cache": [RotatingKVCache(32, keep=4), KVCache()]},
            "lossless: expected a cache that stores all keys, got a rotating one (--max-kv-size).",
        ),
    ],
)
def test_unsupported_calls_are_refused_in_one_line(
    options: dict[str, Any], message: str, enabled: Callable[..., Any]
) -> None:
    model = build()
    enabled(model)
    with pytest.raises(ConfigError, match=re.escape(message)):
        generation.generate_step(mx.array([1, 2]), model, **options)


@pytest.mark.parametrize(
    ("backend", "family", "options", "drafts"),
    [
        *(("auto", "llama", {}, 7), ("ops", "llama", {}, 3), ("auto", "llama", {"head_dim": 72}, 3)),
        *(("auto", "llama", {"num_key_value_heads": 1, "num_attention_heads": 32, "head_dim": 16}, 3),),
    ],
)
def test_draft_length_on_metal_is_limited_by_the_kernel(
    backend: str, family: str, options: dict[str, Any], drafts: int, metal: Metal
) -> None:
    eight = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16}
    model = build(family, **{**eight, **options})
    mlx_sparse.enable(model, SPARQ, lossless=True, backend=backend)
    try:
        assert generation.Run(plan_of(model), model, generation.Options()).draft_length.most == drafts
    finally:
        mlx_sparse.disable(model)


@pytest.mark.parametrize(("family", "heads"), [("llama", (4, 2)), ("gpt_oss", (16, 2))])
def test_verification_on_metal_reads_keys_once_and_equals_dense_decoding(
    family: str, heads: tuple[int, int], metal: Metal
) -> None:
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    model, prompt = build(family, **sizes), prompt_of(40)
    for layer in model.layers:
        if hasattr(layer.self_attn, "sinks"):
            layer.self_attn.sinks = mx.arange(heads[0], dtype=mx.float32) / 4
    expected, logprobs = generate(generation.original, model, prompt, 6)
    mlx_sparse.enable(model, SPARQ, lossless=True, draft_tokens=3)
    try:
        found, ours = generate(generation.generate_step, model, prompt, 6)
    finally:
        mlx_sparse.disable(model)
    assert found == expected
    assert all(mx.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in zip(ours, logprobs, strict=True))
    if metal.emulated:
        checks = [report for report in metal.launches if report.kernel == "attend_rows"]
        assert checks and all(report.grid[1] == heads[1] for report in checks)


@pytest.mark.parametrize(
    ("L", "G", "D", "ours"),
    [
        *((2, 4, 64, False), (8, 4, 128, False), (9, 1, 64, True), (8, 5, 128, True), (2, 2, 80, True)),
        *((16, 8, 128, True), (16, 9, 128, False), (3, 2, 72, False), (4, 16, 256, True)),
    ],
)
def test_large_groups_use_our_kernel_only_where_mlx_has_none(L: int, G: int, D: int, ours: bool, metal: Metal) -> None:
    q, k = mx.zeros((1, 2 * G, L, D)), mx.zeros((1, 2, 20, D))
    assert large_group("auto", q, k) == large_group("metal", q, k) == ours
    assert not large_group("ops", q, k)
    if D % 32 == 0:
        assert not large_group("auto", q, PackedRows.of(k, bits=8, group_size=32))
