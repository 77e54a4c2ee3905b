"""Agreement of SparQ's choice with the exact one, by rank: the oracle's figures, and what has to hold of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import build, prompt_of

from mlx_sparse import oracle
from mlx_sparse.checks import ConfigError
from mlx_sparse.tools.evaluate import selection
from mlx_sparse.tools.evaluate.journal import as_json
from mlx_sparse.tools.evaluate.selection import QUERIES, SelectionRow

CONTEXT, TOP_K, D = 150, 24, 16
TOKENS = prompt_of(1000)
RANKS = (2, 4, 8, D)


def rows_of(model: Any, **options: Any) -> dict[tuple[str, int], SelectionRow]:
    settings = {"context": CONTEXT, "limit": 3, "seed": 0, "ranks": RANKS, "top_k": TOP_K} | options
    return {(row.component_score, row.rank): row for row in selection.run(model, TOKENS, **settings)}


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], SelectionRow]:
    return rows_of(build())


@pytest.mark.parametrize("score", selection.SCORES)
def test_more_components_agree_more_and_all_of_them_fully(score: str, rows: dict[tuple[str, int], SelectionRow]):
    found = [rows[score, rank] for rank in RANKS]
    assert [row.agreement for row in found] == sorted(row.agreement for row in found)
    assert found[0].agreement < 0.6
    # Another order of summation may put two keys in another order.
    assert found[-1].agreement > 1 - 1 / (QUERIES * TOP_K)
    assert found[-1].worst > 1 - 1 / (QUERIES * TOP_K)
    for row in found:
        assert row.worst <= row.agreement
        assert row.mass <= row.exact_mass < 1
        assert row.exact_mass == found[0].exact_mass
        assert (row.layers, row.examples, row.head_dim, row.context, row.top_k) == (2, 3, D, CONTEXT, TOP_K)
    assert found[-1].mass == pytest.approx(found[-1].exact_mass, abs=1e-6)
    assert found[-1].alpha_gap < 1e-6 < found[0].alpha_gap


def test_the_figures_are_the_oracles():
    n, Hq, Hkv, S = 5, 6, 2, 90
    random = np.random.default_rng(0)
    q, k = random.normal(size=(1, Hq, n, D)), random.normal(size=(1, Hkv, S, D))
    choices = [(score, rank) for score in selection.SCORES for rank in (4, 8)]
    found = selection._compare(mx.array(q, mx.float32), mx.array(k, mx.float32), 0.3, choices, TOP_K)
    expected = np.zeros_like(found)
    for i in range(n):
        query, keys = q[:, :, i : i + 1], k[:, :, : S - n + 1 + i]
        logits = np.einsum("hgd,hsd->hgs", query.reshape(Hkv, -1, D), keys[0]) * 0.3
        weights = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        exact = np.argsort(-weights.sum(axis=1), axis=-1)[:, :TOP_K]
        for row, (score, rank) in zip(expected, choices, strict=True):
            chosen = oracle.sparq_select(
                query, keys, rank=rank, top_k=TOP_K, local_window=0, component_score=score, scale=0.3
            )
            indices = chosen.indices[0]
            mass = np.stack([weights[h][:, indices[h]].sum(axis=-1) for h in range(Hkv)])
            best = np.stack([weights[h][:, exact[h]].sum(axis=-1) for h in range(Hkv)])
            shared = [len(set(a) & set(b)) / TOP_K for a, b in zip(indices.tolist(), exact.tolist(), strict=True)]
            gap = np.abs(chosen.alpha.reshape(mass.shape) - mass)
            row += [np.mean(shared), mass.mean(), best.mean(), gap.mean()]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def rescaled(model: Any) -> Any:
    """The same model but for channels of q and k: powers of two that cancel in every score, so no digit changes."""
    heads, kv_heads, half = 4, 2, D // 2
    for layer in model.layers:
        powers = mx.random.randint(-3, 4, (kv_heads, half), key=mx.random.key(3)).astype(mx.float32)
        factors = mx.tile(2.0**powers, (1, 2))  # RoPE turns channel i with channel i + D / 2
        attention = layer.self_attn
        attention.k_proj.weight = attention.k_proj.weight / factors.reshape(-1, 1)
        attention.q_proj.weight = attention.q_proj.weight * mx.repeat(factors, heads // kv_heads, axis=0).reshape(-1, 1)
    return model


def test_a_rescaling_of_channels_changes_the_choice_by_queries_and_not_that_by_queries_and_keys(
    rows: dict[tuple[str, int], SelectionRow],
):
    model = rescaled(build())
    prompt = mx.array([prompt_of(40)])
    assert mx.allclose(model(prompt), build()(prompt), rtol=1e-5, atol=1e-5)
    found = rows_of(model)
    for rank in (2, 4, 8):
        assert found["query_key", rank].agreement == pytest.approx(rows["query_key", rank].agreement, abs=1e-3)
        assert found["query", rank].agreement < rows["query", rank].agreement - 0.02


def test_layers_with_a_sliding_window_are_left_out():
    found = rows_of(build("gemma3_text"), limit=1)["query", 4]
    assert found.layers == 2
    assert found.worst_layer in (1, 3)


def test_one_text_has_no_error_and_is_json(rows: dict[tuple[str, int], SelectionRow]):
    (row, *_) = rows_of(build(), limit=1, ranks=(4,)).values()
    assert math.isnan(row.agreement_error)
    data = json.loads(json.dumps(as_json(row), allow_nan=False))
    assert data["agreement_error"] is data["mass_error"] is data["alpha_gap_error"] is None
    assert data["agreement"] == row.agreement
    assert rows["query", 4].agreement_error > 0


def test_errors_are_over_texts():
    figures = np.zeros((2, 3, 1, 4))
    figures[0, :, 0, 0], figures[1, :, 0, 0] = [0.2, 0.4, 0.6], [0.4, 0.2, 0.9]
    (row,) = selection._rows(figures, [("query", 4)], [0, 5, 7], head_dim=D, top_k=TOP_K, context=CONTEXT)
    assert row.agreement == pytest.approx(0.45)
    assert row.agreement_error == pytest.approx(0.05)  # of texts at 0.4 and 0.5
    assert (row.worst, row.worst_layer) == (pytest.approx(0.3), 0)


def test_ranks_above_the_head_dim_are_left_out_and_a_text_may_have_an_opening():
    plain = rows_of(build(), ranks=(4, 32))
    assert list(plain) == [("query", 4), ("query_key", 4)]
    opened = rows_of(build(), ranks=(4,), opening=[7])
    assert opened["query", 4].context == CONTEXT
    assert opened["query", 4].agreement != plain["query", 4].agreement


def test_a_prompt_in_several_calls_of_the_model_gives_the_figures_of_one(
    monkeypatch: pytest.MonkeyPatch, rows: dict[tuple[str, int], SelectionRow]
):
    monkeypatch.setattr(selection, "STEP", 40)
    monkeypatch.setattr(selection, "CHUNK", 7 * 2 * CONTEXT * D)  # seven queries at a time
    for key, row in rows_of(build()).items():
        assert row.agreement == pytest.approx(rows[key].agreement, abs=1e-3)
        assert row.alpha_gap == pytest.approx(rows[key].alpha_gap, abs=1e-4)


def test_texts_that_were_measured_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: dict[tuple[str, int], SelectionRow]
):
    kept = {"out": tmp_path, "key": "model and text"}
    measure, calls = selection._measure, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(selection, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows_of(build(), **kept)
    assert rows_of(build(), **kept) == rows
    assert len(calls) == 4
    assert rows_of(build(), **kept) == rows
    assert len(calls) == 4
    assert rows_of(build(), **kept, top_k=TOP_K + 1) != rows


def test_the_table_has_a_line_for_each_choice(rows: dict[tuple[str, int], SelectionRow]):
    lines = selection.table(list(rows.values())).splitlines()
    assert len(lines) == 2 + len(rows)
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| `query` | 2 of 16 | 150 | 3 | 0.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 80}, r"^context: expected at least top_k \+ 64 = 88, got 80\."),
        ({"limit": 100}, r"^--limit: expected 100 x 150 tokens of text, got 1,000\."),
        ({"top_k": 0}, r"^top_k: expected an integer of at least 1, got 0\."),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        rows_of(build(), **options)


def test_attention_that_is_no_number_is_refused(tmp_path: Path):
    model = build()
    model.model.layers[1].self_attn.q_proj.weight *= mx.array(math.nan)
    with pytest.raises(ConfigError, match=r"^--model: expected attention of finite numbers, got others\.$"):
        rows_of(model, out=tmp_path, limit=1)


def test_a_model_without_plain_caches_is_refused():
    with pytest.raises(ConfigError, match=r"^--model: expected an attention layer with a plain KV cache, got none\.$"):
        rows_of(build("mamba"))
