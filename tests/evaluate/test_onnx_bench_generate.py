"""mlx-sparse bench generate --engine onnx: exported models decode in turns, and wrong ones get no speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
from exported import artefact, exported
from mlx_sparse.onnx_export import Runner
from mlx_sparse.onnx_export.bench import generate as onnx_generate
from mlx_sparse.onnx_export.bench.generate import Turns
from mlx_sparse.onnx_export.runtime import native
from require import absent

from mlx_sparse.checks import ConfigError
from mlx_sparse.tools.bench.command import main

SPARQ = "sparq:rank=4,top_k=16,dense_below=64"
ROBUST = SPARQ + ",component_score=query_key,reallocate=true"
COLUMNS = ROBUST + ",key_bits=16"
LENGTHS, TOKENS, TURNS = (40, 300), 3, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was made for 256 tokens."""
    return tiny_models.write(tmp_path_factory.mktemp("models") / "llama", max_position_embeddings=256)


def rows_of(capsys: pytest.CaptureFixture[str], model: Path, attn: str, *options: str) -> list[dict[str, Any]]:
    lengths = ",".join(map(str, LENGTHS))
    argv = [
        "generate",
        "--engine",
        "onnx",
        "--model",
        str(model),
        "--attn",
        attn,
        "--lengths",
        lengths,
        "--max-tokens",
        str(TOKENS),
    ]
    assert main([*argv, "--repeat", str(TURNS), "-o", "json", *options]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


@pytest.mark.parametrize("method", [SPARQ, ROBUST, SPARQ + ",key_bits=16"])
def test_every_file_and_kind_of_kernels_decodes_from_every_length(method: str, model: Path, capsys: Any):
    if reason := native.unavailable():
        absent("ort", reason)
    rows = rows_of(capsys, model, method)
    kinds = [(row["method"], row["kernels"], row["S"]) for row in rows]
    assert set(kinds) == {(m, k, S) for m in ("dense", method) for k in ("native", "bodies") for S in LENGTHS}
    assert len(kinds) == len(set(kinds))
    assert all(row["turns"] == TURNS and row["generation"] > 0 and not row["failed"] for row in rows)
    assert all(row["error"] < 1e-4 for row in rows)  # float32, and no choice of a key on the edge
    assert all(row["generation_ratio"] == row["busy_ratio"] == 1 for row in rows if row["method"] == "dense")
    notes = {(row["S"], row["note"]) for row in rows if row["method"] == method}
    assert notes == {(40, "its steps are dense below 64 keys"), (300, None)}


def test_saap_decodes_with_its_artefact(model: Path, tmp_path: Path, capsys: Any):
    file = artefact(tmp_path / "index.safetensors", tiny_models.build(max_position_embeddings=256))
    method = f"saap:artefact={file},probes=2,sink_tokens=1,recent_tokens=9,dense_layers=1,dense_below=0,fold_every=1"
    rows = [row for row in rows_of(capsys, model, method) if row["method"] == method]
    assert rows and not any(row["failed"] or row["note"] for row in rows)


def test_the_model_itself_is_left_as_it_is(model: Path, tmp_path: Path):
    before = (model / "config.json").read_bytes()
    copy, own = onnx_generate._allowing(str(model), 1000, tmp_path / "copy")
    assert (own, json.loads((copy / "config.json").read_text())["max_position_embeddings"]) == (256, 1000)
    assert (model / "config.json").read_bytes() == before


def test_caches_hold_what_a_prompt_leaves_there(model: Path):
    """The same keys in both layouts, and their sums."""
    folder, prompt = exported(COLUMNS), tiny_models.prompt_of(100)
    runner = Runner(folder, native="off")
    runner.prefill(prompt)
    layers = list(onnx_generate._sparq_caches(SimpleNamespace(folder=folder), runner.caches))
    assert len(layers) == 2
    for keys, keys_t, values, sums, lanes in layers:
        written = onnx_generate._component_major(keys, lanes)
        assert np.array_equal(keys_t, written) and not np.array_equal(keys, written)
        expected = onnx_generate._sums_of(keys[:, :, : len(prompt)], values[:, :, : len(prompt)])
        np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-4)  # float32 sums


def test_random_caches_are_such_as_a_prompt_could_have_left():
    file = SimpleNamespace(folder=exported(COLUMNS), max_length=256)
    decoder = onnx_generate.Decoder(file, COLUMNS, "off", 1)
    for S in (100, 200, 100):
        decoder.first(S, 5)
        for keys, keys_t, values, sums, lanes in onnx_generate._sparq_caches(file, decoder.runner.caches):
            assert np.array_equal(keys_t, onnx_generate._component_major(keys, lanes))
            expected = onnx_generate._sums_of(keys[:, :, : S + 1], values[:, :, : S + 1])
            np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("method", [COLUMNS])
def test_what_the_first_layer_that_chooses_hands_on_follows_from_its_values(method: str):
    decoder = onnx_generate.Decoder(SimpleNamespace(folder=exported(method), max_length=256), method, "off", 1)
    before = decoder.handed_on(200, decoder.first(200, 5))
    assert before.shape == decoder.runner.caches["past_key_values.0.key"][:, :, 0].shape
    assert np.array_equal(before, decoder.handed_on(200, decoder.first(200, 5)))
    for layer, follows in ((1, False), (0, True)):
        decoder.runner.caches[f"past_key_values.{layer}.value"][:, :, :100] *= -2
        after = decoder.handed_on(200, decoder.first(200, 5))
        assert (np.abs(after - before).max() > 0) == follows


def test_a_step_that_is_wrong_gets_no_speed():
    file = SimpleNamespace(method="sparq:rank=4", sparse_from=10)
    right = Turns(np.ones((2, 1, 9)), np.array([[[1.0, -4.0]], [[2.0, 3.0]]]), [10.0, 20.0], [20.0, 20.0])
    found = {("dense", kernels, 99): right for kernels in ("native", "bodies")}
    found |= {("sparq", "native", 99): replace(right, handed_on=np.array([[[1.1, -4.0]], [[2.1, 3.0]]]))}
    found |= {("sparq", "bodies", 99): replace(right, speeds=[20.0, 30.0])}
    row = onnx_generate.row(file, "sparq", "bodies", 99, 1, found)
    assert row.failed and set(row.spreads.values()) == {None} and row.as_dict()["generation"] is None
    assert "| wrong |" in onnx_generate.table([row]) and "differ" in onnx_generate.table([row])
    dense = onnx_generate.row(file, "dense", "native", 99, 1, found)
    assert not dense.failed and dense.as_dict()["generation"] == 15
    found["sparq", "native", 99] = replace(right, handed_on=np.array([[[1.1, -4.0]], [[2.0, 3.0]]]))
    assert onnx_generate.row(file, "sparq", "bodies", 99, 1, found).failed, "wrong after one of the tokens"
    found["sparq", "native", 99] = replace(right, logits=np.full((2, 1, 9), np.nan))
    assert onnx_generate.row(file, "sparq", "bodies", 99, 1, found).failed, "not finite"
    found["sparq", "native", 99] = right
    row = onnx_generate.row(file, "sparq", "bodies", 99, 1, found)
    said = row.as_dict()
    assert (said["generation"], said["generation_ratio"], said["busy_ratio"], said["error"]) == (25, 1.75, 1, 0)
    assert "25.0 (22.5 to 27.5), 1.75 x" in onnx_generate.table([row])


def test_caches_that_do_not_fit_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(onnx_generate, "too_large", lambda needed, there, share: "too large")
    with pytest.raises(ConfigError, match="--lengths: expected caches that fit into memory"):
        main(["generate", "--engine", "onnx", "--model", str(model), "--attn", SPARQ, "--lengths", "40"])
