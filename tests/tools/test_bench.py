"""Test `mlx-sparse bench` on every engine: options, the check before timing, paired ratios and immediate output."""

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
from json_tables import read_tables

from mlx_sparse import cli, oracle
from mlx_sparse.checks import ConfigError
from mlx_sparse.core import registry
from mlx_sparse.methods import SAAP, Quest, SparQ, parse
from mlx_sparse.tools.bench import command, core, inputs
from mlx_sparse.tools.bench.core import Case, Request, Shape, Spread, Variant
from mlx_sparse.tools.formats import Printer

DATA = read_tables(__file__)

CASE = Case("float16", Shape(4, 2, 32), 1, 200)


class Fake(Variant):
    """Variant with a given result and a given time in seconds."""

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
    """Error with the name of torch's out-of-memory error."""


def test_correct_variants_alternate_and_wrong_ones_are_not_timed() -> None:
    fakes = [Fake("mlx", 4e-6, role="dense"), Fake("a", 2e-6), Fake("b", wrong="wrong result: error 1")]
    fakes.append(Fake("products", 3e-6, role="dense"))
    rows = core.measure(CASE, fakes, 3, warm_up=2)
    assert [fake.taken for fake in fakes] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [], [0, 1, 2, 3, 4]]
    a, b = (row.as_dict() for row in rows)
    assert (a["dense"], a["dense_us"], a["sparse_us"], a["turns"]) == ("products", 12, 8, 3)
    assert (a["ratio"], a["ratio_low"], a["ratio_high"]) == pytest.approx((1.5, 1.5, 1.5))  # the ratio of each turn
    assert a["dense_ways_us"] == pytest.approx({"mlx": 16, "products": 12})
    assert (b["failed"], b["note"], b["sparse_us"], b["ratio"]) == (True, "wrong result: error 1", None, None)
    assert {"dtype": "float16", "shape": "4x2x32", "batch": 1, "S": 200, "backend": "ops"}.items() <= a.items()


def test_backend_baselines_compare_within_their_backend() -> None:
    ours, theirs, sparse = Fake("ours", 1e-6, role="dense"), Fake("any", 3e-6, role="dense"), Fake("a", 2e-6)
    ours.row.backend = "native"
    (row,) = core.measure(CASE, [ours, theirs, sparse], 2)
    assert row.as_dict()["dense"] == "any" and row.as_dict()["ratio"] == pytest.approx(1.5)


def test_wrong_baseline_is_a_failed_row() -> None:
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
def test_errors_are_rows_with_a_reason(error: Exception, ours: bool, note: str, failed: bool) -> None:
    first, second = core.measure(CASE, [Fake("a", wrong=error, ours=ours), Fake("b")], 1)
    assert (first.note, first.failed, first.turns, second.turns) == (note, failed, 0, 1)


def test_setup_errors_leave_other_variants_timed() -> None:
    def variants() -> Iterator[Variant]:
        yield Fake("a")
        core.check_memory(70e9, 100e9, 0.6)

    a, whole = core.measure(CASE, variants(), 1)
    assert a.turns == 1
    assert (whole.method, whole.note, whole.failed) == ("", "needs 70 GB of 100 GB of memory", False)


def test_time_limit_keeps_a_minimum_of_turns() -> None:
    late = Fake("a")
    core.measure(CASE, [late], 9, until=time.monotonic() - 1)
    assert len(late.taken) == core.MIN_TURNS


def test_spread_is_quartiles() -> None:
    assert Spread.of([4, 1, 2, 3, 5]) == Spread(2, 3, 4)
    assert Spread.of([3e-6], 1e-6).median == pytest.approx(3)
    assert Spread(99.94, 100.4, 1000).text() == "100.4 (99.9 to 1,000.0)"


# Loop over cases


def run_cases(form: str, made: Any, out: Path | None = None, budget: float = math.inf) -> tuple[bool, str]:
    """Run two cases with the variants from ``made``. Return the success and the printed text."""
    request = Request("step", [], ["ops"], [CASE, CASE], 2, budget)
    printed, engine = io.StringIO(), SimpleNamespace(variants=lambda request, case: made())
    with redirect_stdout(printed):
        args = argparse.Namespace(output=form, out=out)
        right = command.run(request, engine, Printer(args, {"command": "mlx-sparse bench x", "machine": {"chip": "a"}}))
    return right, printed.getvalue()


@pytest.mark.parametrize("form", ["md", "json", "jsonl"])
def test_every_format_has_the_same_rows(form: str, tmp_path: Path) -> None:
    target = tmp_path / "found"
    target.write_text("old")
    right, text = run_cases(form, lambda: [Fake("mlx", role="dense"), Fake("a")], target)
    assert right and target.read_text() == text and len(list(tmp_path.iterdir())) == 1
    if form == "md":
        assert text.startswith("    mlx-sparse bench x\n\nA decode step in one layer")
        assert text.count("| a | ops | float16 | 4x2x32 | 1 | 200 |") == 2
    else:
        lines = [json.loads(line) for line in text.splitlines()] if form == "jsonl" else json.loads(text)["rows"]
        assert [line["kind"] for line in lines] == ["row", "row"] + ["end"] * (form == "jsonl")
        facts = lines[0]["run"] if form == "jsonl" else json.loads(text)
        assert (facts["command"], facts["machine"]) == ("mlx-sparse bench x", {"chip": "a"})


def test_skipped_cases_are_rows_and_wrong_results_fail() -> None:
    right, text = run_cases("json", lambda: [Fake("a")], budget=1e-9)
    assert right and {row["note"] for row in json.loads(text)["rows"]} == {
        "skipped: the time budget of 1e-09 s was used up"
    }
    assert not run_cases("json", lambda: [Fake("a", wrong="wrong result")])[0]


# Inputs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "text", ["sparq:rank=8,local_window=32", "oracle_top_k:local_window=32", "streaming", f"{Quest.name}:top_k=64"]
)
def test_planted_decode_problem_matches_the_oracle(text: str, dtype: str) -> None:
    (config,) = parse(text)
    problem = inputs.planted_problem(Case(dtype, Shape(8, 2, 64), 1, 600), config)
    names = ("rank", "top_k", "local_window", "page_size", "sink_tokens", "recent_tokens")
    settings = {name: value for name, value in config.parameters(4).items() if name in names}
    run = getattr(oracle, f"{config.name}_attention")
    assert problem.wrong(run(problem.queries, problem.keys, problem.values, **settings)) is None
    dense = oracle.dense_attention(problem.queries, problem.keys, problem.values)
    assert str(problem.wrong(dense)).startswith("wrong result: error")
    if "top_k" in settings:  # one key or one page less
        settings["top_k"] -= settings.get("page_size", 1)
        assert problem.wrong(run(problem.queries, problem.keys, problem.values, **settings))


def test_saap_problem_matches_the_oracle() -> None:
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
    assert stats.selectivity == pytest.approx(inputs.LOAD_FACTOR * config.probes / inputs.BUCKETS, rel=0.05)


@pytest.mark.parametrize("text", ["sample:alpha_column=0.6,alpha_slash=0.6,block_size=32", "bigbird"])
def test_prefill_problem_matches_the_oracle(text: str) -> None:
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


# Options

SMALL = ["--shapes", "4x2x32", "--repeat", "2", "--lengths", "200"]
RUNTIMES = pytest.mark.parametrize("engine", command.RUNTIMES)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one-line error of a command that fails."""
    assert cli.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mlx-sparse: error: ") and error.count("\n") == 1
    return error.removeprefix("mlx-sparse: error: ")


@pytest.mark.parametrize(("arguments", "message"), DATA["every_engine"])
@pytest.mark.parametrize("stage", ["step", "prefill"])
@RUNTIMES
def test_wrong_options_are_refused(engine, stage, arguments, message, capsys) -> None:
    assert refused(capsys, stage, "--runtime", engine, *SMALL, *arguments).startswith(message)


@pytest.mark.parametrize(("arguments", "message"), DATA["one_engine"])
def test_unsupported_options_of_an_engine_are_refused(arguments: str, message: str, capsys) -> None:
    stage, *more = arguments.split()
    assert refused(capsys, stage, *SMALL, *more).startswith(message)


@pytest.mark.parametrize("what", [[], ["step"], ["prefill"], ["generate"]])
def test_every_command_has_help(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", *what, "--help"])
    assert capsys.readouterr().out.startswith(" ".join(["usage: mlx-sparse bench", *what]))


def test_command_starts_without_optional_packages(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('mlx', 'mlx_lm', 'torch', 'triton', 'onnx', 'onnxruntime', 'tqdm'):\n"
        "    sys.modules[name] = None\n"
        "import importlib.metadata, runpy\n"
        "importlib.metadata.version = lambda name: {}[name]  # it is not installed\n"
        "sys.argv = ['command', 'step', '--runtime', 'cuda', '--lengths', '200']\n"
        "import mlx_sparse.tools.bench.inputs\n"
        "runpy.run_module('mlx_sparse.tools.bench.command', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("mlx-sparse bench: error: torch: expected it to be installed")


# MLX


def rows_of(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Return the result rows of a benchmark run."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert cli.main(["bench", *arguments, "-o", "json"]) == code
    return json.loads(printed.getvalue())["rows"]


DECODE = ["sparq", "sparq:key_bits=16", f"{Quest.name}:top_k=32", "streaming", "flexgen", "oracle_top_k"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_steps_of_every_method_are_correct_and_timed(dtype: str) -> None:
    methods = [*DECODE, "saap:recent_tokens=63", "saap:mode=online,probes=8,recent_tokens=63", "saap"]
    rows = rows_of("step", *SMALL, "--batches", "2", "--dtype", dtype, "--attn", ",".join(methods))
    configs = [parse(text)[0] for text in methods]
    backends = [registry.resolve("auto", config.name, D=32, G=2) for config in configs]
    assert [(row["method"], row["backend"]) for row in rows] == list(zip(map(str, configs), backends, strict=True))
    assert rows.pop()["note"] == "dense: all of 200 keys are attended"
    for row in rows:
        assert (row["failed"], row["note"], row["turns"], row["layers"]) == (False, None, 2, 32)
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert 0 < row["plain_read_us"] and row["dense_us_low"] <= row["dense_us"] <= row["dense_us_high"]
        assert 0 < row["bytes_formula"] and row["bytes_plain"] == 2 * 2 * 2 * 200 * 32 * (
            4 if dtype == "float32" else 2
        )


def test_a_step_that_attends_to_more_than_the_fewest_keys_is_correct() -> None:
    (row,) = rows_of("step", *SMALL, "--lengths", "4k", "--attn", "sparq")
    assert (row["failed"], row["note"]) == (False, None)


def test_quantized_kv_caches_are_timed() -> None:
    sizes = "--shapes 4x2x64 --lengths 300 --repeat 2 --kv-bits 4,8"
    rows = rows_of("step", *sizes.split(), "--attn", "sparq,sparq:score=copy")
    assert [row.get("kv_bits") for row in rows] == [None, 4, 8] * 2
    assert not any(row["note"] for row in rows)
    assert rows[1]["bytes_formula"] < rows[2]["bytes_formula"] < rows[0]["bytes_plain"]


def test_chunked_prefill_is_correct_and_timed() -> None:
    attn = "sample:alpha_column=0.6,alpha_slash=0.6,block_size=32,minference:vertical_tokens=64,slash_tokens=64"
    sizes = "--shapes 4x2x32 --lengths 600 --repeat 2 --dtype float32 --steps 350,all"
    rows = rows_of("prefill", *sizes.split(), "--attn", attn)
    assert [(row["step"], row["method"].partition(":")[0]) for row in rows] == [
        (n, name) for n in (350, 600) for name in ("sample", "minference")
    ]
    for row in rows:
        assert (row["failed"], row["turns"]) == (False, 2) and 0 < row["density"] < 1 and row["ratio"] > 0


@pytest.mark.parametrize("stage", ["step", "prefill"])
def test_wrong_mlx_results_are_not_timed(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_sparse.tools.bench import mlx_variants

    kind = mlx_variants.MlxStep if stage == "step" else mlx_variants.MlxPrefill
    right = kind.attend
    monkeypatch.setattr(kind, "attend", lambda self, *given: right(self, *given) + 0.05)
    (row,) = rows_of(stage, *SMALL, "--dtype", "float32", code=1)
    assert row["failed"] and row["note"].startswith("wrong result: error ")
    assert row["dense_us"] is row["sparse_us"] is row["ratio"] is row["plain_read_us"] is None


def test_metal_kernels_pass_the_check(metal: Any) -> None:
    from mlx_sparse.tools.bench import mlx_variants

    methods = [SparQ(), SAAP(recent_tokens=100)]
    case = Case("float16", Shape(4, 2, 64), 1, 1024)
    request = Request("step", methods, ["metal"], [case], 1, math.inf)
    assert [row.note for row in core.measure(case, mlx_variants.variants(request, case), 1)] == [None] * 2


def test_unavailable_backends_and_large_cases_are_rows() -> None:
    rows = rows_of("step", *SMALL, "--backend", "auto,ops,onnx")
    assert [row["note"] for row in rows if row["backend"] == "ops"] == [None]
    assert rows[-1]["note"] == "onnx: it runs exported files: export-onnx, then mlx-sparse run-onnx"
    for stage, length in (("step", "1000000000"), ("prefill", "10000000")):
        (row,) = rows_of(stage, *SMALL, "--lengths", length, *(["--steps", "all"] if stage == "prefill" else []))
        assert re.fullmatch(r"needs \d+ GB of \d+ GB of memory", row["note"])
