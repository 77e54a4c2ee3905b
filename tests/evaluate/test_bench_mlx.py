"""MLX's contenders: every method's step or prompt, what its result has to be, and what it is compared with."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msl import Metal

from mlx_sparse import cli
from mlx_sparse.methods import (
    H2O,
    SAAP,
    BigBird,
    FlexGen,
    Method,
    MInference,
    OracleTopK,
    Prefill,
    Sample,
    SparQ,
    Streaming,
    StreamingPrefill,
    parse,
    registry,
    stats,
)
from mlx_sparse.methods.block_layout import Layout
from mlx_sparse.methods.stats import prefill_elements
from mlx_sparse.ops import sample
from mlx_sparse.tools.bench import inputs, mlx
from mlx_sparse.tools.bench.core import Case, Shape
from mlx_sparse.tools.bench.mlx import dense, saap, steps
from mlx_sparse.tools.bench.mlx.prompts import MethodPrompt, Pieces, Prompt
from mlx_sparse.tools.bench.mlx.steps import DecodeStep
from mlx_sparse.tools.evaluate.report.read import read_speed

SIZES = ["--shapes", "4x2x32", "--repeat", "2", "--dtype", "float32"]
DECODE = ["sparq", "sparq:rank=4,top_k=30", "streaming", "h2o", "flexgen", "oracle_top_k"]
PREFILL = [
    "sample:alpha_column=0.5,alpha_slash=0.5",
    "minference:vertical_tokens=128,slash_tokens=128",
    "bigbird",
    "streaming_prefill",
]
TIMES = [f"{side}_us{end}" for side in ("dense", "sparse", "plain_read") for end in ("", "_low", "_high", "_min")]


def printed(*arguments: str, code: int = 0) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert cli.main(["bench", *arguments]) == code
    return out.getvalue()


def rows_of(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(printed(arguments[0], *SIZES, *arguments[1:], "-o", "json", code=code))[
        "rows"
    ]
    return rows


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MOST_LAYERS", 2)


def test_every_method_has_a_row_in_every_case_with_all_sides_of_one_run() -> None:
    rows = rows_of("step", "--lengths", "200", "--attn", ",".join(DECODE), "--batches", "1,3")
    assert [(row["batch"], row["method"]) for row in rows] == [(batch, m) for batch in (1, 3) for m in DECODE]
    for row in rows:
        assert (row["backend"], row["layers"], row["note"], row["failed"]) == ("ops", 2, None, False)
        assert row["ratio"] == pytest.approx(row["dense_us"] / row["sparse_us"])
        for side in ("dense_us", "sparse_us", "plain_read_us"):
            assert 0 < row[f"{side}_low"] <= row[side] <= row[f"{side}_high"]
        assert list(row["dense_ways_us"]) == ["mlx", "products"]
        assert row["dense_us"] == row["dense_ways_us"][row["dense"]] == min(row["dense_ways_us"].values())
        cache = 2 * row["batch"] * 2 * row["S"] * 32 * 4
        elements = parse(row["method"])[0].elements(row["S"], 32)
        assert (row["bytes_plain"], row["bytes_formula"]) == (cache, row["batch"] * 2 * elements * 4)
        read = row["plain_read_us"]
        assert row["dense_of_read"] == pytest.approx(read / row["dense_us"])
        assert row["sparse_of_read"] == pytest.approx(read * row["bytes_formula"] / cache / row["sparse_us"])
    assert len({(row["batch"], row["dense_us"]) for row in rows}) == 2  # the same turns, the same dense side


def test_steps_over_quantised_caches_stand_beside_those_over_plain_ones() -> None:
    methods = ["sparq", "sparq:score=copy", "streaming"]
    rows = rows_of("step", "--shapes", "4x2x64", "--lengths", "200", "--attn", ",".join(methods), "--kv-bits", "4,8")
    assert [(row["method"], row.get("kv_bits")) for row in rows] == [(m, b) for m in methods for b in (None, 4, 8)]
    assert not any(row["failed"] or row["note"] for row in rows)
    assert len({row["dense_us"] for row in rows}) == 1
    plain, four, eight = rows[-3:]
    packed, new = [2 * 2 * (64 * bits // 8 + 2 * 4) for bits in (4, 8)], 2 * 2 * 64 * 4  # of keys and values
    attended = parse("streaming")[0].attended
    assert [four["bytes_formula"], eight["bytes_formula"]] == [attended * row + new for row in packed]
    assert four["bytes_plain"] == plain["bytes_plain"]
    table = printed("step", *SIZES, "--shapes", "4x2x64", "--lengths", "200", "--kv-bits", "4")
    assert "| sparq | ops | 4 bits | 4x2x64 |" in table


def test_a_wrong_step_over_a_quantised_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("float32", Shape(4, 2, 64), 1, 300)
    step = mlx.PackedStep(case, parse("sparq")[0], "ops", None, 4)
    assert step.check() is None
    monkeypatch.setattr(step, "attend", lambda queries, cache: queries)
    assert "wrong result" in str(step.check())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--kv-bits", "7"], "--kv-bits: expected some of 2, 3, 4, 5, 6, 8, got 7."),
        (
            ["--kv-bits", "4", "--shapes", "4x2x32"],
            "--kv-bits: expected head dims that are multiples of 64, got 4x2x32.",
        ),
        (["--kv-bits", "4", "--attn", "h2o"], "--kv-bits: expected methods that choose by keys alone, got h2o."),
        (["--kv-bits", "4", "--engine", "onnx"], "--kv-bits: expected none with --engine onnx, got 4."),
    ],
)
def test_quantised_caches_that_there_are_not_are_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "step", "--shapes", "4x2x64", "--lengths", "200", *arguments]) == 2
    assert line in capsys.readouterr().err


def test_saap_is_timed_with_every_network() -> None:
    rows = rows_of("step", "--lengths", "200,3k", "--attn", "saap,saap:mode=online", "--backend", "ops")
    labels = ["saap (64 hidden units)", "saap (1,024 hidden units)", "saap:mode=online"]
    assert [(row["S"], row["method"]) for row in rows] == [(S, label) for S in (200, 3072) for label in labels]
    for row, H in zip(rows[3:], (64, 1024, 0), strict=True):
        assert row["default_from"] > 2.5 * 2048
        assert row["ratio"] == pytest.approx(row["dense_us"] / row["sparse_us"])
        C = 1024 if H else 256
        network = 2 * (32 * H + H + H * C + C) if H else 4 * (32 * C + C)
        # 1,024 keys are not always attended, of which an eighth or a quarter is in visited buckets.
        visited = 1024 * 32 * 2 // C
        expected = 2 * (4 * stats.saap_elements(32, 2048 + visited) + network)
        assert row["bytes_formula"] == pytest.approx(expected, rel=0.02)
    assert all(row["note"] == "dense: all of 200 keys are attended" for row in rows[:3])


@pytest.mark.parametrize(
    ("stage", "lengths", "note"),
    [
        ("step", "100", "dense: all of 100 keys are attended"),
        ("step", "1000000000", r"needs \d+ GB of the \d+ GB there are"),
        ("prompt", "10000000", r"needs \d+ GB of the \d+ GB there are"),
    ],
)
def test_what_cannot_be_timed_is_said(stage: str, lengths: str, note: str) -> None:
    assert re.search(rf"\| {note} \|", printed(stage, *SIZES, "--lengths", lengths))


@pytest.mark.parametrize(("stage", "methods"), [("step", ["sparq", "streaming"]), ("prompt", PREFILL[:2])])
def test_the_table_has_a_line_for_each_row(stage: str, methods: list[str]) -> None:
    text = printed(stage, *SIZES, "--lengths", "200", "--attn", ",".join(methods))
    assert text.startswith(f"    mlx-sparse bench {stage} --shapes 4x2x32 ") and "\n\nMLX " in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {method}" for method in methods]


def test_a_prompt_has_both_times_and_the_density_beside_them() -> None:
    rows = rows_of("prompt", "--attn", ",".join(PREFILL), "--lengths", "700", "--steps", "400,all")
    assert [(row["step"], row["method"]) for row in rows] == [(n, method) for n in (400, 700) for method in PREFILL]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["dense_us"] / row["sparse_us"])
        assert row["dense_us_low"] <= row["dense_us"] <= row["dense_us_high"]
        # Dense attention in smaller pieces leaves out what is above the diagonal; pieces of 400 are small as they are.
        assert row["dense"] in (("mlx",) if row["step"] == 400 else ("mlx", "mlx, in pieces"))
        assert (row["last_step_ratio"] == pytest.approx(row["ratio"], rel=1e-9)) == (row["step"] == 700)
        assert row["bytes_plain"] == 2 * 2 * 32 * 4 * (400 + 700 if row["step"] == 400 else 700)
        assert 0 < row["density"] < 1


def test_density_and_bytes_are_those_of_the_attended_pairs_of_all_pieces() -> None:
    config = Sample(alpha_column=0.5, alpha_slash=0.5)
    case = Prompt("float32", Shape(4, 2, 32), 2, 700, 400)
    entrant = MethodPrompt(case, config, "ops")
    attended = causal = elements = 0
    for queries, cache in Pieces(case).all:
        entrant.count((queries, cache))
        layout, keys = Layout(queries.shape[2], cache.length, 1, 128), cache.keys[:, :, : cache.length]
        blocks = sample.sample_select(queries, keys, **config.parameters(), scale=32**-0.5)
        chosen = int((blocks >= 0).sum().item())
        attended, causal = attended + chosen, causal + 2 * 4 * layout.causal_pairs
        elements += 2 * 4 * prefill_elements(layout, 32, chosen / (2 * 4 * layout.causal_pairs))
    assert (entrant.attended, entrant.causal, entrant.elements) == (attended, causal, elements)


def test_pieces_are_those_of_a_prompt() -> None:
    case = Prompt("float32", Shape(2, 1, 32), 1, 300, 128)
    pieces = Pieces(case).all
    assert [(queries.shape[2], cache.length) for queries, cache in pieces] == [(128, 128), (128, 256), (44, 300)]
    assert np.array_equal(mx.concatenate([queries for queries, _ in pieces], axis=2), inputs.prompt(case)[0])


@pytest.mark.parametrize("L", [1100, 300])
def test_all_ways_to_attend_a_prompt_densely_agree(L: int) -> None:
    queries, keys, values = map(mx.array, inputs.prompt(Case("float32", Shape(4, 2, 32), 1, 1100)))
    ways = dense.dense_ways(mx.float32, L)
    outs = [way(queries[:, :, -L:], keys, values) for way in ways.values()]
    assert len(outs) == (2 if L > dense.PIECE else 1)
    for out in outs[1:]:
        assert mx.abs(out - outs[0]).max().item() < 1e-5


# right and wrong results

WRONG: dict[str, Callable[[mx.array], mx.array]] = {
    "a little off": lambda out: out + 0.01,
    "not a number": lambda out: out * mx.nan,
    "heads in another order": lambda out: out[:, ::-1],
}


@pytest.mark.parametrize(
    ("attn", "wrong"),
    [*((attn, "a little off") for attn in (*DECODE[1:], "saap:mode=online")), *(("sparq", wrong) for wrong in WRONG)],
)
def test_no_speed_beside_a_wrong_result(attn: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = mlx.step_of(parse(attn)[0])
    right = step.attend
    monkeypatch.setattr(step, "attend", lambda self, *given: WRONG[wrong](right(self, *given)))
    (row,) = rows_of("step", "--lengths", "3k" if "saap" in attn else "600", "--attn", attn, code=1)
    assert row["failed"]
    assert row["note"].startswith("wrong result: error ")
    assert {row[name] for name in (*TIMES, "ratio", "dense", "dense_ways_us", "dense_of_read", "sparse_of_read")} == {
        None
    }


WRONG_PROMPTS: dict[str, Callable[..., Any]] = {
    "a little off": lambda out, lse, blocks: (out + 0.01, lse, blocks),
    "not a number": lambda out, lse, blocks: (out * mx.nan, lse, blocks),
    "blocks left out": lambda out, lse, blocks: (out, lse, mx.where(mx.arange(blocks.shape[-1]) == 1, -1, blocks)),
}


@pytest.fixture
def loading_anew() -> Iterator[None]:
    """Functions of the table that a test replaces are found, and forgotten afterwards."""
    registry._import.cache_clear()
    yield
    registry._import.cache_clear()


@pytest.mark.usefixtures("loading_anew")
@pytest.mark.parametrize("wrong", WRONG_PROMPTS.values(), ids=WRONG_PROMPTS)
def test_no_speed_beside_a_wrong_prompt(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sample.sample_attention
    monkeypatch.setattr(sample, "sample_attention", lambda *args, **settings: wrong(*right(*args, **settings)))
    row, other = rows_of("prompt", "--attn", "sample,streaming_prefill", "--lengths", "600", "--steps", "all", code=1)
    assert row["failed"]
    assert row["note"].startswith("wrong ")
    assert row["dense_us"] is row["sparse_us"] is row["ratio"] is row["plain_read_us"] is None
    assert other["ratio"] > 0


def test_no_speed_beside_other_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    right = saap.route_scores
    monkeypatch.setattr(saap, "route_scores", lambda *arguments, **network: -right(*arguments, **network))
    rows = mlx.measure_steps(Case("float32", Shape(4, 2, 32), 1, 3000), [(SAAP(), "ops")], 2)
    assert {(row.failed, row.note) for row in rows} == {(True, "wrong result: other buckets")}


CHOOSING = [
    SparQ(local_window=32),
    SparQ(rank=4, top_k=30, local_window=0),
    SparQ(component_score="query_key", local_window=32),
    OracleTopK(local_window=32),
]


@pytest.mark.parametrize(
    ("text", "always"),
    [
        ("sparq", (0, 32)),
        ("h2o:local_window=7", (0, 7)),
        ("flexgen", (0, 0)),
        ("streaming", (16, 112)),
        ("saap", (1, 2047)),
    ],
)
def test_a_method_knows_the_keys_that_it_always_attends(text: str, always: tuple[int, int]) -> None:
    assert parse(text)[0].always == always


def case_of(dtype: str) -> Case:
    return Case(dtype, Shape(8, 2, 64), 2, 600)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("config", CHOOSING, ids=str)
def test_dense_attention_is_no_right_result(config: Method, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = DecodeStep(case_of(dtype), config, "ops")
    monkeypatch.setattr(step, "attend", lambda queries, cache: dense.fused(queries, cache.keys, cache.values))
    assert str(step.check()).startswith("wrong result: error")


SPOILT: list[tuple[Any, dict[str, int]]] = [
    *((config, {"top_k": config.attended - 1}) for config in CHOOSING),  # a key too few
    *((kind(local_window=32), {"local_window": 0}) for kind in (SparQ, OracleTopK)),  # without its window
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("config", "otherwise"), SPOILT, ids=str)
def test_other_keys_are_no_right_result(
    config: Any, otherwise: dict[str, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = DecodeStep(case_of(dtype), config, "ops")
    monkeypatch.setattr(step, "attend", DecodeStep(step.case, replace(config, **otherwise), "ops").attend)
    assert str(step.check()).startswith("wrong result: error")


METHODS = [
    SparQ(),
    SparQ(component_score="query_key"),
    SparQ(top_k=256),
    SparQ(rank=4, top_k=30, local_window=0),
    SparQ(top_k=64, local_window=64),
    SparQ(reallocate=True),
    Streaming(),
    Streaming(sink_tokens=0),
    H2O(),
    H2O(top_k=40, local_window=0),
    FlexGen(),
]


def each(configs: Sequence[Method], shapes: Sequence[str]) -> list[tuple[str, str, Method]]:
    """Every method in every shape, and in every type in some shape."""
    types = ("float32", "float16", "bfloat16")
    pairs = product(enumerate(configs), enumerate(shapes))
    return [(types[(n + place) % 3], shape, config) for (n, config), (place, shape) in pairs]


@pytest.mark.parametrize(("dtype", "shape", "config"), each(METHODS, ["9x3x64", "8x8x128", "16x1x256"]), ids=str)
def test_right_results_pass(dtype: str, shape: str, config: Method) -> None:
    mx.random.seed(0)
    case = Case(dtype, Shape(*map(int, shape.split("x"))), 2 if shape == "9x3x64" else 1, 1000)
    (step,) = mlx.steps_of(case, config, "ops")
    assert step.check() is None


@pytest.mark.parametrize("config", [SparQ(), SAAP()], ids=str)
def test_the_kernels_pass_too(config: Method, metal: Metal) -> None:
    case = Case("float16", Shape(4, 2, 64), 1, 3000 if isinstance(config, SAAP) else 1024)
    (row, *_) = mlx.measure_steps(case, [(config, "metal")], 2)
    assert row.note is None


SHAPES = ["9x3x64", "8x1x128", "2x2x256"]
SAMPLES = [Sample(), Sample(alpha_column=0.6, alpha_slash=0.9, chunks=2, block_size=32)]
BASELINES = [
    MInference(vertical_tokens=100, slash_tokens=100),
    BigBird(),
    StreamingPrefill(),
    *(parse(text)[0] for text in ("hash_sparse", "hyperattention:bucket_size=32,sampled_keys=32,exact_rows=128")),
]


@pytest.mark.parametrize(
    ("dtype", "shape", "config"),
    [*each(SAMPLES, SHAPES), *(("float16", SHAPES[0], config) for config in BASELINES)],
    ids=str,
)
def test_right_prompts_pass(dtype: str, shape: str, config: Prefill) -> None:
    case = Prompt(dtype, Shape(*map(int, shape.split("x"))), 1, 900, 500)
    one = MethodPrompt(case, config, "ops")
    for piece in Pieces(case).all:
        assert one.wrong(piece) is None


def test_the_report_of_an_evaluation_reads_what_is_printed(tmp_path: Path) -> None:
    found = tmp_path / "speed.jsonl"
    found.write_text(printed("step", *SIZES, "--lengths", "200", "--attn", "sparq,streaming", "-o", "jsonl"))
    assert [row.method for row in read_speed(found)] == ["sparq", "streaming"]


# what methods are compared with


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_ways_to_attend_densely_agree(dtype: str) -> None:
    kind = getattr(mx, dtype)
    sizes = ((6, 1), (2, 90), (2, 90))
    queries, keys, values = (mx.random.normal((2, heads, n, 64)).astype(kind) for heads, n in sizes)
    ways = dense.dense_ways(kind, 1)
    assert list(ways) == ["mlx", "products", *["float32 products"] * (dtype != "float32")]
    outs = [way(queries, keys, values) for way in ways.values()]
    for out in outs:
        assert out.dtype == kind
        assert mx.abs(out - outs[0]).max().item() <= 8 * mx.finfo(kind).eps


def test_a_plain_read_looks_at_all_rows_in_use_and_at_no_others() -> None:
    keys, values = (mx.zeros((1, 2, 8, 6), mx.float16) for _ in "kv")
    keys[0, 1, 4, 5] = values[0, 0, 0, 0] = 1.0
    keys[0, 1, 5, 5] = 1e3
    found = dense.read(dense.cache_of(keys, values, 5))
    one = int(mx.array([1.0], mx.float16).view(mx.uint16).item())
    assert [array.item() for array in found] == [one << 16, one]


def test_the_inputs_make_heads_differ() -> None:
    """Some look nearby, some far away: their densities lie apart, as a model's do."""
    queries, keys, _ = map(mx.array, inputs.prompt(Case("float32", Shape(8, 2, 64), 1, 2048)))
    blocks = np.array(sample.sample_select(queries, keys, **Sample().parameters(), scale=64**-0.5))
    density = (blocks >= 0).sum(axis=(2, 3))[0] / Layout(2048, 2048, 1, 128).causal_pairs
    assert density.min() < 0.7 * density.max()


# backends and arguments


def test_a_backend_that_cannot_run_here_is_a_row_beside_those_that_can() -> None:
    rows = rows_of("step", "--lengths", "200", "--attn", "sparq,streaming", "--backend", "auto,ops,onnx")
    ran = {(row["method"], row["backend"]): row["note"] for row in rows}
    assert len(rows) == len(ran) == 4  # auto is ops here
    for method in ("sparq", "streaming"):
        assert ran[method, "ops"] is None
        assert ran[method, "onnx"] == ("onnx: it runs exported files: export-onnx, then mlx-sparse run-onnx")


def test_a_method_that_a_backend_does_not_have_is_a_row(metal: Metal) -> None:
    sparq, flexgen = mlx.serving([SparQ(), FlexGen()], ["metal"], Shape(4, 2, 64))
    assert sparq[2] is None
    assert str(flexgen[2]).startswith("it does not have flexgen")
