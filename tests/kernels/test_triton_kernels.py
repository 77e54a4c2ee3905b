"""The Triton backend against the float64 oracle, over the one list of cases; on the CPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    CASES,
    SPARQ,
    Array,
    Case,
    assert_as_good_as_plain,
    assert_same_choice,
    lse_tolerance,
    parameters,
    plain_attention,
    plain_reallocation,
    round_to,
)
from mlx_sparse.cuda_ref.api import steps
from mlx_sparse.cuda_ref.launchers import attend, configs, sparq
from torch_arrays import DEVICE, DTYPES, cached, component_major, padding, to_numpy, to_torch
from torch_operators import assert_keeps_its_promises_and_compiles

from mlx_sparse import BackendUnavailable, ConfigError, ShapeError, cuda_ref, oracle

pytestmark = pytest.mark.usefixtures("guarded")
by_case = pytest.mark.parametrize("case", CASES, ids=str)


def by_setting(settings: Iterable[str]) -> pytest.MarkDecorator:
    """Every case with every setting; those of 32 heads, which take longest, with two of them."""
    pairs = [(case, setting) for setting in settings for case in CASES if case.Hq < 32 or setting in ("paper", "eval")]
    return pytest.mark.parametrize(("case", "setting"), pairs, ids=str)


SELECTION = ("rank", "top_k", "local_window", "group_reduce", "component_score", "scale")
SMALL = Case(2, 6, 2, 70, 64, "f32", padding=(0, 30))


def tensors(case: Case, *given: Array) -> list[torch.Tensor]:
    return [to_torch(array, case.dtype) for array in given]


def chosen_by_oracle(case: Case, q: Array, k: Array, params: dict[str, Any]) -> oracle.SparQSelection:
    return oracle.sparq_select(q, k, left_padding=case.padding, **{n: params[n] for n in SELECTION if n in params})


def choose(case: Case, q: torch.Tensor, keys: torch.Tensor, params: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Indices, and the scores behind them, from keys in a cache whose free columns are NaN."""
    weighted = params.get("component_score") == "query_key"
    return sparq.sparq_select(
        q,
        component_major(keys),
        rank=params["rank"],
        top_k=params["top_k"],
        local_window=params.get("local_window", params["top_k"] // 4),
        group_reduce=params.get("group_reduce", "softmax"),
        component_weight=steps.deviation(keys, padding(case)) if weighted else None,
        scale=params.get("scale", case.D**-0.5),
        left_padding=padding(case),
    )


@by_setting(SPARQ)
def test_sparq_chooses_the_keys_of_the_oracle_and_attends_to_them(case: Case, setting: str) -> None:
    q, k, v = case.inputs()
    params = parameters(case, setting)
    expected = chosen_by_oracle(case, q, k, params)
    queries, keys, values = tensors(case, q, k, v)
    indices, scores = choose(case, queries, keys, params)
    assert_same_choice(to_numpy(indices), expected.indices, expected.scores)

    # From here on the oracle's own choice, so that a tie cannot hide or cause an error.
    scale = params.get("scale", case.D**-0.5)
    reallocate = params.get("reallocate", case.Hq == case.Hkv) and case.S > params["top_k"]
    reallocation = None
    plain = plain_attention(q, k, v, expected.indices, scale, case.dtype)
    out, lse = oracle.attend_indices(q, k, v, expected.indices, scale=scale)
    if reallocate:
        mean = steps.masked_mean(values, padding(case))
        reallocation = attend.Reallocation(scores.logits, scores.softmax, mean)
        plain = plain_reallocation(plain, q, k, v, expected.indices, padding=case.padding, **params)
        out = oracle.sparq_attention(q, k, v, left_padding=case.padding, **params)
    got, got_lse = attend.attend(
        queries,
        cached(keys),
        cached(values),
        torch.tensor(expected.indices, device=DEVICE),
        scale=scale,
        reallocation=reallocation,
    )
    assert got.dtype == DTYPES[case.dtype]
    assert_as_good_as_plain(to_numpy(got), out, round_to(plain, case.dtype), case.dtype)
    assert got_lse.dtype == torch.float32
    finite = np.isfinite(lse)
    assert (np.isfinite(to_numpy(got_lse)) == finite).all()
    allowed = lse_tolerance(q, k, expected.indices, scale, lse)
    np.testing.assert_allclose(to_numpy(got_lse)[finite], lse[finite], rtol=0, atol=allowed)


def test_of_components_that_tie_the_first_are_taken() -> None:
    case = Case(1, 2, 2, 300, 64, "f32")
    q, k, _ = case.inputs()
    q = np.sign(q)
    params = {"rank": 8, "top_k": 16}
    queries, keys = tensors(case, q, k)
    expected = chosen_by_oracle(case, q, k, params)
    assert_same_choice(to_numpy(choose(case, queries, keys, params)[0]), expected.indices, expected.scores)


def test_a_program_adds_up_the_softmax_of_all_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "processors", lambda device: 1)
    case = Case(2, 4, 2, 1100, 64, "f32", padding=(0, 600))
    q, k, _ = case.inputs()
    _, scores = choose(case, *tensors(case, q, k), {"rank": 16, "top_k": 32})
    logits = to_numpy(scores.logits).astype(np.float64)
    most = logits.max(axis=-1)
    expected = np.stack([most, 1 / np.exp(logits - most[..., None]).sum(axis=-1)], axis=-1)
    assert scores.statistics.shape[-1] == 1
    np.testing.assert_allclose(to_numpy(scores.softmax), expected, rtol=1e-5)


@by_setting(["paper", "reallocate"])
def test_sparq_attention_equals_the_oracle_and_says_what_it_moved(case: Case, setting: str) -> None:
    q, k, v = case.inputs()
    params = parameters(case, setting)
    expected, stats = oracle.sparq_attention(q, k, v, left_padding=case.padding, return_stats="mass", **params)
    out, measured = cuda_ref.sparq_attention(
        *tensors(case, q, k, v), left_padding=case.padding, return_stats="mass", **params
    )
    chosen = chosen_by_oracle(case, q, k, params).indices
    plain = plain_attention(q, k, v, chosen, case.D**-0.5, case.dtype)
    if params.get("reallocate", case.Hq == case.Hkv) and case.S > params["top_k"]:
        plain = round_to(plain_reallocation(plain, q, k, v, chosen, padding=case.padding, **params), case.dtype)
    assert_as_good_as_plain(to_numpy(out), expected, plain, case.dtype)
    assert (measured.elements, measured.density) == (stats.elements, stats.density)
    np.testing.assert_allclose(to_numpy(measured.retained_mass), stats.retained_mass, rtol=1e-4, atol=1e-6)


@by_case
def test_split_dense_decode_equals_the_oracle(case: Case) -> None:
    q, k, v = case.inputs(seed=1)
    expected = oracle.dense_attention(q, k, v, left_padding=case.padding)
    queries, keys, values = tensors(case, q, k, v)
    out = cuda_ref.dense_attention(queries, cached(keys), cached(values), left_padding=case.padding)
    everything = np.broadcast_to(np.arange(case.S), (case.B, case.Hkv, case.S))
    if case.padding:
        everything = np.where(everything >= np.array(case.padding)[:, None, None], everything, -1)
    plain = plain_attention(q, k, v, everything, case.D**-0.5, case.dtype)
    assert_as_good_as_plain(to_numpy(out), expected, plain, case.dtype)


def test_weights_are_not_rounded_to_the_type_of_the_values() -> None:
    case = Case(2, 8, 2, 127, 64, "f16")
    q, k, v = case.inputs()
    expected = oracle.dense_attention(q, k, v)
    error = np.abs(to_numpy(cuda_ref.dense_attention(*tensors(case, q, k, v))) - expected)
    # The rounding of the result, and what is below the smallest number of the type in every weight; the largest is 1.
    allowed = np.spacing(np.abs(expected).astype(np.float16)) / 2 + case.S * 2.0**-25 * np.abs(v).max()
    assert (error <= allowed).all()


@pytest.mark.parametrize("empty", [-1, 20, 25000])
def test_an_index_that_is_no_key_is_an_empty_slot(empty: int) -> None:
    case = Case(1, 4, 2, 20, 64, "f32")
    q, k, v = case.inputs()
    indices = np.array([[[3, 7, empty]] * 2], dtype=np.int32)
    expected, _ = oracle.attend_indices(q, k, v, indices[..., :2], scale=0.2)
    queries, keys, values = tensors(case, q, k, v)
    out, _ = cuda_ref.attend_indices(
        queries, cached(keys), cached(values), torch.tensor(indices, device=DEVICE), scale=0.2
    )
    np.testing.assert_allclose(to_numpy(out), expected, rtol=0, atol=1e-6)


def test_an_index_of_64_bits_does_not_wrap_to_a_key() -> None:
    case = Case(1, 4, 2, 20, 64, "f32")
    indices = torch.tensor([[[3, 2**32 + 7]] * 2], device=DEVICE)
    out, lse = cuda_ref.attend_indices(*tensors(case, *case.inputs()), indices)
    alone, alone_lse = cuda_ref.attend_indices(*tensors(case, *case.inputs()), indices[..., :1])
    assert torch.equal(out, alone)
    assert torch.equal(lse, alone_lse)


def test_a_list_without_entries_gives_zeros() -> None:
    case = Case(1, 4, 2, 20, 64, "f32")
    empty = torch.zeros((1, 2, 0), dtype=torch.int32, device=DEVICE)
    out, lse = cuda_ref.attend_indices(*tensors(case, *case.inputs()), empty)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("poison", [1e3, float("inf"), float("nan")])
@pytest.mark.parametrize("method", ["sparq", "dense"])
def test_padded_rows_never_reach_the_output(method: str, poison: float) -> None:
    case = Case(2, 6, 2, 300, 64, "f32", padding=(290, 7))
    q, k, v = case.inputs()
    clean = getattr(oracle, f"{method}_attention")(q, k, v, left_padding=case.padding)
    for row, first in enumerate(case.padding or ()):
        k[row, :, :first] = poison
        v[row, :, :first] = poison
    out = getattr(cuda_ref, f"{method}_attention")(*tensors(case, q, k, v), left_padding=case.padding)
    np.testing.assert_allclose(to_numpy(out), clean, rtol=0, atol=1e-5)


def test_a_row_without_a_valid_key_gives_zeros_whatever_value_mean_is() -> None:
    case = Case(2, 6, 2, 300, 64, "f32", padding=(300, 0))
    given = {"value_mean": torch.full((2, 2, 64), 7.0, device=DEVICE), "left_padding": case.padding}
    out = cuda_ref.sparq_attention(*tensors(case, *case.inputs()), rank=16, top_k=32, reallocate=True, **given)
    assert (out[0] == 0).all()
    assert (out[1] != 0).all()


@pytest.mark.parametrize("L", [2, 5, 70])
@pytest.mark.parametrize("method", ["sparq", "dense"])
def test_several_queries_are_attended_densely_and_causally(method: str, L: int) -> None:
    for case in (SMALL, Case(1, 6, 2, 70, 64, "f32")):
        q, k, v = case.inputs(L=L)
        out = getattr(cuda_ref, f"{method}_attention")(*tensors(case, q, k, v), left_padding=case.padding)
        expected = oracle.dense_attention(q, k, v, left_padding=case.padding)
        np.testing.assert_allclose(to_numpy(out), expected, rtol=0, atol=1e-5)


def test_keeping_every_key_is_dense_attention_to_the_last_bit() -> None:
    arrays = tensors(SMALL, *SMALL.inputs())
    sparse = cuda_ref.sparq_attention(*arrays, rank=2, top_k=SMALL.S, left_padding=SMALL.padding)
    assert torch.equal(sparse, cuda_ref.dense_attention(*arrays, left_padding=SMALL.padding))


def test_a_row_without_a_valid_key_gives_zeros_and_has_lost_nothing() -> None:
    case = Case(2, 6, 2, 300, 64, "f32", padding=(300, 0))
    out, stats = cuda_ref.sparq_attention(
        *tensors(case, *case.inputs()), left_padding=case.padding, reallocate=True, return_stats="mass"
    )
    assert (out[0] == 0).all()
    assert (stats.retained_mass[0] == 1).all()


def test_a_given_value_mean_is_used_whatever_its_strides() -> None:
    case = Case(1, 2, 2, 300, 64, "f32")
    q, k, v = case.inputs()
    mean = np.linspace(0, 7, 128, dtype=np.float32).reshape(1, 64, 2).swapaxes(1, 2)
    given = torch.as_tensor(mean, device=DEVICE)
    assert not given.is_contiguous()
    out = cuda_ref.sparq_attention(*tensors(case, q, k, v), rank=8, top_k=16, value_mean=given)
    expected = oracle.sparq_attention(q, k, v, rank=8, top_k=16, value_mean=mean)
    np.testing.assert_allclose(to_numpy(out), expected, rtol=0, atol=1e-5)


LAYOUTS = {
    "of a cache": component_major,
    "contiguous": lambda keys: keys.transpose(-1, -2).contiguous(),
    "a view of keys": lambda keys: keys.transpose(-1, -2),
    "every other column": lambda keys: component_major(keys.repeat_interleave(2, dim=2))[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_t_may_have_any_strides(layout: str) -> None:
    case = Case(1, 6, 2, 203, 64, "f32")
    q, k, v = case.inputs()
    queries, keys, values = tensors(case, q, k, v)
    out = cuda_ref.sparq_attention(queries, keys, values, rank=8, top_k=40, keys_t=LAYOUTS[layout](keys))
    expected = oracle.sparq_attention(q, k, v, rank=8, top_k=40)
    np.testing.assert_allclose(to_numpy(out), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("S", [31, 32, 33])
def test_rows_are_read_beyond_their_end_only_where_there_is_room(S: int) -> None:
    whole = torch.zeros(1, 2, 8, 48, device=DEVICE)
    assert sparq.readable_beyond(whole[..., :S])
    exact = torch.zeros(1, 2, 8, S, device=DEVICE)
    assert sparq.readable_beyond(exact) == (S % 16 == 0)
    # The last row ends with its storage, though rows start 48 apart.
    last = torch.zeros(15 * 48 + S, device=DEVICE).as_strided((1, 2, 8, S), (8 * 48, 8 * 48, 48, 1))
    assert sparq.readable_beyond(last) == (S % 16 == 0)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels from now on started."""
    started: list[str] = []
    run = sparq.Launch.run

    def counted(self: sparq.Launch) -> None:
        started.append(self.kernel.__name__)
        run(self)

    monkeypatch.setattr(sparq.Launch, "run", counted)
    return started


@pytest.mark.parametrize(("S", "top_k"), [(40, 16), (3000, 128), (3000, 2500)])
def test_a_step_of_sparq_is_three_launches(monkeypatch: pytest.MonkeyPatch, S: int, top_k: int) -> None:
    case = Case(1, 4, 2, S, 64, "f16")
    q, k, v = tensors(case, *case.inputs())
    started = launches(monkeypatch)
    torch.ops.mlx_sparse.sparq_decode(
        q, k, v, component_major(k), 16, top_k, 4, "softmax", None, 0.1, None, torch.zeros(1, 2, 64, device=DEVICE)
    )
    assert started == ["sparq_scores", "top_k_select", "attend"]


OPERATORS = {
    "sparq_decode": lambda q, k, v: (q, k, v, component_major(k), 8, 16, 4, "softmax", None, 0.1, None, None),
    "dense_decode": lambda q, k, v: (q, k, v, 0.1, None),
    "attend_indices": lambda q, k, v: (q, k, v, torch.tensor([[[1, 2, -1]] * 2], dtype=torch.int32).to(DEVICE), 0.1),
    "top_k_select": lambda q, k, v: (k[..., 0].float(), 8, 2, None),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_of_torch_keeps_its_promises_and_compiles(name: str) -> None:
    case = Case(1, 4, 2, 50, 64, "f32")
    assert_keeps_its_promises_and_compiles(name, OPERATORS[name](*tensors(case, *case.inputs())))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rank": 0}, ConfigError, "rank: expected an integer of at least 1, got 0"),
    ({"rank": 65}, ConfigError, "rank: expected at most the head dim D=64, got 65"),
    ({"top_k": -3}, ConfigError, "top_k: expected an integer of at least 1, got -3"),
    ({"local_window": 200}, ConfigError, "local_window: expected at most top_k=128"),
    ({"reallocate": "yes"}, ConfigError, "reallocate: expected one of auto, true, false"),
    ({"group_reduce": "max"}, ConfigError, "group_reduce: expected one of softmax, logits"),
    ({"component_score": "key"}, ConfigError, "component_score: expected one of query, query_key"),
    ({"keys_t": torch.zeros(1, 2, 50, 64)}, ShapeError, "keys_t: expected shape"),
    ({"keys_t": torch.zeros(1, 2, 64, 50, dtype=torch.float16)}, ConfigError, "keys_t: expected the type"),
    ({"keys_t": torch.zeros(1, 2, 64, 50, device="meta")}, ConfigError, "keys_t: expected a tensor on"),
    ({"value_mean": torch.zeros(1, 2)}, ShapeError, "value_mean: expected shape"),
    ({"left_padding": [0, 1]}, ShapeError, "left_padding: expected shape"),
    ({"left_padding": [0.5]}, ShapeError, "left_padding: expected integers"),
    ({"left_padding": [None]}, ShapeError, r"left_padding: expected 1 integers, got \[None\]"),
    ({"keys_t": [1]}, ConfigError, "keys_t: expected a tensor of torch, got list"),
    ({"backend": "ops"}, BackendUnavailable, "backend: expected auto or triton for mlx_sparse.cuda_ref, got ops"),
    ({"return_stats": "all"}, ConfigError, "return_stats: expected one of"),
]


@pytest.mark.parametrize(("settings", "error", "message"), BAD, ids=[message[:40] for _, _, message in BAD])
def test_a_wrong_argument_gets_one_clear_line(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    case = Case(1, 4, 2, 50, 64, "f32")
    with pytest.raises(error, match=message) as caught:
        cuda_ref.sparq_attention(*tensors(case, *case.inputs()), **settings)
    assert "\n" not in str(caught.value)


def test_what_is_no_tensor_or_has_no_memory_is_refused() -> None:
    arrays = [torch.zeros(1, 2, 1, 64, device=DEVICE)] * 2
    with pytest.raises(ConfigError, match="queries: expected a tensor of torch, got ndarray"):
        cuda_ref.sparq_attention(np.zeros((1, 2, 1, 64)), *arrays)
    with pytest.raises(BackendUnavailable, match="the tensors are on meta; move them to the GPU"):
        cuda_ref.dense_attention(*[torch.zeros(1, 2, 1, 64, device="meta")] * 3)
    with pytest.raises(ShapeError, match=r"queries: expected at most 65535 sequences and KV heads, got \(65536, 2\)"):
        cuda_ref.dense_attention(*[arrays[0].expand(65536, -1, -1, -1)] * 3)


def test_a_gradient_is_refused_and_not_left_out() -> None:
    queries, keys, values = tensors(SMALL, *SMALL.inputs())
    for method in (cuda_ref.sparq_attention, cuda_ref.dense_attention):
        with pytest.raises(RuntimeError, match="no autograd formula"):
            method(queries.requires_grad_(), keys, values).sum().backward()


def test_types_and_head_dims_without_a_kernel_are_refused() -> None:
    arrays = [torch.zeros(1, 2, 1, 64, dtype=torch.float64, device=DEVICE)] * 3
    with pytest.raises(ConfigError, match="queries: expected float32, float16 or bfloat16, got float64"):
        cuda_ref.sparq_attention(*arrays)
    for D in (8, 12, 70, 512):
        with pytest.raises(BackendUnavailable, match=f"from 16 to 256, got {D}"):
            cuda_ref.dense_attention(*[torch.zeros(1, 2, 1, D, device=DEVICE)] * 3)
