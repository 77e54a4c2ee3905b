"""Exported models that decode by SAAP: the same tokens as mlx-lm, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import onnx
import onnxruntime_genai as og
import pytest
import tiny_models
from exported import FLOAT32, PROMPT_LENGTH, SAAP, STEPS, Made, artefact, said_in_steps
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from mlx_sparse.onnx_export.defaults import saap_dense_below
from mlx_sparse.onnx_export.exporter import command, families
from mlx_sparse.onnx_export.exporter.methods.saap import SaapDecoding
from mlx_sparse.onnx_export.exporter.verify import compare
from mlx_sparse.onnx_export.exporter.verify.session import File
from mlx_sparse.onnx_export.runtime import genai, native
from mlx_sparse.onnx_export.runtime.runner import Runner
from onnx import TensorProto
from require import absent

from mlx_sparse import methods
from mlx_sparse.checks import ArtefactError

NAMES = ("centroids", "hidden_weight", "hidden_bias", "out_weight", "out_bias")


def made(tmp_path: Path, family: str = "llama", mode: str = "trained", **options: Any) -> Made:
    """A tiny model exported with an artefact of its own; ``options`` are the exporter's, or those listed here."""
    changes = options.pop("changes", {})
    about = options.pop("about", {})
    settings = options.pop("settings", SAAP)
    file = artefact(tmp_path / "tiny.safetensors", tiny_models.build(family, **changes), **about)
    return Made(tmp_path, family, f"saap:artefact={file},mode={mode},{settings}", changes, **options)


def nodes(of: Made) -> list[str]:
    return [node.op_type for node in of.proto.graph.node if node.domain == "mlx_sparse"]


@pytest.mark.parametrize("mode", ["trained", "kmeans"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_tokens_of_every_family_are_those_of_mlx(tmp_path: Path, family: str, mode: str) -> None:
    file = made(tmp_path, family, mode)
    file.check_tokens()
    assert "SaapAttention" in nodes(file)


VARIANTS: dict[str, dict[str, Any]] = {
    "every layer": {"settings": SAAP.replace("dense_layers=1", "dense_layers=0")},
    "three layers": {"changes": {"num_hidden_layers": 3}},
    "one query head per KV head": {"changes": {"num_key_value_heads": 4}},
    "traditional rope": {"changes": {"rope_traditional": True}},
    "every bucket": {"settings": SAAP.replace("probes=3", "probes=8")},
    "after rope": {"about": {"space": "roped"}},
    "late": {"settings": SAAP.replace("dense_below=0", "dense_below=33")},
    "a layer that the artefact lacks": {
        "settings": SAAP.replace("dense_layers=1", "dense_layers=0"),
        "about": {"only": [1]},
        "changes": {"num_hidden_layers": 3},
    },
    "no sinks": {"settings": SAAP.replace("sink_tokens=1", "sink_tokens=0")},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_of_variants_are_those_of_mlx(tmp_path: Path, variant: str) -> None:
    made(tmp_path, **VARIANTS[variant]).check_tokens()


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_left_padded_rows_are_those_of_mlx(tmp_path: Path, kernels: str) -> None:
    if kernels == "auto" and (reason := native.unavailable()):
        absent("ort", reason)
    file, padding = made(tmp_path), [5, 0]
    rows = np.array([tiny_models.prompt_of(PROMPT_LENGTH, seed) for seed in (1, 2)])
    with file.mlx():
        cache = [BatchKVCache(padding) for _ in make_prompt_cache(file.model)]
        expected = [np.array(file.model(mx.array(rows), cache=cache)[:, -1])]
        for _ in range(STEPS):
            last = mx.array(expected[-1].argmax(axis=1)[:, None])
            expected.append(np.array(file.model(last, cache=cache)[:, -1]))
    model = Runner(file.folder, native=kernels, batch=2)
    got = [model.step(rows, left_padding=padding).copy()]
    for _ in range(STEPS):
        got.append(model.step(got[-1].argmax(axis=1)[:, None]).copy())
    assert np.abs(np.array(got) - np.array(expected)).max() < FLOAT32 * np.abs(expected).max()


@pytest.mark.parametrize(
    "options",
    [{"compat": True}, {"inline": True}, {"dtype": "float16"}, {"dtype": "bfloat16"}],
    ids=["compat", "inline", "float16", "bfloat16"],
)
def test_other_forms_say_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    file = made(tmp_path, **options)
    if "dtype" not in options:
        file.check_tokens()
    assert file.result.agreement.sparse < FLOAT32 * file.result.agreement.largest
    types = {tensor.name: tensor.type.tensor_type.elem_type for tensor in file.proto.graph.input}
    assert types["past_bucket_ids.1"] == TensorProto.INT16


@pytest.mark.parametrize("mode", ["trained", "kmeans"])
def test_a_static_file_has_only_numbers_and_says_the_same(tmp_path: Path, mode: str) -> None:
    file = made(tmp_path, mode=mode, static=(2, 64), max_length=None)
    for tensor in (*file.proto.graph.input, *file.proto.graph.output):
        assert all(dim.HasField("dim_value") for dim in tensor.type.tensor_type.shape.dim), tensor.name
    prompts = [tiny_models.prompt_of(6, seed) for seed in (1, 2)]  # all in the window: dense, as mlx-lm does prompts
    runner = File(file.folder / "model.onnx")
    runner.start(2)
    for column in np.array(prompts).T:
        last = runner(column[:, None]).argmax(axis=1)
    told = []
    for _ in range(STEPS):
        last = runner(last[:, None]).argmax(axis=1)
        told.append(last.tolist())
    with file.mlx():
        assert [list(row) for row in zip(*told, strict=True)] == [
            tiny_models.greedy(file.model, prompt, STEPS)[0] for prompt in prompts
        ]


def test_what_a_file_has_of_an_artefact(tmp_path: Path) -> None:
    """Weights as they were, no network for centroids, no layer that stays dense, no path of anybody's disk."""
    for mode, kind in (("trained", TensorProto.FLOAT16), ("kmeans", TensorProto.FLOAT)):
        folder = tmp_path / mode
        folder.mkdir()
        file = made(folder, mode=mode, changes={"num_hidden_layers": 3})
        assert nodes(file) == ["CachedAttention", "SaapAttention", "SaapAttention"]
        weights = {t.name: t for t in file.proto.graph.initializer if ".saap." in t.name}
        stored = NAMES if mode == "trained" else ("centroids", "out_weight", "out_bias")
        assert sorted(weights) == sorted(f"model.layers.{i}.self_attn.saap.{name}" for i in (1, 2) for name in stored)
        assert {tensor.data_type for tensor in weights.values()} == {kind}
        inputs = [t.name for t in file.proto.graph.input if not t.name.startswith("past_key")]
        states = [f"past_{name}.{i}" for i in (1, 2) for name in ("bucket_ids", "conv")]
        assert sorted(inputs) == sorted(["input_ids", "attention_mask", *states])
        said = {entry.key: entry.value for entry in file.proto.metadata_props}
        assert said["mlx_sparse.method"].startswith("saap:artefact=tiny.safetensors,")
        assert str(tmp_path) not in str(said)


def test_layers_with_a_sliding_window_stay_dense(tmp_path: Path) -> None:
    file = made(tmp_path, "gemma3_text", settings=SAAP.replace("dense_layers=1", "dense_layers=0"))
    assert nodes(file) == ["CachedAttention", "SaapAttention"] * 2


def test_quantised_models_keep_their_artefact(tmp_path: Path) -> None:
    """A quantised copy is the same model."""
    from mlx_lm.convert import convert
    from mlx_sparse.onnx_export import export

    changes = {"intermediate_size": 96}
    source = tiny_models.write(tmp_path / "source", **changes)
    file = artefact(tmp_path / "tiny.safetensors", tiny_models.build(**changes))
    convert(str(source), str(tmp_path / "4-bit"), quantize=True, q_bits=4, q_group_size=32)
    result = export(str(tmp_path / "4-bit"), tmp_path / "out", method=f"saap:artefact={file},{SAAP}", max_length=64)
    assert result.agreement.sparse < FLOAT32 * result.agreement.largest


@pytest.mark.parametrize("kernels", ["off", "auto"])
@pytest.mark.parametrize("layers", [2, 3])
def test_genai_says_what_the_runner_says(tmp_path: Path, layers: int, kernels: str) -> None:
    if kernels == "auto" and (reason := native.unavailable()):
        absent("ort", reason)
    file, prompt = made(tmp_path, changes={"num_hidden_layers": layers}, max_length=256), tiny_models.prompt_of(100)
    if kernels == "auto":
        genai.add_native_library(file.folder)
    model = og.Model(str(file.folder))
    generator = og.Generator(model, og.GeneratorParams(model))
    generator.append_tokens(np.array(prompt, np.int32))
    for _ in range(STEPS):
        generator.generate_next_token()
    expected = said_in_steps(Runner(file.folder, native=kernels), [prompt], STEPS)
    assert [generator.get_sequence(0)[-STEPS:].tolist()] == expected


def test_a_text_after_another_starts_anew(tmp_path: Path) -> None:
    runner, prompts = made(tmp_path).runner(), [tiny_models.prompt_of(20, seed) for seed in (1, 2)]
    told = []
    for prompt in (*prompts, prompts[0]):
        told.append(list(runner.generate(prompt, 8)))
        runner.reset()
    assert told[0] == told[2] != told[1]


@pytest.mark.parametrize(("name", "change"), [("sink_tokens", 1), ("recent_tokens", 1), ("probes", -2)])
def test_a_file_that_attends_to_other_keys_is_not_kept(
    tmp_path: Path, name: str, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = compare.copy_for_check

    def other_copy(*arguments: Any) -> onnx.ModelProto:
        model = copy(*arguments)
        for node in model.graph.node:
            for attribute in (each for each in node.attribute if each.name == name):
                attribute.i += change
        return model

    monkeypatch.setattr(compare, "copy_for_check", other_copy)
    with pytest.raises(ArtefactError, match="Nothing was kept"):
        made(tmp_path)
    assert not (tmp_path / "exported").exists()


def test_queries_that_choose_after_rope_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SaapDecoding.routing
    monkeypatch.setattr(SaapDecoding, "routing", lambda self, before, after: original(self, after, after))
    with pytest.raises(ArtefactError, match="Nothing was kept"):
        made(tmp_path)


@pytest.mark.parametrize(("length", "dense_below", "dense"), [(100, 101, True), (100, 100, False)])
def test_a_file_too_short_for_sparse_steps_is_named(
    tmp_path: Path, length: int, dense_below: int, dense: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_models.write(tmp_path / "model")
    file = artefact(tmp_path / "own.safetensors", tiny_models.build())
    method = f"saap:artefact={file},probes=3,recent_tokens=9,dense_below={dense_below}"
    given = {"--model": tmp_path / "model", "-o": tmp_path / "out", "--method": method, "--max-length": length}
    command.main([str(word) for pair in given.items() for word in pair])
    said = capsys.readouterr().out
    assert ("It decodes densely: sparse steps begin at 101 keys and it holds 100 tokens." in said) == dense
    assert ("densely" in said) == dense


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run the command with a method; its message."""
    model = tiny_models.build()
    tiny_models.write(tmp_path / "model")
    artefact(tmp_path / "own.safetensors", model)
    artefact(tmp_path / "centroids.safetensors", model, hidden=0)
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
    ("method", "message"),
    [
        ("saap", "artefact: expected a file that mlx-sparse train-saap wrote, got none"),
        ("saap:mode=online", "mode: expected trained or kmeans for a file, .*, got online"),
        ("saap:artefact=FOLDER/no.safetensors", "no.safetensors: expected .*, got none that can be read"),
        ("saap:artefact=FOLDER/cut.safetensors", "cut.safetensors: expected .*, got .* bytes of data"),
        ("saap:artefact=FOLDER/other.safetensors,probes=4", "artefact: expected one trained on this model"),
        ("saap:artefact=FOLDER/family.safetensors,probes=4", "artefact: expected one for llama, got one for qwen3"),
        (
            "saap:artefact=FOLDER/own.safetensors,probes=9",
            "probes: expected at most the 8 buckets of .*own.safetensors, got 9",
        ),
        (
            "saap:artefact=FOLDER/centroids.safetensors,probes=4",
            "mode: expected kmeans with .*centroids.safetensors, .*got trained",
        ),
        (
            "saap:artefact=FOLDER/own.safetensors,probes=4,dense_layers=2",
            "dense_layers: expected a layer that SAAP serves",
        ),
        (
            "sparq+saap:artefact=FOLDER/own.safetensors",
            "--method: expected dense, sparq, saap, sample, sample.sparq or sample.saap",
        ),
        ("saap:artefact=FOLDER/own.safetensors,prob=4", "saap: expected one of the keys"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(
    run: Callable[[str], str], tmp_path: Path, method: str, message: str
) -> None:
    said = run(method)
    assert re.fullmatch(rf"export-onnx: error: [^\n]*{message}[^\n]*\n", said), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({}, 2049 + 5555),  # 2 ** 20 elements and the network's, 256 for each of 31 - 6.4 keys out of 32
        ({"probes": 1024}, methods.NEVER),
        ({"probes": 820}, methods.NEVER),
        ({"recent_tokens": 100}, 102),  # an experiment on a short text
        ({"dense_below": 5000}, 5000),
        ({"dense_below": 0}, 2049),
    ],
)
def test_short_contexts_stay_dense_where_sparse_steps_save_too_little(given: dict[str, Any], keys: int) -> None:
    assert saap_dense_below(methods.SAAP(artefact="file", **given), 128, 1024, 44_544) == keys
