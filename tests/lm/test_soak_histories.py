"""scripts/soak_histories.py: it finds nothing wrong in what is right, and finds what is planted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_sparse.cache.kv_cache import SparseBatchKVCache
from mlx_sparse.cache.saap_state import BucketIndex
from mlx_sparse.cache.sparq_state import SparQState
from mlx_sparse.cache.sparse_cache import SparseCache

FOREVER = 1e9  # seconds
MOST = 40  # histories until a planted bug shows


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "soak_histories.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_a_dozen_histories_attend_as_the_oracle_does(soak: ModuleType):
    found = soak.soak(FOREVER, 0, most=12)
    assert found.mismatches == []
    assert found.histories == sum(found.families.values()) == 12
    assert sum(found.sparse.values()) > 120
    assert found.operations["trim"] > 0


def test_a_history_is_the_same_for_the_same_seed(soak: ModuleType, tmp_path: Path):
    first, again = (soak.Found().take(3, tmp_path).done for _ in range(2))
    assert first == again


def nothing(*_: Any, **__: Any) -> None:
    """In place of a method that matters."""


def of_whole_buffers(cache: Any, backend: str) -> Any:
    return cache.keys, cache.values, {}


def without_padding(cache: Any) -> mx.array:
    return mx.zeros_like(cache.left_padding)


SPARQ = "sparq:rank=4,top_k=8,component_score=query_key,reallocate=true,dense_below=0"
SAAP = "saap:mode=online,buckets=8,probes=2,recent_tokens=8,fold_every=7,dense_layers=0,dense_below=0"

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
    soak: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(owner, name, wrong)
    found, again = soak.Found(), soak.Found()
    while not found.mismatches and found.histories < MOST:
        found.take(first + found.histories, tmp_path, attn)
    (mismatch,) = found.mismatches
    again.take(mismatch["seed"], tmp_path, attn)
    assert [wrong["done"] for wrong in again.mismatches] == [mismatch["done"]]


def test_the_command_says_how_to_replay_and_writes_its_counts(
    soak: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(SparseCache, "rows", of_whole_buffers)
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["soak_histories.py", "--replay", "0", "--attn", STREAMING, "--json", str(file)])
    assert soak.main() == 1
    assert "model " in capsys.readouterr().out
    assert json.loads(file.read_text())["mismatches"][0]["seed"] == 0
