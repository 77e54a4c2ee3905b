"""Test the density limit of sample: a layer is dense if its sample selects too many blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from lm_prompts import LAYERS, SAMPLE, process, prompt_logits
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.core import registry
from mlx_sparse.core.decide import SAMPLE_DENSE_ABOVE

STEP = 256
TOO_FULL = "with too many selected key blocks"


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of keys at every sample."""
    found: list[int] = []
    load = registry.load

    def recording(function: str, backend: str) -> Any:
        if function != "sample_select":
            return load(function, backend)

        def select(queries: mx.array, keys: mx.array, **options: Any) -> Any:
            found.append(options.get("length", keys.shape[2]))
            return load(function, backend)(queries, keys, **options)

        return select

    monkeypatch.setattr(registry, "load", recording)
    return found


def test_dense_layer_is_sampled_again_after_the_context_doubles(samples: list[int]) -> None:
    model = build()
    tokens = prompt_of(5 * STEP)
    expected = prompt_logits(model, tokens, STEP)
    with mlx_sparse.sparse(model, SAMPLE + ",dense_above=0.01", backend="ops") as report:
        logits = prompt_logits(model, tokens, STEP)
    assert mx.array_equal(logits, expected)
    assert report.dense_calls == {TOO_FULL: 5 * LAYERS}
    assert report.prefill.calls == 0
    assert samples == [STEP] * LAYERS + [2 * STEP] * LAYERS + [4 * STEP] * LAYERS


def test_limit_does_not_change_sparse_layers(samples: list[int]) -> None:
    model = build()
    tokens = prompt_of(3 * STEP)
    with mlx_sparse.sparse(model, SAMPLE) as unlimited:
        expected = prompt_logits(model, tokens, STEP)
    assert samples == []  # selection and attention are one call
    with mlx_sparse.sparse(model, SAMPLE + ",dense_above=0.999") as report:
        logits = prompt_logits(model, tokens, STEP)
    assert mx.array_equal(logits, expected)
    assert samples == [length * STEP for length in (1, 2, 3) for _ in range(LAYERS)]
    assert report.dense_calls == {}
    assert report.prefill.as_dict() == unlimited.prefill.as_dict()


def test_the_limit_lies_between_the_densities_of_layers() -> None:
    model = build()
    tokens = prompt_of(STEP)
    with mlx_sparse.sparse(model, SAMPLE) as report:
        process(model, tokens, STEP)
    densities = sorted(sum(heads) / len(heads) for heads in report.prefill.density.values())
    assert densities[0] < densities[1]
    with mlx_sparse.sparse(model, f"{SAMPLE},dense_above={sum(densities) / 2}") as report:
        process(model, tokens, STEP)
    assert report.dense_calls == {TOO_FULL: 1}
    assert report.prefill.calls == 1


def trim(count: int) -> Callable[[list[Any]], None]:
    return lambda cache: trim_prompt_cache(cache, count * STEP)


def move_rows(cache: list[Any]) -> None:
    for entry in cache:
        entry.state = entry.state


@pytest.mark.parametrize(
    ("chunks", "change", "then", "sampled"),
    [(4, trim(3), 1, [2]), (4, trim(0), 1, []), (2, trim(2), 2, [1, 2]), (2, move_rows, 1, [3])],
    ids=["trimmed", "longer", "emptied", "moved"],
)
def test_trimmed_and_moved_rows_are_sampled_again(
    chunks: int, change: Callable[[list[Any]], None], then: int, sampled: list[int], samples: list[int]
) -> None:
    model = build()
    cache = make_prompt_cache(model)
    with mlx_sparse.sparse(model, SAMPLE + ",dense_above=0.01"):
        process(model, prompt_of(chunks * STEP), STEP, cache)
        del samples[:]
        change(cache)
        process(model, prompt_of(then * STEP, 1), STEP, cache)
    assert samples == [length * STEP for length in sampled for _ in range(LAYERS)]


def test_limit_applies_to_each_sequence_of_a_batch() -> None:
    model = build()
    tokens = mx.array([prompt_of(STEP, 1), prompt_of(STEP, 2), prompt_of(STEP, 3)])
    with mlx_sparse.sparse(model, SAMPLE) as report:
        model(tokens, cache=make_prompt_cache(model))
    densities = [sum(heads) / len(heads) for heads in report.prefill.density.values()]
    for limit, dense in ((1.01 * max(densities), 0), (0.99 * min(densities), LAYERS)):
        with mlx_sparse.sparse(model, f"{SAMPLE},dense_above={limit}") as report:
            model(tokens, cache=make_prompt_cache(model))
        assert report.dense_calls[TOO_FULL] == dense


def test_other_settings_are_sampled_again(samples: list[int]) -> None:
    """Test other settings over the same cache: of another method, or of the next context range."""
    model = build()
    cache = make_prompt_cache(model)
    with mlx_sparse.sparse(model, SAMPLE + ",dense_above=0.01"):
        process(model, prompt_of(4 * STEP), STEP, cache)
    for change in (",dense_above=0.02", ",dense_above=0.01,chunks=2", f",dense_above=0.01,ranges={6 * STEP}:0.3:0.2:1"):
        del samples[:]
        with mlx_sparse.sparse(model, SAMPLE + change):
            process(model, prompt_of(STEP), STEP, cache)
            assert len(samples) == LAYERS
        trim_prompt_cache(cache, STEP)
    del samples[:]
    ranges = f"{5 * STEP}:0.9:0.9:1/{9 * STEP}:0.3:0.3:1"
    with mlx_sparse.sparse(model, f"{SAMPLE},dense_above=0.01,ranges={ranges}"):
        process(model, prompt_of(3 * STEP), STEP)
        assert samples == [STEP] * LAYERS + [2 * STEP] * LAYERS
        process(model, prompt_of(3 * STEP), STEP, cache)
        assert samples[2 * LAYERS :] == [5 * STEP] * LAYERS


def test_contexts_that_are_long_enough_are_limited_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_sparse.methods.sample.config.SAMPLE_TUNED_BELOW", STEP)
    monkeypatch.setattr("mlx_sparse.methods.sample.config.SAMPLE_SHARE", 0)
    monkeypatch.setitem(SAMPLE_DENSE_ABOVE, "ops", 0.01)
    model = build()
    with mlx_sparse.sparse(model, SAMPLE.replace(",dense_below=0", f",ranges={9 * STEP}:0.3:0.3:1")) as report:
        process(model, prompt_of(STEP), STEP)
    assert report.dense_calls == {TOO_FULL: LAYERS}


@pytest.mark.parametrize(
    ("chunks", "steps", "sparse"),
    [(1, (STEP - 32,), True), (1, (STEP - 33,), False), (2, (STEP,), False), (1, (STEP, 100), True)],
)
def test_short_chunks_are_dense_by_default(
    chunks: int, steps: tuple[int, ...], sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test short chunks: with blocks of 32, a sample is an eighth of 256 queries. The last block may be incomplete."""
    monkeypatch.setattr("mlx_sparse.methods.sample.config.SAMPLE_TUNED_BELOW", 0)
    model = build()
    cache = make_prompt_cache(model)
    with mlx_sparse.sparse(model, f"sample:block_size=32,ranges=9999:0.95:0.95:{chunks},dense_above=1") as report:
        for step in steps:
            model(mx.array(prompt_of(step))[None], cache=cache)
    short = {"with more than an eighth of the queries sampled": LAYERS * (len(steps) - sparse)}
    assert report.dense_calls == {reason: count for reason, count in short.items() if count}
    assert report.prefill.calls == LAYERS * sparse
