"""`mlx-sparse bench --prefill`: what it times, and what it refuses."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_sparse import cli
from mlx_sparse.bench import prefill
from mlx_sparse.bench.dense import Shape
from mlx_sparse.config import Sample
from mlx_sparse.layout import Layout
from mlx_sparse.ops import sample

SMALL = ["--prefill", "--shapes", "4x2x32", "--lengths", "600", "--dtype", "float32", "--repeat", "1"]


def bench(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


def test_a_row_has_a_time_for_each_step_and_the_density_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*SMALL, "--lengths", "1000", "--steps", "400,all", "--alphas", "0.5,0.9", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    methods = ["sample:alpha_column=0.5,alpha_slash=0.5", "sample:alpha_column=0.9,alpha_slash=0.9"]
    assert [(row["step"], row["method"]) for row in rows] == [(n, m) for n in (400, 1000) for m in methods]
    for row in rows:
        assert len(row["dense"]) == len(row["sparse"]) == (3 if row["step"] == 400 else 1)
        assert row["ratio"] == pytest.approx(sum(row["dense"]) / sum(row["sparse"]))
        assert row["last_step_ratio"] == pytest.approx(row["dense"][-1] / row["sparse"][-1])
    assert 0 < rows[2]["density"] < rows[3]["density"] < 1


def test_density_is_the_share_of_attended_pairs_over_all_steps() -> None:
    pieces = prefill.steps(prefill.inputs(Shape(4, 2, 32), 1000, mx.float32), 400)
    config = Sample(alpha_column=0.5, alpha_slash=0.5)
    attended = causal = 0
    for queries, keys, _ in pieces:
        layout = Layout(queries.shape[2], keys.shape[2], 1, 128)
        blocks = sample.sample_select(queries, keys, **config.parameters(), scale=32**-0.5)
        attended += int((blocks >= 0).sum().item())
        causal += 4 * layout.causal_pairs
    assert prefill.density(pieces, config, "ops") == pytest.approx(attended / causal)


def test_steps_are_those_of_a_prompt() -> None:
    queries, keys, values = prefill.inputs(Shape(2, 1, 32), 300, mx.float32)
    pieces = prefill.steps((queries, keys, values), 128)
    assert [(q.shape[2], k.shape[2], v.shape[2]) for q, k, v in pieces] == [
        (128, 128, 128),
        (128, 256, 256),
        (44, 300, 300),
    ]
    assert mx.array_equal(mx.concatenate([q for q, _, _ in pieces], axis=2), queries)


WRONG = {
    "a little off": lambda out, lse, blocks: (out + 0.01, lse, blocks),
    "not a number": lambda out, lse, blocks: (out * mx.nan, lse, blocks),
    "blocks left out": lambda out, lse, blocks: (out, lse, mx.where(mx.arange(blocks.shape[-1]) == 1, -1, blocks)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_no_speed_beside_a_wrong_result(
    wrong, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = sample.sample_attention
    monkeypatch.setattr(sample, "sample_attention", lambda *args, **settings: wrong(*right(*args, **settings)))
    assert bench(*SMALL, "--steps", "all", "--json") == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["failed"]
    assert row["note"].startswith("wrong ")
    assert row["dense"] is row["sparse"] is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", ["9x3x64", "8x1x128", "2x2x256"])
@pytest.mark.parametrize(
    "config", [Sample(), Sample(alpha_column=0.6, alpha_slash=0.9, chunks=2, block_size=32)], ids=str
)
def test_right_results_pass(dtype: str, shape: str, config: Sample) -> None:
    prompt = prefill.inputs(Shape(*map(int, shape.split("x"))), 900, getattr(mx, dtype))
    for piece in prefill.steps(prompt, 500):
        assert prefill.parity(piece, config, "ops") is None


def test_what_does_not_fit_into_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*SMALL, "--lengths", "10000000") == 0
    assert "GB of this machine's" in capsys.readouterr().out


def test_the_inputs_make_heads_differ() -> None:
    """Some look nearby, some far away: their densities lie apart, as a model's do."""
    queries, keys, _ = prefill.inputs(Shape(8, 2, 64), 2048, mx.float32)
    blocks = np.array(sample.sample_select(queries, keys, **Sample().parameters(), scale=64**-0.5))
    density = (blocks >= 0).sum(axis=(2, 3))[0] / Layout(2048, 2048, 1, 128).causal_pairs
    assert density.min() < 0.7 * density.max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attn", "sparq"], "--attn: expected sample with or without parameters, got sparq."),
        (["--alphas", "0.9,1.5"], "--alphas: expected a number above 0 and at most 1, got 1.5."),
        (["--steps", "512,none"], "--steps: expected numbers such as 1k,2k,3000, got 'none'."),
        (["--repeat", "0"], "repeat: expected an integer of at least 1, got 0."),
        (["--dtype", "half"], "--dtype: expected some of float16, bfloat16, float32, got half."),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*SMALL, *arguments) == 2
    assert capsys.readouterr().err == f"mlx-sparse: error: {message}\n"
