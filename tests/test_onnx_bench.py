"""`mlx-sparse bench --onnx`: every contender computes the same, and the report is whole."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlx_sparse.onnx_export import native
from mlx_sparse.onnx_export.bench import caches as bench_caches
from mlx_sparse.onnx_export.bench import contenders as bench_contenders
from mlx_sparse.onnx_export.bench import report as bench_report
from mlx_sparse.onnx_export.bench import run as bench
from mlx_sparse.onnx_export.bench.caches import Caches, Problem
from mlx_sparse.onnx_export.bench.contenders import CONTENDERS, HALF, Contender
from mlx_sparse.onnx_export.bench.run import Row
from require import absent

from mlx_sparse import cli, oracle

SMALL = ["--onnx", "--lengths", "200,1k", "--shapes", "4x2x32", "--attn", "sparq:rank=8,top_k=32", "--repeat", "2"]
PROBLEMS = [Problem(4, 2, 32, 200, 8, 32, 8), Problem(8, 8, 64, 513, 16, 40, 0), Problem(6, 2, 80, 1024, 32, 129, 33)]
K = 1024


MISSING = {
    **dict.fromkeys(bench_contenders.KERNELS, "not built" if native.unavailable() else None),
    **dict.fromkeys(bench_contenders.TORCH, None if importlib.util.find_spec("torch") else "torch is not installed"),
}
EVERYONE = [(name, dtype) for name, dtypes in CONTENDERS.items() for dtype in dtypes]


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_caches, "IN_PLAY", 1_000_000)


def values(caches: Caches, arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[1][:, :, : caches.problem.S].astype(np.float64) * caches.step


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize(("name", "dtype"), [c for c in EVERYONE if c[0] != "read"])
def test_every_contender_computes_what_the_oracle_does(name: str, dtype: str, problem: Problem) -> None:
    if missing := MISSING.get(name):
        absent("torch" if name in bench_contenders.TORCH else "ort", missing)
    caches = Caches(problem, dtype, component_major=dtype in HALF)
    kind = np.float32 if dtype == "int8" else caches.dtype
    queries = problem.queries.astype(kind).astype(np.float64).reshape(1, problem.Hq, 1, problem.D)
    inputs = queries, values(caches, caches.keys), values(caches, caches.values)
    if name.endswith("sparq"):
        settings = {"rank": problem.rank, "top_k": problem.top_k, "local_window": problem.window}
        expected = oracle.sparq_attention(*inputs, **settings, reallocate=False)
    else:
        expected = oracle.dense_attention(*inputs)
    contender = bench_contenders.build(name, dtype, caches, threads=2)
    _, allowed = caches.plant()
    caches.restore()
    for i in (1, 0):
        contender.bind(i)
        contender.run()
        assert contender.output is not None
        assert np.abs(contender.output().astype(np.float64) - expected.reshape(problem.Hq, problem.D)).max() <= allowed


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("dtype", bench_caches.DTYPES)
def test_planted_keys_take_all_of_the_attention_and_leave_no_trace(problem: Problem, dtype: str) -> None:
    caches = Caches(problem, dtype, component_major=dtype in HALF)
    before = [array.copy() for array in (caches.keys[0], caches.values[0], *caches.keys_t[:1])]
    planted, allowed = caches.plant()
    kind = np.float32 if dtype == "int8" else caches.dtype
    queries = problem.queries.astype(kind).astype(np.float64).reshape(1, problem.Hq, 1, problem.D)
    keys = caches.keys[0][:, :, : problem.S].astype(np.float64) * caches.step
    exact = oracle.dense_attention(queries, keys, values(caches, caches.values))
    assert np.abs(planted - exact.reshape(planted.shape)).max() <= allowed
    caches.restore()
    for array, old in zip((caches.keys[0], caches.values[0], *caches.keys_t[:1]), before, strict=True):
        assert (array.view(np.uint8) == old.view(np.uint8)).all()


def test_enough_caches_are_in_play(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_caches, "IN_PLAY", 600_000_000)
    for S in (4 * K, 16 * K, 64 * K, 128 * K):
        problem = Problem(32, 8, 128, S, 32, 128, 32)
        for dtype in bench_caches.DTYPES:
            sets, sets_t = problem.copies(dtype)
            assert sets * 2 * problem.bytes(dtype) >= 600_000_000
            assert sets_t * problem.bytes(dtype) * 32 // 128 >= 600_000_000
        assert problem.memory() < 14e9


def test_each_step_uses_the_next_set() -> None:
    problem = PROBLEMS[0]
    caches = Caches(problem, "float32", component_major=True)
    for i, array in enumerate(caches.values):
        array[:] = i
    for name in ("gqa", "standard", "body-dense", "body-sparq", *MISSING):
        if not MISSING.get(name):
            contender = bench_contenders.build(name, "float32", caches, threads=1)
            for i in range(len(caches.values) + 2):
                contender.bind(i)
                contender.run()
                assert contender.output is not None
                # The new token of the operators that append has a value of its own.
                assert round(float(np.median(contender.output()))) == i % len(caches.values)


def test_the_command_prints_tables_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "onnx.md"
    assert cli.main(["bench", *SMALL, "--out", str(target)]) == 0
    text = capsys.readouterr().out
    assert target.read_text() == text
    assert text.startswith("    mlx-sparse bench --onnx --lengths 200,1k")
    assert "\n\nonnxruntime " in text
    assert text.count("| ORT standard operators, group as rows | float32 | ") == 2  # one thread and two
    assert "| | caches | 200 | 1k |" in text
    assert "wrong result" not in text
    assert cli.main(["bench", *SMALL, "--threads", "1", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2 * len(EVERYONE)
    for row in rows:
        if missing := MISSING.get(row["contender"]):
            assert row["note"] == missing
            assert row["median_ms"] is None
        else:
            assert row["note"] is None
            assert 0 < row["min_ms"] <= row["median_ms"]
            assert row["samples"] >= 2
            assert row["gigabytes_per_second"] == pytest.approx(1e3 * row["gigabytes"] / row["median_ms"])


@pytest.mark.parametrize("wrong", [lambda out: out + 0.1, lambda out: out * np.nan], ids=["off", "nan"])
def test_no_time_beside_a_wrong_result(
    wrong: Callable[[np.ndarray], np.ndarray], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = bench_contenders.build

    def spoiled(name: str, *arguments: object) -> Contender:
        contender = build(name, *arguments)
        if (right := contender.output) is not None:
            contender.output = lambda: wrong(right())
        return contender

    monkeypatch.setattr(bench, "build", spoiled)
    assert cli.main(["bench", *SMALL, "--threads", "1", "-o", "json"]) == 1
    for row in json.loads(capsys.readouterr().out)["rows"]:
        if row["contender"] != "read" and not MISSING.get(row["contender"]):
            assert row["failed"]
            assert row["note"].startswith("wrong result: error ")
            assert row["median_ms"] is None


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *SMALL, "--lengths", "1000000000", "-o", "json"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert row["note"].startswith("needs ")


def rows(times: dict[tuple[str, str], float], S: int) -> list[Row]:
    return [Row(name, dtype, S, 2, times=[time]) for (name, dtype), time in times.items()]


def test_bars_compare_medians_of_two_threads() -> None:
    times = {
        ("read", "float16"): 7.0,
        ("native-dense", "float16"): 10.0,
        ("native-sparq", "float16"): 2.0,
        ("gqa", "float32"): 60.0,
        ("torch-rows", "float32"): 30.0,
        ("torch-gqa", "bfloat16"): 9.0,
        ("body-sparq", "float32"): 4.0,
    }
    found = {bar.what: bar for bar in bench_report.bars(rows(times, 64 * K))}
    assert {what: (bar.found, bar.met) for what, bar in found.items()} == {
        "native SparQ over native dense": (5.0, "NO"),
        "bandwidth of native dense over the plain read": (0.7, "yes"),
        "native dense over torch's best view of any type": (0.9, "NO"),
        "native SparQ over ORT GroupQueryAttention float32": (30.0, "NO"),
        "SparQ's function body over the best float dense that is not ours": (9 / 4, "NO"),
    }
    assert all(bar.met == "not measured" for bar in bench_report.bars(rows({("read", "float16"): 7.0}, 64 * K)))
    assert not bench_report.bars([Row("read", "float16", 64 * K, 1, times=[1.0])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "1,many"], "--threads: expected an integer of at least 1, got 'many'."),
        (["--lengths", "32"], "--lengths: expected more than the 32 keys that SparQ attends to, got 32."),
        (["--shapes", "4x2x32,4x2x64"], "--shapes: expected query heads x KV heads x head dim such as 32x8x128"),
        (["--attn", "sparq:rank=33"], "rank: expected at most the head dim D=32, got 33."),
        (
            ["--attn", "sparq:reallocate=true"],
            "--attn: expected rank, top_k and local_window alone with --onnx, got sparq:reallocate=true.",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mlx-sparse: error: {message}")
    assert error.count("\n") == 1
