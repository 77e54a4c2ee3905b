"""Test gathered prefill of mlx-lm's models."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from lm_prompts import LAYERS, SPARQ, PrefillCall, batch, generated, last_logits, process, prompt_logits
from mlx_lm import batch_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.checks import BackendUnavailable
from mlx_sparse.core import registry
from mlx_sparse.core.packed_rows import PackedRows

SETTINGS = "share=0.3,chunk=50,samples=8,exact_tail=10"
GATHER = f"gather:{SETTINGS},dense_below=60"


def assert_as_the_oracle(calls: list[PrefillCall]) -> None:
    """Assert that the results of sparse prefill calls are those of the oracle over the rows of the cache."""
    assert calls
    for call in calls:
        sinks = call.options["sinks"]
        how = {"scale": call.options["scale"], "sinks": None if sinks is None else np.array(sinks)}
        how |= call.config.parameters()
        out, lse, pairs, _ = registry.load("gather", "oracle")(call.q, call.k, call.v, **how)
        np.testing.assert_allclose(call.out, out, atol=1e-4)
        np.testing.assert_allclose(call.lse, lse, atol=1e-4)
        np.testing.assert_array_equal(call.blocks, pairs)


@pytest.mark.parametrize("backend", ["ops", "cpu"])
def test_chunks_start_at_absolute_multiples_and_short_contexts_stay_dense(
    backend: str, model: Any, prefill_calls: list[PrefillCall]
) -> None:
    with mlx_sparse.sparse(model, GATHER, backend=backend) as report:
        process(model, prompt_of(300), 70)
    assert [call.S for call in prefill_calls[::LAYERS]] == [140, 210, 280, 300]
    assert report.dense_calls == {"over fewer than 60 keys": LAYERS}
    starts = [[piece.earlier for piece in call.config.layout(call.L, call.S).pieces] for call in prefill_calls]
    assert starts[::LAYERS] == [[70, 100], [140, 150, 200], [210, 250], [280]]
    assert_as_the_oracle(prefill_calls)
    density = prefill_calls[0].blocks.sum() / sum(range(71, 141)) / prefill_calls[0].q.shape[1]
    assert 0.5 < density < 0.9
    prefill = report.as_dict()["prefill"]
    assert 0.5 < prefill["density"]["mean"] < 0.9
    assert 0.5 < prefill["estimated_recall"] < 1
    assert f"; estimated attention recall {prefill['estimated_recall']:.3f}" in report.summary()


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "qwen3"])
def test_sinks_scales_and_sliding_windows_of_models(family: str, prefill_calls: list[PrefillCall]) -> None:
    model = build(family)
    with mlx_sparse.sparse(model, GATHER) as report:
        process(model, prompt_of(300), 128)
    assert_as_the_oracle(prefill_calls)
    assert len(prefill_calls) == 3 * report.served_layers
    assert (prefill_calls[0].options["sinks"] is not None) == (family == "gpt_oss")
    assert set(report.dense_layers) == (set() if family == "qwen3" else {"with a sliding window (RotatingKVCache)"})


def test_sinks_with_all_the_mass_make_sparse_and_dense_attention_equal(prefill_calls: list[PrefillCall]) -> None:
    model = build("gpt_oss")
    for layer in model.layers:
        layer.self_attn.sinks = mx.full(layer.self_attn.sinks.shape, 1e3)
    dense = prompt_logits(model, prompt_of(300), 128)
    with mlx_sparse.sparse(model, GATHER):
        found = prompt_logits(model, prompt_of(300), 128)
        mx.eval(found)
    assert prefill_calls
    np.testing.assert_allclose(found, dense, atol=1e-5)


@pytest.mark.parametrize("attn", ["gather:share=1,dense_below=0", "gather:exact_tail=300,dense_below=0"])
def test_keeping_every_key_is_bitwise_dense(attn: str, model: Any) -> None:
    dense = last_logits(model, process(model, prompt_of(300), 100))
    with mlx_sparse.sparse(model, attn, backend="ops") as report:
        assert mx.array_equal(last_logits(model, process(model, prompt_of(300), 100)), dense)
    assert report.dense_calls["with all earlier keys selected"] == 3 * LAYERS


def test_quantized_caches_dequantize_selected_rows_only(monkeypatch: Any, prefill_calls: list[PrefillCall]) -> None:
    model, rows, take = build(head_dim=32), [], PackedRows.__getitem__

    def counting(packed: PackedRows, at: Any) -> mx.array:
        found = take(packed, at)
        rows.append(found.shape[2])
        return found

    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0, "prefill_step_size": 100}
    with monkeypatch.context() as patch, mlx_sparse.sparse(model, GATHER.replace("tail=10", "tail=0")):
        patch.setattr(PackedRows, "__getitem__", counting)
        generated(model, prompt_of(301), 1, **options)
    # The first chunk of 50 queries after at least 60 keys starts at 100. The oracle's rows are whole contexts.
    selected = {100: 30, 150: 45, 200: 60, 250: 75}
    assert {count for count in rows if count not in (200, 300)} == {*selected.values(), 50}
    assert [call.S for call in prefill_calls[::LAYERS]] == [200, 300]
    assert_as_the_oracle(prefill_calls)


def test_padding_of_a_batch_changes_no_output(model: Any, tokenizer: TokenizerWrapper) -> None:
    with mlx_sparse.sparse(model, GATHER) as report:
        together = batch(model, tokenizer, [300, 170, 90])
        calls = report.prefill.calls
        prompts = [prompt_of(length, seed) for seed, length in enumerate([300, 170, 90])]
        alone = [batch_generate(model, tokenizer, [one], max_tokens=6).texts[0] for one in prompts]
    assert together == alone
    assert report.prefill.calls == 2 * calls


def test_gather_combines_with_a_decode_method(model: Any) -> None:
    with mlx_sparse.sparse(model, f"{GATHER}+{SPARQ}") as report:
        generated(model, prompt_of(300))
    assert report.prefill.calls > 0
    assert report.sparse_calls > 0


def test_other_backends_refuse_gather() -> None:
    arrays = [mx.zeros((1, 1, 4, 64))] * 3
    with pytest.raises(BackendUnavailable, match="got onnx"):
        mlx_sparse.gather_attention(*arrays, backend="onnx")
    assert registry.backends_of("gather") == ("oracle", "ops", "cpu")
