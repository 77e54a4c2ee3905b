"""Compare the estimated attention recall (sparq.24) with the float64 oracle."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from adapters import backends_with
from cases import CASES, SOME_CASES, Case, every_parameter

from mlx_sparse import oracle
from mlx_sparse.methods.sparq.metal import selected_shares

BACKENDS = [name for name in backends_with("sparq") if name.partition("-")[0] in ("ops", "cpu", "metal")]
by_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
# Lists that the Metal backend attends in other launches: more than 512 keys, and reallocation.
LONG = Case(1, 4, 2, 1500, 64, "f32", None)


def expected_recall(case: Case, params: dict[str, Any]) -> Any:
    """Return the mean of the oracle's alpha over the query heads of a KV head."""
    q, k, _ = case.inputs()
    selection = {name: value for name, value in params.items() if name != "reallocate"}
    alpha = reference.sparq_select(q, k, left_padding=case.padding, **selection).alpha
    return alpha.reshape(case.B, case.Hkv, -1).mean(axis=2)


def estimated_recall(backend: Any, case: Case, params: dict[str, Any]) -> Any:
    given = {**params, "left_padding": case.padding, "return_stats": True}
    _, wanted = oracle.sparq_attention(*case.inputs(), **given)
    _, stats = backend.public("sparq_attention", case, **given)
    assert (stats.estimated_recall is None) == (wanted.estimated_recall is None) == (case.S <= params["top_k"])
    return None if wanted.estimated_recall is None else backend.numpy(stats.estimated_recall)


@pytest.mark.parametrize("setting", ["paper", "reallocate", "query_key"])
@pytest.mark.parametrize("case", list(dict.fromkeys([*CASES[::3], *SOME_CASES])), ids=str)
@by_backend
def test_estimated_recall_is_the_alpha_of_the_oracle(backend: Any, case: Case, setting: str) -> None:
    component = {"component_score": "query_key"} if setting == "query_key" else {}
    params = every_parameter(case, "paper" if component else setting) | component
    found = estimated_recall(backend, case, params)
    if found is not None:
        np.testing.assert_allclose(found, expected_recall(case, params), rtol=0, atol=1e-5)


@pytest.mark.parametrize("reallocate", [True, False])
@pytest.mark.parametrize("top_k", [1, 100, 600])
@by_backend
def test_every_launch_of_a_step_estimates_the_recall(backend: Any, top_k: int, reallocate: bool) -> None:
    window = {"top_k": top_k, "local_window": top_k // 4, "reallocate": reallocate}
    params = every_parameter(LONG, "paper") | window
    found = estimated_recall(backend, LONG, params)
    np.testing.assert_allclose(found, expected_recall(LONG, params), rtol=0, atol=1e-5)


@pytest.mark.parametrize("reallocate", [True, False])
@pytest.mark.parametrize("top_k", [100, 600])
@by_backend
def test_scoring_keys_estimate_the_recall_within_the_steps_of_their_logits(
    backend: Any, top_k: int, reallocate: bool
) -> None:
    case = Case(2, 4, 2, 1500, 64, "f16", (0, 37))
    params = every_parameter(case, "paper") | {"top_k": top_k, "local_window": 20, "key_bits": 4}
    params |= {"reallocate": reallocate}
    found, wanted = estimated_recall(backend, case, params), expected_recall(case, params)
    # An 8-bit logit is a multiple of 1/16, so a weight differs by at most a factor of exp(1/32).
    rounded = backend.name == "metal" and not reallocate
    np.testing.assert_allclose(found, wanted, rtol=np.exp(1 / 32) - 1 if rounded else 0, atol=1e-5)


def test_bits_of_overflown_and_empty_slots() -> None:
    bits = mx.array([[[0, 0x80000000 | 0x3F000000, 0xFF800001], [0xFFFFFFFF, 0, 0], [0xFF800000, 0, 0]]], mx.uint32)
    found = np.array(selected_shares(bits, 2).sum(axis=-1))
    assert found[0, 0] == 0.25  # half of the mass of one head, and a local key without mass
    assert np.isnan(found[0, 1:]).all()
