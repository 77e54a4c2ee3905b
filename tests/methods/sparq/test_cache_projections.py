"""Test the low-rank projections of a cache: each sequence is fitted once, and keeps its projection."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache
from tiny_caches import D, H, Rows, single

from mlx_sparse import ConfigError
from mlx_sparse.cache.kv_cache import adopt
from mlx_sparse.core import registry
from mlx_sparse.methods import SparQ
from mlx_sparse.methods.sparq import low_rank, ops
from mlx_sparse.methods.sparq.state import SparQState

CONFIG = SparQ(rank=2, top_k=8, local_window=1, reallocate=False, component_score="low_rank", dense_below=0)
C_Q = np.diag(np.arange(1.0, D + 1))


def step(cache: Any, backend: str = "ops") -> SparQState:
    """Run a decode step, and compare it with a step over new scoring keys. Return the state of the cache."""
    B, S = cache.keys.shape[0], cache.length
    queries = mx.random.normal((B, 2 * H, 1, D), key=mx.random.key(7))
    run = cache.bind(CONFIG, 2, backend, query_covariance=lambda: C_Q)
    out, lse, recall = run(queries, cache, S, 0.5)
    state = cache.aux_states["sparq"]
    keys, values = cache.keys[..., :S, :], cache.values[..., :S, :]
    given = CONFIG.parameters(2) | {"rank": state.projection.keys.shape[3], "left_padding": cache.padding}
    coded = ops.code_keys(low_rank.project(state.projection, queries, keys)[1], cache.padding)
    given |= {"keys_t": coded, "projection": state.projection, "value_mean": None}
    wanted = ops.sparq_attention(queries, keys, values, scale=0.5, **given)
    for found, array in zip((out, lse, recall), wanted, strict=True):
        np.testing.assert_allclose(np.array(found), np.array(array), rtol=1e-5, atol=1e-5)
    return state


def filled(rows: int, seed: int = 0) -> Any:
    cache = single()
    cache.update_and_fetch(*Rows(1, seed)(rows))
    return cache


@pytest.mark.parametrize("backend", ["ops", "auto"])
def test_growth_and_short_trims_keep_the_fit(backend: str) -> None:
    backend = registry.resolve(backend, "sparq", D=D, G=2)
    cache, rows = filled(100), Rows(1, seed=1)
    fit = step(cache, backend).projection
    for change in (1, 70, -20, 3, 500, -300, 1):
        cache.trim(-change) if change < 0 else cache.update_and_fetch(*rows(change))
        assert step(cache, backend).projection is fit
    assert cache.nbytes > cache.keys.nbytes + cache.values.nbytes + fit.keys.nbytes + fit.queries.nbytes


def test_a_trim_of_more_than_half_of_the_rows_fits_again() -> None:
    cache = filled(200)
    fit = step(cache).projection
    cache.trim(100)
    assert step(cache).projection is fit
    cache.trim(41)
    cache.update_and_fetch(*Rows(1, seed=3)(1))
    again = step(cache).projection
    assert again is not fit
    wanted = low_rank.fit(C_Q, cache.keys[..., :60, :], 2)
    np.testing.assert_array_equal(np.array(again.keys), np.array(wanted.keys))


def test_a_copy_keeps_the_fit_and_a_file_is_fitted_again(tmp_path: Path) -> None:
    cache = filled(150)
    fit = step(cache).projection
    other = copy.deepcopy(cache)
    other.update_and_fetch(*Rows(1, seed=5)(9))
    np.testing.assert_array_equal(np.array(step(other).projection.keys), np.array(fit.keys))
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    (loaded,) = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    adopt(loaded)
    assert loaded.aux_states == {}
    np.testing.assert_array_equal(np.array(step(loaded).projection.keys), np.array(fit.keys))


def test_batches_fit_only_new_sequences() -> None:
    """Test merge, a step, filter, a longer sequence that joins, extract, and a step alone."""
    long, short, new = filled(150, seed=1), filled(90, seed=2), filled(70, seed=3)
    fits = [step(cache).projections[0] for cache in (long, short)]
    batch: Any = type(long).merge([long, new, short])
    assert batch.aux_states["sparq"].projections == [fits[0], None, fits[1]]
    state = step(batch)
    assert state.projections[0] is fits[0] and state.projections[2] is fits[1]
    alone = low_rank.fit(C_Q, new.keys[..., :70, :], 2)
    np.testing.assert_array_equal(np.array(state.projections[1].keys), np.array(alone.keys))
    third = state.projections[1]
    batch.filter([1, 2])
    assert [found is own for found, own in zip(step(batch).projections, (third, fits[1]), strict=True)] == [True] * 2
    joining: Any = type(long).merge([filled(300, seed=4)])
    batch.extend(joining)
    state = step(batch)
    assert state.projections[0] is third and len(state.projections) == 3
    one = batch.extract(1)
    assert one.aux_states["sparq"].projections[0] is fits[1]
    assert step(one).projections[0] is fits[1]


def test_another_rule_replaces_the_projected_scoring_keys() -> None:
    cache = filled(150)
    step(cache)
    queries = mx.random.normal((1, 2 * H, 1, D))
    other = SparQ(rank=2, top_k=8, component_score="query_key", reallocate=False)
    outs = [each.attend(queries, other, scale=0.5, backend="ops")[0] for each in (cache, filled(150))]
    np.testing.assert_array_equal(*map(np.array, outs))
    step(cache)


@pytest.mark.parametrize("setting", [{"key_bits": 16}, {"reallocate": True}])
def test_settings_that_low_rank_does_not_support_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="component_score: expected low_rank with key_bits=4 and without reallocate"):
        SparQ(component_score="low_rank", **setting)


def test_the_crossover_length_of_low_rank_is_modeled() -> None:
    """A timed layer has random latents, whose projection would need all components."""
    assert SparQ(component_score="query_key").measurable
    assert not SparQ(component_score="low_rank").measurable
