"""Test `mlx-sparse bench --runtime cuda`: every variant is correct, and a wrong variant is not timed.

Without a GPU, kernels run in Triton's interpreter, where only the times are meaningless.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from mlx_sparse.cuda_ref import bench

from mlx_sparse import cli
from mlx_sparse.tools.bench.core import Case, Shape

pytestmark = pytest.mark.slow  # benchmarks

METHODS = "sparq:rank=16,top_k=32,sparq:rank=16,top_k=32,key_bits=16,saap:probes=40,recent_tokens=50"


def rows_of(capsys: Any, stage: str, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Return the result rows of a benchmark run."""
    sizes = ["--lengths", "200", "--repeat", "1", "-o", "json"]
    assert cli.main(["bench", stage, "--runtime", "cuda", *sizes, *arguments]) == code
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


@pytest.mark.parametrize(
    "sizes", ["--shapes 4x2x32 --batches 2", "--shapes 3x3x64 --dtype bfloat16"], ids=["grouped", "bfloat16"]
)
def test_triton_decode_steps_are_correct_and_timed(sizes: str, capsys: Any) -> None:
    rows = rows_of(capsys, "step", "--attn", METHODS, *sizes.split())
    assert [(row["method"].partition(":")[0], row["backend"]) for row in rows] == [
        ("sparq", "triton"),
        ("sparq", "triton"),
        ("saap", "triton"),
    ]
    ways = {"torch, enable_gqa", "triton", *(["torch, group as rows"] if "4x2x32" in sizes else [])}
    for row in rows:
        assert (row["failed"], row["note"], row["turns"]) == (False, None, 1)
        assert set(row["dense_ways_us"]) == ways and row["ratio"] > 0
        assert 0 < row["bytes_formula"] and row["bytes_plain"] > 0


def test_triton_prefill_is_correct_and_timed(capsys: Any) -> None:
    (row,) = rows_of(
        capsys, "prefill", "--attn", "sample:block_size=32,alpha_column=0.6,alpha_slash=0.6", "--shapes", "2x1x32"
    )
    assert (row["failed"], row["note"], row["turns"], row["step"]) == (False, None, 1, 200)
    assert 0 < row["density"] < 1 and set(row["dense_ways_us"]) == {"torch", "triton"}


@pytest.mark.parametrize("stage", ["step", "prefill"])
def test_triton_wrong_results_are_not_timed(stage: str, monkeypatch: Any, capsys: Any) -> None:
    kind = bench.SparqStep if stage == "step" else bench.SamplePrefill
    right = kind.attend
    monkeypatch.setattr(kind, "attend", lambda self, *given: right(self, *given) + 0.1)
    (row,) = rows_of(capsys, stage, "--shapes", "2x1x32", code=1)
    assert row["failed"] and row["note"].startswith("wrong result: error ") and row["sparse_us"] is None


def test_cache_copies_exceed_l2(monkeypatch: Any) -> None:
    monkeypatch.setattr(bench, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("H200", (), {"L2_cache_size": 60 << 20}))
    for S in (4096, 32768, 131072):
        case = Case("float16", Shape(32, 8, 128), 1, S)
        count = bench.Caches(case).count
        assert count == bench.MOST_COPIES or count * 2 * case.keys / 8 >= bench.ROTATIONS * (60 << 20)
