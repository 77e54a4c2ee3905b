"""Quantised caches (docs/spec/quantized.md): on packed rows functions attend as the oracle on what those stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import (
    assert_as_good_as_plain,
    assert_chosen_within,
    covering,
    every_parameter,
    plain_attention,
)
from expected import assert_conforms, attended, expected
from quantised_cases import PackedCase, adapter, packed_cases

from mlx_sparse import ShapeError, oracle

HERE = [("ops", case) for case in packed_cases()]
by_backend = pytest.mark.parametrize("backend", ["ops"], indirect=True)
# In the harness a case takes seconds: some of them, and what kernels score, which is whole rows.
SETTINGS = ["rank-D", "paper", "robust", "reallocate", "eval"]
PAIRS = [*HERE, *(("metal", case) for case in packed_cases()[1::6])]
ARMS = [(*pair, setting) for pair, setting in covering(HERE, SETTINGS)]
ARMS += [(*pair, SETTINGS[0]) for pair in PAIRS if pair[0] == "metal"]


@pytest.mark.parametrize(("backend", "case", "setting"), ARMS, ids=str, indirect=["backend"])
def test_sparq_chooses_by_packed_rows_and_attends_as_the_oracle(backend: Any, setting: str, case: PackedCase) -> None:
    params = every_parameter(case, setting)
    found, wanted = adapter(backend).sparq(case, params), expected(case, setting, "sparq")
    if backend.name == "metal" and not params["reallocate"]:  # scores are held in 8 bits
        assert wanted.scores is not None
        assert_chosen_within(found.choice, wanted.choice, wanted.scores, 1 / 16)
        wanted = attended(case, found.choice, params["scale"], wanted.scores)
    assert_conforms(found, wanted, case)


@pytest.mark.parametrize(("backend", "case"), HERE, ids=str, indirect=["backend"])
def test_dense_attention_over_packed_rows_is_the_oracles(backend: Any, case: PackedCase) -> None:
    found = adapter(backend).dense(case, every_parameter(case, "", "dense"))
    assert_conforms(found, expected(case, "", "dense"), case)


@pytest.mark.parametrize(("backend", "case"), PAIRS, ids=str, indirect=["backend"])
def test_listed_rows_are_unpacked_and_attended(backend: Any, case: PackedCase) -> None:
    chosen = np.tile(np.arange(0, case.S, 3, dtype=np.int32), (case.B, case.Hkv, 1))
    assert_conforms(adapter(backend).attend_indices(case, chosen, 0.2), attended(case, chosen, 0.2), case)


@by_backend
def test_public_functions_take_packed_rows(backend: Any) -> None:
    case = PackedCase(2, 6, 2, 150, 64, "f16", padding=(3, 40), bits=4)
    packed, given = adapter(backend), {"top_k": 32, "left_padding": np.array(case.padding)}
    q, keys, values = case.inputs()
    best = oracle.sparq_select(q, keys, rank=64, top_k=32, local_window=8, left_padding=case.padding).indices
    pages, _ = oracle.quest_select(q, keys, page_size=16, top_k=32, left_padding=case.padding)
    for name, more, chosen in (
        ("quest", {}, pages),
        ("oracle_top_k", {"local_window": 8}, best),
        ("sparq", {"rank": 64}, best),
    ):
        wanted = getattr(oracle, f"{name}_attention")(q, keys, values, left_padding=case.padding, **more, top_k=32)
        plain = plain_attention(q, keys, values, chosen, case.D**-0.5, case.dtype)
        if hasattr(packed.functions, f"{name}_attention"):
            found = packed.numpy(packed.public(f"{name}_attention", case, **given, **more))
            assert_as_good_as_plain(found, wanted, plain, case.dtype)
    with pytest.raises(ShapeError, match="values: expected the shape of keys"):
        q, k, v = packed.arrays(case)
        packed.functions.sparq_attention(q, k, v.first(100))
