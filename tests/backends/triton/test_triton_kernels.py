"""Test the Triton launchers: launches, torch operators and errors; tests/core compares numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import reference
import torch
from cases import Array, Case
from mlx_sparse.cuda_ref import torch_functions
from mlx_sparse.cuda_ref.launchers import attend, blocks, configs, saap, sample, select, sparq
from torch_arrays import DEVICE, component_major, padding, to_numpy, to_torch

from mlx_sparse import BackendUnavailable, ConfigError, ShapeError, cuda_ref
from mlx_sparse.methods.sparq.config import Selection

pytestmark = pytest.mark.usefixtures("checked_memory")
SMALL = Case(2, 6, 2, 70, 64, "f32", padding=(0, 30))


def tensors(case: Case, *given: Array) -> list[torch.Tensor]:
    return [to_torch(array, case.dtype) for array in given]


def test_softmax_statistics_cover_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "processors", lambda device: 1)
    case = Case(2, 4, 2, 1100, 64, "f32", padding=(0, 600))
    queries, keys, _ = tensors(case, *case.inputs())
    selection = Selection(16, 32, 8, 0.125, left_padding=padding(case), keys_t=component_major(keys))
    _, scores = sparq.sparq_select(queries, keys, selection, exact=True)
    logits = to_numpy(scores.logits).astype(np.float64)
    most = logits.max(axis=-1)
    expected = np.stack([most, 1 / np.exp(logits - most[..., None]).sum(axis=-1)], axis=-1)
    assert scores.statistics.shape[-1] == 1
    np.testing.assert_allclose(to_numpy(scores.softmax), expected, rtol=1e-5)


def test_weights_are_not_rounded_to_half_precision() -> None:
    case = Case(2, 8, 2, 127, 64, "f16")
    q, k, v = case.inputs()
    expected = reference.dense_attention(q, k, v)
    error = np.abs(to_numpy(cuda_ref.dense_attention(*tensors(case, q, k, v))) - expected)
    # Rounding of the result, plus the underflow of each weight relative to a largest weight of 1.
    allowed = np.spacing(np.abs(expected).astype(np.float16)) / 2 + case.S * 2.0**-25 * np.abs(v).max()
    assert (error <= allowed).all()


LAYOUTS = {
    "of a cache": component_major,
    "contiguous": lambda keys: keys.transpose(-1, -2).contiguous(),
    "a view of keys": lambda keys: keys.transpose(-1, -2),
    "every other column": lambda keys: component_major(keys.repeat_interleave(2, dim=2))[..., ::2],
}


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "of a cache"])
def test_keys_t_may_have_any_strides(layout: str) -> None:
    queries, keys, values = tensors(case := Case(1, 6, 2, 203, 64, "f32"), *case.inputs())
    out, expected = (
        cuda_ref.sparq_attention(queries, keys, values, rank=8, top_k=40, keys_t=LAYOUTS[name](keys))
        for name in (layout, "of a cache")
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("S", [31, 32, 33])
def test_rows_are_read_past_their_end_only_within_storage(S: int) -> None:
    whole = torch.zeros(1, 2, 8, 48, device=DEVICE)
    assert sparq.readable_beyond(whole[..., :S])
    exact = torch.zeros(1, 2, 8, S, device=DEVICE)
    assert sparq.readable_beyond(exact) == (S % 16 == 0)
    # The last row ends at the end of the storage, although rows are 48 elements apart.
    last = torch.zeros(15 * 48 + S, device=DEVICE).as_strided((1, 2, 8, S), (8 * 48, 8 * 48, 48, 1))
    assert sparq.readable_beyond(last) == (S % 16 == 0)


def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of all kernels that are launched after this call."""
    names: list[str] = []
    run = sparq.Launch.run

    def counted(self: sparq.Launch) -> None:
        names.append(self.kernel.__name__)
        run(self)

    monkeypatch.setattr(sparq.Launch, "run", counted)
    return names


@pytest.mark.parametrize(("S", "top_k"), [(40, 16), (3000, 128), (3000, 2500)])
@pytest.mark.parametrize("key_bits", [16, 4])
def test_sparq_step_is_three_launches(monkeypatch: pytest.MonkeyPatch, S: int, top_k: int, key_bits: int) -> None:
    case = Case(1, 4, 2, S, 64, "f16")
    q, k, v = tensors(case, *case.inputs())
    scored = [component_major(k)] if key_bits == 16 else list(cuda_ref.code_keys(k))
    names = started(monkeypatch)
    sparq.sparq_decode(q, k, v, scored, 16, top_k, 4, 0.1, value_mean=torch.zeros(1, 2, 64, device=DEVICE))
    assert names == ["sparq_scores" if key_bits == 16 else "sparq_code_scores", "top_k_select", "attend"]


@pytest.mark.parametrize("hidden", [32, None])
def test_saap_step_is_three_or_four_launches(monkeypatch: pytest.MonkeyPatch, hidden: int | None) -> None:
    names = started(monkeypatch)
    network = [torch.randn(2, hidden or 64, 20), None, torch.randn(2, 64, hidden) if hidden else None, None]
    network = [None if array is None else array.to(DEVICE) for array in network]
    visited = saap.saap_route(torch.randn(1, 4, 1, 64, device=DEVICE), *network, 2)
    q, k, v, _, *index = saap_step()
    saap.saap_decode(q, k, v, visited, *index, 40, 1, 60, 0.1, None)
    assert names == [*(["saap_hidden"] if hidden else []), "saap_route", "saap_expand", "attend"]


def test_padded_rows_score_like_single_rows() -> None:
    case = Case(5, 4, 2, 1400, 64, "f16", padding=(0, 9, 700, 1337, 1400))
    q, k, _ = tensors(case, *case.inputs())

    def logits(rows: slice, first: int, padding: torch.Tensor, narrow: bool) -> torch.Tensor:
        keys = k[rows, :, first:]
        coded = torch_functions.code_keys(keys, padding)
        selection = Selection(16, 32, 8, 0.125, left_padding=padding, keys_t=coded)
        return sparq.sparq_code_scores(q[rows], keys, selection, narrow=narrow).logits

    for narrow in (True, False):
        together = logits(slice(None), 0, padding(case), narrow)
        for b, first in enumerate(case.padding):
            if first < case.S:
                alone = logits(slice(b, b + 1), first, torch.zeros(1, dtype=torch.int32, device=DEVICE), narrow)
                assert torch.equal(together[b, :, :, first : case.S], alone[0, :, :, : case.S - first])


def step() -> list[torch.Tensor]:
    """Return the queries, keys and values of a small decode step."""
    return tensors(case := Case(1, 4, 2, 70, 64, "f32"), *case.inputs())


def prompt() -> list[torch.Tensor]:
    return [torch.randn(1, heads, length, 64).to(DEVICE) for heads, length in ((2, 66), (1, 90), (1, 90))]


def saap_step() -> list[torch.Tensor]:
    """Return queries, keys and values, the visited buckets, and an index of 40 of the 70 keys."""
    ids = torch.randint(0, 4, (1, 2, 40), device=DEVICE)
    index = cuda_ref.saap_index(ids, buckets=4, sink_tokens=1)
    return [*step(), integers([[[0, 2], [1, 3]]]), *index]


def integers(array: Any) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.int32, device=DEVICE)


def with_keys_t(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
    return q, k, v, [component_major(k)], 8, 16, 4, 0.1


def with_codes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
    return q, k, v, list(cuda_ref.code_keys(k)), 8, 16, 4, 0.1


# Arguments of each operator.
OPERATORS: dict[str, tuple[Any, Callable[[], Sequence[Any]]]] = {
    "sparq": (sparq.sparq_decode, lambda: with_keys_t(*step())),
    "sparq-codes": (sparq.sparq_decode, lambda: with_codes(*step())),
    "dense": (attend.dense_decode, lambda: (*step(), 0.1, None)),
    "list": (attend.attend_indices, lambda: (*step(), integers([[[1, 2, -1]] * 2]), 0.1)),
    "counted list": (attend.attend_indices, lambda: (*step(), integers([[[1, 2, 3]] * 2]), 0.1, integers([[2, 0]]))),
    "select": (select.top_k_select, lambda: (step()[1][..., 0].float(), 8, 2, None)),
    "route": (
        saap.saap_route,
        lambda: (step()[0], *(torch.randn(2, n, m, device=DEVICE) if m else None for n, m in NETWORK), 3),
    ),
    "expand": (saap.saap_indices, lambda: (*saap_step()[3:], 50, 40, 1, 60, None)),
    "saap": (saap.saap_decode, lambda: (*saap_step(), 40, 1, 60, 0.1, None)),
    "sample": (sample.sample_attention, lambda: (*prompt(), 0.8, 0.7, 2, 32, 0.1)),
    "sample scores": (sample.sample_scores, lambda: (*prompt()[:2], 2, 32, 0.1)),
    "sample select": (sample.sample_select, lambda: (*prompt()[:2], 0.8, 0.7, 2, 32, 0.1)),
    "blocks": (blocks.attend_blocks, lambda: (*prompt(), integers([[[[0, 0]] * 3] * 2]), 32, 0.1)),
}
NETWORK = ((32, 20), (0, 0), (64, 32), (0, 0))  # weights with a hidden layer of 32, and no biases


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_operators_pass_opcheck_and_compile(name: str) -> None:
    """Check the schema, the fake implementation and the result under `torch.compile`."""
    torch.manual_seed(0)
    operator, make = OPERATORS[name]
    arguments = tuple(make())
    torch.library.opcheck(operator, arguments)
    # Dynamo caches at most eight versions of the function through which it compiles all operators.
    torch.compiler.reset()
    found = torch.compile(operator._opoverload, backend="aot_eager", fullgraph=True)(*arguments)
    expected = operator(*arguments)
    assert type(found) is type(expected)
    for got, wanted in zip(*(pair if isinstance(pair, tuple) else (pair,) for pair in (found, expected)), strict=True):
        assert torch.equal(got, wanted)


def test_wrong_tensors_are_refused() -> None:
    arrays = [torch.zeros(1, 2, 1, 64, device=DEVICE)] * 2
    with pytest.raises(ConfigError, match="queries: expected a torch tensor, got ndarray"):
        cuda_ref.sparq_attention(np.zeros((1, 2, 1, 64)), *arrays)
    with pytest.raises(BackendUnavailable, match="the tensors are on meta; move them to the GPU"):
        cuda_ref.dense_attention(*[torch.zeros(1, 2, 1, 64, device="meta")] * 3)
    with pytest.raises(ConfigError, match="keys_t: expected a tensor on"):
        keys = torch.zeros(1, 2, 50, 64, device=DEVICE)
        cuda_ref.sparq_attention(arrays[0], keys, keys, keys_t=torch.zeros(1, 2, 64, 50, device="meta"))
    with pytest.raises(ShapeError, match=r"queries: expected at most 65535 sequences and KV heads, got \(65536, 2\)"):
        cuda_ref.dense_attention(*[arrays[0].expand(65536, -1, -1, -1)] * 3)


@pytest.mark.parametrize(
    ("part", "dtype", "message"),
    [
        ("codes", torch.int32, "keys_t.codes: expected uint8, got int32. Pass the result of code_keys."),
        ("lo", torch.float32, "keys_t.lo: expected float16, got float32."),
        ("step", torch.bfloat16, "keys_t.step: expected float16, got bfloat16."),
        ("center", torch.float16, "keys_t.center: expected float32, got float16."),
    ],
)
def test_codes_of_other_dtypes_are_refused(part: str, dtype: torch.dtype, message: str) -> None:
    case = Case(1, 4, 2, 130, 64, "f16")
    q, k, v = tensors(case, *case.inputs())
    coded = cuda_ref.code_keys(k)
    coded = coded._replace(**{part: getattr(coded, part).to(dtype)})
    with pytest.raises(ConfigError, match=re.escape(message)):
        cuda_ref.sparq_attention(q, k, v, top_k=32, key_bits=4, keys_t=coded)


def test_gradients_are_refused() -> None:
    queries, keys, values = tensors(SMALL, *SMALL.inputs())
    for method in (cuda_ref.sparq_attention, cuda_ref.dense_attention):
        with pytest.raises(RuntimeError, match="no autograd formula"):
            method(queries.requires_grad_(), keys, values).sum().backward()


def test_unsupported_dtypes_and_head_dims_are_refused() -> None:
    arrays = [torch.zeros(1, 2, 1, 64, dtype=torch.float64, device=DEVICE)] * 3
    with pytest.raises(ConfigError, match="queries: expected float32, float16 or bfloat16, got float64"):
        cuda_ref.sparq_attention(*arrays)
    for D in (8, 12, 70, 512):
        with pytest.raises(BackendUnavailable, match=f"from 16 to 256, got {D}"):
            cuda_ref.dense_attention(*[torch.zeros(1, 2, 1, D, device=DEVICE)] * 3)
    rows = torch.zeros(1, 1, 60, 64, device=DEVICE)
    for G, method in ((17, cuda_ref.sparq_attention), (32, cuda_ref.dense_attention)):
        with pytest.raises(BackendUnavailable, match=f"at most 16 query heads per KV head, got {G}"):
            method(torch.zeros(1, G, 1, 64, device=DEVICE), rows, rows)


def test_recall_ignores_padding() -> None:
    case = Case(3, 6, 2, 150, 64, "f32", padding=(0, 145, 150))
    q, k, v = case.inputs(L=9)
    arrays = tensors(case, q, k, v)
    given = {"rank": 8, "top_k": 40, "left_padding": padding(case), "return_stats": "recall"}
    _, stats = cuda_ref.sparq_attention(*arrays, **given)  # a dense call, so the attention recall is 1
    assert torch.equal(stats.recall, torch.ones(3, 6, 9, device=DEVICE))
    lse = to_numpy(torch_functions.dense_lse(*arrays[:2], scale=0.125, left_padding=padding(case)))
    position = np.arange(150)
    for b, first in enumerate(case.padding):
        logits = np.einsum("hgld,hsd->hgls", q[b].reshape(2, 3, 9, 64), k[b]).reshape(6, 9, 150) * 0.125
        seen = (position >= first) & (position <= position[-9:, None])
        with np.errstate(divide="ignore"):
            expected = np.log(np.where(seen, np.exp(logits), 0).sum(axis=-1))
        np.testing.assert_allclose(lse[b], expected, rtol=1e-5)


# selection


@pytest.mark.parametrize("nan", [torch.nan, -torch.nan], ids=["positive", "negative"])
def test_nan_scores_count_as_infinity(nan: float) -> None:
    scores = torch.arange(40.0, device=DEVICE).expand(1, 1, 40).clone()
    scores[..., [3, 5]], scores[..., 4] = nan, torch.inf
    got = cuda_ref.top_k_select(scores, top_k=5, local_window=1)
    assert got.flatten().tolist() == [3, 4, 5, 38, 39]
    got = cuda_ref.top_k_select(scores, top_k=3, local_window=1)
    assert got.flatten().tolist() == [3, 4, 39]


@pytest.mark.parametrize("top_k", [2**31, 2**70])
def test_top_k_may_exceed_the_keys(top_k: int) -> None:
    scores = torch.arange(40.0, device=DEVICE)[None, None]
    chosen = cuda_ref.top_k_select(scores, top_k=top_k, local_window=top_k)
    assert chosen.flatten().tolist() == list(range(40))


@pytest.mark.parametrize("S", [1, 1024, 4096, 16384, 65536, 1 << 19])
@pytest.mark.parametrize("top_k", [1, 128, 4096, 100_000])
def test_candidates_fit_into_one_block(S: int, top_k: int) -> None:
    block = select.block_size(S, top_k)
    assert block in configs.SELECT_WARPS
    candidates = -(-S // block) * min(top_k, block)
    assert candidates <= block or block == max(configs.SELECT_WARPS)
