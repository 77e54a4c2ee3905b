"""Calls of several queries by the Triton kernels: large groups, prefixes of buffers; see tests/conformance too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import PRECISION, Array, Case
from mlx_sparse.cuda_ref import PackedRows
from mlx_sparse.cuda_ref.api.several import attend_own
from mlx_sparse.cuda_ref.launchers import configs, saap, sparq
from torch_arrays import DEVICE, cached, cached_rows, component_major, to_numpy, to_torch

from mlx_sparse import BackendUnavailable, cuda_ref, oracle
from mlx_sparse.common.several import fold

BUCKETS = 12
EXACT = {"rank": 16, "top_k": 32, "reallocate": True}  # with logits in float32
# Settings of each method: those of SAAP have arrays besides, and those of codes `keys_t`.
SETTINGS: dict[str, dict[str, Any]] = {
    "sparq": {"rank": 16, "top_k": 32},
    "sparq-all components": {"rank": 64, "top_k": 33, "component_score": "query_key", "group_reduce": "logits"},
    "sparq-8 bits": {**EXACT, "key_bits": 8},
    "sparq-4 bits": {**EXACT, "key_bits": 4, "component_score": "query_key"},
    "quest": {"page_size": 16, "top_k": 48},
    "saap": {"sink_tokens": 2, "recent_tokens": 30},
}


@dataclass(frozen=True)
class Several(Case):
    """A call of ``L`` queries."""

    L: int = 2

    def __str__(self) -> str:
        return f"{super().__str__()}-L{self.L}"

    @property
    def P(self) -> int:
        return self.S - self.L + 1

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        return super().inputs(seed, self.L)


CASES = [
    Several(1, 1, 1, 150, 64, "f32", L=16),
    Several(1, 4, 1, 200, 64, "f16", L=2),
    Several(2, 8, 2, 140, 64, "f32", (0, 70), L=16),
    Several(1, 8, 1, 200, 128, "bf16", L=4),
    Several(1, 7, 1, 333, 80, "f16", L=5),  # a group of 35 rows, and six groups of keys in few bits
    Several(1, 8, 1, 300, 64, "f16", L=16),
]


def given(case: Several, name: str) -> dict[str, Any]:
    """What a public function is given, arrays in NumPy."""
    settings = dict(SETTINGS[name])
    if name == "saap":
        rng = np.random.default_rng(case.S)
        ids = rng.integers(0, BUCKETS, (case.B, case.Hkv, case.S)).astype(np.int32)
        visited = np.tile(np.array([1, 4, 7], dtype=np.int32), (case.B, case.Hkv, 1))
        settings |= {"bucket_ids": ids, "visited": visited}
    return settings


def arrays(case: Several) -> list[torch.Tensor]:
    """Queries as a model has them, keys and values as slices of a cache."""
    q, *rows = (to_torch(array, case.dtype) for array in case.inputs())
    return [q.transpose(1, 2).contiguous().transpose(1, 2), *map(cached, rows)]


def assert_near(out: torch.Tensor, expected: Array, dtype: str) -> None:
    # What a step gives is rounded to the type before it is merged.
    spacing = 3 * 2.0 ** -(PRECISION[dtype] + 1) * np.abs(expected).max()
    np.testing.assert_allclose(to_numpy(out), expected, rtol=0, atol=spacing + 2e-5)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("guarded")
def test_a_call_is_that_of_the_oracle(case: Several, name: str) -> None:
    function, settings = f"{name.partition('-')[0]}_attention", given(case, name)
    more = {"left_padding": case.padding, "verify": "sparse"}
    expected = getattr(oracle, function)(*case.inputs(), **settings, **more)
    for key in {"bucket_ids", "visited"} & settings.keys():
        settings[key] = torch.tensor(settings[key], device=DEVICE)
    q, k, v = arrays(case)
    if name == "sparq":
        settings["keys_t"] = component_major(k)
    assert_near(getattr(cuda_ref, function)(q, k, v, **settings, **more), expected, case.dtype)


@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[5]], ids=str)
@pytest.mark.usefixtures("guarded")
def test_logits_of_8_bits_change_a_choice_by_no_more_than_their_step(case: Several) -> None:
    q, k, _ = case.inputs()
    selection = {"rank": 16, "top_k": 24, "local_window": 4, "group_reduce": "softmax", "scale": case.D**-0.5}
    right = oracle.sparq_select(fold(q), k[:, :, : case.P], **selection, key_bits=4)
    keys = to_torch(k, case.dtype)[:, :, : case.P]
    coded, none = cuda_ref.code_keys(keys, key_bits=4), {"component_weight": None, "left_padding": None}
    indices, scores = sparq.sparq_select(
        fold(to_torch(q, case.dtype)), coded, keys=keys, key_bits=4, **selection, **none
    )
    assert scores.logits.dtype == torch.uint8
    left = set(range(case.P)) - set(indices[0, 0].tolist())
    chosen = [key for key in indices[0, 0].tolist() if key < case.P - 4]
    assert len(chosen) == 20
    # Each of the group's logits is off by 1/32 nat at most.
    assert right.scores[0, 0, chosen].min() >= right.scores[0, 0, sorted(left)].max() * np.exp(-1 / 16)


def packed(case: Several, seed: int) -> PackedRows:
    rng = np.random.default_rng(seed)
    rows = (case.B, case.Hkv, case.S)
    codes = torch.tensor(rng.integers(0, 2**32, (*rows, case.D // 8), dtype=np.uint32), device=DEVICE)
    scales, biases = (to_torch(part, case.dtype) for part in rng.normal(size=(2, *rows, case.D // 32)))
    return cached_rows(PackedRows(codes, scales / 16, biases, 4))


@pytest.mark.parametrize("settings", [{"rank": 64, "top_k": 32}, {**EXACT, "key_bits": 4}], ids=["rows", "a copy"])
@pytest.mark.usefixtures("guarded")
def test_packed_rows_are_read_for_all_queries_as_their_numbers(settings: dict[str, Any]) -> None:
    for case in (Several(1, 8, 1, 150, 64, "f16", L=16), Several(1, 4, 1, 150, 64, "f32", L=4)):
        q, keys, values = to_torch(case.inputs()[0], case.dtype), packed(case, 1), packed(case, 2)
        numbers = [to_numpy(rows[:]) for rows in (keys, values)]
        expected = oracle.sparq_attention(case.inputs()[0], *numbers, **settings, verify="sparse")
        assert_near(cuda_ref.sparq_attention(q, keys, values, **settings, verify="sparse"), expected, case.dtype)


def test_a_prefix_of_a_buffer_is_read_where_it_lies(guarded: list[Any]) -> None:
    case = CASES[5]
    q, k, v = arrays(case)
    for settings in ({"keys_t": component_major(k)}, {"key_bits": 4}):
        del guarded[:]
        cuda_ref.sparq_attention(q, k, v, rank=16, top_k=32, verify="sparse", **settings)
        for launch in guarded:
            for name, whole in {"keys": k, "values": v, "keys_t": settings.get("keys_t")}.items():
                read = launch.arguments.get(name)
                assert read is None or whole is None or read.data_ptr() == whole.data_ptr()
                assert read is None or launch.arguments["length"] == case.P


@pytest.mark.usefixtures("guarded")
def test_a_large_group_of_many_splits_is_merged_as_one_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES[5], S=700)
    chosen = torch.arange(0, 690, 2, dtype=torch.int32, device=DEVICE).expand(1, 1, -1)
    q, k, v = (to_torch(array, "f32") for array in case.inputs())
    found = {}
    for processors in (1, 64):
        monkeypatch.setattr(configs, "processors", lambda device, n=processors: n)
        found[processors] = cuda_ref.attend_indices(fold(q), k, v, chosen)
    expected = oracle.attend_indices(*map(to_numpy, (fold(q), k, v, chosen)), scale=case.D**-0.5)
    for results in found.values():
        for result, exact in zip(results, expected, strict=True):
            np.testing.assert_allclose(to_numpy(result), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.usefixtures("guarded")
def test_the_queries_of_a_call_are_routed_together(dtype: str) -> None:
    rng = np.random.default_rng(0)
    B, Hkv, G, L, D, H, C = 3, 2, 8, 16, 32, 48, 70
    shapes = {"out_weight": (Hkv, H, C), "out_bias": (Hkv, C), "hidden_weight": (Hkv, D, H), "hidden_bias": (Hkv, H)}
    network = {name: to_torch(0.3 * rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    q = to_torch(rng.normal(size=(B, Hkv * G, L, D)), dtype)
    visited = saap.saap_route(fold(q).contiguous(), saap.Network(**network), probes=5)
    numbers = {name: to_numpy(array) for name, array in network.items()}
    np.testing.assert_array_equal(to_numpy(visited), oracle.saap_route(to_numpy(fold(q)), **numbers, probes=5))


@pytest.mark.parametrize(("L", "padding"), [(2, None), (9, None), (5, (0, 12, 20))])
def test_own_keys_are_attended_causally_and_merged(L: int, padding: tuple[int, ...] | None) -> None:
    """Against dense attention: the step over the prefix is dense here, so that the whole is."""
    case = Several(len(padding or (0,)), 6, 2, 20, 16, "f32", padding, L=L)
    q, k, v = case.inputs()
    step = oracle.attend_indices(fold(q), k[:, :, : case.P], v[:, :, : case.P], listed(case), scale=0.3)
    for b, first in enumerate(padding or ()):
        k[b, :, :first] = v[b, :, :first] = np.inf
    first = None if padding is None else torch.tensor(padding, dtype=torch.int32, device=DEVICE)
    given = [to_torch(array, "f32") for array in (q, k, v, *step)]
    out, lse = attend_own(*given, scale=0.3, left_padding=first)
    expected = oracle.dense_attention(*case.inputs(), scale=0.3, left_padding=padding)
    np.testing.assert_allclose(to_numpy(out), expected, rtol=1e-6, atol=1e-6)
    assert (lse.dtype, tuple(lse.shape)) == (torch.float32, (case.B, 6, L))
    assert bool((lse == -torch.inf).any()) == (padding is not None)  # of queries that are padding themselves


def listed(case: Several) -> Array:
    """All keys of the prefix that are valid."""
    keys = np.tile(np.arange(case.P, dtype=np.int32), (case.B, case.Hkv, 1))
    first = np.array(case.padding or (0,) * case.B)
    return np.where(keys >= first[:, None, None], keys, -1)


def test_a_group_that_is_too_large_is_refused_in_one_line() -> None:
    q, k = torch.zeros(1, 18, 8, 64, device=DEVICE), torch.zeros(1, 2, 100, 64, device=DEVICE)
    message = "backend: expected at most 128 query heads per KV head, times the queries of a call, got 144."
    with pytest.raises(BackendUnavailable, match=f"^{message}$"):
        cuda_ref.sparq_attention(q.repeat(1, 1, 2, 1), k, k, top_k=16, verify="sparse")
    with pytest.raises(BackendUnavailable, match="got 129"):
        cuda_ref.dense_attention(q[:, :1, :1].expand(1, 129, 1, 64), k[:, :1], k[:, :1])
    with pytest.raises(BackendUnavailable, match="got 129"):
        cuda_ref.saap_route(q[:, :1, :1].expand(1, 129, 1, 64), out_weight=torch.zeros(1, 64, 8), probes=2)
    cuda_ref.sparq_attention(q.repeat(1, 1, 2, 1), k, k, top_k=16)  # dense
