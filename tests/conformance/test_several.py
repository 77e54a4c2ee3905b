"""Calls of several queries, docs/spec/several.md: the oracle against a loop, every backend against the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from adapters import having
from cases import PRECISION, Array, Case

import mlx_sparse
from mlx_sparse import oracle

BUCKETS = 12
# Settings of each method; SAAP's arrays are of the case.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sparq": ("sparq", {"rank": 16, "top_k": 32}),
    "sparq-eval": ("sparq", {"rank": 16, "top_k": 33, "local_window": 9, "group_reduce": "logits"}),
    "sparq-mixed": ("sparq", {"rank": 16, "top_k": 32, "component_score": "query_key", "reallocate": True}),
    "sparq-coded": ("sparq", {"rank": 16, "top_k": 32, "key_bits": 4, "reallocate": True}),
    "quest": ("quest", {"page_size": 16, "top_k": 48}),
    "saap": ("saap", {"sink_tokens": 2, "recent_tokens": 30}),
    "streaming": ("streaming", {"sink_tokens": 4, "recent_tokens": 28}),
}


@dataclass(frozen=True)
class Several(Case):
    """A call of ``L`` queries."""

    L: int = 2

    def __str__(self) -> str:
        return f"{super().__str__()}-L{self.L}"

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        return super().inputs(seed, self.L)

    def settings(self, name: str) -> dict[str, Any]:
        """What a public function is given, arrays in NumPy."""
        method, given = SETTINGS[name]
        if method != "saap":
            return dict(given)
        rng = np.random.default_rng(self.S)
        ids = rng.integers(0, BUCKETS, (self.B, self.Hkv, self.S)).astype(np.int32)
        visited = np.sort(rng.permuted(np.tile(np.arange(BUCKETS), (self.B, self.Hkv, 1)), axis=-1)[..., :3])
        return {**given, "bucket_ids": ids, "visited": visited.astype(np.int32)}


CASES = [
    Several(1, 4, 4, 129, 64, "f32", L=16),
    Several(2, 6, 2, 150, 64, "f32", (0, 61), L=2),
    Several(2, 6, 2, 150, 64, "f32", (0, 149), L=4),
    Several(1, 8, 2, 300, 80, "bf16", L=4),
    Several(1, 8, 1, 257, 128, "f16", L=2),
    Several(1, 8, 2, 130, 64, "f32", L=16),
    Several(1, 16, 2, 200, 128, "f16", L=16),
]
by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_setting = pytest.mark.parametrize("name", SETTINGS)


def wanted(case: Several, name: str, **more: Any) -> Any:
    function = getattr(oracle, f"{SETTINGS[name][0]}_attention")
    return function(*case.inputs(), **case.settings(name), left_padding=case.padding, verify="sparse", **more)


def chosen(case: Several, name: str) -> list[list[set[int]]]:
    """The keys of each KV head, by its own rule, among those that the first query sees."""
    q, k, _ = case.inputs()
    P, method = case.S - case.L + 1, SETTINGS[name][0]
    given = case.settings(name)
    folded, k = q.reshape(case.B, -1, 1, case.D), k[:, :, :P]
    if method == "sparq":
        indices = oracle.sparq_select(folded, k, **given, left_padding=case.padding).indices
    elif method == "quest":
        indices = oracle.quest_select(folded, k, **given, left_padding=case.padding)[0]
    else:
        first = np.zeros(case.B, int) if case.padding is None else np.array(case.padding)
        valid = np.arange(P) >= first[:, None, None]
        exact = (np.arange(P) < (first + given["sink_tokens"])[:, None, None]) | (
            np.arange(P) >= P - given["recent_tokens"]
        )
        there = np.broadcast_to(valid & exact, (case.B, case.Hkv, P))
        if method == "saap":
            ids = given["bucket_ids"][..., :P]
            there = there | (valid & (ids[..., None] == given["visited"][:, :, None]).any(axis=-1))
        indices = np.where(there, np.arange(P), -1)
    return [[set(row[row >= 0].tolist()) for row in heads] for heads in indices]


@pytest.mark.parametrize("name", [name for name in SETTINGS if not SETTINGS[name][1].get("reallocate")])
@by_case
def test_each_query_attends_the_calls_choice_and_the_calls_own_keys_up_to_itself(case: Several, name: str) -> None:
    q, k, v = (array.astype(np.float64) for array in case.inputs())
    more = {"reallocate": False} if SETTINGS[name][0] == "sparq" else {}
    out, first, keys = wanted(case, name, **more), case.padding or (0,) * case.B, chosen(case, name)
    for b, h, i in np.ndindex(case.B, case.Hq, case.L):
        kv, position = h // (case.Hq // case.Hkv), case.S - case.L + i
        own = set(range(max(case.S - case.L + 1, first[b]), position + 1))
        listed = sorted(keys[b][kv] | own)
        if not listed:
            assert (out[b, h, i] == 0).all()
            continue
        logits = k[b, kv, listed] @ q[b, h, i] * case.D**-0.5
        weights = np.exp(logits - logits.max())
        np.testing.assert_allclose(out[b, h, i], weights @ v[b, kv, listed] / weights.sum(), rtol=0, atol=1e-12)


@by_case
def test_the_first_query_never_sees_what_a_later_token_brings(case: Several) -> None:
    """Reallocation included: with the same choice of keys, its output is that of the call without the later rows."""
    given = {"rank": 16, "top_k": 32, "reallocate": True, "verify": "sparse", "left_padding": case.padding}
    q, k, v = case.inputs()
    changed = v.copy()
    changed[:, :, case.S - case.L + 1 :] += 100
    before, after = (oracle.sparq_attention(q, k, values, **given) for values in (v, changed))
    np.testing.assert_array_equal(before[:, :, 0], after[:, :, 0])
    assert (before[:, :, 1:] != after[:, :, 1:]).any()


def takes(backend: str, name: str) -> bool:
    """Metal and Triton hold logits of coded keys in 8 bits where they may: tests/kernels has those."""
    return SETTINGS[name][0] != "streaming" or backend == "ops"


@pytest.mark.parametrize(
    ("backend", "name"),
    [(backend, name) for backend in having("attend_indices") for name in SETTINGS if takes(backend, name)],
    indirect=["backend"],
)
@by_case
def test_a_backend_makes_one_choice_for_all_queries_as_the_oracle(backend: Any, name: str, case: Several) -> None:
    arrays = {"bucket_ids", "visited"}
    given = {key: backend.integers(it) if key in arrays else it for key, it in case.settings(name).items()}
    given |= {"left_padding": case.padding, "verify": "sparse", "return_stats": "mass"}
    out, stats = backend.public(f"{SETTINGS[name][0]}_attention", case, **given)
    expected, other = wanted(case, name, return_stats="mass")
    # A part is rounded to the type before it is merged.
    spacing = 3 * 2.0 ** -(PRECISION[case.dtype] + 1) * np.abs(expected).max()
    np.testing.assert_allclose(backend.numpy(out), expected, rtol=0, atol=spacing + 2e-5)
    np.testing.assert_allclose(backend.numpy(stats.retained_mass), other.retained_mass, rtol=1e-3, atol=1e-6)
    assert (stats.elements, stats.density) == (other.elements, other.density)
    np.testing.assert_allclose(stats.selectivity, other.selectivity, rtol=1e-12)


@by_setting
@pytest.mark.parametrize(("L", "verify"), [(2, "dense"), (17, "sparse"), (100, "sparse")])
def test_a_call_that_is_not_asked_or_too_long_is_dense(name: str, L: int, verify: str) -> None:
    case = Several(1, 4, 2, 150, 64, "f32", L=L)
    function = getattr(oracle, f"{SETTINGS[name][0]}_attention")
    out = function(*case.inputs(), **case.settings(name), verify=verify)
    np.testing.assert_array_equal(out, oracle.dense_attention(*case.inputs()))


@by_setting
def test_a_call_whose_first_query_sees_no_more_than_a_step_attends_is_dense(name: str) -> None:
    attended = {"quest": 48, "sparq-eval": 33}.get(name, 32)
    for more, equal in ((0, True), (1, False)):
        case = Several(1, 4, 2, attended + 3 + more, 64, "f32", L=4)
        dense = oracle.dense_attention(*case.inputs())
        assert (wanted(case, name) == dense).all() == equal


@pytest.mark.parametrize("backend", having("attend_indices"), indirect=True)
def test_another_word_than_dense_or_sparse_is_refused(backend: Any) -> None:
    with pytest.raises(mlx_sparse.ConfigError, match="verify: expected one of dense, sparse, got 'all'"):
        backend.public("sparq_attention", Several(1, 2, 2, 40, 64, "f32"), verify="all")
