"""Compare the estimated attention recall (sparq.24) and the adaptive budget (sparq.25) with the float64 oracle."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters import backends_with
from cases import CASES, SOME_CASES, Case, every_parameter
from require import absent

import mlx_sparse
from mlx_sparse import ConfigError, oracle
from mlx_sparse.kernels.sparq import selected_shares
from mlx_sparse.methods import SparQ
from mlx_sparse.methods.sparq import Selection
from mlx_sparse.ops.select import keep_fewest
from mlx_sparse.oracle.select import fewest, top_k_select

BACKENDS = [name for name in backends_with("sparq") if name in ("ops", "metal")]
by_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
# Lists that the Metal backend attends in other launches: more than 512 keys, and reallocation.
LONG = Case(1, 4, 2, 1500, 64, "f32", None)


def expected_recall(case: Case, params: dict[str, Any]) -> Any:
    """Return the mean of the oracle's alpha over the query heads of a KV head."""
    q, k, _ = case.inputs()
    selection = {name: value for name, value in params.items() if name != "reallocate"}
    alpha = oracle.sparq_select(q, k, left_padding=case.padding, **selection).alpha
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


@pytest.mark.parametrize("recall", [0.05, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("reallocate", [True, False])
@pytest.mark.parametrize("top_k", [100, 600])
@by_backend
def test_an_adaptive_budget_attends_as_the_oracle(backend: Any, top_k: int, reallocate: bool, recall: float) -> None:
    case = Case(2, 4, 2, 1500, 64, "f32", (0, 1450))
    params = every_parameter(case, "paper") | {"top_k": top_k, "local_window": 9, "recall": recall}
    params["reallocate"] = reallocate
    given = {**params, "left_padding": case.padding, "return_stats": True}
    wanted, expected = oracle.sparq_attention(*case.inputs(), **given)
    dense = oracle.dense_attention(*case.inputs(), left_padding=case.padding)
    np.testing.assert_allclose(wanted[1], dense[1], rtol=0, atol=1e-12)  # 50 keys are fewer than top_k
    out, stats = backend.public("sparq_attention", case, **given)
    np.testing.assert_allclose(backend.numpy(out), wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(backend.numpy(stats.estimated_recall), expected.estimated_recall, rtol=0, atol=1e-5)


@pytest.mark.parametrize("reallocate", [True, False])
@by_backend
def test_an_adaptive_budget_with_scoring_keys_reaches_its_recall(backend: Any, reallocate: bool) -> None:
    case = Case(1, 4, 2, 1500, 64, "f16")
    params = every_parameter(case, "paper") | {"top_k": 400, "local_window": 9, "key_bits": 4, "recall": 0.5}
    found = estimated_recall(backend, case, params | {"reallocate": reallocate})
    assert (found >= 0.5 - 1e-5).all()
    assert (found < 0.51).all()


@pytest.mark.parametrize("share", [0.001, 0.3, 0.6, 5.0])
def test_the_oracle_keeps_the_fewest_keys(share: float) -> None:
    """Compare with a search over all numbers of keys, and `ops` with the oracle, with NaN and empty slots."""
    rng = np.random.default_rng(1)
    scores = rng.dirichlet(np.full(40, 0.2), size=(3, 2))
    scores[1, 0, 7] = np.nan
    scores[2, 0, 38] = np.nan  # in the local window
    padding = np.array([0, 5, 35])
    indices = top_k_select(scores, top_k=12, local_window=4, left_padding=padding)
    found = fewest(scores, indices, share=np.where([False, False, True], np.inf, share), local_window=4)
    for row in np.ndindex(3, 2):
        chosen = [j for j in indices[row] if j >= 0]
        rest = sorted((j for j in chosen if j < 36), key=lambda j: -np.nan_to_num(scores[row][j], nan=np.inf))
        sets = [sorted([j for j in chosen if j >= 36] + rest[:n]) for n in range(len(rest) + 1)]
        wanted = next((one for one in sets if scores[row][one].sum() >= share and row[0] < 2), sets[-1])  # 5 of 12 keys
        assert [j for j in found[row] if j >= 0] == wanted
    shares = np.where(indices >= 0, np.take_along_axis(scores, np.maximum(indices, 0), axis=-1), np.nan)
    local = mx.array(indices >= 36)
    selection = Selection(1, 12, 4, 1.0, left_padding=mx.array(padding), recall=share)
    ours, kept = keep_fewest(mx.array(indices), mx.array(shares, mx.float32), local, selection, 40)
    np.testing.assert_array_equal(ours, found)
    sums = np.where(found >= 0, np.take_along_axis(scores, np.maximum(found, 0), axis=-1), 0).sum(axis=-1)
    np.testing.assert_allclose(kept, sums, rtol=0, atol=1e-6)


def test_the_smallest_recall_selects_the_best_key() -> None:
    case = Case(1, 4, 2, 100, 64, "f32")
    params = every_parameter(case, "paper") | {"top_k": 20, "local_window": 0, "reallocate": False}
    wanted = oracle.sparq_attention(*case.inputs(), **params | {"top_k": 1})
    found = mlx_sparse.sparq_attention(*map(mx.array, case.inputs()), backend="ops", **params, recall=1e-320)
    np.testing.assert_allclose(np.array(found), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [-0.1, 1.5, True, "half", float("nan")])
def test_recall_is_0_or_a_share(value: Any) -> None:
    q, k, v = Case(1, 4, 2, 20, 64, "f32").inputs()
    message = f"^recall: expected a number above 0 and at most 1, got {re.escape(repr(value))}"
    with pytest.raises(ConfigError, match=message):
        oracle.sparq_attention(q, k, v, recall=value)
    with pytest.raises(ConfigError, match=message):
        mlx_sparse.sparq_attention(*map(mx.array, (q, k, v)), recall=value)
    with pytest.raises(ConfigError, match=message):
        SparQ(recall=value)


REFUSE = r"^(min_)?recall: expected 0 {}, got 0\.5\. Set top_k instead\.$"


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_other_backends_refuse_an_adaptive_budget(backend: Any) -> None:
    case = Case(1, 4, 2, 300, 64, "f32")
    with pytest.raises(ConfigError, match=REFUSE.format("with backend triton")):
        backend.public("sparq_attention", case, rank=16, top_k=32, recall=0.5)
    from mlx_sparse.cuda_ref.hf.cache import _sparq

    with pytest.raises(ConfigError, match=REFUSE.format("with transformers")):
        _sparq("sparq:min_recall=0.5")


def test_exported_files_refuse_an_adaptive_budget() -> None:
    if importlib.util.find_spec("onnx") is None:
        absent("ort", "onnx is not installed")
    from mlx_sparse.onnx_export.exporter.methods.sparq import SparQDecoding

    with pytest.raises(ConfigError, match=REFUSE.format("in an exported file")):
        SparQDecoding.resolve(SparQ(recall=0.5), None)
