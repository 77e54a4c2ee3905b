"""Compare random histories of prompt caches with the oracle, and check that planted bugs are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cache_histories import SAAP, SPARQ, Summary, WrittenHistory, nothing

from mlx_sparse.cache.kv_cache import SparseBatchKVCache
from mlx_sparse.methods.saap.state import BucketIndex
from mlx_sparse.methods.sparq.state import SparQState

pytestmark = pytest.mark.slow  # random histories

STREAMING = "streaming:sink_tokens=2,recent_tokens=8"


@pytest.mark.parametrize(
    ("attn", "histories"),
    [
        (None, 12),
        (SPARQ, 3),
        (f"{SPARQ},key_bits=16", 3),
        (SAAP, 3),
        ("h2o:top_k=8", 3),
        ("h2o:top_k=8,local_window=0", 2),
    ],
)
def test_random_histories_equal_the_oracle(attn: str | None, histories: int, tmp_path: Path):
    found = Summary()
    for seed in range(histories):
        found.take(seed, tmp_path, attn)
    assert found.mismatches == []
    assert found.histories == sum(found.families.values()) == histories
    assert sum(found.sparse.values()) > 10 * histories
    assert found.operations["trim"] > 0


@pytest.mark.parametrize("attn", [SPARQ, f"{SPARQ},key_bits=16", SAAP, "h2o:top_k=8"])
def test_histories_of_programs_that_write_cache_attributes_equal_the_oracle(attn: str, tmp_path: Path):
    found = Summary()
    for seed in range(4, 8):
        found.take(seed, tmp_path, attn, WrittenHistory)
    assert found.mismatches == []
    assert found.sparse.total() >= 10 and found.operations["write"] > 4


def test_same_seed_gives_the_same_history(tmp_path: Path):
    first, again = (Summary().take(3, tmp_path).done for _ in range(2))
    assert first == again


def without_padding(cache: Any) -> mx.array:
    return mx.zeros_like(cache.left_padding)


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "attn", "first"),  # "first" is the first history that finds the bug
    [
        (SparQState, "rewind", nothing, SPARQ, 10),
        (BucketIndex, "rewind", nothing, SAAP, 2),
        (SparseBatchKVCache, "_moved", nothing, SPARQ, 17),
        (SparseBatchKVCache, "padding", property(without_padding), STREAMING, 0),
    ],
    ids=["statistics not trimmed", "lists not trimmed", "state kept for moved rows", "padding attended"],
)
def test_planted_bug_is_found_and_replayed_by_its_seed(
    owner: type, name: str, wrong: Any, attn: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(owner, name, wrong)
    Summary().find(first, tmp_path, attn)
