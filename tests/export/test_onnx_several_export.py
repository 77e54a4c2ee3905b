"""Exported models with ``verify=sparse``: a few tokens at once choose keys together, as in mlx-lm's models."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import onnx
import pytest
import tiny_models
from exported import FLOAT32, SAAP_FILE, Made, by_kernels, exported, need
from mlx_lm.models.cache import make_prompt_cache
from mlx_sparse.onnx_export import export
from mlx_sparse.onnx_export.exporter.verify import compare
from mlx_sparse.onnx_export.runtime.runner import Runner

import mlx_sparse
from mlx_sparse.checks import ArtefactError, ConfigError

METHODS = {
    "columns": "sparq:rank=4,top_k=8,local_window=2,dense_below=0,key_bits=16,verify=sparse",
    "codes": "sparq:rank=4,top_k=8,local_window=2,dense_below=0,key_bits=4,verify=sparse",
    "mixed": "sparq:rank=4,top_k=8,reallocate=true,component_score=query_key,dense_below=0,key_bits=16,verify=sparse",
    "quest": "quest:page_size=4,top_k=8,dense_below=0,verify=sparse",
}
COLUMNS = METHODS["columns"]
PIECES = [list(range(1, 63)), [7, 9, 3], [5], [2, 8], list(range(3, 19))]  # a group of codes is filled by the second


def said_by_mlx(method: str, pieces: list[list[int]]) -> list[Any]:
    """Logits after each of the pieces."""
    model = tiny_models.build()
    cache = make_prompt_cache(model)
    sparse = contextlib.nullcontext() if method == "dense" else mlx_sparse.sparse(model, method, backend="ops")
    with sparse:
        return [np.array(model(mx.array([piece]), cache=cache)[:, -1]) for piece in pieces]


def said_by_file(folder: Path, pieces: list[list[int]], kernels: str) -> list[Any]:
    runner = Runner(folder, native=kernels, threads=1)
    return [runner.step([piece]).copy() for piece in pieces]


def assert_close(found: list[Any], wanted: list[Any]) -> None:
    for got, logits in zip(found, wanted, strict=True):
        assert np.abs(got - logits).max() < FLOAT32 * np.abs(logits).max()


@by_kernels
@pytest.mark.parametrize("name", METHODS)
def test_a_few_tokens_at_once_say_what_mlx_says(name: str, kernels: str) -> None:
    need(kernels)
    method = METHODS[name]
    wanted, dense = said_by_mlx(method, PIECES), said_by_mlx("dense", PIECES)
    assert_close(said_by_file(exported(method), PIECES, kernels), wanted)
    for logits, others in list(zip(wanted, dense, strict=True))[1:]:
        assert np.abs(logits - others).max() > 0.01  # much is left out


@by_kernels
def test_with_keys_enough_it_is_dense(kernels: str) -> None:
    need(kernels)
    folder = exported("sparq:rank=4,top_k=128,dense_below=0,key_bits=16,verify=sparse")
    assert_close(said_by_file(folder, PIECES, kernels), said_by_mlx("dense", PIECES))


@by_kernels
def test_without_it_a_few_tokens_are_dense(kernels: str) -> None:
    need(kernels)
    pieces = PIECES[:2]
    folder = exported(COLUMNS.replace(",verify=sparse", ""))
    assert_close(said_by_file(folder, pieces, kernels), said_by_mlx("dense", pieces))


@pytest.mark.parametrize("method", [COLUMNS, f"{SAAP_FILE},verify=sparse", "sample:block_size=32+" + METHODS["quest"]])
def test_a_file_is_checked_with_a_few_tokens_and_says_so(tmp_path: Path, method: str) -> None:
    made = Made(tmp_path, "llama", method, {"num_hidden_layers": 3}, max_length=320)
    assert "verified" in str(made.result.agreement)
    assert "verify=sparse" in made.result.method
    nodes = [
        node for node in made.proto.graph.node if node.domain == "mlx_sparse" and node.op_type != "CachedAttention"
    ]
    asked = [{attribute.name: attribute.i for attribute in node.attribute}.get("verify_queries") for node in nodes]
    assert asked == [16 if node.op_type != "SampleAttention" else None for node in nodes]


@pytest.mark.parametrize(
    "options", [{"kv_bits": 8, "kv_group_size": 32}, {"inline": True}, {"compat": True}, {"dtype": "float16"}], ids=str
)
def test_other_forms_are_checked_too(tmp_path: Path, options: dict[str, Any]) -> None:
    method = "sparq:rank=4,top_k=8,dense_below=0,verify=sparse"
    made = Made(tmp_path, "llama", method, {"head_dim": 32}, max_length=128, **options)
    assert made.result.agreement.several is not None
    text = b"verify_queries" in (made.folder / "model.onnx").read_bytes()
    assert text == ("inline" not in options)


@pytest.mark.parametrize(("name", "value"), [("verify_queries", 0), ("verify_queries", 2), ("scale", 0.3)])
def test_a_file_that_takes_a_few_tokens_otherwise_is_not_kept(
    tmp_path: Path, name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = compare.copy_for_check

    def other_copy(*arguments: Any) -> onnx.ModelProto:
        model: onnx.ModelProto = copy(*arguments)
        if name == "scale":  # of the queries' own keys alone
            [body] = [function for function in model.functions if function.name == "OwnKeys"]
            [factor] = [node for node in body.node if "factor" in node.output]
            factor.CopyFrom(onnx.helper.make_node("Constant", [], ["factor"], value_float=value))
            return model
        for node in model.graph.node:
            for attribute in (each for each in node.attribute if each.name == name):
                attribute.i = int(value)
        return model

    monkeypatch.setattr(compare, "copy_for_check", other_copy)
    with pytest.raises(ArtefactError, match="Nothing was kept"):
        Made(tmp_path, "llama", COLUMNS, max_length=128)
    assert not (tmp_path / "exported").exists()


def test_beside_static_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="verify: expected dense beside --static, whose calls have one token, got sparse"
    ):
        export("no model", tmp_path / "out", method=COLUMNS, static=(1, 64))
