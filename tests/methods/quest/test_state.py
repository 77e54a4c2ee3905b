"""Test the settings of Quest, and its page bounds in caches and models."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from mlx_lm.models.cache import BatchKVCache, KVCache
from tiny_models import build, greedy, prompt_of

import mlx_sparse
from mlx_sparse.cache.kv_cache import adopt
from mlx_sparse.cache.sparse_cache import SparseCache
from mlx_sparse.core import registry
from mlx_sparse.methods import parse
from mlx_sparse.methods.quest.config import Quest
from mlx_sparse.tools.evaluate.variants import fit_budget, transfers


def test_settings_budgets_and_contexts() -> None:
    assert Quest(top_k=20, page_size=8).attended == 24
    assert [Quest().shortest_context(), Quest(top_k=20).shortest_context()] == [4096, 33]
    assert str(parse("quest:top_k=64")[0]) == "quest:top_k=64"
    assert transfers(parse(fit_budget("quest", Fraction(1, 4), 8192, 128) or "")[0], 8192, 128) <= 1 / 4
    with pytest.raises(mlx_sparse.ConfigError, match="page_size: expected an integer of at least 1, got 0"):
        parse("quest:page_size=0")


def attend(cache: Any, page_size: int = 4) -> None:
    """Run a step and assert that the bounds in the cache match the keys."""
    config = Quest(page_size=page_size, top_k=page_size)
    query = mx.random.normal((cache.keys.shape[0], 4, 1, 8))
    out, _ = cache.attend(query, config, scale=0.3, backend="ops")
    keys, values, _ = cache.rows("ops")
    fresh = registry.load("page_bounds", "ops")(keys, cache.padding, page_size=page_size)
    for row, first in enumerate(cache.first_rows()):
        full = max(cache.length - 1 - first, 0) // page_size
        for kept, bound in zip(cache.aux_states["quest"].bounds, fresh, strict=True):
            assert mx.array_equal(kept[row, :, :full], bound[row, :, :full])
    how = {"left_padding": cache.padding, "scale": 0.3, "page_size": page_size, "top_k": page_size}
    assert mx.array_equal(out, mlx_sparse.quest_attention(query, keys, values, **how, backend="ops"))


@pytest.mark.parametrize("padding", [None, [3, 0, 1]], ids=["alone", "batch"])
@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_right_after_any_history(padding: list[int] | None, seed: int) -> None:
    random = np.random.default_rng(seed)
    cache: Any = KVCache() if padding is None else BatchKVCache(padding)
    adopt(cache)
    actions = ["append"] * 6 + ["trim", "copy", "page"] + (["filter", "extend"] if padding else [])
    for action in ["append", *random.choice(actions, 40)]:
        count = 250 if action == "append" and random.random() < 0.1 else int(random.integers(1, 12))
        B = 1 if padding is None else cache.left_padding.size
        if action == "append":
            cache.update_and_fetch(*(mx.array(random.normal(size=(B, 2, count, 8)), mx.float16) for _ in "kv"))
        elif action == "trim":
            cache.trim(min(count, cache.length - 9))
        elif action == "copy":
            cache = copy.deepcopy(other := cache)
            other.update_and_fetch(*(mx.ones((B, 2, 5, 8), mx.float16) for _ in "kv"))
        elif action == "filter" and B > 1:
            cache.filter(mx.array([B - 1, 0]))
        elif action == "extend" and B < 4:
            cache.extend(copy.deepcopy(cache))
        if cache.length > 9:
            attend(cache, 7 if action == "page" else 4)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3"])
def test_a_model_attends_at_every_step_as_the_oracle(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bind, steps = SparseCache.bind, []

    def checked_bind(cache: Any, *settings: Any) -> Any:
        step = bind(cache, *settings)

        def checked(queries: mx.array, cache: Any, S: int, scale: float, hooks: Any = None) -> Any:
            out, *more = step(queries, cache, S, scale, hooks)
            rows = [np.array(array.astype(mx.float32)) for array in (queries, *cache.rows("ops")[:2])]
            expected = reference.quest_attention(*rows, page_size=4, top_k=16, scale=scale)
            np.testing.assert_allclose(np.array(out.astype(mx.float32)), expected, rtol=0, atol=1e-4)
            steps.append(cache.length)
            return out, *more

        return checked

    monkeypatch.setattr(SparseCache, "bind", checked_bind)
    model = build(family)
    with mlx_sparse.sparse(model, "quest:page_size=4,top_k=16"):
        greedy(model, prompt_of(30), 8)
    assert set(steps) >= set(range(31, 38))
