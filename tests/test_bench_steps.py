"""`mlx-sparse bench` of decode steps: what it times, in what forms it prints it, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msl import Metal

from mlx_sparse import cli, stats
from mlx_sparse.bench import decode, saap_steps, times, timing
from mlx_sparse.bench.decode import Case
from mlx_sparse.bench.dense import Shape
from mlx_sparse.bench.steps import DecodeStep, steps_of, wrong_result
from mlx_sparse.config import H2O, SAAP, FlexGen, MethodConfig, OracleTopK, SparQ, Streaming, parse

SIZES = ["--shapes", "4x2x32", "--repeat", "2", "--dtype", "float32"]
SMALL = [*SIZES, "--lengths", "200,600"]
EVERYONE = ["sparq", "sparq:rank=4,top_k=30", "streaming", "h2o", "flexgen", "oracle_top_k"]
TIMES = [f"{side}_us{end}" for side in ("dense", "sparse", "plain_read") for end in ("", "_low", "_high")]


def bench(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


def printed(*arguments: str, code: int = 0) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert bench(*arguments) == code
    return out.getvalue()


def rows_of(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(printed(*arguments, "-o", "json", code=code))["rows"]
    return rows


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MOST_LAYERS", 2)


def test_every_method_has_a_row_in_every_case_with_all_sides_of_one_run() -> None:
    rows = rows_of(*SIZES, "--lengths", "200", "--attn", ",".join(EVERYONE), "--batches", "1,3")
    assert [(row["batch"], row["method"]) for row in rows] == [(batch, m) for batch in (1, 3) for m in EVERYONE]
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


def test_prompts_and_steps_may_be_asked_for_at_once() -> None:
    rows = rows_of(*SIZES, "--attn", "sample,sparq", "--lengths", "600", "--steps", "all")
    assert [(row["method"], row.get("step")) for row in rows] == [("sparq", None), ("sample", 600)]


def test_saap_is_timed_with_every_network() -> None:
    rows = rows_of(*SIZES, "--lengths", "200,3k", "--attn", "saap,saap:mode=online", "--backend", "ops")
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
    ("arguments", "note"),
    [
        (["--lengths", "100"], "dense: all of 100 keys are attended"),
        (["--lengths", "1000000000"], r"needs \d+ GB of this machine's \d+ GB"),
    ],
)
def test_what_cannot_be_timed_is_said(arguments: list[str], note: str) -> None:
    assert re.search(rf"\| {note} \|", printed(*SIZES, *arguments))


# forms


def test_each_form_holds_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*SMALL, "--attn", "sparq,streaming", "--lengths", "200"]
    for form in ("md", "json", "jsonl", "csv"):
        target = tmp_path / f"result.{form}"
        target.write_text("old")
        text = printed(*arguments, "-o", form, "--out", str(target))
        assert target.read_text() == text
        command = f"mlx-sparse bench {' '.join(arguments)} -o {form} --out {target}"
        if form == "md":
            assert text.startswith(f"    {command}\n\nMLX ")
            assert [line.split(" | ")[0] for line in text.splitlines()[-2:]] == ["| sparq", "| streaming"]
            continue
        if form == "csv":
            rows = list(csv.DictReader(io.StringIO(text)))
            facts = [{"command": row["run.command"], "mlx": row["run.machine.mlx"]} for row in rows]
            assert all(float(row["ratio"]) > 0 and row["note"] == "" for row in rows)
        else:
            found = [json.loads(line) for line in text.splitlines()] if form == "jsonl" else json.loads(text)
            rows = found if form == "jsonl" else found["rows"]
            runs = [row["run"] for row in rows] if form == "jsonl" else [found]
            facts = [{"command": run["command"], "mlx": run["machine"]["mlx"]} for run in runs]
        assert [row["method"] for row in rows] == ["sparq", "streaming"]
        assert all(fact == {"command": command, "mlx": mx.__version__} for fact in facts)
    assert len(list(tmp_path.iterdir())) == 4


def test_the_plot_draws_what_was_timed(tmp_path: Path) -> None:
    target = tmp_path / "speed.svg"
    printed(*SMALL, "--attn", "sparq,streaming", "--plot", str(target))
    drawn = target.read_text()
    assert drawn.startswith("<?xml")
    assert "streaming on ops" in drawn


def test_a_plot_without_matplotlib_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench(*SMALL, "--plot", str(tmp_path / "speed.svg")) == 2
    assert capsys.readouterr().err.startswith("mlx-sparse: error: matplotlib: expected it to be installed")
    assert not list(tmp_path.iterdir())


# right and wrong results

WRONG: dict[str, Callable[[mx.array], mx.array]] = {
    "a little off": lambda out: out + 0.01,
    "not a number": lambda out: out * mx.nan,
    "heads in another order": lambda out: out[:, ::-1],
}


@pytest.mark.parametrize(
    ("attn", "wrong"),
    [*((attn, "a little off") for attn in (*EVERYONE[1:], "saap:mode=online")), *(("sparq", wrong) for wrong in WRONG)],
)
def test_no_speed_beside_a_wrong_result(attn: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (config,) = parse(attn)
    for step in {type(step) for step in steps_of(config, "ops", Shape(4, 2, 32))}:
        right = step.attend
        monkeypatch.setattr(step, "attend", lambda self, *given, right=right: WRONG[wrong](right(self, *given)))
    (row,) = rows_of(*SIZES, "--lengths", "3k" if "saap" in attn else "600", "--attn", attn, code=1)
    assert row["failed"]
    assert row["note"].startswith("wrong result: error ")
    assert {row[name] for name in (*TIMES, "ratio", "dense", "dense_ways_us", "dense_of_read", "sparse_of_read")} == {
        None
    }


@pytest.mark.parametrize("form", ["md", "jsonl", "csv"])
def test_a_wrong_result_leaves_the_others_their_times(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = DecodeStep.attend
    monkeypatch.setattr(
        DecodeStep,
        "attend",
        lambda self, *given: right(self, *given) + (0.01 if self.config.name == "flexgen" else 0),
    )
    lines = printed(*SMALL, "--lengths", "200", "--attn", "sparq,flexgen", "-o", form, code=1).splitlines()[-2:]
    if form == "jsonl":
        assert [json.loads(line)["sparse_us"] is None for line in lines] == [False, True]
    elif form == "csv":
        assert "wrong result: error" in lines[1]
        assert lines[1].count(",,,,,,,,,") == 1
        assert ",,," not in lines[0]
    else:
        assert re.fullmatch(r"\| flexgen .* \|  \|  \| wrong result: error [^|]* \|( +\|)+", lines[1])
        assert "us" not in lines[1].replace("wrong result", "")


def test_no_speed_beside_other_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    right = saap_steps.route_scores
    monkeypatch.setattr(saap_steps, "route_scores", lambda *arguments, **network: -right(*arguments, **network))
    step, _ = steps_of(SAAP(), "ops", Shape(4, 2, 32))
    (row,) = decode.measure(Case("float32", Shape(4, 2, 32), 1, 3000), [step], 2)
    assert (row.failed, row.note) == (True, "wrong result: other buckets")


CHOOSING = [
    SparQ(local_window=32),
    SparQ(rank=4, top_k=30, local_window=0),
    SparQ(component_score="query_key", local_window=32),
    OracleTopK(local_window=32),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("config", CHOOSING, ids=str)
def test_dense_attention_is_no_right_result(config: MethodConfig, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = DecodeStep(config, "ops", Shape(8, 2, 64))
    monkeypatch.setattr(step, "attend", lambda queries, cache: timing.fused(queries, cache.keys, cache.values))
    assert str(wrong_result(step, 2, 600, getattr(mx, dtype))).startswith("wrong result: error")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("config", CHOOSING, ids=str)
def test_a_key_too_few_is_no_right_result(config: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = DecodeStep(config, "ops", Shape(8, 2, 64))
    fewer = DecodeStep(replace(config, top_k=config.attended - 1), "ops", step.shape)
    monkeypatch.setattr(step, "attend", fewer.attend)
    assert str(wrong_result(step, 2, 600, getattr(mx, dtype))).startswith("wrong result: error")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("config", [SparQ(local_window=32), OracleTopK(local_window=32)], ids=str)
def test_a_step_without_its_window_is_no_right_result(config: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = DecodeStep(config, "ops", Shape(8, 2, 64))
    monkeypatch.setattr(step, "attend", DecodeStep(replace(config, local_window=0), "ops", step.shape).attend)
    assert str(wrong_result(step, 2, 600, getattr(mx, dtype))).startswith("wrong result: error")


CONFIGS = [
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
    OracleTopK(group_reduce="logits"),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", ["9x3x64", "8x8x128", "16x1x256"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_right_results_pass(dtype: str, shape: str, config: MethodConfig) -> None:
    mx.random.seed(0)
    (step,) = steps_of(config, "ops", Shape(*map(int, shape.split("x"))))
    assert wrong_result(step, 2 if shape == "9x3x64" else 1, 1000, getattr(mx, dtype)) is None


@pytest.mark.parametrize("config", [SparQ(), SAAP()], ids=str)
def test_the_kernels_pass_too(config: MethodConfig, metal: Metal) -> None:
    step = steps_of(config, "metal", Shape(4, 2, 64))[0]
    S = 3000 if isinstance(config, SAAP) else 1024
    (row,) = decode.measure(Case("float16", Shape(4, 2, 64), 1, S), [step], 2)
    assert row.note is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_ways_to_attend_densely_agree(dtype: str) -> None:
    kind = getattr(mx, dtype)
    sizes = ((6, 1), (2, 90), (2, 90))
    queries, keys, values = (mx.random.normal((2, heads, n, 64)).astype(kind) for heads, n in sizes)
    ways = timing.dense_ways(kind, 1)
    assert list(ways) == ["mlx", "products", *["float32 products"] * (dtype != "float32")]
    outs = [way(queries, keys, values) for way in ways.values()]
    for out in outs:
        assert out.dtype == kind
        assert mx.abs(out - outs[0]).max().item() <= 8 * mx.finfo(kind).eps


def test_a_plain_read_looks_at_all_rows_in_use_and_at_no_others() -> None:
    keys, values = (mx.zeros((1, 2, 8, 6), mx.float16) for _ in "kv")
    keys[0, 1, 4, 5] = values[0, 0, 0, 0] = 1.0
    keys[0, 1, 5, 5] = 1e3
    found = timing.read(timing.cache_of(keys, values, 5))
    one = int(mx.array([1.0], mx.float16).view(mx.uint16).item())
    assert [array.item() for array in found] == [one << 16, one]


# backends and arguments


def test_a_backend_that_cannot_run_here_is_a_row_beside_those_that_can() -> None:
    rows = rows_of(*SMALL, "--lengths", "200", "--attn", "sparq,streaming", "--backend", "auto,ops,onnx")
    ran = {(row["method"], row["backend"]): row["note"] for row in rows}
    assert len(rows) == len(ran) == 4  # auto is ops here
    for method in ("sparq", "streaming"):
        assert ran[method, "ops"] is None
        assert ran[method, "onnx"] == ("onnx: it runs exported files: export-onnx, then mlx-sparse run-onnx")


def test_a_method_that_a_backend_does_not_have_is_a_row(metal: Metal) -> None:
    sparq, flexgen = times.serving([SparQ(), FlexGen()], ["metal"], Shape(4, 2, 64))
    assert sparq[2] is None
    assert str(flexgen[2]).startswith("it does not have flexgen")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "1k,much"], "--lengths: expected numbers such as 1k,2k,3000, got 'much'."),
        (
            ["--shapes", "3x2x64"],
            "--shapes: expected query heads x KV heads x head dim such as 32x8x128, got '3x2x64'.",
        ),
        (["--dtype", "half"], "--dtype: expected some of float16, bfloat16, float32, got half."),
        (["--repeat", "0"], "repeat: expected an integer of at least 1, got 0."),
        (["--batches", "1,all"], "--batches: expected an integer of at least 1, got 'all'."),
        (["--attn", "sparq:rank=33"], "rank: expected at most the head dim D=32, got 33."),
        (["--attn", "streaming,"], "methods: expected a list such as sparq:rank=16,streaming, got 'streaming,'."),
        (
            ["--attn", "saap:mode=online,buckets=32"],
            "probes: expected an integer of at least 1 and at most 31, got 32.",
        ),
        (
            ["--backend", "onnx"],
            "--backend: expected one that has sparq here, got onnx "
            "(it runs exported files: export-onnx, then mlx-sparse run-onnx).",
        ),
        (["-o", "result.md"], "-o: expected one of md, json, jsonl, csv, got result.md. --out names a file."),
        (["--out", "no/folder/x"], "--out: expected a file in a folder that exists, got no/folder/x."),
        (["--out", "."], "--out: expected a file in a folder that exists, got .."),
        (["--plot", "speed.png"], "--plot: expected a name that ends in .svg, got speed.png."),
        (
            ["--roofline", "--plot", "speed.svg"],
            "--plot: expected times of decode steps or prompts to draw, got another option.",
        ),
        (
            ["--onnx", "--batches", "2"],
            "--batches: expected none with --onnx, whose steps are of one sequence, got 2.",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*SMALL, *arguments) == 2
    assert capsys.readouterr().err == f"mlx-sparse: error: {message}\n"
