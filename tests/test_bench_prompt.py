"""`mlx-sparse bench` of prompts: what it times, and what it refuses."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_sparse import cli
from mlx_sparse.bench import prefill, timing
from mlx_sparse.bench.decode import Case
from mlx_sparse.bench.dense import Shape
from mlx_sparse.config import BigBird, MInference, Prefill, Sample, StreamingPrefill
from mlx_sparse.layout import Layout
from mlx_sparse.ops import sample
from mlx_sparse.stats import prefill_elements

SMALL = ["--attn", "sample", "--shapes", "4x2x32", "--lengths", "600", "--dtype", "float32", "--repeat", "1"]


def bench(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


METHODS = [
    "sample:alpha_column=0.5,alpha_slash=0.5",
    "minference:vertical_tokens=128,slash_tokens=128",
    "bigbird",
    "streaming_prefill",
]


def rows_of(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
    out = io.StringIO()
    with redirect_stdout(out):
        assert bench(*SMALL, *arguments, "-o", "json") == code
    rows: list[dict[str, Any]] = json.loads(out.getvalue())["rows"]
    return rows


def test_a_row_has_both_times_and_the_density_beside_them() -> None:
    rows = rows_of("--attn", ",".join(METHODS), "--lengths", "700", "--steps", "400,all")
    assert [(row["step"], row["method"]) for row in rows] == [(n, method) for n in (400, 700) for method in METHODS]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["dense_us"] / row["sparse_us"])
        assert row["dense_us_low"] <= row["dense_us"] <= row["dense_us_high"]
        # Dense attention in smaller pieces leaves out what is above the diagonal; pieces of 400 are small as they are.
        assert row["dense"] in (("mlx",) if row["step"] == 400 else ("mlx", "mlx, in pieces"))
        assert (row["last_step_ratio"] == row["ratio"]) == (row["step"] == 700)
        assert row["bytes_plain"] == 2 * 2 * 32 * 4 * (400 + 700 if row["step"] == 400 else 700)
        assert 0 < row["density"] < 1


def test_density_and_bytes_are_those_of_the_attended_pairs_of_all_pieces() -> None:
    config = Sample(alpha_column=0.5, alpha_slash=0.5)
    pieces = prefill.pieces(prefill.inputs(Case("float32", Shape(4, 2, 32), 2, 700)), 400)
    entrant = prefill.Entrant(config, "ops")
    attended = causal = elements = 0
    for queries, cache in pieces:
        entrant.count((queries, cache))
        layout, keys = Layout(queries.shape[2], cache.length, 1, 128), cache.keys[:, :, : cache.length]
        blocks = sample.sample_select(queries, keys, **config.parameters(), scale=32**-0.5)
        chosen = int((blocks >= 0).sum().item())
        attended, causal = attended + chosen, causal + 2 * 4 * layout.causal_pairs
        elements += 2 * 4 * prefill_elements(layout, 32, chosen / (2 * 4 * layout.causal_pairs))
    assert entrant.density == pytest.approx(attended / causal)
    assert entrant.elements == elements


def test_pieces_are_those_of_a_prompt() -> None:
    prompt = prefill.inputs(Case("float32", Shape(2, 1, 32), 1, 300))
    pieces = prefill.pieces(prompt, 128)
    assert [(queries.shape[2], cache.length) for queries, cache in pieces] == [(128, 128), (128, 256), (44, 300)]
    assert mx.array_equal(mx.concatenate([queries for queries, _ in pieces], axis=2), prompt[0])


@pytest.mark.parametrize("L", [1100, 300])
def test_all_ways_to_attend_densely_agree(L: int) -> None:
    queries, keys, values = prefill.inputs(Case("float32", Shape(4, 2, 32), 1, 1100))
    ways = timing.dense_ways(mx.float32, L)
    outs = [way(queries[:, :, -L:], keys, values) for way in ways.values()]
    assert len(outs) == (2 if L > timing.PIECE else 1)
    for out in outs[1:]:
        assert mx.abs(out - outs[0]).max().item() < 1e-5


WRONG = {
    "a little off": lambda out, lse, blocks: (out + 0.01, lse, blocks),
    "not a number": lambda out, lse, blocks: (out * mx.nan, lse, blocks),
    "blocks left out": lambda out, lse, blocks: (out, lse, mx.where(mx.arange(blocks.shape[-1]) == 1, -1, blocks)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_no_speed_beside_a_wrong_result(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sample.sample_attention
    monkeypatch.setattr(sample, "sample_attention", lambda *args, **settings: wrong(*right(*args, **settings)))
    row, other = rows_of("--attn", "sample,streaming_prefill", "--steps", "all", code=1)
    assert row["failed"]
    assert row["note"].startswith("wrong ")
    assert row["dense_us"] is row["sparse_us"] is row["ratio"] is row["plain_read_us"] is None
    assert other["ratio"] > 0


SHAPES = ["9x3x64", "8x1x128", "2x2x256"]
SAMPLES = [Sample(), Sample(alpha_column=0.6, alpha_slash=0.9, chunks=2, block_size=32)]
BASELINES = [MInference(vertical_tokens=100, slash_tokens=100), BigBird(), StreamingPrefill()]


@pytest.mark.parametrize(
    ("config", "shape", "dtype"),
    [
        *product(SAMPLES, SHAPES, ["float32", "float16", "bfloat16"]),
        *product(BASELINES, SHAPES[:1], ["float16"]),
    ],
    ids=str,
)
def test_right_results_pass(config: Prefill, shape: str, dtype: str) -> None:
    prompt = prefill.inputs(Case(dtype, Shape(*map(int, shape.split("x"))), 1, 900))
    for piece in prefill.pieces(prompt, 500):
        assert prefill.wrong_result(piece, prefill.Entrant(config, "ops")) is None


def test_what_does_not_fit_into_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*SMALL, "--lengths", "10000000") == 0
    assert "GB of this machine's" in capsys.readouterr().out


def test_the_inputs_make_heads_differ() -> None:
    """Some look nearby, some far away: their densities lie apart, as a model's do."""
    queries, keys, _ = prefill.inputs(Case("float32", Shape(8, 2, 64), 1, 2048))
    blocks = np.array(sample.sample_select(queries, keys, **Sample().parameters(), scale=64**-0.5))
    density = (blocks >= 0).sum(axis=(2, 3))[0] / Layout(2048, 2048, 1, 128).causal_pairs
    assert density.min() < 0.7 * density.max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--attn", "sample+sparq"],
            "--attn: expected methods such as sparq:rank=16,streaming or sample, got sample+sparq.",
        ),
        (["--attn", "sample,dense"], "--attn: expected methods such as sparq:rank=16,streaming or sample, got dense."),
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
