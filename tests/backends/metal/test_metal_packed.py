"""Test the Metal kernels for quantized KV caches (docs/spec/quantized.md)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fixtures_msl import Launched
from mlx_arrays import to_mlx, to_numpy, unpacked
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache
from msl import Metal
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse.cache.kv_cache import adopt
from mlx_sparse.core import registry
from mlx_sparse.core.packed_rows import PackedRows
from mlx_sparse.methods import parse
from mlx_sparse.methods.sparq import metal as sparq

KEY_AND_VALUE = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 32))


def test_the_smallest_quantized_rows_are_dequantized_in_their_type(metal: Metal) -> None:
    """Test arrays of fewer than eight elements, which MLX passes in the constant address space."""
    keys, values = (PackedRows.of(to_mlx(rows, "f16"), bits=4, group_size=32) for rows in KEY_AND_VALUE)
    how = {"rank": 32, "top_k": 1, "local_window": 0, "component_weight": None}
    how |= {"reallocate": False, "value_mean": None, "left_padding": None, "keys_t": None, "scale": 0.1, "length": 1}
    out, lse, _ = sparq.sparq_attention(mx.ones((1, 2, 1, 32)), keys, values, **how)
    np.testing.assert_array_equal(np.array(out)[:, 1:], unpacked(values))  # float32 of float16
    np.testing.assert_allclose(np.array(lse), 0.1 * unpacked(keys).sum(), rtol=0, atol=1e-6)


# Scores from the quantized rows, and from a copy with the given number of bits.
# the cache and the model

SPECS = ["sparq:reallocate=true", "sparq:score=copy,rank=16,reallocate=true"]  # scores in float32


@pytest.mark.parametrize("spec", SPECS)
def test_a_quantized_cache_decodes_on_metal_as_on_ops(metal: Metal, spec: str, launched: list[Launched]) -> None:
    (config,) = parse(f"{spec},top_k=32,dense_below=0")
    config = config.for_model(qk_norm=False)
    cache: Any = QuantizedKVCache(group_size=64, bits=4)
    adopt([cache])
    rng = np.random.default_rng(3)
    for L in (270, 1, 1):
        cache.update_and_fetch(*(to_mlx(rng.normal(size=(1, 2, L, 64)), "f16") for _ in "kv"))
        queries = to_mlx(rng.standard_t(3, size=(1, 8, 1, 64)), "f16")
        (out, lse), (ops_out, ops_lse) = (
            cache.attend(queries, config, scale=0.125, backend=backend) for backend in ("metal", "ops")
        )
        np.testing.assert_allclose(to_numpy(out), to_numpy(ops_out), rtol=0, atol=2e-3)
        np.testing.assert_allclose(np.array(lse), np.array(ops_lse), rtol=0, atol=1e-4)
        # MLX copies a slice on every call.
        packed = [given.inputs for given in launched if "keys_scales" in given.inputs]
        assert len(packed) == 2
        assert all(inputs["keys"] is cache.keys[0] for inputs in packed)
        assert packed[-1]["values_scales"] is cache.values[1]
        launched.clear()


@pytest.mark.parametrize("method", ["sparq:top_k=40", "saap:mode=online,buckets=8,probes=2,recent_tokens=32"])
def test_a_model_with_a_quantized_cache_decodes_on_metal_as_on_ops(metal: Metal, method: str) -> None:
    quantized = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    model, prompt = build(head_dim=32), mx.array(prompt_of(150))
    generated = {}
    for backend in ("ops", "auto"):
        with mlx_sparse.sparse(model, f"{method},dense_below=0", backend=backend) as report:
            generated[report.backend] = [token for token, _ in generate_step(prompt, model, max_tokens=4, **quantized)]
        assert report.sparse_calls > 0
    assert generated["metal"] == generated["ops"]
    if metal.emulated:
        assert "attend_indices_packed" in {report.kernel for report in metal.launches}


def test_metal_supports_quantized_rows_in_decode_but_not_in_prefill(metal: Metal) -> None:
    assert registry.resolve("auto", "sparq", D=128, G=4, bits=3) == "metal"
    assert registry.resolve("auto", "attend_blocks", D=128, G=4, bits=4) == "ops"
    with pytest.raises(mlx_sparse.BackendUnavailable, match="its prefill kernels do not read quantized KV caches"):
        registry.resolve("metal", "sample", D=128, G=4, bits=4)
