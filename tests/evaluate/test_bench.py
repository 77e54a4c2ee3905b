"""`mlx-sparse bench`, the same for every engine: results are checked before they are timed, rows come at once."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from mlx_sparse import cli
from mlx_sparse.checks import ConfigError
from mlx_sparse.tools.bench import core
from mlx_sparse.tools.bench.command import ENGINES, read
from mlx_sparse.tools.bench.core import Case, Contender, Row, Sample, Shape, Spread, Turns
from mlx_sparse.tools.bench.run import Plan, run
from mlx_sparse.tools.bench.thresholds import Bar, bar_table, length
from mlx_sparse.tools.formats import Printer

CASE = Case("float16", Shape(4, 2, 32), 1, 200)


class Fake(Contender):
    """A contender with a result that is what the test says."""

    def __init__(self, name: str, wrong: Any = None, seconds: float = 1e-6, ours: bool = True) -> None:
        super().__init__(Row(CASE, name, details={"bytes": 1000}))
        self.wrong, self.seconds, self.ours, self.taken = wrong, seconds, ours, list[int]()

    def prepare(self) -> None:
        if isinstance(self.wrong, Exception):
            raise self.wrong

    def check(self) -> str | None:
        return self.wrong

    def step(self, turn: int) -> Sample:
        self.taken.append(turn)
        return Sample(self.seconds, disturbed=self.seconds > 1)


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


# contenders, turns, rows


def test_all_that_are_right_take_turns_and_a_wrong_one_gets_no_time() -> None:
    fakes = [Fake("a"), Fake("b", wrong="wrong result: error 1"), Fake("c", seconds=2e-6)]
    rows = core.measure(CASE, fakes, Turns(3, warm_up=2))
    assert [fake.taken for fake in fakes] == [[0, 1, 2, 3, 4], [], [0, 1, 2, 3, 4]]
    a, b, c = (row.as_dict() for row in rows)
    assert (a["us"], c["us"], a["turns"], a["gigabytes_per_second"]) == (1, 2, 3, 1)
    assert (b["failed"], b["note"], b["us"], b["us_min"], b["turns"]) == (True, "wrong result: error 1", None, None, 0)
    assert (
        a | {"contender": "a"} == a
        and {"dtype": "float16", "shape": "4x2x32", "batch": 1, "S": 200}.items() <= a.items()
    )


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
def test_what_raises_is_a_row_with_its_reason(error: Exception, ours: bool, note: str, failed: bool) -> None:
    rows = core.measure(CASE, [Fake("a", error, ours=ours), Fake("b")], Turns(1))
    assert (rows[0].note, rows[0].failed, rows[0].turns, rows[1].turns) == (note, failed, 0, 1)


def test_what_raises_before_a_contender_is_a_row_of_the_case_and_the_others_are_timed() -> None:
    def contenders() -> Iterator[Contender]:
        yield Fake("a")
        raise RuntimeError("no inputs")

    a, whole = core.measure(CASE, contenders(), Turns(1))
    assert a.turns == 1
    assert (whole.name, whole.note, whole.failed) == ("", "no inputs", True)


def test_turns_end_when_time_is_up_but_some_are_taken() -> None:
    late = Fake("a")
    core.measure(CASE, [late], Turns(9, until=time.monotonic() - 1, least=5))
    assert len(late.taken) == 5


def test_disturbed_samples_are_discarded_unless_there_are_too_few_others() -> None:
    def step(turn: int) -> Sample:
        return Sample(float(turn), disturbed=turn % 2 == 1)

    (taken,) = core.take_turns({"a": step}, Turns(3, tries=3)).values()
    assert (taken.seconds, taken.disturbed, taken.all_are_needed) == ([0, 2, 4], [1, 3], False)
    (taken,) = core.take_turns({"a": lambda turn: Sample(2.0, disturbed=True)}, Turns(2, tries=2)).values()
    assert (taken.seconds, taken.all_are_needed) == ([2.0] * 4, True)
    (taken,) = core.take_turns({"a": lambda turn: Sample(2.0)}, Turns(9, longest=3)).values()
    assert len(taken.seconds) == core.ENOUGH


def test_a_spread_is_quartiles_and_the_least() -> None:
    assert Spread.of([4, 1, 2, 3, 5]) == Spread(2, 3, 4, 1)
    assert Spread.of([3e-6], 1e-6).median == pytest.approx(3)
    assert str(Spread(99.94, 100.4, 1000, 1)) == "100 (99.9 to 1000)"


def test_what_does_not_fit_is_said() -> None:
    assert core.too_large(50e9, 100e9, 0.6) is None
    assert core.too_large(70e9, 100e9, 0.6) == "needs 70 GB of the 100 GB there are"
    assert core.too_large(math.inf, 100e9, 0.6)


def test_bars_say_whether_they_are_met() -> None:
    bars = [Bar("a", 131072, 3.5, 3.0), Bar("b", 100, 1, 1.0), Bar("c", 1, 1, None)]
    assert [bar.met for bar in bars] == ["NO", "yes", "not measured"]
    assert "| a | 128k | 3.5 | 3.00 | NO |\n| b | 100 | 1 | 1.00 | yes |\n| c | 1 | 1 |  | not measured |" in bar_table(
        bars
    )
    assert (length(4096), length(4095)) == ("4k", "4095")


# runs


def ran(form: str, plan: Plan, budget: float = math.inf, out: Path | None = None) -> tuple[bool, str]:
    printed = io.StringIO()
    with redirect_stdout(printed):
        args = argparse.Namespace(output=form, out=out)
        right = run(plan, Printer(args, {"command": "mlx-sparse bench x", "machine": {"chip": "a"}}), budget)
    return right, printed.getvalue()


def planned(measure: Callable[[Any, float], list[Row]], cases: int = 2, **more: Any) -> Plan:
    return Plan({}, [CASE] * cases, measure, lambda rows: f"{len(rows)} rows", **more)


def test_rows_are_printed_when_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(case: Any, end: float) -> Iterator[Row]:
        before.append(capsys.readouterr())
        yield Row(case, f"contender {len(before)}", details={"dtype": "float16"}, note="a reason")

    before: list[Any] = []
    args = argparse.Namespace(output="jsonl", out=None)
    assert run(planned(measure), Printer(args, {"command": "c"}))  # type: ignore[arg-type]
    assert json.loads(before[1].out)["contender"] == "contender 1"
    assert before[1].err == f"[2/2] {CASE}\n"
    before.clear()
    assert run(planned(measure), Printer(argparse.Namespace(output="md", out=None), {"command": "c"}))  # type: ignore[arg-type]
    assert before[1].out == ""
    assert "  contender 1, float16: a reason\n" in before[1].err


@pytest.mark.parametrize("form", ["md", "json", "jsonl", "csv"])
def test_each_form_holds_the_same_rows(form: str, tmp_path: Path) -> None:
    target = tmp_path / "found"
    target.write_text("old")
    plan = planned(lambda case, end: [Row(case, "a", details={"bytes": 7})], lines=lambda rows: [{"kind": "bar"}])
    right, text = ran(form, plan, out=target)
    assert right and target.read_text() == text and len(list(tmp_path.iterdir())) == 1
    if form == "md":
        assert text == "    mlx-sparse bench x\n\n2 rows\n"
    elif form == "csv":
        rows = list(csv.DictReader(io.StringIO(text)))
        assert [(row["contender"], row["bytes"], row["run.machine.chip"]) for row in rows[:2]] == [("a", "7", "a")] * 2
    else:
        lines = [json.loads(line) for line in text.splitlines()] if form == "jsonl" else json.loads(text)["rows"]
        assert [line["kind"] for line in lines] == ["row", "row", "bar"] + ["end"] * (form == "jsonl")
        facts = lines[0]["run"] if form == "jsonl" else json.loads(text)
        assert (facts["command"], facts["machine"]) == ("mlx-sparse bench x", {"chip": "a"})
    if form == "jsonl":
        assert (lines[-1]["right"], lines[-1]["text"]) == (True, "2 rows")


def test_cases_for_which_no_time_is_left_are_rows_and_nothing_measured_can_be_wrong() -> None:
    found: list[float] = []
    right, text = ran("json", planned(lambda case, end: found.append(end) or [], needed=True), budget=1e-9)
    assert not right and not found
    assert {row["note"] for row in json.loads(text)["rows"]} == {"left out: the 1e-09 s were over"}
    start = time.monotonic()
    ran("json", planned(lambda case, end: found.append(end - start) or [], cases=4), budget=100)
    assert found[0] == pytest.approx(25, abs=5) and found[-1] == pytest.approx(100, abs=5)
    ran("json", planned(lambda case, end: found.append(end - start) or [], cases=4, ahead=2), budget=100)
    assert found[4] == pytest.approx(50, abs=5)


@pytest.mark.parametrize("failed", [True, False])
def test_a_wrong_result_is_an_exit_status(failed: bool) -> None:
    assert ran("json", planned(lambda case, end: [Row(case, "a", failed=failed)]))[0] != failed


# every engine

SMALL = {
    ("mlx", "step"): ["--lengths", "200", "--dtype", "float32"],
    ("mlx", "prompt"): ["--lengths", "200", "--dtype", "float32", "--steps", "all"],
    ("onnx", "step"): ["--lengths", "200", "--threads", "1"],
    ("onnx", "prompt"): ["--lengths", "200", "--threads", "1"],
    ("cuda", "step"): ["--lengths", "200", "--batches", "1"],
    ("cuda", "prompt"): ["--lengths", "200"],
}


def bench(engine: str, stage: str, *more: str) -> int:
    sizes = ["--shapes", "4x2x32", "--repeat", "2", *SMALL[engine, stage]]
    return cli.main(["bench", stage, "--engine", engine, *sizes, *more])


@pytest.mark.parametrize("stage", ["step", "prompt"])
@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_refuses_what_it_does_not_have_in_one_line(
    engine: str, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = {"--backend": "ops", "--threads": "1", "--budget-s": "9", "--batches": "2", "--dtype": "float16"}
    for option, engines in (
        ("--backend", "mlx"),
        ("--threads", "onnx"),
        ("--budget-s", "cuda"),
        ("--dtype", "mlx cuda"),
    ):
        if engine not in engines:
            value = theirs[option] if option != "--budget-s" else "9.0"
            assert bench(engine, stage, option, theirs[option]) == 2
            message = f"{option}: expected none with --engine {engine}, got {value}."
            assert capsys.readouterr().err == f"mlx-sparse: error: {message}\n"


REFUSED = [
    (["--lengths", "1k,much"], "--lengths: expected numbers such as 1k,2k,3000, got 'much'."),
    (["--shapes", "3x2x64"], "--shapes: expected query heads x KV heads x head dim such as 32x8x128, got '3x2x64'."),
    (["--repeat", "0"], "--repeat: expected an integer of at least 1, got 0."),
    (["--attn", "streaming,"], "methods: expected a list such as sparq:rank=16,streaming, got 'streaming,'."),
    (["--attn", "dense"], "--attn: expected methods of "),
    (["--attn", "sample+sparq"], "--attn: expected methods of "),
    (["-o", "result.md"], "-o: expected one of md, json, jsonl, csv, got 'result.md'. --out names a file."),
    (["--out", "no/folder/x"], "--out: expected a file in a folder that exists, got no/folder/x."),
    (["--out", "."], "--out: expected a file in a folder that exists, got .."),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
@pytest.mark.parametrize("stage", ["step", "prompt"])
@pytest.mark.parametrize("engine", ENGINES)
def test_wrong_arguments_are_refused_in_one_line(
    engine: str, stage: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(engine, stage, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mlx-sparse: error: {message}") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("engine", "stage", "arguments", "message"),
    [
        (
            "mlx",
            "step",
            ["--attn", "sample"],
            "--attn: expected methods of decode steps such as sparq:rank=16,streaming",
        ),
        (
            "mlx",
            "prompt",
            ["--attn", "sparq"],
            "--attn: expected methods of prompts such as sample,minference, got sparq.",
        ),
        ("mlx", "step", ["--dtype", "half"], "--dtype: expected some of float16, bfloat16, float32, got 'half'."),
        ("mlx", "step", ["--batches", "1,all"], "--batches: expected an integer of at least 1, got 'all'."),
        ("mlx", "step", ["--attn", "sparq:rank=33"], "rank: expected at most the head dim D=32, got 33."),
        (
            "mlx",
            "step",
            ["--attn", "saap:mode=online,buckets=32"],
            "probes: expected an integer of at least 1 and at most 31",
        ),
        (
            "mlx",
            "step",
            ["--backend", "onnx"],
            "--backend: expected one that has sparq here, got onnx (it runs exported",
        ),
        ("mlx", "prompt", ["--steps", "512,none"], "--steps: expected numbers such as 1k,2k,3000, got 'none'."),
        ("onnx", "step", ["--threads", "1,many"], "--threads: expected an integer of at least 1, got 'many'."),
        (
            "onnx",
            "step",
            ["--lengths", "32"],
            "--lengths: expected more than the 128 keys that SparQ attends to, got 32.",
        ),
        (
            "onnx",
            "step",
            ["--shapes", "4x2x32,4x2x64"],
            "--shapes: expected one for steps with --engine onnx, got 4x2x32,",
        ),
        ("onnx", "step", ["--attn", "sparq:rank=33"], "rank: expected at most the head dim D=32, got 33."),
        (
            *("onnx", "step", ["--attn", "sparq:reallocate=true"]),
            "--attn: expected rank, top_k and local_window alone with --engine onnx, got sparq:reallocate=true.",
        ),
        ("onnx", "step", ["--attn", "h2o"], "--attn: expected sparq or saap with --engine onnx, got h2o."),
        (
            "onnx",
            "step",
            ["--attn", "sparq,saap"],
            "--attn: expected sparq or saap with --engine onnx, got sparq,saap.",
        ),
        (
            "onnx",
            "step",
            ["--attn", "saap:probes=1025"],
            "probes: expected an integer of at least 1 and at most 1024, got",
        ),
        ("onnx", "step", ["--attn", "saap"], "--lengths: expected more than the 2048 keys always attended, got 200"),
        (
            *("onnx", "step", ["--attn", "saap:artefact=file"]),
            "--attn: expected probes, sink_tokens and recent_tokens alone with --engine onnx",
        ),
        (
            *("onnx", "prompt", ["--attn", "sample:alpha_column=0.5"]),
            "--attn: expected block_size and chunks alone with --engine onnx, got sample:alpha_column=0.5.",
        ),
        ("cuda", "step", ["--dtype", "float32"], "--dtype: expected one of float16, bfloat16, got 'float32'."),
        ("cuda", "step", ["--budget-s", "0"], "--budget-s: expected seconds, got 0."),
        (
            "cuda",
            "step",
            ["--lengths", "128"],
            "--lengths: expected more than the 128 keys that SparQ attends to, got 128.",
        ),
        ("cuda", "step", ["--attn", "sparq:rank=65"], "rank: expected at most the head dim D=32, got 65."),
        (
            "cuda",
            "step",
            ["--attn", "saap"],
            "--lengths: expected at least 4096 keys, twice what SAAP always attends, got 200.",
        ),
        (
            "cuda",
            "step",
            ["--attn", "saap:probes=8"],
            "--attn: expected no parameters with --engine cuda, got saap:probes=8.",
        ),
        ("cuda", "prompt", ["--densities", "1.5"], "--densities: expected "),
        (
            "cuda",
            "prompt",
            ["--densities", "0.1,,"],
            "--densities: expected shares such as 0.05,0.1,0.2,0.5, got '0.1,,'.",
        ),
        ("cuda", "prompt", ["--batches", "2"], "--batches: expected 1 of prompts with --engine cuda, got 2."),
    ],
)
def test_each_engine_refuses_its_own_mistakes_in_one_line(
    engine: str, stage: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(engine, stage, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mlx-sparse: error: {message}") and error.count("\n") == 1


@pytest.mark.parametrize("what", [[], ["step"], ["prompt"], ["generate"]])
def test_each_command_has_a_help_of_its_own(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", *what, "--help"])
    assert capsys.readouterr().out.startswith(" ".join(["usage: mlx-sparse bench", *what]))


def test_what_is_not_given_is_the_engines_default() -> None:
    args = argparse.Namespace(engine="cuda", stage="step", attn="saap", lengths=None, shapes=None, repeat=None)
    request, budget = read(args)
    assert (request.lengths[0], request.batches, request.shapes, budget) == (65536, [1], [Shape(32, 8, 128)], 280)


def test_the_core_and_the_engines_command_run_without_mlx_torch_and_onnx(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('mlx', 'mlx_lm', 'torch', 'triton', 'onnx', 'onnxruntime', 'numpy', 'tqdm'):\n"
        "    sys.modules[name] = None\n"
        "import mlx_sparse.tools.bench.core, mlx_sparse.cuda_ref.bench\n"
        "from mlx_sparse.tools.bench.command import program\n"
        "sys.argv = ['bench', 'step', '--lengths', '200']\n"
        "sys.exit(program('cuda', 'bench'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(
        "bench: error: --engine cuda: expected an NVIDIA GPU with torch and triton, got none ("
    )
