"""`top_k_agreement`: SparQ's selections beside the exact one, by rank."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import build, prompt_of

from mlx_sparse.checks import ConfigError
from mlx_sparse.tools.evaluate import selection
from mlx_sparse.tools.evaluate.journal import Journal, as_json
from mlx_sparse.tools.evaluate.selection import OfText, SelectionRow

CONTEXT, TOP_K = 150, 24
TOKENS = prompt_of(1000)
RANKS = (2, 4, 8, 16, 32)  # the last is above the head dim


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "RANKS", RANKS)
    monkeypatch.setattr(selection, "TOP_K", TOP_K)
    monkeypatch.setattr(selection, "QUERIES", 8)
    monkeypatch.setattr(selection, "STEP", 40)


def rows_of(model: Any, path: Path | None = None, **options: Any) -> dict[tuple[str, int], SelectionRow]:
    journal = Journal(path, "eval top_k_agreement", "key", OfText)
    found = selection.run(model, TOKENS, journal, **{"context": CONTEXT, "limit": 3, "seed": 0} | options)
    return {(row.component_score, row.rank): row for row in found}


def test_more_components_agree_more_and_all_of_them_fully_and_texts_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(build(), tmp_path / "selections.jsonl")
    for score in selection.SCORES:
        found = [rows[score, rank] for rank in RANKS[:-1]]
        means = [row.mean for row in found]
        assert [one.agreement for one in means] == sorted(one.agreement for one in means)
        assert means[0].agreement < 0.6 and means[-1].agreement == pytest.approx(1)
        assert all(one.recall <= one.exact_recall < 1 for one in means)
        assert means[-1].recall == pytest.approx(means[-1].exact_recall)
        assert means[-1].alpha_gap < 1e-6 < means[0].alpha_gap
        assert (found[0].layers, found[0].examples, found[0].head_dim, found[0].error.recall > 0) == (2, 3, 16, True)
    monkeypatch.setattr(selection, "_measure", None)
    assert rows_of(build(), tmp_path / "selections.jsonl") == rows


def test_the_figures_are_means_over_decode_steps() -> None:
    """Two decode steps by hand: the queries are unit vectors, so one component gives exact scores."""
    keys = np.zeros((1, 1, 6, 4))
    keys[0, 0, :, 0] = [5, 4, 3, 2, 1, 0]
    keys[0, 0, :, 1:3] = np.arange(6)[:, None]
    queries = np.zeros((1, 1, 2, 4))
    queries[0, 0, :, 0] = 1
    exact = selection.compare(queries, keys, 1.0, [("query", 1)], 2)
    weights = [np.exp([5, 4, 3, 2, 1]), np.exp([5, 4, 3, 2, 1, 0])]
    recall = np.mean([w[:2].sum() / w.sum() for w in weights])
    np.testing.assert_allclose(exact, [[1, recall, recall, 0]], atol=1e-12)
    queries[0, 0, :, 1:3] = 0.9  # two components that together outweigh the one of largest |q|
    assert selection.compare(queries, keys, 1.0, [("query", 1)], 2)[0, 0] == 0


def test_layers_with_a_sliding_window_are_left_out_and_one_text_has_no_error() -> None:
    row = rows_of(build("gemma3_text"), limit=1, opening=[7])["query", 4]
    assert row.layers == 2 and math.isnan(row.error.agreement)
    assert json.loads(json.dumps(as_json(row), allow_nan=False))["error"]["recall"] is None


def test_what_cannot_be_measured_is_refused() -> None:
    for options, message in (
        ({"context": 31}, r"^--context: expected an integer of at least 32, got 31\."),
        ({"limit": 100}, r"^--limit: expected 100 x 150 tokens of text, got 1,000\."),
    ):
        with pytest.raises(ConfigError, match=message):
            rows_of(build(), **options)
    model = build()
    model.model.layers[1].self_attn.q_proj.weight *= mx.array(math.nan)
    with pytest.raises(ConfigError, match=r"^--model: expected attention of finite numbers, got others\.$"):
        rows_of(model, limit=1)
    with pytest.raises(ConfigError, match=r"^--model: expected an attention layer with a plain KV cache, got none\.$"):
        rows_of(build("mamba"))
