"""Test SAAP artefacts: the round trip, and one-line errors for all other files."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from commands import file_size_limit
from json_tables import read_tables
from mlx import nn
from mlx_arrays import to_numpy
from mlx_lm.tuner.utils import linear_to_lora_layers
from safetensors import safe_open
from tiny_models import FAMILIES, build

from mlx_sparse.checks import ArtefactError
from mlx_sparse.methods.saap.artefact import Artefact, Layer, load
from mlx_sparse.model_info import identity

DATA = read_tables(__file__)

BUCKETS, HIDDEN, HEADS, D = 6, 8, 2, 16


def layer(seed: int = 0) -> Layer:
    keys = mx.random.split(mx.random.key(seed), 5)
    shapes = [(HEADS, BUCKETS, D), (HEADS, D, HIDDEN), (HEADS, HIDDEN), (HEADS, HIDDEN, BUCKETS), (HEADS, BUCKETS)]
    arrays = [mx.random.normal(shape, key=key).astype(mx.float16) for shape, key in zip(shapes, keys, strict=True)]
    return Layer(*arrays)


def artefact(model: Any = None, *, layers: tuple[int, ...] = (0, 1)) -> Artefact:
    of = identity(model) if model is not None else {"model_type": "llama", "hash": "0" * 64}
    made = {index: layer(index) for index in layers}
    return Artefact(made, BUCKETS, HIDDEN, 1, 2047, of, {"steps": 3})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.saap.safetensors"


def rewrite(path: Path, change: Any) -> None:
    """Change the JSON header and write the file with the new header length."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def describe(path: Path, **changes: Any) -> None:
    """Change fields of the description in the metadata; None removes a field."""

    def change(header: dict[str, Any]) -> None:
        about = json.loads(header["__metadata__"]["mlx_sparse"]) | changes
        kept = {name: value for name, value in about.items() if value is not None}
        header["__metadata__"]["mlx_sparse"] = json.dumps(kept)

    rewrite(path, change)


def test_round_trip(path: Path) -> None:
    written = artefact(layers=(3, 11, 2))
    written.save(path)
    read = load(path)
    assert list(read.layers) == [2, 3, 11]
    assert dataclasses.replace(read, layers={}, versions={}) == dataclasses.replace(written, layers={})
    assert set(read.versions) == {"mlx-sparse-attention", "mlx", "mlx-lm"}
    for index, found in read.layers.items():
        assert found.arrays().keys() == written.layers[index].arrays().keys()
        for name, array in found.arrays().items():
            np.testing.assert_array_equal(to_numpy(array), to_numpy(written.layers[index].arrays()[name]))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    with safe_open(path, "numpy") as file:  # files of earlier versions have the same values
        about = json.loads(file.metadata()["mlx_sparse"])
    assert (about["format"], about["kind"], about["space"]) == (1, "saap", "before_rope")


def test_truncated_files_are_refused(path: Path) -> None:
    artefact(layers=(0,)).save(path)
    content = path.read_bytes()
    for length in (0, 7, 63, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ArtefactError, match=r"^[^\n]*expected .*, got .*\. Train it again\.$"):
            load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(ArtefactError, match="not fully covered"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header too small"),
        (b"GGUF" * 100, "header too large"),
        ((2).to_bytes(8, "little") + b"[]", "invalid JSON"),
        ((2).to_bytes(8, "little") + b"{}", "something else"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "invalid JSON"),
    ],
)
def test_foreign_files_are_refused(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match=message):
        load(path)


HOSTILE = "two words\n" * 90


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update({HOSTILE: 7}),
        lambda header: header["layers.0.centroids"].update(dtype=HOSTILE),
        lambda header: header["layers.0.centroids"].update(shape=[HOSTILE]),
        lambda header: header["__metadata__"].update(mlx_sparse=HOSTILE),
        lambda header: header.update({HOSTILE: header.pop("layers.0.centroids")}),
    ],
    ids=["entry", "type", "shape", "description", "name"],
)
def test_errors_are_one_short_line_for_hostile_content(path: Path, change: Any) -> None:
    artefact(layers=(0,)).save(path)
    rewrite(path, change)
    with pytest.raises(ArtefactError) as error:
        load(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value).replace(str(path), "")) < 250


@pytest.mark.parametrize("word", ["", HOSTILE, "a" * 65, "llama\n", 7])
def test_unprintable_model_types_are_refused(path: Path, word: Any) -> None:
    artefact(layers=(0,)).save(path)
    describe(path, model={"model_type": word, "hash": "0" * 64})
    with pytest.raises(ArtefactError, match="description is damaged"):
        load(path)


def test_missing_files_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "none", "none that can be read"),
        (tmp_path, "none that can be read"),
        (tmp_path / "pipe", "no file"),
    ):
        with pytest.raises(ArtefactError, match=message):
            load(path)


def test_other_safetensors_files_are_refused(path: Path) -> None:
    mx.save_safetensors(str(path), {"weight": mx.zeros((2, 2))}, {"format": "mlx"})
    with pytest.raises(ArtefactError, match="something else"):
        load(path)
    mx.save_safetensors(str(path), {"weight": mx.zeros((2, 2), mx.bfloat16)})
    with pytest.raises(ArtefactError, match="tensors of other types than F16 and F32"):
        load(path)


@pytest.mark.parametrize(("changes", "message"), DATA["descriptions"])
def test_wrong_descriptions_are_refused(path: Path, changes: dict[str, Any], message: str) -> None:
    artefact().save(path)
    describe(path, **changes)
    with pytest.raises(ArtefactError, match=message):
        load(path)


@pytest.mark.parametrize(("old", "new", "message"), DATA["tensors"])
def test_unexpected_tensors_are_refused(path: Path, old: str, new: str | None, message: str) -> None:
    artefact().save(path)

    def change(header: dict[str, Any]) -> None:
        entry = header.pop(old)
        if new:
            header[new] = entry

    rewrite(path, change)
    with pytest.raises(ArtefactError, match=message):
        load(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_numbers_are_never_read_or_written(path: Path, value: float) -> None:
    made = artefact()
    made.save(path)
    wrong = dataclasses.replace(made.layers[1], hidden_bias=mx.full((HEADS, HIDDEN), value, mx.float16))
    with pytest.raises(ArtefactError, match=r"not finite in layers\.1\.hidden_bias"):
        dataclasses.replace(made, layers={**made.layers, 1: wrong}).save(path)
    assert load(path).layers.keys() == {0, 1}
    tensors, metadata = mx.load(str(path), return_metadata=True)
    tensors["layers.0.centroids"] = tensors["layers.0.centroids"] * value
    mx.save_safetensors(str(path), tensors, metadata)
    with pytest.raises(ArtefactError, match=r"not finite in layers\.0\.centroids"):
        load(path)


def test_mismatched_layers_are_never_written(path: Path) -> None:
    for changes in ({"buckets": BUCKETS + 1}, {"hidden": 0}, {"layers": {}}):
        with pytest.raises(ArtefactError):
            dataclasses.replace(artefact(), **changes).save(path)
    assert not path.exists()


def test_full_disk_leaves_the_old_file(path: Path) -> None:
    artefact(layers=(0,)).save(path)
    before = path.read_bytes()
    many = artefact(layers=tuple(range(40)))
    with file_size_limit(2 * len(before)), pytest.raises(OSError, match="disk full"):
        many.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"expected a file name that ends in \.safetensors"):
        artefact().save(tmp_path / "model.saap")
    assert not list(tmp_path.iterdir())


def test_quantized_and_half_precision_models_match() -> None:
    made = artefact(build("llama", intermediate_size=96))
    model = build("llama", intermediate_size=96)
    made.check_model(model)
    model.set_dtype(mx.bfloat16)
    made.check_model(model)
    nn.quantize(model, group_size=32, bits=4)
    made.check_model(model)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_keep_the_identity(family: str, use_dora: bool) -> None:
    model = build(family)
    found = identity(model)
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 1.0, "dropout": 0.0}, use_dora=use_dora)
    assert identity(model) == found


def test_bfloat16_and_float16_share_an_identity() -> None:
    model = build("qwen2")
    model.model.norm.weight = mx.array([1e-3, 3e-5, 1e-5, 1e-7, -7e-6] * 13)[:64]
    model.set_dtype(mx.bfloat16)
    found = identity(model)
    model.set_dtype(mx.float16)
    assert identity(model) == found


def test_identity_uses_matrices_without_vectors() -> None:
    assert identity(build("nanochat")) == identity(build("nanochat")) != identity(build("nanochat", seed=1))


def test_equivalent_rope_scaling_has_one_hash() -> None:
    def hash_of(**scaling: Any) -> str:
        model = build()
        model.args.rope_scaling = scaling or None
        return identity(model)["hash"]

    assert (
        hash_of(type="linear", factor=2) == hash_of(rope_type="linear", factor=2.0) != hash_of(type="linear", factor=4)
    )
    assert hash_of() == hash_of(rope_type="default") != hash_of(type="linear", factor=2)


@pytest.mark.parametrize(("family", "changes", "message"), DATA["other_models"])
def test_files_of_other_models_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtefactError, match=message):
        artefact(build("llama")).check_model(build(family, **changes))


def test_nested_text_config_is_part_of_the_identity() -> None:
    text = FAMILIES["mistral3"]["text_config"]
    one, other = (build("mistral3", text_config={**text, "rope_theta": theta}) for theta in (1e4, 2e4))
    assert identity(one) == identity(build("mistral3")) != identity(other)
