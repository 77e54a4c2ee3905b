"""Check exported models that decode by SAAP, and the errors of their export."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from exported import FLOAT32, SAAP, SAAP_FILE, SAMPLE_SAAP, ExportedModel, artefact
from mlx_sparse.onnx_export.defaults import saap_dense_below
from mlx_sparse.onnx_export.exporter import command
from mlx_sparse.onnx_export.exporter.methods.saap import SaapDecoding
from onnx import TensorProto

from mlx_sparse import methods
from mlx_sparse.checks import ArtefactError
from mlx_sparse.core.decide import NEVER

NAMES = ("centroids", "hidden_weight", "hidden_bias", "out_weight", "out_bias")


def test_a_file_contains_the_weights_of_the_artefact(tmp_path: Path) -> None:
    """Export weights unchanged, without dense layers and without the path of the artefact."""
    file = ExportedModel(tmp_path, "llama", SAAP_FILE, {"num_hidden_layers": 3})
    assert file.nodes == ["CachedAttention", "SaapAttention", "SaapAttention"]
    weights = {t.name: t for t in file.proto.graph.initializer if ".saap." in t.name}
    assert sorted(weights) == sorted(f"model.layers.{i}.self_attn.saap.{name}" for i in (1, 2) for name in NAMES)
    assert {tensor.data_type for tensor in weights.values()} == {TensorProto.FLOAT16}
    inputs = [t.name for t in file.proto.graph.input if not t.name.startswith("past_key")]
    states = [f"past_{name}.{i}" for i in (1, 2) for name in ("bucket_ids", "conv")]
    assert sorted(inputs) == sorted(["input_ids", "attention_mask", *states])
    types = {tensor.name: tensor.type.tensor_type.elem_type for tensor in file.proto.graph.input}
    assert types["past_bucket_ids.1"] == TensorProto.INT16
    assert file.metadata["method"].startswith("saap:artefact=tiny.safetensors,")
    assert str(tmp_path) not in str(file.metadata)


def test_layers_with_a_sliding_window_stay_dense(tmp_path: Path) -> None:
    made = ExportedModel(tmp_path, "gemma3_text", SAAP_FILE.replace("dense_layers=1", "dense_layers=0"))
    assert made.nodes == ["CachedAttention", "SaapAttention"] * 2


def test_layers_without_saap_are_sampled(tmp_path: Path) -> None:
    made = ExportedModel(tmp_path, "llama", SAMPLE_SAAP, {"num_hidden_layers": 3})
    assert made.nodes == ["SampleAttention", "SampleSaapAttention", "SampleSaapAttention"]
    assert made.metadata["method"].startswith("sample:block_size=32,alpha_column=0.4,alpha_slash=0.3,")
    assert "+saap:artefact=tiny.safetensors," in made.metadata["method"]
    assert made.metadata["prefill_chunk"] == "2048"


def test_an_artefact_fits_the_quantized_model(tmp_path: Path) -> None:
    """Export a quantized copy of the model that the artefact was made for."""
    from mlx_lm.convert import convert
    from mlx_sparse.onnx_export import export

    changes = {"intermediate_size": 96}
    source = tiny_models.write(tmp_path / "source", **changes)
    file = artefact(tmp_path / "tiny.safetensors", tiny_models.build(**changes))
    convert(str(source), str(tmp_path / "4-bit"), quantize=True, q_bits=4, q_group_size=32)
    result = export(str(tmp_path / "4-bit"), tmp_path / "out", method=f"saap:artefact={file},{SAAP}", max_length=64)
    assert result.agreement.sparse < FLOAT32 * result.agreement.largest


def test_routing_after_rope_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SaapDecoding.routing
    monkeypatch.setattr(SaapDecoding, "routing", lambda self, before, after: original(self, after, after))
    with pytest.raises(ArtefactError, match="Nothing was written"):
        ExportedModel(tmp_path, "llama", SAAP_FILE)


@pytest.mark.parametrize(("length", "dense_below", "dense"), [(100, 101, True), (100, 100, False)])
def test_the_command_reports_a_file_without_sparse_steps(
    tmp_path: Path, length: int, dense_below: int, dense: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_models.write(tmp_path / "model")
    file = artefact(tmp_path / "own.safetensors", tiny_models.build())
    method = f"saap:artefact={file},probes=3,recent_tokens=9,dense_below={dense_below}"
    given = {"--model": tmp_path / "model", "-o": tmp_path / "out", "--method": method, "--max-length": length}
    command.main([str(word) for pair in given.items() for word in pair])
    said = capsys.readouterr().out
    assert ("they become sparse at 101 keys and the caches have 100." in said) == dense
    assert ("decode steps are dense" in said) == dense


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Return a function that runs the command with a method and returns its message."""
    model = tiny_models.build()
    tiny_models.write(tmp_path / "model")
    artefact(tmp_path / "own.safetensors", model)
    artefact(tmp_path / "other.safetensors", tiny_models.build(seed=3))
    artefact(tmp_path / "family.safetensors", tiny_models.build("qwen3"))
    whole = (tmp_path / "own.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-10])

    def call(method: str) -> str:
        arguments = ["--model", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "--max-length", "64"]
        with pytest.raises(SystemExit):
            command.main([*arguments, "--method", method.replace("FOLDER", str(tmp_path))])
        return capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("method", "message"), json.loads(Path(__file__).with_suffix(".json").read_text())["refused methods"]
)
def test_invalid_methods_are_a_one_line_error(
    run: Callable[[str], str], tmp_path: Path, method: str, message: str
) -> None:
    said = run(method)
    assert re.fullmatch(rf"export-onnx: error: [^\n]*{message}[^\n]*\n", said), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({}, 2049 + 5555),  # 2 ** 20 elements plus the network; a step saves 256 * (31 - 6.4) / 32 elements per key
        ({"probes": 1024}, NEVER),
        ({"probes": 820}, NEVER),
        ({"recent_tokens": 100}, 102),  # an experiment on a short text
        ({"dense_below": 5000}, 5000),
        ({"dense_below": 0}, 2049),
    ],
)
def test_short_contexts_stay_dense_where_sparse_steps_save_too_little(given: dict[str, Any], keys: int) -> None:
    assert saap_dense_below(methods.SAAP(artefact="file", **given), 128, 1024, 44_544) == keys
