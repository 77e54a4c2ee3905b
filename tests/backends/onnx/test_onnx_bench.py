"""Test `mlx-sparse bench --runtime onnx`: every variant is correct, and a wrong variant is not timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from exported import artefact
from mlx_sparse.onnx_export import bench, bench_generate
from mlx_sparse.onnx_export.runtime import native
from require import absent

from mlx_sparse import cli

pytestmark = pytest.mark.slow  # benchmarks

STEP = ["step", "--attn", "sparq,sparq:rank=8,top_k=40,key_bits=16,saap:probes=40,recent_tokens=50"]
SPARQ = "sparq:rank=4,top_k=16,dense_below=64"


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BYTES_IN_TURNS", 500_000)


def rows_of(capsys: Any, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Return the result rows of a benchmark run."""
    stage, *more = arguments
    assert cli.main(["bench", stage, "--runtime", "onnx", *more, "--repeat", "2", "-o", "json"]) == code
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def need_native() -> None:
    if reason := native.unavailable():
        absent("ort", reason)


@pytest.mark.parametrize("shape", ["4x2x32", "3x3x64", "6x1x80"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_decode_steps_are_correct_and_timed(shape: str, dtype: str, capsys: Any) -> None:
    need_native()
    rows = rows_of(capsys, *STEP, "--shapes", shape, "--dtype", dtype, "--lengths", "300,1k", "--threads", "2")
    assert [(row["S"], row["backend"]) for row in rows] == [
        (S, b) for S in (300, 1024) for b in ("native", "standard") for _ in range(3)
    ]
    for row in rows:
        coded = row["method"] == "sparq" and row["backend"] == "standard"
        assert row["note"] == ("int4 scoring keys need the native kernels" if coded else None)
        assert coded or (row["turns"], row["threads"], row["ratio"] > 0) == (2, 2, True)
        assert row["dense"] == (None if coded else "CachedAttention")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_prefill_is_correct_and_timed(dtype: str, capsys: Any) -> None:
    need_native()
    sizes = ["--lengths", "600", "--shapes", "4x2x32", "--dtype", dtype, "--threads", "1"]
    rows = rows_of(capsys, "prefill", "--attn", "sample:alpha_column=0.6,alpha_slash=0.6,block_size=32", *sizes)
    assert [(row["backend"], row["step"], row["turns"], row["note"]) for row in rows] == [
        ("native", 600, 2, None),
        ("standard", 600, 2, None),
    ]
    assert 0 < rows[0]["density"] == rows[1]["density"] < 1


@pytest.mark.parametrize(
    "arguments", [[*STEP, "--lengths", "300"], ["prefill", "--lengths", "300"]], ids=["step", "prefill"]
)
@pytest.mark.parametrize("wrong", [lambda out: out + 0.1, lambda out: out * np.nan], ids=["off", "nan"])
def test_wrong_results_are_not_timed(arguments: list[str], wrong: Any, monkeypatch: Any, capsys: Any) -> None:
    kind = bench.OrtStep if arguments[0] == "step" else bench.OrtPrefill
    right = kind.output
    monkeypatch.setattr(kind, "output", lambda self: wrong(right(self)))
    for row in rows_of(capsys, *arguments, "--shapes", "4x2x32", "--backend", "standard", code=1):
        if row["note"] != "int4 scoring keys need the native kernels":
            assert row["note"].startswith("wrong result: error ") and row["sparse_us"] is None
            assert row["failed"]


# generate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model."""
    return tiny_models.write(tmp_path_factory.mktemp("models") / "llama", max_position_embeddings=512)


def generated(capsys: Any, model: Path, attn: str, *more: str, code: int = 0) -> list[dict[str, Any]]:
    options = ["--model", str(model), "--attn", attn, "--lengths", "40,300", "--max-tokens", "3", *more]
    return rows_of(capsys, "generate", *options, code=code)


@pytest.mark.parametrize("method", [f"{SPARQ},component_score=query_key,reallocate=true", SPARQ, "saap"])
def test_exported_models_decode_at_every_length(method: str, model: Path, tmp_path: Path, capsys: Any) -> None:
    need_native()
    if method == "saap":
        file = artefact(tmp_path / "index.safetensors", tiny_models.build(max_position_embeddings=512))
        method = (
            f"saap:artefact={file},probes=2,sink_tokens=1,recent_tokens=9,dense_layers=1,dense_below=0,merge_every=1"
        )
    rows = generated(capsys, model, method)
    kinds = [(row["method"], row["backend"], row["S"]) for row in rows]
    backends = ("native", "standard")
    assert kinds == [(name, kind, S) for S in (40, 300) for kind in backends for name in ("dense", method)]
    for row in rows:
        assert (row["turns"], row["failed"]) == (2, False) and row["generation"] > 0 and row["error"] < 1e-2
        assert row["method"] != "dense" or row["generation_ratio"] == 1
        early = row["S"] == 40 and "dense_below=64" in row["method"]
        assert row["note"] == ("decode steps are dense below 64 keys" if early else None)
        assert "time_to_first_token" not in row


def test_prefill_of_exported_models_is_timed(model: Path, tmp_path: Path, capsys: Any) -> None:
    need_native()
    text = tmp_path / "text"
    text.write_text(tiny_models.words(tiny_models.prompt_of(300)))
    rows = generated(capsys, model, f"sample:dense_below=0+{SPARQ}", "--text", str(text))
    assert [row["S"] for row in rows] == [40] * 4 + [300] * 4
    assert all(row["time_to_first_token"] > 0 < row["time_to_first_token_ratio"] for row in rows)
    assert all(row["turns"] == 2 and row["generation"] > 0 for row in rows)


@pytest.mark.parametrize("factor", [2, np.nan])
@pytest.mark.parametrize("tokens", [1, 2])
def test_models_whose_backends_differ_for_most_tokens_are_not_timed(
    tokens: int, factor: float, model: Path, monkeypatch: Any, capsys: Any
) -> None:
    need_native()
    right, wrong = bench_generate.Decoder._first, bench_generate.TOKENS[:tokens]
    monkeypatch.setattr(
        bench_generate.Decoder,
        "_first",
        lambda self, runner, token: right(self, runner, token) * (factor if runner.native and token in wrong else 1),
    )
    refused = tokens > 1 or np.isnan(factor)
    for row in generated(capsys, model, SPARQ, code=int(refused)):
        assert row["failed"] == refused == ("generation" not in row)
        assert ("the logits differ between" if refused else "one token differ between") in row["note"]
