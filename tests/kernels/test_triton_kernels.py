"""The Triton kernels of decode steps, one by one, and what their tensors may be; tests/conformance has the cases."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from cases import Array, Case
from mlx_sparse.cuda_ref.api import steps
from mlx_sparse.cuda_ref.api.key_codes import code_keys
from mlx_sparse.cuda_ref.launchers import configs, sparq
from torch_arrays import DEVICE, component_major, padding, to_numpy, to_torch
from torch_operators import assert_keeps_its_promises_and_compiles

from mlx_sparse import BackendUnavailable, ConfigError, ShapeError, cuda_ref, oracle

pytestmark = pytest.mark.usefixtures("guarded")
SMALL = Case(2, 6, 2, 70, 64, "f32", padding=(0, 30))


def tensors(case: Case, *given: Array) -> list[torch.Tensor]:
    return [to_torch(array, case.dtype) for array in given]


def test_a_program_adds_up_the_softmax_of_all_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "processors", lambda device: 1)
    case = Case(2, 4, 2, 1100, 64, "f32", padding=(0, 600))
    queries, keys, _ = tensors(case, *case.inputs())
    selection = {"rank": 16, "top_k": 32, "local_window": 8, "scale": 0.125}
    given = {"component_weight": None, "left_padding": padding(case)}
    _, scores = sparq.sparq_select(queries, component_major(keys), **selection, **given)
    logits = to_numpy(scores.logits).astype(np.float64)
    most = logits.max(axis=-1)
    expected = np.stack([most, 1 / np.exp(logits - most[..., None]).sum(axis=-1)], axis=-1)
    assert scores.statistics.shape[-1] == 1
    np.testing.assert_allclose(to_numpy(scores.softmax), expected, rtol=1e-5)


def test_weights_are_not_rounded_to_the_type_of_the_values() -> None:
    case = Case(2, 8, 2, 127, 64, "f16")
    q, k, v = case.inputs()
    expected = oracle.dense_attention(q, k, v)
    error = np.abs(to_numpy(cuda_ref.dense_attention(*tensors(case, q, k, v))) - expected)
    # The rounding of the result, and what is below the smallest number of the type in every weight; the largest is 1.
    allowed = np.spacing(np.abs(expected).astype(np.float16)) / 2 + case.S * 2.0**-25 * np.abs(v).max()
    assert (error <= allowed).all()


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


def test_a_step_with_codes_is_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(1, 4, 2, 200, 64, "f16")
    q, k, v = tensors(case, *case.inputs())
    coded = cuda_ref.code_keys(k)
    started = launches(monkeypatch)
    cuda_ref.sparq_attention(q, k, v, rank=16, top_k=32, key_bits=4, keys_t=coded)
    assert started == ["sparq_code_scores", "top_k_select", "attend"]


@pytest.mark.parametrize("narrow", [True, False])
def test_a_padded_row_is_scored_as_it_is_alone(narrow: bool) -> None:
    case = Case(5, 4, 2, 1400, 64, "f16", padding=(0, 9, 700, 1337, 1400))
    q, k, _ = tensors(case, *case.inputs())

    def logits(rows: slice, first: int, padding: torch.Tensor) -> torch.Tensor:
        keys = k[rows, :, first:]
        coded = code_keys(keys, padding)
        given = {"rank": 16, "component_weight": None, "scale": 0.125, "left_padding": padding}
        return sparq.sparq_code_scores(q[rows], keys, coded, narrow=narrow, **given).logits

    together = logits(slice(None), 0, padding(case))
    for b, first in enumerate(case.padding):
        if first < case.S:
            alone = logits(slice(b, b + 1), first, torch.zeros(1, dtype=torch.int32, device=DEVICE))
            assert torch.equal(together[b, :, :, first : case.S], alone[0, :, :, : case.S - first])


def with_codes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
    codes, *ranges = cuda_ref.code_keys(k)
    return q, k, v, codes, 8, 16, 4, "softmax", None, 0.1, None, None, 4, *ranges


OPERATORS = {
    "sparq_decode": lambda q, k, v: (q, k, v, component_major(k), 8, 16, 4, "softmax", None, 0.1, None, None),
    "sparq_decode-codes": with_codes,
    "dense_decode": lambda q, k, v: (q, k, v, 0.1, None),
    "attend_indices": lambda q, k, v: (q, k, v, torch.tensor([[[1, 2, -1]] * 2], dtype=torch.int32).to(DEVICE), 0.1),
    "top_k_select": lambda q, k, v: (k[..., 0].float(), 8, 2, None),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_of_torch_keeps_its_promises_and_compiles(name: str) -> None:
    case = Case(1, 4, 2, 70, 64, "f32")
    assert_keeps_its_promises_and_compiles(name.partition("-")[0], OPERATORS[name](*tensors(case, *case.inputs())))


def test_what_is_no_tensor_or_has_no_memory_is_refused() -> None:
    arrays = [torch.zeros(1, 2, 1, 64, device=DEVICE)] * 2
    with pytest.raises(ConfigError, match="queries: expected a tensor of torch, got ndarray"):
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
        ("codes", torch.int32, "keys_t.codes: expected uint8, got int32. Take what code_keys returns."),
        ("lo", torch.float32, "keys_t.lo: expected float16, got float32."),
        ("step", torch.bfloat16, "keys_t.step: expected float16, got bfloat16."),
        ("centre", torch.float16, "keys_t.centre: expected float32, got float16."),
    ],
)
def test_codes_of_other_types_are_refused(part: str, dtype: torch.dtype, message: str) -> None:
    case = Case(1, 4, 2, 130, 64, "f16")
    q, k, v = tensors(case, *case.inputs())
    coded = cuda_ref.code_keys(k)
    coded = coded._replace(**{part: getattr(coded, part).to(dtype)})
    with pytest.raises(ConfigError, match=re.escape(message)):
        cuda_ref.sparq_attention(q, k, v, top_k=32, key_bits=4, keys_t=coded)


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
    rows = torch.zeros(1, 1, 60, 64, device=DEVICE)
    for G, method in ((17, cuda_ref.sparq_attention), (32, cuda_ref.dense_attention)):
        with pytest.raises(BackendUnavailable, match=f"at most 16 query heads per KV head, got {G}"):
            method(torch.zeros(1, G, 1, 64, device=DEVICE), rows, rows)


def test_recall_of_a_padded_prompt_is_measured_against_the_valid_keys() -> None:
    case = Case(3, 6, 2, 150, 64, "f32", padding=(0, 145, 150))
    q, k, v = case.inputs(L=9)
    arrays = tensors(case, q, k, v)
    given = {"rank": 8, "top_k": 40, "left_padding": padding(case), "return_stats": "mass"}
    _, stats = cuda_ref.sparq_attention(*arrays, **given)  # dense, so that all of the mass is retained
    assert torch.equal(stats.retained_mass, torch.ones(3, 6, 9, device=DEVICE))
    lse = to_numpy(steps.dense_lse(*arrays[:2], scale=0.125, left_padding=padding(case)))
    position = np.arange(150)
    for b, first in enumerate(case.padding):
        logits = np.einsum("hgld,hsd->hgls", q[b].reshape(2, 3, 9, 64), k[b]).reshape(6, 9, 150) * 0.125
        seen = (position >= first) & (position <= position[-9:, None])
        with np.errstate(divide="ignore"):
            expected = np.log(np.where(seen, np.exp(logits), 0).sum(axis=-1))
        np.testing.assert_allclose(lse[b], expected, rtol=1e-5)
