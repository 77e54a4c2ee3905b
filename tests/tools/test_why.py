"""Test scripts/why.py, which measures the statistics of docs/results/why.md."""

import json
from pathlib import Path

import commands
import mlx.core as mx
import numpy as np
import pytest
import why
from tiny_models import write

from mlx_sparse import oracle
from mlx_sparse.core.attend.oracle import dense_softmax
from mlx_sparse.methods import SparQ


def test_rows_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    model = write(tmp_path / "tiny-model", num_hidden_layers=2, head_dim=64)
    (tmp_path / "text.txt").write_text(commands.text(1600))
    options = ["--model", str(model), "--text", str(tmp_path / "text.txt"), "--context", "512", "--passages", "3"]
    monkeypatch.setattr(why, "SELECTIONS", 4)
    monkeypatch.setattr("sys.argv", ["scripts/why.py", *options])
    assert why.main() == 0
    rows = {row["key"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    row = rows["why/tiny/text/0.5k/sparq-rank-64-top_k-128/recall"]
    assert (row["examples"], row["passages"], len(row["by_layer"])) == (12, 3, 2)
    assert row["mean"] == pytest.approx(np.mean(row["by_layer"]), abs=1e-4) and row["sem"] > 0
    assert all(rows[f"why/tiny/text/0.5k/dense/{name}"]["mean"] > 0 for name in ("top_32_mass", "span_pre_rope"))


def test_selections_match_the_oracle():
    random = np.random.default_rng(0)
    query, keys = random.standard_normal((1, 6, 1, 64)), random.standard_normal((1, 2, 500, 64))
    found, mass = why.select(mx.array(query, mx.float32), mx.array(keys, mx.float32), 0.5, False)
    exact = dense_softmax(query, keys, scale=0.5, left_padding=None)[0].reshape(6, 500)
    assert mass == pytest.approx(np.sort(exact)[:, -32:].sum(axis=1).mean(), rel=1e-5)
    settings = SparQ.preset("default") | {"rank": 32, "top_k": 128, "scale": 0.5, "return_stats": True}
    stats = oracle.sparq_attention(query, keys, keys, **settings)[1]
    place = list(why.methods(64)).index("sparq")
    np.testing.assert_allclose(found[place, :, :3].mean(axis=1), stats.estimated_recall[0], rtol=1e-5)


def test_buckets_of_shifted_queries_and_of_keys_in_runs():
    runs = np.repeat(np.eye(64, dtype=np.float32)[: why.BUCKETS], 16, axis=0)[None, None]
    positions = np.arange(0, 512, 4)[None]
    same = why.of_buckets(runs[:, :, positions[0]], runs, positions)
    other = why.of_buckets(np.repeat(runs[:, :, :1], 128, axis=2), runs, positions)
    assert same["shift"] == same["shift_of_keys"] == pytest.approx(0) and other["shift"] > 0.9
    assert same["span"] < 0.3 and same["negative"] == 0
    shuffled = np.random.default_rng(0).permutation(runs, axis=2)
    assert why.of_buckets(shuffled[:, :, positions[0]], shuffled, positions)["span"] > 0.6
