"""The contenders of `mlx-sparse bench --engine onnx`: all compute the same, and the reports are whole."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_sparse.onnx_export.bench import caches as bench_caches
from mlx_sparse.onnx_export.bench import prompts, saap, steps
from mlx_sparse.onnx_export.bench.bound import HALF
from mlx_sparse.onnx_export.bench.caches import Caches, Problem
from mlx_sparse.onnx_export.bench.prompts import DENSITIES, Buffers
from mlx_sparse.onnx_export.bench.saap import BUCKETS, Index, Indexed
from mlx_sparse.onnx_export.runtime import native
from require import absent

from mlx_sparse import cli, oracle
from mlx_sparse.methods import SAAP
from mlx_sparse.tools.bench.core import MICRO, Row, Shape

SMALL = ["bench", "step", "--engine", "onnx", "--shapes", "4x2x32", "--repeat", "2", "--threads"]
SPARQ = ["--lengths", "200,1k", "--attn", "sparq:rank=8,top_k=32"]
OF_SAAP = ["--lengths", "600", "--attn", "saap:probes=40,recent_tokens=50"]
SAMPLE = ["bench", "prompt", "--engine", "onnx", "--attn", "sample:block_size=32", "--lengths", "600"]
SAMPLE += ["--shapes", "4x2x32", "--repeat", "2", "--threads"]
PROBLEMS = [
    Problem("", Shape(4, 2, 32), 1, 200, 8, 32, 8),
    Problem("", Shape(8, 8, 64), 1, 513, 16, 40, 0),
    Problem("", Shape(6, 2, 80), 1, 1024, 32, 129, 33),
]
METHOD = SAAP(probes=40, sink_tokens=2, recent_tokens=50)
INDEXED = [
    Indexed("", Shape(4, 2, 32), 1, 600, 32, 128, 32, METHOD),
    Indexed("", Shape(6, 3, 64), 1, 1030, 64, 128, 32, METHOD),
]
PROMPT = prompts.Problem("", Shape(4, 2, 32), 1, 700, block_size=32, chunks=2)
K = 1024

MISSING = {
    **dict.fromkeys(("native-dense", "native-sparq"), "not built" if native.unavailable() else None),
    **dict.fromkeys(steps.TORCH, None if importlib.util.find_spec("torch") else "torch is not installed"),
}
EVERYONE = steps.CONTENDERS


def missing(name: str) -> str | None:
    """Why a contender cannot run here."""
    if name.startswith("native"):
        return MISSING["native-dense"]
    return MISSING["torch-gqa"] if name.startswith("torch") else None


def need(name: str) -> None:
    if reason := missing(name):
        absent("torch" if name.startswith("torch") else "ort", reason)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert cli.main([*arguments, "-o", "json"]) == code
    return json.loads(capsys.readouterr().out)["rows"]


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_caches, "IN_PLAY", 1_000_000)


def values(caches: Caches, arrays: list[np.ndarray]) -> np.ndarray:
    return caches.loaded(arrays[1][:, :, : caches.problem.S]).astype(np.float64)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize(("name", "dtype"), [c for c in EVERYONE if c[0] != "read"])
def test_every_step_computes_what_the_oracle_does(name: str, dtype: str, problem: Problem) -> None:
    need(name)
    caches = Caches(problem, dtype, component_major=dtype in HALF, coded=name in steps.CODED)
    queries = problem.queries.astype(caches.kind).astype(np.float64).reshape(1, problem.Hq, 1, problem.D)
    keys = steps.between_codings(problem.S) if name in steps.CODED else problem.S
    settings = {"rank": problem.rank, "top_k": problem.top_k, "local_window": problem.window, "reallocate": False}
    if name in steps.CODED:
        settings["key_bits"] = bench_caches.CODED_BITS
    contender = steps.build(name, dtype, caches, threads=2)
    _, allowed = caches.plant()
    caches.restore()
    for i in (1, 0):
        contender.bind(i)
        contender.run()
        assert contender.output is not None
        # With the new token, which was packed another time.
        rows = (caches.loaded(sets[i][:, :, :keys]).astype(np.float64) for sets in (caches.keys, caches.values))
        if "sparq" in name:
            expected = oracle.sparq_attention(queries, *rows, **settings)
        else:
            expected = oracle.dense_attention(queries, *rows)
        assert np.abs(contender.output().astype(np.float64).ravel() - expected.ravel()).max() <= allowed


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("dtype", bench_caches.DTYPES)
def test_planted_keys_take_all_of_the_attention_and_leave_no_trace(problem: Problem, dtype: str) -> None:
    caches = Caches(problem, dtype, component_major=dtype in HALF)
    before = [array.copy() for array in (caches.keys[0], caches.values[0], *caches.keys_t[:1])]
    planted, allowed = caches.plant()
    queries = problem.queries.astype(caches.kind).astype(np.float64).reshape(1, problem.Hq, 1, problem.D)
    keys = caches.loaded(caches.keys[0][:, :, : problem.S]).astype(np.float64)
    exact = oracle.dense_attention(queries, keys, values(caches, caches.values))
    assert np.abs(planted - exact.reshape(planted.shape)).max() <= allowed
    caches.restore()
    for array, old in zip((caches.keys[0], caches.values[0], *caches.keys_t[:1]), before, strict=True):
        assert (array.view(np.uint8) == old.view(np.uint8)).all()


def test_enough_caches_are_in_play(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_caches, "IN_PLAY", 600_000_000)
    for S in (4 * K, 16 * K, 64 * K, 128 * K):
        problem = Problem("", Shape(32, 8, 128), 1, S, 32, 128, 32)
        for dtype in bench_caches.DTYPES:
            sets, sets_t = problem.copies(dtype)
            assert sets * 2 * problem.bytes(dtype) >= (150_000_000 if dtype in bench_caches.PACKED else 600_000_000)
            assert sets_t * problem.bytes(dtype) * 32 // 128 >= 600_000_000
        assert problem.memory(bench_caches.DTYPES) < 14.2e9


def test_each_step_uses_the_next_set() -> None:
    problem = PROBLEMS[0]
    caches = Caches(problem, "float32", component_major=True)
    for i, array in enumerate(caches.values):
        array[:] = i
    for name in ("gqa", "standard", "body-dense", "body-sparq", *MISSING):
        if not MISSING.get(name):
            contender = steps.build(name, "float32", caches, threads=1)
            for i in range(len(caches.values) + 2):
                contender.bind(i)
                contender.run()
                assert contender.output is not None
                # The new token of the operators that append has a value of its own.
                assert round(float(np.median(contender.output()))) == i % len(caches.values)


@pytest.mark.parametrize("problem", INDEXED, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", saap.NAMES)
def test_every_step_of_saap_computes_what_the_oracle_does(name: str, dtype: str, problem: Indexed) -> None:
    need(name)
    caches = Caches(problem, dtype, component_major=False)
    queries = problem.queries.astype(caches.dtype).astype(np.float64).reshape(1, problem.Hq, 1, problem.D)
    keys, values = (sets[0][:, :, : problem.S].astype(np.float64) for sets in (caches.keys, caches.values))
    if "saap" in name:
        index = Index(problem, trained=not name.endswith("kmeans"))
        network = {key: array for key, array in index.weights.items() if key != "centroids"}
        if name.endswith("kmeans"):
            network = {"out_weight": network["out_weight"]}
        visited = oracle.saap_route(index.query, probes=METHOD.probes, **network)
        np.testing.assert_array_equal(np.sort(index.visited), visited[0])
        ids = index.bucket_ids[:, :, : problem.S]
        window = {"sink_tokens": METHOD.sink_tokens, "recent_tokens": METHOD.recent_tokens}
        expected, stats = oracle.saap_attention(
            queries, keys, values, bucket_ids=ids, visited=visited, **window, return_stats=True
        )
        assert stats.selectivity < 0.3
    else:
        expected = oracle.dense_attention(queries, keys, values)
    contender = saap.build(name, dtype, caches, threads=2)
    _, allowed = caches.plant()
    caches.restore()
    for i in (1, 0):
        contender.bind(i)
        contender.run()
        assert contender.output is not None
        assert np.abs(contender.output().astype(np.float64).ravel() - expected.ravel()).max() <= allowed


def test_what_is_read_is_more_than_a_processor_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_caches, "IN_PLAY", 600_000_000)
    problem = Indexed("", Shape(32, 8, 128), 1, 32768, 128, 128, 32, SAAP(probes=51))
    assert problem.attended == 2048 + 30720 * 51 // BUCKETS
    sets, _ = problem.copies("float16")
    assert sets * problem.attended * 8 * 128 * 2 * 2 >= 600_000_000
    assert sets * 2 * problem.bytes("float16") < 6e9


@pytest.mark.parametrize("density", [0.55, 0.75])
def test_the_alpha_is_that_of_the_density(density: float) -> None:
    alpha = PROMPT.alpha_of(density)
    assert abs(PROMPT.density(alpha) - density) < 0.1
    q, k, _ = PROMPT.arrays
    chosen = oracle.sample_select(q, k, alpha_column=alpha, alpha_slash=alpha, chunks=2, block_size=32).blocks
    assert (oracle.block_mask(chosen, 22) == PROMPT.blocks(alpha)).all()


@pytest.mark.parametrize("alpha", [None, 0.4])
def test_the_expected_rows_are_the_oracles(alpha: float | None) -> None:
    rows, expected = PROMPT.expected(alpha)
    q, k, v = PROMPT.arrays
    both = {"alpha_column": alpha or 1.0, "alpha_slash": alpha or 1.0}
    whole = oracle.sample_attention(q, k, v, **both, chunks=2, block_size=32)
    np.testing.assert_allclose(expected, whole[0][:, rows], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [*prompts.DENSE, *prompts.SPARSE])
def test_every_prompt_computes_what_the_oracle_does(name: str) -> None:
    need(name)
    row = next(row for row in prompts.rows_of(PROMPT, 1) if row.name == name)
    contender = prompts.CpuPrompt(row, PROMPT, Buffers(PROMPT, "float32"))
    contender.prepare()
    assert contender.check() is None
    row.details["alpha"] = None if row.details["alpha"] else 0.4
    assert str(contender.check()).startswith("wrong result: error ")


def test_a_prompt_that_would_hold_too_much_is_left_out() -> None:
    large = prompts.Problem("", Shape(32, 8, 128), 1, 8192, 128, 1)
    assert prompts.unavailable("attention", large) == "holds 8.6 GB of logits"


# the command


def test_the_command_prints_tables_and_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "onnx.md"
    assert cli.main([*SMALL, "1,2", *SPARQ, "--out", str(target)]) == 0
    text = capsys.readouterr().out
    assert target.read_text() == text
    assert text.startswith("    mlx-sparse bench step --engine onnx ")
    assert "\n\nonnxruntime " in text
    assert text.count("| ORT standard operators, group as rows | float32 | ") == 2  # one thread and two
    assert "|  | caches | 200 | 1k |" in text
    assert "wrong result" not in text
    rows = printed(capsys, *SMALL, "1", *SPARQ)
    assert [(row["contender"], row["dtype"], row["S"]) for row in rows] == [
        (*who, S) for S in (200, K) for who in EVERYONE
    ]
    for row in rows:
        if reason := missing(row["contender"]):
            assert (row["note"], row["us"]) == (reason, None)
        else:
            assert row["note"] is None
            assert 0 < row["us_min"] <= row["us"]
            assert row["turns"] >= 2
            assert row["gigabytes_per_second"] == pytest.approx(row["bytes"] / row["us"] / 1e3)


def test_the_command_prints_saap(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "1", *OF_SAAP]) == 0
    text = capsys.readouterr().out
    assert "SAAP with 40 of 1024 equal buckets and 1 + 50 keys exactly (12 % of 600 keys)" in text
    lines = [line for line in text.splitlines() if line.startswith("| our SaapAttention, function body | ")]
    assert [line.split(" | ")[1] for line in lines] == ["float16", "float32"]


def test_the_command_prints_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SAMPLE, "1,2"]) == 0
    text = capsys.readouterr().out
    assert "### 1 thread\n" in text and "### 2 threads\n" in text
    assert "|  | type | 4/2/32, 600 |" in text
    assert "wrong result" not in text
    rows = printed(capsys, *SAMPLE, "1")
    assert len(rows) == 6 + 3 * len(DENSITIES)
    for row in rows:
        reason = missing(row["contender"])
        assert (row["note"], row["turns"]) == (reason, 0 if reason else 2)
        assert 0 < row["density"] <= 1


@pytest.mark.parametrize("wrong", [lambda out: out + 0.1, lambda out: out * np.nan], ids=["off", "nan"])
@pytest.mark.parametrize("method", ["sparq", "saap", "sample"])
def test_no_time_beside_a_wrong_result(
    method: str,
    wrong: Callable[[np.ndarray], np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    of = {"sparq": (steps, SMALL, SPARQ), "saap": (saap, SMALL, OF_SAAP), "sample": (prompts, SAMPLE, [])}
    module, command, arguments = of[method]
    build = module.build

    def spoiled(*given: Any) -> Any:
        bound = build(*given)
        if (right := bound.output) is not None:
            bound.output = lambda: wrong(right())
        return bound

    monkeypatch.setattr(module, "build", spoiled)
    for row in printed(capsys, *command, "1", *arguments, code=1):
        if row["contender"] != "read" and not missing(row["contender"]):
            assert row["failed"]
            assert row["note"].startswith("wrong result: error ")
            assert row["us"] is row["us_min"] is None


def test_buckets_of_which_none_is_visited_are_found(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    need("native-saap")
    ids = Index.bucket_ids.func  # of the planted keys none is visited
    monkeypatch.setattr(Index, "bucket_ids", property(lambda self: 0 * ids(self) - 1))
    assert cli.main([*SMALL, "1", *OF_SAAP]) == 1
    assert "wrong result: error" in capsys.readouterr().out


def test_too_little_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for row in printed(capsys, *SMALL, "1", *SPARQ, "--lengths", "1000000000"):
        assert row["note"].startswith("needs ")


def rows(times: dict[tuple[str, str], float], threads: int = 2) -> list[Row]:
    made = [
        Row(Problem("", Shape(32, 8, 128), 1, 64 * K, 32, 128, 32), name, details={"dtype": dtype, "threads": threads})
        for name, dtype in times
    ]
    for row, time in zip(made, times.values(), strict=True):
        row.take([MICRO * time])
    return made


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
    found = {bar.what: bar for bar in steps.bars(rows(times))}
    assert {what: (pytest.approx(bar.found), bar.met) for what, bar in found.items()} == {
        "native SparQ over native dense": (5.0, "NO"),
        "bandwidth of native dense over the plain read": (0.7, "yes"),
        "native dense over torch's best view of any type": (0.9, "NO"),
        "native SparQ over ORT GroupQueryAttention float32": (30.0, "NO"),
        "SparQ's function body over the best float dense that is not ours": (9 / 4, "NO"),
    }
    assert all(bar.met == "not measured" for bar in steps.bars(rows({("read", "float16"): 7.0})))
    assert not steps.bars(rows({("read", "float16"): 7.0}, threads=1))
