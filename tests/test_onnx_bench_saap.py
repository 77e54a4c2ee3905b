"""`mlx-sparse bench --onnx --attn saap`: every contender computes what it should, and the report is whole."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from mlx_sparse.onnx_export import native
from mlx_sparse.onnx_export.bench import caches as bench_caches
from mlx_sparse.onnx_export.bench import saap as bench
from mlx_sparse.onnx_export.bench.caches import Caches
from mlx_sparse.onnx_export.bench.saap import BUCKETS, NAMES, Index, Indexed
from require import absent

from mlx_sparse import cli, oracle
from mlx_sparse.config import SAAP

METHOD = SAAP(probes=40, sink_tokens=2, recent_tokens=50)
PROBLEMS = [Indexed(4, 2, 32, 600, 32, 128, 32, METHOD), Indexed(6, 3, 64, 1030, 64, 128, 32, METHOD)]
SMALL = ["bench", "--onnx", "--lengths", "600", "--shapes", "4x2x32", "--repeat", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_caches, "IN_PLAY", 1_000_000)


@pytest.mark.parametrize("problem", PROBLEMS, ids=["600", "1030"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_contender_computes_what_the_oracle_does(name: str, dtype: str, problem: Indexed) -> None:
    if name.startswith("native") and (reason := native.unavailable()):
        absent("ort", reason)
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
    contender = bench.build(name, dtype, caches, threads=2)
    _, allowed = caches.plant()
    caches.restore()
    for i in (1, 0):
        contender.bind(i)
        contender.run()
        assert contender.output is not None
        assert np.abs(contender.output().astype(np.float64) - expected.reshape(problem.Hq, problem.D)).max() <= allowed


def test_what_is_read_is_more_than_a_processor_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_caches, "IN_PLAY", 600_000_000)
    problem = Indexed(32, 8, 128, 32768, 128, 128, 32, SAAP(probes=51))
    assert problem.attended == 2048 + 30720 * 51 // BUCKETS
    sets, _ = problem.copies("float16")
    assert sets * problem.attended * 8 * 128 * 2 * 2 >= 600_000_000
    assert sets * 2 * problem.bytes("float16") < 6e9


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    method = ["--attn", "saap:probes=40,recent_tokens=50"]
    assert cli.main([*SMALL, *method]) == 0
    text = capsys.readouterr().out
    assert "SAAP with 40 of 1024 equal buckets and 1 + 50 keys exactly (12 % of 600 keys)" in text
    assert "| | caches | 600 |" in text
    assert "| our CachedAttention, function body | float16 |" in text
    assert "| our SaapAttention, function body | float32 |" in text
    assert cli.main([*SMALL, *method, "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["contender"], row["dtype"]) for row in rows] == [
        (name, dtype) for dtype in ("float32", "float16") for name in NAMES
    ]


def test_a_wrong_result_has_no_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if reason := native.unavailable():
        absent("ort", reason)
    ids = Index.bucket_ids.func  # of the planted keys none is visited
    monkeypatch.setattr(Index, "bucket_ids", property(lambda self: 0 * ids(self) - 1))
    assert cli.main([*SMALL, "--attn", "saap:probes=40,recent_tokens=50"]) == 1
    assert "wrong result: error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attn", "saap:probes=1025"], "probes: expected an integer of at least 1 and at most 1024, got 1025"),
        (["--attn", "saap"], "--lengths: expected more than the 2048 keys always attended, got 600"),
        (["--attn", "saap:artefact=file"], "--attn: expected probes, sink_tokens and recent_tokens alone with --onnx"),
    ],
)
def test_mistakes_get_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], run_cli: Callable[..., int] = cli.main
) -> None:
    assert run_cli([*SMALL, *options]) != 0
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
