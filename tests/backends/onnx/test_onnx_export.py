"""Check that exported models of all families generate the tokens of mlx-lm."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tiny_models
from cases import covering
from exported import CODED, FLOAT32, SAAP_FILE, SAMPLE, SAMPLE_SAAP, STEPS, ExportedModel, need, needs_kernels
from exported import PROMPT_LENGTH as PROMPT
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, make_prompt_cache
from mlx_sparse.onnx_export import COMPAT, DEFAULT, export, registered
from mlx_sparse.onnx_export.exporter import compare, families
from mlx_sparse.onnx_export.exporter.export import methods_of
from mlx_sparse.onnx_export.runtime import native
from tier import some

import mlx_sparse
from mlx_sparse.checks import ArtefactError

METHODS = {
    "dense": "dense",
    "sparq": "sparq:rank=4,top_k=4,dense_below=0,key_bits=16",
    # All other settings, and dense for the first eight steps.
    "late": "sparq:rank=6,top_k=16,local_window=3,reallocate=true,component_score=query_key,dense_below=33,key_bits=16",
    "saap": SAAP_FILE,
}
MIXED = "sparq:rank=4,top_k=2,local_window=1,reallocate=true,component_score=query_key,dense_below=0,key_bits=16"
SAMPLED = f"sample:block_size=32,dense_below=0+{METHODS['sparq']}"
TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
VARIANTS, SAAP_VARIANTS = TABLES["variants"], TABLES["variants with SAAP"]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}


@pytest.mark.parametrize(("family", "method"), covering(list(families.FAMILIES), list(METHODS.values())))
def test_every_family_generates_the_tokens_of_mlx(tmp_path: Path, family: str, method: str) -> None:
    ExportedModel(tmp_path, family, method, max_length=128).check_tokens()


@pytest.mark.parametrize("variant", some(list(VARIANTS), 8))
def test_variants_generate_the_tokens_of_mlx(tmp_path: Path, variant: str) -> None:
    given = VARIANTS[variant]
    method = "sparq:rank=4,top_k=4,dense_below=33,key_bits=16"
    ExportedModel(tmp_path, given["family"], method, given["changes"]).check_tokens()


@pytest.mark.parametrize("variant", SAAP_VARIANTS)
def test_saap_variants_generate_the_tokens_of_mlx(tmp_path: Path, variant: str) -> None:
    made = ExportedModel(tmp_path, "llama", **{"method": SAAP_FILE, **SAAP_VARIANTS[variant]})
    made.check_tokens()
    assert "SaapAttention" in made.nodes


@pytest.mark.parametrize(
    ("family", "method", "kernels"),
    [
        *(
            (family, METHODS[name], "off")
            for family in ("llama", "gemma3_text", "smollm3")
            for name in ("dense", "sparq")
        ),
        ("llama", METHODS["sparq"], "auto"),
        ("llama", SAAP_FILE, "off"),
        ("llama", SAAP_FILE, "auto"),
    ],
)
def test_left_padded_rows_equal_mlx(tmp_path: Path, family: str, method: str, kernels: str) -> None:
    need(kernels)
    made = ExportedModel(tmp_path, family, method, SLIDING if family == "smollm3" else {}, max_length=128)
    padding = [5, 0]
    rows = np.array([tiny_models.prompt_of(PROMPT, seed) for seed in (1, 2)])
    with made.mlx():
        cache = [
            BatchKVCache(padding) if type(c) is KVCache else BatchRotatingKVCache(c.max_size, padding)
            for c in make_prompt_cache(made.model)
        ]
        expected = [np.array(made.model(mx.array(rows), cache=cache)[:, -1])]
        for _ in range(STEPS):
            last = mx.array(expected[-1].argmax(axis=1)[:, None])
            expected.append(np.array(made.model(last, cache=cache)[:, -1]))
    model = made.runner(batch=2, kernels=kernels)
    got = [model.step(rows, left_padding=padding).copy()]
    for _ in range(STEPS):
        got.append(model.step(got[-1].argmax(axis=1)[:, None]).copy())
    assert (np.array(got).argmax(axis=-1) == np.array(expected).argmax(axis=-1)).all()
    assert np.abs(np.array(got) - np.array(expected)).max() < FLOAT32 * np.abs(expected).max()


@functools.lru_cache(maxsize=1)  # a test uses one file several times
def session_of(file: Path, kernels: str) -> ort.InferenceSession:
    options = native.session_options(kernels)
    options.log_severity_level = 4
    return ort.InferenceSession(file, options)


def outputs(made: ExportedModel, *calls: tuple[list[list[int]], list[list[int]]], kernels: str = "off") -> np.ndarray:
    """Run calls of (tokens, mask) with empty caches, and return the logits of the last call."""
    session = session_of(made.folder / "model.onnx", kernels)
    rows = len(calls[0][0])
    kinds = {"tensor(float)": np.float32, "tensor(int16)": np.int16, "tensor(uint8)": np.uint8}
    caches = {t.name: np.zeros((rows, *t.shape[1:]), kinds[t.type]) for t in session.get_inputs()[2:]}
    for tokens, mask in calls:
        got = session.run(None, {"input_ids": np.array(tokens), "attention_mask": np.array(mask), **caches})
        present = dict(zip([t.name for t in session.get_outputs()], got, strict=True))
        caches = {past: present[re.sub("^past(_key_values)?", "present", past)] for past in caches}
    return present["logits"]


@pytest.fixture(scope="module")
def sparse_llama(tmp_path_factory: pytest.TempPathFactory) -> ExportedModel:
    return ExportedModel(tmp_path_factory.mktemp("llama"), "llama", METHODS["sparq"], {})


def test_a_mask_may_be_longer_than_the_tokens(sparse_llama: ExportedModel) -> None:
    tokens = [tiny_models.prompt_of(9)]
    short, long = (outputs(sparse_llama, (tokens, [[0] * 2 + [1] * 7 + [0] * more])) for more in (0, 30))
    np.testing.assert_array_equal(short, long)


@pytest.mark.parametrize("mask", [[1, 1, 0, 1], [0, 1, 0, 1], [1, 1, 0, 0]])
def test_an_invalid_mask_raises_a_runtime_error(sparse_llama: ExportedModel, mask: list[int]) -> None:
    with pytest.raises(Exception, match="ScatterND"):
        outputs(sparse_llama, ([[5, 6, 7]], [mask]))


@pytest.mark.parametrize(
    ("method", "kernels"),
    covering(["dense", METHODS["sparq"], MIXED, SAAP_FILE, SAMPLED, SAMPLE_SAAP], ["off", "auto"]),
)
def test_a_row_of_padding_may_get_tokens_later(tmp_path: Path, method: str, kernels: str) -> None:
    need(kernels)
    made = ExportedModel(tmp_path, "llama", method)
    one, other = tiny_models.prompt_of(9, 1), tiny_models.prompt_of(3, 2)
    rows = [one, [5] * 6 + other]
    mask = [[1] * 9, [0] * 6 + [1] * 3]
    # The second row has no token in the first two calls, the second of which is a decode step.
    pieces = [([row[a:b] for row in rows], [row[:b] for row in mask]) for a, b in ((0, 5), (5, 6), (6, 8), (8, 9))]
    first = outputs(made, pieces[0], kernels=kernels)
    assert np.isfinite(first).all()
    assert np.isfinite(outputs(made, *pieces[:2], kernels=kernels)).all()
    for row, tokens in enumerate((one, other)):
        n = len(tokens)
        cuts = [(a, b) for a, b in ((n - 9, n - 4), (n - 4, n - 3), (n - 3, n - 1), (n - 1, n)) if b > 0]
        alone = [([tokens[max(a, 0) : b]], [[1] * b]) for a, b in cuts]
        expected = outputs(made, *alone, kernels=kernels)
        got = outputs(made, *pieces, kernels=kernels)[row : row + 1]
        np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32 * np.abs(expected).max())


FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "compat": {"compat": True},
    "inline": {"inline": True},
    "both": {"inline": True, "compat": True},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    ("family", "method", "form", "length"),
    [
        *(
            ("qwen3", method, form, PROMPT)
            for method, form in (("dense", "both"), (METHODS["sparq"], "default"), (METHODS["sparq"], "both"))
        ),
        *(("llama", SAAP_FILE, form, PROMPT) for form in ("both", "bfloat16")),
        *(("llama", method, form, 230) for method, form in ((SAMPLE, "inline"), (SAMPLE_SAAP, "float16"))),
    ],
)
def test_other_formats_generate_the_same_tokens(
    tmp_path: Path, family: str, method: str, form: str, length: int
) -> None:
    options = FORMS[form]
    made = ExportedModel(tmp_path, family, method, max_length=320, **options)
    profile = COMPAT if options.get("compat") else DEFAULT
    assert made.proto.ir_version == profile.ir
    assert {opset.version for opset in made.proto.opset_import if not opset.domain} == {profile.opset}
    with registered():
        onnx.checker.check_model(str(made.folder / "model.onnx"), full_check=True)
    inlined = options.get("inline", False)
    assert bool(made.nodes) != inlined
    assert bool(made.proto.functions) != inlined
    assert (made.folder / "genai_config.json").exists() != inlined
    if "dtype" not in options:
        made.check_tokens(length)
    assert not inlined or not made.runner(kernels="auto").native
    agreement = made.result.agreement
    of_sparse = [error for error in (agreement.sparse, agreement.sampled, agreement.coded) if error is not None]
    assert len(of_sparse) == (method != "dense") + ("sample" in method)
    assert all(error < FLOAT32 * agreement.largest for error in of_sparse)


@pytest.mark.parametrize(
    ("method", "name", "change"),
    [
        *((method, name, 1) for method in (SAAP_FILE, SAMPLE_SAAP) for name in ("sink_tokens", "recent_tokens")),
        (SAAP_FILE, "probes", -2),
        (SAMPLE, "rank", 1),
        *((method, "alpha_column", 0.8) for method in (SAMPLE.partition("+")[0], SAMPLE_SAAP)),
        (SAMPLE.partition("+")[0], "chunks", 2),
        (SAMPLE.partition("+")[0], "scale", -0.05),
        (CODED, "rank", -1),
    ],
)
def test_a_file_with_other_attributes_than_mlx_is_rejected(
    tmp_path: Path, method: str, name: str, change: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = compare.copy_for_check

    def other_copy(*arguments: Any) -> onnx.ModelProto:
        model = copy(*arguments)
        for node in model.graph.node:
            for attribute in (
                each for each in node.attribute if each.name == name and node.op_type != "CachedAttention"
            ):
                kind = "f" if attribute.type == onnx.AttributeProto.FLOAT else "i"
                setattr(attribute, kind, getattr(attribute, kind) + change)
        return model

    monkeypatch.setattr(compare, "copy_for_check", other_copy)
    with pytest.raises(ArtefactError, match="Nothing was written"):
        ExportedModel(tmp_path, "llama", method, {"num_hidden_layers": 3}, max_length=320)
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("own", [True, False], ids=["the model's", "asked for"])
@pytest.mark.parametrize(
    ("method", "state"), [("sparq:rank=4,top_k=4,key_bits=4", "summary"), ("sparq:rank=4,top_k=4", "sums")]
)
def test_half_precision_is_stored_and_widened(tmp_path: Path, method: str, state: str, dtype: str, own: bool) -> None:
    source = tiny_models.write(tmp_path / "source", tie_word_embeddings=True)
    if own:
        weights = mx.load(str(source / "model.safetensors"))
        halved = {name: array.astype(getattr(mx, dtype)) for name, array in weights.items()}
        mx.save_safetensors(str(source / "model.safetensors"), halved, {"format": "mlx"})
    folder = tmp_path / "exported"
    made = export(
        str(source), folder, method=method, max_length=64, native=needs_kernels(method), dtype=None if own else dtype
    )
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    element = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}[dtype]
    types = {tensor.name: tensor.type.tensor_type.elem_type for tensor in proto.graph.input}
    assert all(types[name] == element for name in types if name.startswith("past_key_values."))
    assert types[f"past_{state}.0"] == onnx.TensorProto.FLOAT
    stored = {t.name: t.data_type for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    assert {kind for name, kind in stored.items() if "proj" in name or "embed" in name} == {element}
    # Only the rounding of half precision: with float32 caches the sparse step agrees to float32.
    precision = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    assert made.agreement.dense < 20 * precision * made.agreement.largest
    assert made.agreement.sparse < FLOAT32 * made.agreement.largest


def test_inputs_and_outputs_are_as_documented(tmp_path: Path) -> None:
    made = ExportedModel(tmp_path, "llama", "sparq:rank=4,top_k=4", {"num_hidden_layers": 3}, max_length=60)
    pasts = [f"past_key_values.{i}.{part}" for i in range(5) for part in ("key", "value")]
    pasts += [f"{name}.{i}" for name in ("past_sums", "past_conv") for i in range(3)]
    assert sorted(t.name for t in made.proto.graph.input) == sorted(["input_ids", "attention_mask", *pasts])
    presents = [n.replace("past_key_values", "present").replace("past_", "present_") for n in pasts]
    assert sorted(t.name for t in made.proto.graph.output) == sorted(["logits", *presents])
    assert made.metadata == {
        "spec": "1",
        "version": mlx_sparse.__version__,
        "method": "sparq:rank=4,top_k=4,local_window=1,reallocate=false,component_score=query,key_bits=16,"
        "dense_below=5",
        "model_type": "llama",
        "max_length": "60",
        "dtype": "float32",
        "eos_token_ids": "[0]",
    }
    names = {"model.onnx", "model.onnx.data", "tokenizer.json", "tokenizer_config.json", "genai_config.json"}
    assert {file.name for file in made.folder.iterdir()} == names


def test_int4_scoring_keys_generate_the_tokens_of_mlx(tmp_path: Path) -> None:
    made = ExportedModel(tmp_path, "llama", CODED, {"num_hidden_layers": 3}, max_length=256)
    names = {tensor.name for tensor in made.proto.graph.input}
    pasts = {f"past_key_values.{i}.{part}" for i in range(3) for part in ("key", "value")}
    pasts |= {f"past_{name}.{i}" for name in ("key_codes", "summary") for i in range(3)}
    assert names == {"input_ids", "attention_mask", *pasts}
    assert set(made.nodes) == {"SparQCodedAttention"}
    made.check_tokens(120)  # the second group is full after 8 more


def test_no_genai_omits_its_files_and_states(tmp_path: Path) -> None:
    made = ExportedModel(tmp_path, "llama", METHODS["sparq"], {"num_hidden_layers": 3}, genai=False)
    names = [tensor.name for tensor in made.proto.graph.input]
    assert not any(name.startswith("past_conv") or name == "past_key_values.4.value" for name in names)
    assert not (made.folder / "genai_config.json").exists()
    made.check_tokens()


def test_int4_scoring_keys_are_the_default_of_native_kernels_only(tmp_path: Path) -> None:
    (tmp_path / "attn.toml").write_text("[sparq]\nrank = 8\n")
    for text, file, bits in (
        ("sparq", None, 16),
        ("sample+sparq:rank=8", None, 16),
        ("sparq", tmp_path / "attn.toml", 16),
        ("sparq:key_bits=4", tmp_path / "attn.toml", 4),
    ):
        assert getattr(methods_of(text, file, native=False)[1], "key_bits", None) == bits
        assert getattr(methods_of(text, file, native=True)[1], "key_bits", None) == 4
