"""Check that models exported with SampleAttention generate the tokens of mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import onnx
import pytest
import tiny_models
from cases import covering
from exported import CODED, FLOAT32, SAMPLE, SAMPLE_SAAP, ExportedModel, by_kernels, need
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_sparse.onnx_export.exporter import compare
from mlx_sparse.onnx_export.exporter import export as exporter
from mlx_sparse.onnx_export.exporter.methods import sample

from mlx_sparse.checks import ConfigError
from mlx_sparse.core.decide import SAMPLE_TUNED_BELOW
from mlx_sparse.methods import Sample, parse

pytestmark = pytest.mark.slow  # whole models

METHODS = {
    "sample": SAMPLE.partition("+")[0],
    "regions": "sample:alpha_column=0.3,alpha_slash=0.5,chunks=2,block_size=32,dense_below=150",
    "sample+sparq": SAMPLE,
    "sample+saap": SAMPLE_SAAP,
}
PROMPT = 230  # tokens, so that blocks at both ends are partly filled
by_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def logits_of(made: ExportedModel) -> np.ndarray:
    """Return the logits of MLX after the prompt."""
    prompt = mx.array([tiny_models.prompt_of(PROMPT)])
    return np.array(made.model(prompt, cache=make_prompt_cache(made.model))[:, -1])


@pytest.mark.parametrize(("family", "method"), covering(["llama", "gemma3_text", "glm4"], list(METHODS.values())))
def test_tokens_after_sampled_prefill_equal_mlx(tmp_path: Path, family: str, method: str) -> None:
    made = ExportedModel(tmp_path, family, method, max_length=320)
    made.check_tokens(PROMPT)
    prompt = tiny_models.prompt_of(PROMPT)
    with made.mlx():
        sparse = logits_of(made)
    got = made.runner().step([prompt])
    assert np.abs(got - sparse).max() < FLOAT32 * np.abs(sparse).max()
    if family != "gemma3_text":  # its last layer has a sliding window
        assert np.abs(logits_of(made) - sparse).max() > 20 * np.abs(got - sparse).max()


@by_kernels
@pytest.mark.parametrize("method", [SAMPLE, SAMPLE_SAAP], ids=["sparq", "saap"])
def test_chunked_prefill_equals_mlx_lm_with_the_same_chunks(
    tmp_path: Path, method: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(kernels)
    monkeypatch.setattr(exporter, "SAMPLE_CHUNK", 96)
    made = ExportedModel(tmp_path, "llama", method, max_length=320)
    prompt = tiny_models.prompt_of(PROMPT)
    with made.mlx():
        expected = [
            int(token) for token, _ in generate_step(mx.array(prompt), made.model, max_tokens=20, prefill_step_size=96)
        ]
    runner = made.runner(kernels=kernels)
    steps: list[int] = []
    original = runner.step
    monkeypatch.setattr(runner, "step", lambda tokens: steps.append(len(tokens[0])) or original(tokens))
    assert list(runner.generate(prompt, 20)) == expected
    assert steps[:4] == [96, 96, 37, 1]
    config = json.loads((made.folder / "genai_config.json").read_text())
    assert config["search"]["chunk_size"] == 96


def test_ranges_need_one_setting_up_to_max_length() -> None:
    ranges = parse("sample:ranges=1000:0.9:0.8:3/2000:0.5:0.5:2")[0]
    assert isinstance(ranges, Sample)
    assert str(sample.resolve(ranges, 999)) == str(
        Sample(alpha_column=0.9, alpha_slash=0.8, chunks=3, dense_below=SAMPLE_TUNED_BELOW)
    )
    with pytest.raises(ConfigError, match="ranges: expected one setting for all contexts up to 1000 tokens"):
        sample.resolve(ranges, 1000)


def test_dense_above_is_refused(tmp_path: Path) -> None:
    source = tiny_models.write(tmp_path / "source")
    with pytest.raises(ConfigError, match=r"^dense_above: expected auto or 1, .*, got 0\.4\. Set dense_below instead"):
        exporter.export(str(source), tmp_path / "out", method="sample:dense_above=0.4")
    assert not (tmp_path / "out").exists()
    assert sample.resolve(Sample(dense_above=1.0, dense_below=7), 999).dense_below == 7


def test_a_file_needs_a_length_from_which_prefill_is_sparse() -> None:
    with pytest.raises(ConfigError, match=r"^dense_below: expected the number of keys .*, got auto\."):
        sample.resolve(Sample(), 999)


@pytest.mark.parametrize(("layers", "compared"), [(2, 2), (5, 3)])
def test_the_first_layers_are_compared(
    tmp_path: Path, layers: int, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs: list[set[str]] = []
    original = compare.keep_layers

    def watched(model: onnx.ModelProto, count: int) -> None:
        original(model, count)
        assert count == compared
        inputs.append({value.name for value in model.graph.input})

    monkeypatch.setattr(compare, "keep_layers", watched)
    method = f"{METHODS['sample']}+{CODED}"
    ExportedModel(tmp_path, "llama", method, {"num_hidden_layers": layers}, max_length=320)
    assert len(inputs) == 2  # a prompt of several blocks, and a prompt that fills groups of int4 keys
    for names in inputs:
        assert {name for name in names if "summary" in name} == {f"past_summary.{i}" for i in range(compared)}


def test_verification_includes_a_layer_after_two_sampled_layers(tmp_path: Path) -> None:
    made = ExportedModel(tmp_path, "gemma3_text", METHODS["sample"], {"num_hidden_layers": 8}, max_length=320)
    assert made.result.agreement.sampled is not None


def test_only_layers_without_a_window_are_sampled(tmp_path: Path) -> None:
    made = ExportedModel(tmp_path, "gemma3_text", METHODS["sample"], max_length=320)
    assert made.nodes == ["CachedAttention", "SampleAttention", "CachedAttention", "SampleAttention"]
    assert made.metadata["prefill_chunk"] == "2048"
