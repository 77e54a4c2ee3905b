"""The Metal kernels over packed rows, of quantised caches: docs/spec/quantized.md."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from cases import (
    Array,
    Case,
    assert_as_good_as_plain,
    assert_chosen_within,
    assert_same_choice,
    lse_tolerance,
    plain_attention,
)
from fixtures_msl import Launched
from mlx_arrays import to_mlx, to_numpy, unpacked
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache
from msl import Metal
from tiny_models import build, prompt_of

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.cache.kv_cache import adopt
from mlx_sparse.kernels import attend, sparq
from mlx_sparse.methods import parse, registry
from mlx_sparse.methods.sparq import Selection
from mlx_sparse.ops.key_codes import code_keys
from mlx_sparse.ops.packed_rows import PackedRows

STALE = 9  # rows behind the ones in use
KEY_AND_VALUE = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 32))


class Packed(NamedTuple):
    """A case, bits and group size of its keys and values."""

    case: Case
    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.case}-{self.bits}x{self.group_size}"

    def inputs(self) -> tuple[Array, Array, Array]:
        """Queries, and the keys and values that the packed rows are."""
        return self.case.inputs()[0], *(unpacked(rows) for rows in self._exact())

    def arrays(self) -> tuple[mx.array, PackedRows, PackedRows]:
        """The same for a kernel: whole buffers, whose unused rows and those of the padding hold NaN."""
        keys, values = (self._whole(rows) for rows in self._exact())
        return to_mlx(self.case.inputs()[0], self.case.dtype), keys, values

    def _exact(self) -> list[PackedRows]:
        _, *rows = (to_mlx(array, self.case.dtype) for array in self.case.inputs())
        return [PackedRows.of(array, bits=self.bits, group_size=self.group_size) for array in rows]

    def _whole(self, rows: PackedRows) -> PackedRows:
        spoiled = [
            mx.pad(part, [(0, 0), (0, 0), (0, STALE), (0, 0)], constant_values=value)
            for part, value in zip(rows.parts, (2**32 - 1, np.nan, np.nan), strict=True)
        ]
        first = mx.array(self.case.padding or [0] * self.case.B)[:, None, None, None]
        unused = mx.arange(self.case.S + STALE)[:, None] < first
        spoiled[1:] = [mx.where(unused, mx.array(np.nan, part.dtype), part) for part in spoiled[1:]]
        return PackedRows.from_parts(spoiled, self.bits)

    @property
    def padding(self) -> mx.array | None:
        return None if self.case.padding is None else mx.array(self.case.padding)


CASES = [
    Packed(Case(2, 4, 4, 127, 64, "f16", padding=(0, 100)), 8, 32),
    Packed(Case(1, 8, 2, 1100, 128, "f16", padding=(30,)), 4, 64),
    Packed(Case(1, 16, 1, 70, 64, "bf16"), 3, 64),  # a chunk of codes lies in two words
]


@pytest.mark.parametrize("counts", [None, (700, 3)], ids=str)
def test_packed_rows_are_attended_as_the_numbers_that_they_are(metal: Metal, counts: tuple[int, int] | None) -> None:
    packed = CASES[1]
    case, N, scale = packed.case, 900, 0.1
    rng = np.random.default_rng(0)
    indices = np.sort(rng.integers(30, case.S, (1, case.Hkv, N)))
    indices[rng.random(indices.shape) < 0.1] = -1
    indices[..., 5] = case.S + 2  # a row that is there, but not in use
    used = np.where((np.arange(N) < np.array(counts or (N, N))[:, None]) & (indices < case.S), indices, -1)
    q, k, v = packed.inputs()
    expected, lse = oracle.attend_indices(q, k, v, used, scale=scale)
    given = mx.array(indices), None if counts is None else mx.array([counts])
    out, got = attend.attend_indices(*packed.arrays(), given[0], scale=scale, length=case.S, counts=given[1])
    assert_as_good_as_plain(to_numpy(out), expected, plain_attention(q, k, v, used, scale, case.dtype), case.dtype)
    np.testing.assert_allclose(np.array(got), lse, rtol=0, atol=lse_tolerance(q, k, used, scale, lse))


def test_the_smallest_packed_rows_are_read_and_rounded_to_their_type(metal: Metal) -> None:
    """MLX passes fewer than eight elements in the constant address space."""
    keys, values = (PackedRows.of(to_mlx(rows, "f16"), bits=4, group_size=32) for rows in KEY_AND_VALUE)
    how = {"rank": 32, "top_k": 1, "local_window": 0, "component_weight": None}
    how |= {"reallocate": False, "value_mean": None, "left_padding": None, "keys_t": None, "scale": 0.1, "length": 1}
    out, lse = sparq.sparq_attention(mx.ones((1, 2, 1, 32)), keys, values, **how)
    np.testing.assert_array_equal(np.array(out)[:, 1:], unpacked(values))  # float32 of float16
    np.testing.assert_allclose(np.array(lse), 0.1 * unpacked(keys).sum(), rtol=0, atol=1e-6)


# Scores by the rows, and by a copy of them of so many bits.
STEPS = [
    *((packed, {"rank": packed.case.D}) for packed in CASES[1:]),
    (Packed(Case(1, 4, 1, 8300, 64, "f16"), 4, 64), {"rank": 64}),  # from the best of tiles
    (CASES[0], {"rank": 64, "reallocate": True}),
    (CASES[0], {"rank": 16, "key_bits": 4, "reallocate": True}),
    (CASES[1], {"rank": 16, "key_bits": 4}),
]


@pytest.mark.parametrize(("packed", "settings"), STEPS, ids=str)
def test_a_step_over_packed_rows_is_the_oracles_on_their_numbers(
    metal: Metal, packed: Packed, settings: dict[str, Any]
) -> None:
    case, scale = packed.case, packed.case.D**-0.5
    how = {"top_k": 40, "local_window": 10, "scale": scale, "key_bits": 16, **settings}
    reallocate = how.pop("reallocate", False)
    q, k, v = packed.inputs()
    wanted = oracle.sparq_select(q, k, left_padding=case.padding, **how)
    queries, keys, values = packed.arrays()
    coded = None
    if how["key_bits"] < 16:
        coded = code_keys(keys[:, :, : case.S], packed.padding)
    del how["key_bits"]
    given = {"left_padding": packed.padding, "keys_t": coded, "component_weight": None, "length": case.S, **how}
    selection = Selection(**{name: value for name, value in given.items() if name != "length"})
    chosen = np.array(sparq.sparq_select(queries, keys, selection, exact=reallocate, length=case.S))
    if reallocate:
        assert_same_choice(chosen, wanted.indices, wanted.scores)
    else:
        assert_chosen_within(chosen, wanted.indices, wanted.scores, 1 / 16)  # scores are held in 8 bits
    valid = oracle.valid_keys(case.B, case.S, case.padding)[:, None, :, None]
    mean = (v * valid).sum(axis=2) / valid.sum(axis=2)
    out, lse = sparq.sparq_attention(
        queries, keys, values, reallocate=reallocate, value_mean=mx.array(mean.astype(np.float32)), **given
    )
    expected, lses = oracle.attend_indices(q, k, v, chosen, scale=scale)
    plain = plain_attention(q, k, v, chosen, scale, case.dtype)
    if reallocate:
        alpha, means = wanted.alpha[..., None, None], np.repeat(mean, case.Hq // case.Hkv, axis=1)[:, :, None]
        mixed = alpha * expected + (1 - alpha) * means
        expected, plain = mixed, mixed + 2 * (plain - expected)
    assert_as_good_as_plain(to_numpy(out), expected, plain, case.dtype)
    np.testing.assert_allclose(np.array(lse), lses, rtol=0, atol=lse_tolerance(q, k, chosen, scale, lses))
    if metal.emulated:
        assert all(report.kernel.endswith("_packed") for report in metal.launches if "attend" in report.kernel)


# the cache and the model

SPECS = ["sparq:reallocate=true", "sparq:score=copy,rank=16,reallocate=true", "quest"]  # scores in float32


@pytest.mark.parametrize("spec", SPECS)
def test_a_quantised_cache_decodes_on_metal_as_on_ops(metal: Metal, spec: str, launched: list[Launched]) -> None:
    (config,) = parse(f"{spec}{',' if ':' in spec else ':'}top_k=32,dense_below=0")
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
        # A slice would be copied on every call.
        packed = [given.inputs for given in launched if "key_codes" in given.inputs]
        assert len(packed) == (1 if spec == "quest" else 2)
        assert all(inputs["key_codes"] is cache.keys[0] for inputs in packed)
        assert packed[-1]["value_scales"] is cache.values[1]
        launched.clear()


@pytest.mark.parametrize("method", ["sparq:top_k=40", "saap:mode=online,buckets=8,probes=2,recent_tokens=32"])
def test_a_model_with_a_quantised_cache_decodes_on_metal_as_on_ops(metal: Metal, method: str) -> None:
    quantised = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    model, prompt = build(head_dim=32), mx.array(prompt_of(150))
    generated = {}
    for backend in ("ops", "auto"):
        with mlx_sparse.sparse(model, f"{method},dense_below=0", backend=backend) as report:
            generated[report.backend] = [token for token, _ in generate_step(prompt, model, max_tokens=4, **quantised)]
        assert report.sparse_calls > 0
    assert generated["metal"] == generated["ops"]
    if metal.emulated:
        assert "attend_indices_packed" in {report.kernel for report in metal.launches}


def test_metal_takes_packed_rows_in_steps_and_unpacked_ones_in_prompts(metal: Metal) -> None:
    assert registry.resolve("auto", "sparq", D=128, G=4, bits=3) == "metal"
    assert registry.resolve("auto", "attend_blocks", D=128, G=4, bits=4) == "ops"
    with pytest.raises(mlx_sparse.BackendUnavailable, match="its prefill kernels do not read quantized KV caches"):
        registry.resolve("metal", "sample", D=128, G=4, bits=4)
