"""Run the random histories on models and caches of mlx-vlm, and compare them with mlx-lm and with dense attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest
import vlm_models
from attention_recorder import Sequence, dequantized
from cache_histories import SAAP, SPARQ, History, Summary, Tracked, WrittenHistory, nothing
from mlx_vlm import apc

from mlx_sparse.cache import kv_cache
from mlx_sparse.lm.model import plan_of
from mlx_sparse.methods.sparq.state import SparQState
from mlx_sparse.model_info import new_caches

# The libraries implement these families differently (docs/models.md).
EXCLUDED = ("gemma3_text", "mistral3", "internlm2")


class VlmHistory(History):
    """A random history of a model of mlx-vlm. It stores caches in the prefix cache and quantizes caches."""

    library: ClassVar = 1
    more: ClassVar = {"quantize": 2}

    def build(self) -> tuple[str, Any]:
        def twin(family: str, seed: int, **changes: Any) -> Any:
            model = vlm_models.pair(family, seed=seed, hidden_size=128, head_dim=32, **changes)[self.library]
            return getattr(model, "language_model", model)

        return self.draw.model(twin, EXCLUDED)

    def file(self) -> None:
        """Store a cache in the prefix cache and continue with the stored copy."""
        if (tracked := self.pick(batch=False)) is not None:
            self.log("prefix", tracked)
            stored: Any = apc._clone_prompt_cache_for_apc(tracked.caches) if self.library else None
            rebuilt = tracked.rebuilt()
            tracked.caches, tracked.rows = stored or rebuilt.caches, rebuilt.rows

    def quantize(self) -> None:
        tracked = self.pick(batch=False)
        if tracked and all(type(one).__name__ == "KVCache" and one.keys.shape[3] == 32 for one in tracked.caches):
            bits = self.draw.one([4, 8])
            self.log(f"quantize {bits}", tracked)
            tracked.caches = [cache.to_quantized(group_size=32, bits=bits) for cache in tracked.caches]
            for layer, cache in enumerate(tracked.caches):
                rows = dequantized(cache, cache.keys, cache.values)
                tracked.rows[0].rows[layer] = np.stack([np.array(part)[0, :, : cache.offset] for part in rows])

    def merged(self, layers: list[Any]) -> Any:
        """Merge by the prefix cache's method, which mlx-vlm 0.6 does not have."""
        for cache in layers if hasattr(layers[0], "prefix_cache_merge") else ():
            if (batch := cache.prefix_cache_merge(layers, [one.offset for one in layers])) is not None:
                return batch
        return super().merged(layers)


class LmTwin(VlmHistory):
    """The same history on mlx-lm's model with the same weights."""

    library = 0


class WrittenVlmHistory(WrittenHistory, VlmHistory):
    """A random history of mlx-vlm's caches that a program also writes directly."""

    more: ClassVar = VlmHistory.more | WrittenHistory.more

    def quantize(self) -> None:
        """Quantize a cache. SAAP assigns keys before they are quantized, and the recorder sees only quantized keys."""
        if self.attn != SAAP:
            super().quantize()


class ImageHistory(VlmHistory):
    """A random history of a tiny Qwen3-VL whose prompts begin with an image."""

    def build(self) -> tuple[str, Any]:
        self.whole = vlm_models.qwen3_vl(self.draw.number(0, 9))
        return "qwen3_vl", self.whole.language_model

    def start(self) -> None:
        tracked = Tracked(new_caches(self.model), [Sequence()])
        self.tracked.append(tracked)
        tokens, pixels, grid = vlm_models.image_prompt(self.draw.tokens(1, self.draw.one([1, 40, 300]))[0].tolist())
        self.log(f"start {tokens.size}", tracked)

        def forward(tokens: mx.array, cache: list[Any]) -> Any:
            return self.whole(tokens, pixels, None, cache, image_grid_thw=grid)

        self.call(tracked, tokens, forward=forward)

    def call(self, tracked: Tracked, tokens: Any, *options: Any, **more: Any) -> list[Any]:
        """Check also that every decode step of SparQ is sparse, although the model passes a slice of the mask."""
        calls = super().call(tracked, tokens, *options, **more)
        step = tokens.shape[1] == 1 < min(row.length for row in tracked.rows) - 8
        if self.attn == SPARQ and plan_of(self.model) and step:
            assert all(part.out is not None for call in calls for part in call.parts), "a decode step is dense"
        return calls


@pytest.mark.slow
def test_histories_equal_the_oracle_and_those_of_mlx_lm_bit_for_bit(tmp_path: Path) -> None:
    found, twins = Summary(), Summary()
    for seed in range(14):
        ours, theirs = found.take(seed, tmp_path, None, VlmHistory), twins.take(seed, tmp_path, None, LmTwin)
        for one, other in zip(ours.witness.logits, theirs.witness.logits, strict=True):
            assert mx.array_equal(one, other), f"seed {seed}"
    assert found.mismatches == twins.mismatches == []
    assert found.sparse == twins.sparse and found.sparse.total() > 10 * found.histories
    assert min(found.operations[name] for name in ("trim", "copy", "merge", "prefix", "quantize", "ragged")) > 0


@pytest.mark.parametrize("attn", [SPARQ, None])
def test_histories_with_images_equal_the_oracle(attn: str | None, tmp_path: Path) -> None:
    found = Summary()
    for seed in range(16):
        found.take(seed, tmp_path, attn, ImageHistory)
    assert found.mismatches == []
    assert found.sparse.total() > 10 * found.histories


@pytest.mark.slow
@pytest.mark.parametrize("attn", [SPARQ, SAAP, "h2o:top_k=8"])
def test_histories_of_programs_that_write_cache_attributes_equal_the_oracle(attn: str, tmp_path: Path) -> None:
    found = Summary()
    for seed in range(4):
        found.take(seed, tmp_path, attn, WrittenVlmHistory)
    assert found.mismatches == []
    assert found.sparse.total() >= 10 and found.operations["write"] > 4


def unmoved(batch: Any, rows: Any, prefix_lens: Any) -> Any:
    """Merge caches, and keep the auxiliary state of the first cache for all sequences."""
    merged = kv_cache.merge(rows)
    for method, state in getattr(rows[0], "aux_states", {}).items():
        kv_cache.adopt(merged)
        merged.add_state(method, state)
    return merged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "wrong", "first"),
    [
        (SparQState, "rewind", nothing, 7),
        (kv_cache.SparseBatch, "_moved", nothing, 31),
        (kv_cache._OfVlm, "prefix_cache_merge", unmoved, 4),
    ],
    ids=["statistics not trimmed", "state kept for moved rows", "state kept by a merge"],
)
def test_planted_bug_is_found(
    owner: type, name: str, wrong: Any, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    Summary().find(first, tmp_path, SPARQ, VlmHistory)
