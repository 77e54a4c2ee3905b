"""Compare functions on quantized KV caches (docs/spec/quantized.md) with the oracle on dequantized rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from cases import assert_as_good_as_plain, assert_selection_within, covering, every_parameter, plain_attention
from expected import METHODS, assert_coded_step, assert_conforms, attended, coded_parameters, expected
from quantized_cases import PackedCase, adapter, packed_cases
from sample_cases import SampleCase

from mlx_sparse import PackedRows, ShapeError, oracle
from mlx_sparse.methods import METHODS as CLASSES

PREFILL = [name for name, method in CLASSES.items() if method.stage == "prefill"]

HERE = [("ops", case) for case in packed_cases()]
by_backend = pytest.mark.parametrize("backend", ["ops"], indirect=True)
# Cases for the kernels: padding, codes that span two words, and scores of several tiles.
ON_METAL = [
    PackedCase(2, 4, 4, 127, 64, "f16", padding=(0, 100), bits=8, group_size=32),
    PackedCase(1, 8, 2, 1100, 128, "f16", padding=(30,), bits=4),
    PackedCase(1, 16, 1, 70, 64, "bf16", bits=3),
    PackedCase(1, 4, 1, 8300, 64, "f16", bits=4),
]
# A case takes seconds in the harness, so only some cases run there. The kernels require all components.
SETTINGS = ["rank-D", "paper", "robust", "reallocate", "odd-sizes"]
PAIRS = [*HERE, *(("metal", case) for case in (*packed_cases()[1::6], *ON_METAL))]
ARMS = [(*pair, setting) for pair, setting in covering(HERE, SETTINGS)]
ARMS += [(*pair, SETTINGS[0]) for pair in PAIRS if pair[0] == "metal"] + [("metal", ON_METAL[0], "reallocate")]


@pytest.mark.parametrize(("backend", "case", "setting"), ARMS, ids=str, indirect=["backend"])
def test_sparq_over_quantized_rows_selects_and_attends_as_the_oracle(
    backend: Any, setting: str, case: PackedCase
) -> None:
    params = every_parameter(case, setting) | ({"rank": case.D} if backend.name == "metal" else {})
    found, wanted = adapter(backend).sparq(case, params), METHODS["sparq"](case, params)
    if backend.name == "metal" and not params["reallocate"]:  # scores are stored in 8 bits
        assert wanted.scores is not None
        assert_selection_within(found.choice, wanted.choice, wanted.scores, 1 / 16)
        wanted = attended(case, found.choice, params["scale"], wanted.scores)
    assert_conforms(found, wanted, case)


@pytest.mark.parametrize("setting", ["4-bits", "reallocate"])
@pytest.mark.parametrize("case", ON_METAL[:2], ids=str)
@pytest.mark.parametrize("backend", ["metal"], indirect=True)
def test_quantized_scoring_keys_of_a_quantized_cache_select_as_the_oracle(
    backend: Any, case: PackedCase, setting: str
) -> None:
    params = coded_parameters(case, setting)
    assert_coded_step(adapter(backend).sparq(case, params), case, params, eight_bit_scores=True)


@pytest.mark.parametrize(("backend", "case"), HERE, ids=str, indirect=["backend"])
def test_dense_attention_over_quantized_rows_equals_the_oracle(backend: Any, case: PackedCase) -> None:
    found = adapter(backend).dense(case, every_parameter(case, "", "dense"))
    assert_conforms(found, expected(case, "", "dense"), case)


@pytest.mark.parametrize(("backend", "case"), PAIRS, ids=str, indirect=["backend"])
def test_listed_rows_are_dequantized_and_attended(backend: Any, case: PackedCase) -> None:
    """Test lists in which every seventh slot is empty, and another seventh are rows after the keys in use."""
    chosen = np.tile(np.arange(0, case.S, 3, dtype=np.int32), (case.B, case.Hkv, 1))
    chosen[..., 1::7], chosen[..., 3::7] = -1, case.S + 2
    chosen[chosen < np.reshape(case.padding or 0, (-1, 1, 1))] = -1
    for count in {chosen.shape[2], chosen.shape[2] // 2}:
        counts = backend.integers(np.full((case.B, case.Hkv), count))
        found = adapter(backend).attend_indices(case, chosen, 0.2, counts=counts)
        in_use = (np.arange(chosen.shape[2]) < count) & (chosen < case.S)
        assert_conforms(found, attended(case, np.where(in_use, chosen, -1), 0.2), case)


@by_backend
def test_public_functions_accept_quantized_rows(backend: Any) -> None:
    case = PackedCase(2, 6, 2, 150, 64, "f16", padding=(3, 40), bits=4)
    packed, given = adapter(backend), {"top_k": 32, "left_padding": np.array(case.padding)}
    q, keys, values = case.inputs()
    best = reference.sparq_select(q, keys, rank=64, top_k=32, local_window=8, left_padding=case.padding).indices
    pages, _ = oracle.quest_select(q, keys, page_size=16, top_k=32, left_padding=case.padding)
    for name, more, chosen in (
        ("quest_attention", {}, pages),
        ("oracle_top_k_attention", {"local_window": 8}, best),
        ("sparq_attention", {"rank": 64}, best),
    ):
        wanted = getattr(reference, name)(q, keys, values, left_padding=case.padding, **more, top_k=32)
        plain = plain_attention(q, keys, values, chosen, case.D**-0.5, case.dtype)
        if hasattr(packed.functions, name):
            found = packed.numpy(packed.public(name, case, **given, **more))
            assert_as_good_as_plain(found, wanted, plain, case.dtype)
    with pytest.raises(ShapeError, match="values: expected the shape of keys"):
        q, k, v = packed.arrays(case)
        packed.functions.sparq_attention(q, k, v.first(100))


@pytest.mark.parametrize(
    "case",
    [
        SampleCase(1, 4, 2, 200, 200, 64, "f16", 32, 1, 0.4, 0.4),
        SampleCase(1, 4, 2, 256, 256, 64, "f16", 32, 1, 0.4, 0.4),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", PREFILL)
@by_backend
def test_prefill_functions_dequantize_the_rows(backend: Any, method: str, case: SampleCase) -> None:
    q, *rows = backend.arrays(case)
    packed = [PackedRows.of(array, bits=4) for array in rows]
    attention = getattr(backend.functions, f"{method}_attention")
    settings = case.parameters if method == "sample" else {}
    found, wanted = (
        attention(q, *given, backend=backend.name, return_stats="recall", **settings)
        for given in (packed, [array[:] for array in packed])
    )
    np.testing.assert_array_equal(backend.numpy(found[0]), backend.numpy(wanted[0]))
    np.testing.assert_array_equal(backend.numpy(found[1].recall), backend.numpy(wanted[1].recall))


@by_backend
def test_selected_blocks_of_quantized_rows_equal_those_of_dequantized_rows(backend: Any) -> None:
    case = SampleCase(1, 4, 2, 200, 260, 64, "f16", 32, 1, 0.4, 0.4)
    q, *rows = backend.arrays(case)
    keys, values = (PackedRows.of(array, bits=4) for array in rows)
    blocks = backend.functions.sample_select(q, keys, **case.parameters)
    np.testing.assert_array_equal(
        blocks, backend.functions.sample_select(q, keys[:], **case.parameters, backend=backend.name)
    )
    found = backend.functions.attend_blocks(q, keys, values, blocks, block_size=32)
    wanted = backend.functions.attend_blocks(q, keys[:], values[:], blocks, block_size=32, backend=backend.name)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(backend.numpy(ours), backend.numpy(theirs))
