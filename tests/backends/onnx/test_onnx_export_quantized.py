"""Check exported models with quantized weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import onnx
import pytest
import tiny_models
from exported import FLOAT32
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import load_model
from mlx_sparse.onnx_export import export
from mlx_sparse.onnx_export.runtime import runner
from tier import some

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
PROMPT, STEPS = 24, 12
HALVES = {4: 1, 8: 2}  # number of MatMulNBits nodes per matrix, by bits
STORED = list(itertools.product((4, 8), (32, 64, 128), ("float32", "float16", "bfloat16")))


def write(folder: Path, family: str, bits: int, group_size: int, dtype: str, *, tied: bool, trained: bool) -> Path:
    """Write a tiny quantized model. With ``trained``, the biases are not multiples of the scales."""
    tiny_models.write(folder, family, tie_word_embeddings=tied, **SIZES)
    model = tiny_models.build(family, tie_word_embeddings=tied, **SIZES)
    model.update(tree_map(lambda array: array.astype(getattr(mx, dtype)), model.parameters()))
    nn.quantize(model, group_size=group_size, bits=bits)
    weights = dict(tree_flatten(model.parameters()))
    if trained:
        weights |= {k: v * 1.07 for k, v in weights.items() if k.endswith(".biases")}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": group_size, "bits": bits}}))
    return folder


def logits_of_mlx(source: Path, tokens: list[int]) -> np.ndarray:
    """Return the float32 logits of MLX after a prompt and after each following token."""
    model = load_model(source)[0]
    model.update(tree_map(lambda a: a.astype(mx.float32) if a.dtype != mx.uint32 else a, model.parameters()))
    return np.array(model(mx.array([tokens]))[0, PROMPT - 1 :])


def logits_of_file(folder: Path, tokens: list[int]) -> np.ndarray:
    model = runner.Runner(folder, native="off", threads=1)
    pieces = [tokens[:PROMPT], *([token] for token in tokens[PROMPT:])]
    return np.concatenate([model.step([piece]).copy() for piece in pieces])


@pytest.mark.parametrize(("bits", "group_size", "dtype"), some(STORED, 8))
def test_logits_equal_mlx(tmp_path: Path, bits: int, group_size: int, dtype: str) -> None:
    tied = group_size == 64
    source = write(tmp_path / "source", "llama", bits, group_size, dtype, tied=tied, trained=False)
    made = export(str(source), tmp_path / "out", method="dense", max_length=64)
    tokens = tiny_models.prompt_of(PROMPT + STEPS)
    expected, got = logits_of_mlx(source, tokens), logits_of_file(tmp_path / "out", tokens)
    # The error of rounding keys and values to the type of the caches.
    precision = {"float32": FLOAT32, "float16": 2.0**-8, "bfloat16": 2.0**-5}[dtype]
    assert np.abs(got - expected).max() < precision * np.abs(expected).max()
    if dtype == "float32":
        assert (got.argmax(axis=1) == expected.argmax(axis=1)).all()
    proto = onnx.load(made.folder / "model.onnx", load_external_data=False)
    kinds = [node.op_type for node in proto.graph.node]
    assert kinds.count("MatMulNBits") == HALVES[bits] * (2 * 7 + 1)
    assert kinds.count("GatherBlockQuantized") == HALVES[bits]
    assert "MatMul" not in kinds or dtype != "float32"
    codes = [t for t in proto.graph.initializer if t.name.startswith("model.embed_tokens.data")]
    assert sum(int(np.prod(t.dims)) for t in codes) == tiny_models.VOCAB * 128 * bits // 8  # stored once, tied or not
    assert sum(t.name.startswith("lm_head.B") for t in proto.graph.initializer) == (0 if tied else HALVES[bits])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "phi3"])  # biases, and fused projections
def test_trained_scales_are_exact(tmp_path: Path, family: str, bits: int) -> None:
    tied = family != "phi3"
    source = write(tmp_path / "source", family, bits, 32, "float32", tied=tied, trained=True)
    made = export(str(source), tmp_path / "out", method="sparq:rank=8,top_k=6", max_length=64)
    assert made.agreement.sparse < FLOAT32 * made.agreement.largest
    tokens = tiny_models.prompt_of(PROMPT)
    expected, got = logits_of_mlx(source, tokens), logits_of_file(tmp_path / "out", tokens)
    assert np.abs(got - expected).max() < FLOAT32 * np.abs(expected).max()


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_dtype_float32_dequantizes(tmp_path: Path, bits: int) -> None:
    source = write(tmp_path / "source", "llama", bits, 64, "bfloat16", tied=True, trained=False)
    export(str(source), tmp_path / "out", method="dense", max_length=64, dtype="float32")
    proto = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    assert not {node.op_type for node in proto.graph.node} & {"MatMulNBits", "GatherBlockQuantized"}
    tokens = tiny_models.prompt_of(PROMPT + STEPS)
    expected, got = logits_of_mlx(source, tokens), logits_of_file(tmp_path / "out", tokens)
    assert np.abs(got - expected).max() < FLOAT32 * np.abs(expected).max()


def test_layers_may_be_unquantized_or_have_other_bits(tmp_path: Path) -> None:
    """Export a model that mlx_lm.convert quantized with a mixed recipe."""
    own = {"model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 8}, "model.layers.1.self_attn.v_proj": False}
    source = tiny_models.write(tmp_path / "source", **SIZES)
    model = tiny_models.build(**SIZES)
    nn.quantize(model, group_size=64, bits=4, class_predicate=lambda path, m: own.get(path, hasattr(m, "to_quantized")))
    mx.save_safetensors(str(source / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": 4, **own}}))
    export(str(source), tmp_path / "out", method="dense", max_length=64)
    proto = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    kinds = [node.op_type for node in proto.graph.node]
    assert (kinds.count("MatMulNBits"), kinds.count("MatMul")) == (12 + 2 + 1, 1)
    tokens = tiny_models.prompt_of(PROMPT + STEPS)
    expected, got = logits_of_mlx(source, tokens), logits_of_file(tmp_path / "out", tokens)
    assert np.abs(got - expected).max() < FLOAT32 * np.abs(expected).max()
