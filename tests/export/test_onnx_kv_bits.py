"""Exported models whose caches are in 8 or 4 bits: what they say, where they run, and what is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime_genai as og
import pytest
import tiny_models
from exported import SAAP, STEPS, Made, by_kernels, need, said_in_steps
from mlx_lm.models.cache import QuantizedKVCache
from mlx_sparse.onnx_export.build import graphs
from mlx_sparse.onnx_export.exporter import export
from mlx_sparse.onnx_export.exporter.verify import compare
from mlx_sparse.onnx_export.runtime import genai

import mlx_sparse
from mlx_sparse import ArtefactError, ConfigError
from mlx_sparse.methods import SparQ

HEADS = {"head_dim": 32}
ROWS = "sparq:top_k=16,local_window=4,dense_below=0"
COPY = f"{ROWS},score=copy,rank=6,key_bits=4"
QUEST = "quest:page_size=4,top_k=16,dense_below=0"
SAMPLED = f"sample:alpha_column=0.4,alpha_slash=0.3,block_size=32,dense_below=0+{ROWS}"
METHODS = {
    "dense": ("dense", "PackedCachedAttention"),
    "rows": (ROWS, "PackedSparQRowsAttention"),
    "copy": (COPY, "PackedSparQCodedAttention"),
    "quest": (QUEST, "PackedQuestAttention"),
    "saap": (f"saap:artefact=FILE,{SAAP}", "PackedSaapAttention"),
    "sample": (SAMPLED, "PackedSampleSparQRowsAttention"),
}
by_method = pytest.mark.parametrize(("method", "operator"), METHODS.values(), ids=METHODS)
by_form = pytest.mark.parametrize("form", [(8, "float32"), (4, "float32"), (4, "float16"), (8, "bfloat16")], ids=str)
PROMPT = tiny_models.prompt_of(100)
FLIPPED = 1e-3  # of the largest logit: a rounding error can turn the code of a component into the next one


def made(tmp_path: Path, method: str, bits: int, dtype: str = "float32", **options: Any) -> Made:
    given = {"max_length": 256, "kv_bits": bits, "kv_group_size": 32, "dtype": dtype, **options}
    return Made(tmp_path, "llama", method, HEADS, **given)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("method", ["dense", ROWS, COPY, QUEST])
@by_kernels
def test_tokens_are_those_of_mlx_with_a_quantised_cache(tmp_path: Path, method: str, bits: int, kernels: str) -> None:
    need(kernels)
    file = made(tmp_path, method, bits)
    model = tiny_models.build("llama", **HEADS)
    with contextlib.nullcontext() if method == "dense" else mlx_sparse.sparse(model, method, backend="ops"):
        cache = [QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers]
        expected, logits = tiny_models.greedy(model, PROMPT, STEPS, cache)
    runner = file.runner(kernels=kernels)
    found = [runner.step([PROMPT])[0].copy()]
    for _ in range(STEPS):
        found.append(runner.step([[int(found[-1].argmax())]])[0].copy())
    assert [int(step.argmax()) for step in found[1:]] == expected
    assert np.abs(np.array(found[1:]) - np.array(logits)).max() < FLIPPED * np.abs(np.array(logits)).max()


@by_form
@by_method
def test_bodies_native_kernels_and_genai_say_the_same(
    tmp_path: Path, method: str, operator: str, form: tuple[int, str]
) -> None:
    need("auto")
    file = made(tmp_path, method, *form)
    assert set(file.nodes) <= {operator, "PackedCachedAttention", "PackedSampleAttention"}
    assert operator in file.nodes
    runner = file.runner(kernels="auto")
    said = said_in_steps(runner, [PROMPT], 24)
    assert said == said_in_steps(file.runner(), [PROMPT], 24)
    row = 32 * form[0] // 8 + 2 * np.dtype("f4" if form[1] == "float32" else "f2").itemsize
    for part in ("key", "value"):
        assert runner.caches[f"past_key_values.1.{part}"].shape == (1, 2, 256, row)
        assert runner.caches[f"past_key_values.1.{part}"].dtype == np.uint8
    assert (file.metadata["kv_bits"], file.metadata["kv_group_size"]) == (str(form[0]), "32")
    if "quest" in method:
        return  # genai takes no state of five axes
    genai.add_native_library(file.folder)
    model = og.Model(str(file.folder))
    generator = og.Generator(model, og.GeneratorParams(model))
    generator.append_tokens(np.array(PROMPT, np.int32))
    for _ in range(24):
        generator.generate_next_token()
    assert generator.get_sequence(0)[-24:].tolist() == said[0]


@pytest.mark.parametrize("method", ["dense", ROWS, COPY], ids=["dense", "rows", "copy"])
@pytest.mark.parametrize("form", [{"inline": True}, {"static": (1, 192)}, {"compat": True}], ids=str)
def test_other_forms_say_the_same(tmp_path: Path, method: str, form: dict[str, Any]) -> None:
    (tmp_path / "other").mkdir()
    whole, length = made(tmp_path, method, 8).runner(), {} if "static" not in form else {"max_length": None}
    other = made(tmp_path / "other", method, 8, **form, **length).runner()
    prompt = PROMPT[:30]
    if "static" in form:
        for token in prompt[:-1]:
            other.step([[token]])
        prompt = prompt[-1:]
    # One token at a time is attended sparsely where the prompt is not.
    if "static" in form and method != "dense":
        assert np.isfinite(other.step([prompt])).all()
        return
    assert said_in_steps(other, [prompt], 8) == said_in_steps(whole, [PROMPT[:30]], 8)


def test_left_padded_rows_say_what_each_says_alone(tmp_path: Path) -> None:
    file = made(tmp_path, ROWS, 8)
    prompts = [PROMPT[:40], PROMPT[50:80]]
    padded = [prompts[0], [0] * 10 + prompts[1]]
    together = said_in_steps(file.runner(2), padded, STEPS, [0, 10])
    assert together == [said_in_steps(file.runner(), [prompt], STEPS)[0] for prompt in prompts]


def test_the_defaults_are_those_of_attn(tmp_path: Path) -> None:
    assert export.methods_of("sparq", None, packed=True)[1] == SparQ()
    changes = {"head_dim": 64, "num_hidden_layers": 1}
    file = Made(tmp_path, "llama", "sparq", changes, max_length=4096, kv_bits=4, dtype="float16")
    assert file.nodes == ["PackedSparQRowsAttention"]
    assert file.runner().caches["past_key_values.0.key"].shape[3] == 36
    assert file.result.sparse_from == 2048


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (f"{ROWS},score=copy,key_bits=16", "key_bits: expected 8 or 4 with score=copy beside --kv-bits, got 16"),
        (f"{ROWS},score=copy,rank=33", "rank: expected at most the head dim D=32, got 33"),
    ],
)
def test_what_is_not_served_is_refused(tmp_path: Path, method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, method, 4)
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("wrong", ["sixteen_f", "half_offset", "exponent_unit"])
def test_a_file_that_unpacks_otherwise_than_mlx_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    original = export._write

    def spoiled(*args: Any, **how: Any) -> onnx.ModelProto:
        model = original(*args, **how)
        [body] = [function for function in model.functions if function.name == "Unpack"]
        for node in (node for graph in graphs(body) for node in graph.node):
            if wrong in node.output and node.op_type == "Constant":
                node.attribute[0].f -= 1
            elif wrong in node.output:  # the bits of other types
                node.input[1:] = reversed(node.input[1:])
        return model

    monkeypatch.setattr(export, "_write", spoiled)
    with pytest.raises(ArtefactError, match=r"with dense attention\. Nothing was kept"):
        made(tmp_path, "dense", 4, "float16")


def test_a_file_that_chooses_otherwise_than_mlx_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = compare.copy_for_check

    def other_copy(*arguments: Any) -> onnx.ModelProto:
        model = copy(*arguments)
        assert {node.op_type for node in model.graph.node if node.domain == "mlx_sparse"} == {"SparQRowsAttention"}
        for node in model.graph.node:
            for attribute in (each for each in node.attribute if each.name == "top_k"):
                attribute.i -= 1
        return model

    monkeypatch.setattr(compare, "copy_for_check", other_copy)
    with pytest.raises(ArtefactError, match="Nothing was kept"):
        made(tmp_path, ROWS, 8)
