"""`mlx-sparse bench`, the same for every engine: options, the check before timing, paired ratios, rows at once."""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlx_sparse import cli, oracle
from mlx_sparse.checks import ConfigError
from mlx_sparse.methods import parse
from mlx_sparse.tools.bench import command, core, inputs
from mlx_sparse.tools.bench.core import Case, Request, Shape, Spread, Variant
from mlx_sparse.tools.formats import Printer

CASE = Case("float16", Shape(4, 2, 32), 1, 200)


class Fake(Variant):
    """A variant with the result and the seconds that the test gives."""

    def __init__(self, name: str, seconds: float = 1e-6, wrong: Any = None, role: str = "sparse", ours: bool = True):
        super().__init__(CASE, "dense" if role == "dense" else name, "" if role == "dense" else "ops", dense=name)
        self.seconds, self.wrong, self.role, self.ours, self.taken = seconds, wrong, role, ours, list[int]()

    def check(self) -> str | None:
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong

    def run(self, turn: int) -> float:
        self.taken.append(turn)
        return self.seconds * (1 + turn)


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


def test_right_variants_take_turns_and_a_wrong_one_gets_no_time() -> None:
    fakes = [Fake("mlx", 4e-6, role="dense"), Fake("a", 2e-6), Fake("b", wrong="wrong result: error 1")]
    fakes.append(Fake("products", 3e-6, role="dense"))
    rows = core.measure(CASE, fakes, 3, warm_up=2)
    assert [fake.taken for fake in fakes] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [], [0, 1, 2, 3, 4]]
    a, b = (row.as_dict() for row in rows)
    assert (a["dense"], a["dense_us"], a["sparse_us"], a["turns"]) == ("products", 12, 8, 3)
    assert (a["ratio"], a["ratio_low"], a["ratio_high"]) == pytest.approx((1.5, 1.5, 1.5))  # of each turn
    assert a["dense_ways_us"] == pytest.approx({"mlx": 16, "products": 12})
    assert (b["failed"], b["note"], b["sparse_us"], b["ratio"]) == (True, "wrong result: error 1", None, None)
    assert {"dtype": "float16", "shape": "4x2x32", "batch": 1, "S": 200, "backend": "ops"}.items() <= a.items()


def test_a_baseline_of_one_backend_is_compared_with_that_backend_only() -> None:
    ours, theirs, sparse = Fake("ours", 1e-6, role="dense"), Fake("any", 3e-6, role="dense"), Fake("a", 2e-6)
    ours.row.backend = "native"
    (row,) = core.measure(CASE, [ours, theirs, sparse], 2)
    assert row.as_dict()["dense"] == "any" and row.as_dict()["ratio"] == pytest.approx(1.5)


def test_a_wrong_baseline_is_a_row_that_failed() -> None:
    bad, sparse = core.measure(CASE, [Fake("mlx", wrong="wrong result", role="dense"), Fake("a")], 2)
    assert (bad.method, bad.failed, bad.as_dict()["dense"]) == ("dense", True, "mlx")
    assert sparse.turns == 2 and sparse.spreads["ratio"] is None


@pytest.mark.parametrize(
    ("error", "ours", "note", "failed"),
    [
        (RuntimeError("no kernel\nand a long story"), True, "no kernel", True),
        (RuntimeError("no kernel"), False, "no kernel", False),
        (ConfigError("top_k: expected less."), True, "top_k: expected less.", False),
        (OutOfMemoryError("CUDA out of memory.\nTried"), True, "CUDA out of memory.", False),
        (MemoryError(), True, "MemoryError", False),
        (ValueError("x" * 1000), True, "x" * 237 + "...", True),
    ],
)
def test_an_error_is_a_row_with_its_reason(error: Exception, ours: bool, note: str, failed: bool) -> None:
    first, second = core.measure(CASE, [Fake("a", wrong=error, ours=ours), Fake("b")], 1)
    assert (first.note, first.failed, first.turns, second.turns) == (note, failed, 0, 1)


def test_an_error_before_a_variant_is_a_row_of_the_case_and_the_others_are_timed() -> None:
    def variants() -> Iterator[Variant]:
        yield Fake("a")
        core.check_memory(70e9, 100e9, 0.6)

    a, whole = core.measure(CASE, variants(), 1)
    assert a.turns == 1
    assert (whole.method, whole.note, whole.failed) == ("", "needs 70 GB of the 100 GB there are", False)


def test_turns_end_when_time_is_up_but_some_are_taken() -> None:
    late = Fake("a")
    core.measure(CASE, [late], 9, until=time.monotonic() - 1)
    assert len(late.taken) == core.FEWEST_TURNS


def test_a_spread_is_quartiles() -> None:
    assert Spread.of([4, 1, 2, 3, 5]) == Spread(2, 3, 4)
    assert Spread.of([3e-6], 1e-6).median == pytest.approx(3)
    assert Spread(99.94, 100.4, 1000).text() == "100.4 (99.9 to 1,000.0)"


# The loop over cases


def ran(form: str, made: Any, out: Path | None = None, budget: float = math.inf) -> tuple[bool, str]:
    """Run two cases with the variants of ``made``."""
    request = Request("step", [], ["ops"], [CASE, CASE], 2, budget)
    printed, engine = io.StringIO(), SimpleNamespace(variants=lambda request, case: made())
    with redirect_stdout(printed):
        args = argparse.Namespace(output=form, out=out)
        right = command.run(request, engine, Printer(args, {"command": "mlx-sparse bench x", "machine": {"chip": "a"}}))
    return right, printed.getvalue()


@pytest.mark.parametrize("form", ["md", "json", "jsonl"])
def test_each_form_has_the_same_rows(form: str, tmp_path: Path) -> None:
    target = tmp_path / "found"
    target.write_text("old")
    right, text = ran(form, lambda: [Fake("mlx", role="dense"), Fake("a")], target)
    assert right and target.read_text() == text and len(list(tmp_path.iterdir())) == 1
    if form == "md":
        assert text.startswith("    mlx-sparse bench x\n\nA decode step in one layer")
        assert text.count("| a | ops | float16 | 4x2x32 | 1 | 200 |") == 2
    else:
        lines = [json.loads(line) for line in text.splitlines()] if form == "jsonl" else json.loads(text)["rows"]
        assert [line["kind"] for line in lines] == ["row", "row"] + ["end"] * (form == "jsonl")
        facts = lines[0]["run"] if form == "jsonl" else json.loads(text)
        assert (facts["command"], facts["machine"]) == ("mlx-sparse bench x", {"chip": "a"})


def test_rows_are_printed_when_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    before = []

    def variants() -> list[Variant]:
        before.append(capsys.readouterr())
        return [Fake("a")]

    request = Request("step", [], ["ops"], [CASE, CASE], 2, math.inf)
    printer = Printer(argparse.Namespace(output="jsonl", out=None), {"command": "c"})
    assert command.run(request, SimpleNamespace(variants=lambda request, case: variants()), printer)
    assert json.loads(before[1].out)["method"] == "a"
    assert before[1].err == f"[2/2] {CASE}\n"


def test_cases_without_time_left_are_rows_and_a_wrong_result_is_an_exit_status() -> None:
    right, text = ran("json", lambda: [Fake("a")], budget=1e-9)
    assert right and {row["note"] for row in json.loads(text)["rows"]} == {"left out: the 1e-09 s were over"}
    assert not ran("json", lambda: [Fake("a", wrong="wrong result")])[0]


# Inputs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "text", ["sparq:rank=8,local_window=32", "oracle_top_k:local_window=32", "streaming", "quest:top_k=64"]
)
def test_the_right_result_of_a_planted_problem_is_the_oracles(text: str, dtype: str) -> None:
    (config,) = parse(text)
    problem = inputs.planted_problem(Case(dtype, Shape(8, 2, 64), 1, 600), config)
    names = ("rank", "top_k", "local_window", "page_size", "sink_tokens", "recent_tokens")
    settings = {name: value for name, value in config.parameters(4).items() if name in names}
    run = getattr(oracle, f"{config.name}_attention")
    assert problem.wrong(run(problem.queries, problem.keys, problem.values, **settings)) is None
    dense = oracle.dense_attention(problem.queries, problem.keys, problem.values)
    assert str(problem.wrong(dense)).startswith("wrong result: error")
    if "top_k" in settings:  # a key or a page too few
        settings["top_k"] -= settings.get("page_size", 1)
        assert problem.wrong(run(problem.queries, problem.keys, problem.values, **settings))


def test_the_right_result_of_saap_is_the_oracles() -> None:
    (config,) = parse("saap:recent_tokens=100")
    case = Case("float32", Shape(4, 2, 32), 1, 2000)
    index = inputs.Index.of(case, config, 64)
    visited = oracle.saap_route(inputs.random_problem(case).queries, probes=config.probes, **index.network)
    assert np.array_equal(visited[0], index.visited)
    problem = index.problem(case, config)
    out, stats = oracle.saap_attention(
        problem.queries,
        problem.keys,
        problem.values,
        bucket_ids=index.bucket_ids[None],
        visited=visited,
        sink_tokens=1,
        recent_tokens=100,
        return_stats=True,
    )
    assert problem.wrong(out) is None
    assert stats.selectivity == pytest.approx(inputs.UNEVEN * config.probes / inputs.BUCKETS, rel=0.05)


@pytest.mark.parametrize("text", ["sample:alpha_column=0.6,alpha_slash=0.6,block_size=32", "bigbird"])
def test_the_right_result_of_a_prompt_is_the_oracles(text: str) -> None:
    (config,) = parse(text)
    prompt = inputs.Prompt(Case("float32", Shape(4, 2, 32), 1, 700, 400))
    assert prompt.chunks == [(0, 400), (400, 700)]
    given = prompt.queries[:, :, 400:], prompt.keys, prompt.values
    out, stats = getattr(oracle, f"{config.name}_attention")(*given, **config.parameters(), return_stats=True)
    assert prompt.wrong(out, config) is None
    assert 0 < stats.density < 1 and 0 < prompt.density(config) < 1
    dense = oracle.dense_attention(*given)
    assert prompt.wrong(dense) is None and prompt.wrong(dense, config)
    for spoil in (lambda out: out + 0.1, lambda out: out * np.nan, lambda out: out[:, ::-1]):
        assert str(prompt.wrong(spoil(out), config)).startswith("wrong result: error")


def test_rounding_to_bfloat16_is_to_the_nearest() -> None:
    numbers = np.float32([1, 1 + 2**-8, 1 + 2**-8 + 2**-20, -3.14159])
    assert inputs.rounded(numbers, "bfloat16").tolist() == [1, 1, 1 + 2**-7, -3.140625]


# Options

SMALL = ["--shapes", "4x2x32", "--repeat", "2", "--lengths", "200"]
ENGINES = pytest.mark.parametrize("engine", command.ENGINES)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line of a refusal."""
    assert cli.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mlx-sparse: error: ") and error.count("\n") == 1
    return error.removeprefix("mlx-sparse: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "1k,much"], "--lengths: expected numbers such as 1k,2k,3000, got 'much'."),
        (["--shapes", "3x2x64"], "--shapes: expected query heads x KV heads x head dim such as 32x8x128, got"),
        (["--repeat", "0"], "--repeat: expected an integer of at least 1, got 0."),
        (["--batches", "1,all"], "--batches: expected an integer of at least 1, got 'all'."),
        (["--dtype", "half"], "--dtype: expected some of float32, float16, bfloat16, got 'half'."),
        (["--budget-s", "0"], "--budget-s: expected seconds, got 0."),
        (["--backend", "gpu"], "--backend: expected one of "),
        (["--attn", "streaming,"], "methods: expected a list such as sparq:rank=16,streaming, got 'streaming,'."),
        (["--attn", "dense"], "--attn: expected methods of "),
        (["--attn", "sample+sparq"], "--attn: expected methods of "),
        (["-o", "result.md"], "-o: expected one of md, json, jsonl, got 'result.md'. --out names a file."),
        (["--out", "no/folder/x"], "--out: expected a file in a folder that exists, got no/folder/x."),
    ],
)
@pytest.mark.parametrize("stage", ["step", "prefill"])
@ENGINES
def test_wrong_options_are_refused_in_one_line(engine, stage, arguments, message, capsys) -> None:
    assert refused(capsys, stage, "--engine", engine, *SMALL, *arguments).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("step --attn sample", "--attn: expected methods of decode steps such as sparq:rank=16,streaming, got sample."),
        ("prefill --attn sparq", "--attn: expected methods of prefill such as sample,minference, got sparq."),
        ("step --attn sparq:rank=33", "rank: expected at most the head dim D=32, got 33."),
        ("step --attn h2o", "--attn: expected a method that selects keys or blocks by scores, got h2o."),
        ("prefill --attn hash_sparse", "--attn: expected a method that selects keys or blocks by scores, got hash"),
        (
            "step --attn saap:mode=online,buckets=32",
            "probes: expected an integer of at least 1 and at most 31, got 32.",
        ),
        ("step --backend onnx", "--backend: expected one that has sparq here, got onnx (it runs exported"),
        ("step --kv-bits 7 --shapes 4x2x64", "--kv-bits: expected some of 2, 3, 4, 5, 6, 8 with head dims"),
        ("step --kv-bits 4", "--kv-bits: expected some of 2, 3, 4, 5, 6, 8 with head dims"),
        ("step --threads 2", "--threads: expected none with --engine mlx, got 2."),
        ("prefill --steps 512,none", "--steps: expected numbers such as 1k,2k,3000, got 'none'."),
        ("step --engine onnx --threads many", "--threads: expected an integer of at least 1, got 'many'."),
        ("step --engine onnx --kv-bits 4", "--kv-bits: expected none with --engine onnx, got 4."),
        ("step --engine onnx --attn quest", "--attn: expected sparq, saap, sample without mode=online on this engine"),
        (
            "step --engine onnx --attn saap:probes=1025",
            "probes: expected an integer of at least 1 and at most 1023, got",
        ),
        ("step --engine onnx --batches 2", "--engine onnx: expected batch 1 in float32 or float16"),
        ("prefill --engine cuda --steps 512", "--steps: expected none with --engine cuda, got 512."),
        ("step --engine cuda --attn streaming", "--attn: expected sparq, saap, sample without mode=online on this"),
    ],
)
def test_each_engine_refuses_what_it_does_not_have(arguments: str, message: str, capsys) -> None:
    stage, *more = arguments.split()
    assert refused(capsys, stage, *SMALL, *more).startswith(message)


@pytest.mark.parametrize("what", [[], ["step"], ["prefill"], ["generate"]])
def test_each_command_has_a_help_of_its_own(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", *what, "--help"])
    assert capsys.readouterr().out.startswith(" ".join(["usage: mlx-sparse bench", *what]))


def test_the_command_runs_without_mlx_torch_onnx_and_an_installation(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('mlx', 'mlx_lm', 'torch', 'triton', 'onnx', 'onnxruntime', 'tqdm'):\n"
        "    sys.modules[name] = None\n"
        "import importlib.metadata, runpy\n"
        "importlib.metadata.version = lambda name: {}[name]  # it is not installed\n"
        "sys.argv = ['command', 'step', '--engine', 'cuda', '--lengths', '200']\n"
        "import mlx_sparse.tools.bench.inputs\n"
        "runpy.run_module('mlx_sparse.tools.bench.command', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("mlx-sparse bench: error: torch: expected it to be installed")


# MLX


def rows_of(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a run."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert cli.main(["bench", *arguments, "-o", "json"]) == code
    return json.loads(printed.getvalue())["rows"]


DECODE = ["sparq", "sparq:key_bits=16", "quest:top_k=32", "streaming", "flexgen", "oracle_top_k"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_steps_of_every_method_are_right_and_timed(dtype: str) -> None:
    methods = [*DECODE, "saap:recent_tokens=63", "saap:mode=online,probes=8,recent_tokens=63", "saap"]
    rows = rows_of("step", *SMALL, "--batches", "2", "--dtype", dtype, "--attn", ",".join(methods))
    assert [(row["method"], row["backend"]) for row in rows] == [(str(parse(text)[0]), "ops") for text in methods]
    assert rows.pop()["note"] == "dense: all of 200 keys are attended"
    for row in rows:
        assert (row["failed"], row["note"], row["turns"], row["layers"]) == (False, None, 2, 32)
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert 0 < row["plain_read_us"] and row["dense_us_low"] <= row["dense_us"] <= row["dense_us_high"]
        assert 0 < row["bytes_formula"] and row["bytes_plain"] == 2 * 2 * 2 * 200 * 32 * (
            4 if dtype == "float32" else 2
        )


def test_quantized_kv_caches_are_timed_as_well() -> None:
    rows = rows_of(
        "step",
        "--shapes",
        "4x2x64",
        "--lengths",
        "300",
        "--repeat",
        "2",
        "--kv-bits",
        "4,8",
        "--attn",
        "sparq,sparq:score=copy",
    )
    assert [row.get("kv_bits") for row in rows] == [None, 4, 8] * 2
    assert not any(row["note"] for row in rows)
    assert rows[1]["bytes_formula"] < rows[2]["bytes_formula"] < rows[0]["bytes_plain"]


def test_prefill_in_chunks_and_at_once_is_right_and_timed() -> None:
    attn = "sample:alpha_column=0.6,alpha_slash=0.6,block_size=32,minference:vertical_tokens=64,slash_tokens=64"
    rows = rows_of(
        "prefill",
        "--shapes",
        "4x2x32",
        "--lengths",
        "600",
        "--repeat",
        "2",
        "--dtype",
        "float32",
        "--steps",
        "350,all",
        "--attn",
        attn,
    )
    assert [(row["step"], row["method"].partition(":")[0]) for row in rows] == [
        (n, name) for n in (350, 600) for name in ("sample", "minference")
    ]
    for row in rows:
        assert (row["failed"], row["turns"]) == (False, 2) and 0 < row["density"] < 1 and row["ratio"] > 0


@pytest.mark.parametrize("stage", ["step", "prefill"])
def test_no_time_beside_a_wrong_result_of_mlx(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_sparse.tools.bench import mlx_variants

    kind = mlx_variants.MlxStep if stage == "step" else mlx_variants.MlxPrefill
    right = kind.attend
    monkeypatch.setattr(kind, "attend", lambda self, *given: right(self, *given) + 0.05)
    (row,) = rows_of(stage, *SMALL, "--dtype", "float32", code=1)
    assert row["failed"] and row["note"].startswith("wrong result: error ")
    assert row["dense_us"] is row["sparse_us"] is row["ratio"] is row["plain_read_us"] is None


def test_the_metal_kernels_pass_the_check(metal: Any) -> None:
    from mlx_sparse.tools.bench import mlx_variants

    methods = [parse(text)[0] for text in ("sparq", "saap:recent_tokens=100", "quest:top_k=64")]
    case = Case("float16", Shape(4, 2, 64), 1, 1024)
    request = Request("step", methods, ["metal"], [case], 1, math.inf)
    assert [row.note for row in core.measure(case, mlx_variants.variants(request, case), 1)] == [None] * 3


def test_a_backend_or_a_case_that_cannot_run_is_a_row() -> None:
    rows = rows_of("step", *SMALL, "--backend", "auto,ops,onnx")
    assert [row["note"] for row in rows if row["backend"] == "ops"] == [None]  # auto is ops here
    assert rows[1]["note"] == "onnx: it runs exported files: export-onnx, then mlx-sparse run-onnx"
    for stage, length in (("step", "1000000000"), ("prefill", "10000000")):
        (row,) = rows_of(stage, *SMALL, "--lengths", length, *(["--steps", "all"] if stage == "prefill" else []))
        assert re.fullmatch(r"needs \d+ GB of the \d+ GB there are", row["note"])
