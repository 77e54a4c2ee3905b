"""Random histories of prompt caches: they attend as the oracle does, and planted bugs are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cache_histories import Found

from mlx_sparse.cache.kv_cache import SparseBatchKVCache
from mlx_sparse.cache.saap_state import BucketIndex
from mlx_sparse.cache.sparq_state import SparQState

pytestmark = pytest.mark.slow  # random histories

MOST = 40  # histories until a planted bug shows


def test_random_histories_attend_as_the_oracle_does(tmp_path: Path):
    found = Found()
    for seed in range(12):
        found.take(seed, tmp_path)
    assert found.mismatches == []
    assert found.histories == sum(found.families.values()) == 12
    assert sum(found.sparse.values()) > 120
    assert found.operations["trim"] > 0


def test_a_history_is_the_same_for_the_same_seed(tmp_path: Path):
    first, again = (Found().take(3, tmp_path).done for _ in range(2))
    assert first == again


def nothing(*_: Any, **__: Any) -> None:
    """In place of a method that matters."""


def without_padding(cache: Any) -> mx.array:
    return mx.zeros_like(cache.left_padding)


SPARQ = "sparq:rank=4,top_k=8,component_score=query_key,reallocate=true,dense_below=0"
SAAP = "saap:mode=online,buckets=8,probes=2,recent_tokens=8,merge_every=7,dense_layers=0,dense_below=0"

STREAMING = "streaming:sink_tokens=2,recent_tokens=8"


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "attn", "first"),  # histories before the first say nothing of it
    [
        (SparQState, "rewind", nothing, SPARQ, 10),
        (BucketIndex, "rewind", nothing, SAAP, 2),
        (SparseBatchKVCache, "_moved", nothing, SPARQ, 17),
        (SparseBatchKVCache, "padding", property(without_padding), STREAMING, 0),
    ],
    ids=["sums not rewound", "lists not rewound", "moved rows kept", "padding attended"],
)
def test_a_planted_bug_is_found_and_its_seed_replays_it(
    owner: type,
    name: str,
    wrong: Any,
    attn: str,
    first: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(owner, name, wrong)
    found, again = Found(), Found()
    while not found.mismatches and found.histories < MOST:
        found.take(first + found.histories, tmp_path, attn)
    (mismatch,) = found.mismatches
    again.take(mismatch["seed"], tmp_path, attn)
    assert [wrong["done"] for wrong in again.mismatches] == [mismatch["done"]]
