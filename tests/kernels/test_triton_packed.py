"""The Triton kernels over packed rows, as quantised caches keep them: docs/spec/quantised.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case
from mlx_sparse.cuda_ref import PackedRows
from mlx_sparse.cuda_ref.launchers.operands import operands
from torch_arrays import DEVICE, DTYPES, cached_rows, padding, to_torch
from torch_operators import assert_keeps_its_promises_and_compiles

from mlx_sparse import ConfigError, ShapeError, cuda_ref

NAN = float("nan")
CASE = Case(2, 8, 2, 150, 64, "f16", padding=(3, 90))


def packed(case: Case, bits: int = 4, group_size: int = 32, seed: int = 0) -> PackedRows:
    """Any codes, and scales and biases that make numbers of about 1 of them."""
    rng = np.random.default_rng(seed)
    rows = (case.B, case.Hkv, case.S)
    codes = rng.integers(0, 2**32, (*rows, case.D * bits // 32), dtype=np.uint32)
    scales, biases = rng.normal(size=(2, *rows, case.D // group_size))
    numbers = (to_torch(part, case.dtype) for part in (scales / 2**bits, biases))
    return PackedRows(torch.tensor(codes, device=DEVICE), *numbers, bits)


def given(case: Case, **form: int) -> tuple[torch.Tensor, PackedRows, PackedRows]:
    """Queries, keys and values."""
    return to_torch(case.inputs()[0], case.dtype), packed(case, **form), packed(case, seed=1, **form)


def spoiled(rows: PackedRows, case: Case) -> PackedRows:
    """Scales and biases of the rows before the first valid one are NaN, and of those behind the last in use."""
    unused = torch.arange(case.S, device=DEVICE)[:, None] < padding(case)[:, None, None, None]
    ranges = (part.masked_fill(unused, NAN) for part in rows.parts[1:])
    return cached_rows(PackedRows(rows.codes, *ranges, rows.bits))


def buckets(keys: PackedRows, first: Any) -> dict[str, Any]:
    ids = torch.arange(keys.shape[2], device=DEVICE).expand(*keys.shape[:3]) % 5
    return {"bucket_ids": ids, "visited": ids[..., :2], "recent_tokens": 20}


def copy(keys: PackedRows, first: Any) -> dict[str, Any]:
    coded = cuda_ref.code_keys(keys, left_padding=first)
    return {"keys_t": coded, "key_bits": 4, "rank": 16, "top_k": 32, "component_score": "query_key"}


# What each step takes besides.
STEPS: dict[str, Callable[[PackedRows, Any], dict[str, Any]]] = {
    "sparq_attention": lambda keys, first: {"rank": 64, "top_k": 32},
    "sparq_attention-few components": lambda keys, first: {"rank": 16, "top_k": 32, "reallocate": True},
    "sparq_attention-a copy": copy,
    "saap_attention": buckets,
    "dense_attention": lambda keys, first: {},
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.usefixtures("guarded")
def test_a_step_is_that_over_the_numbers_and_sees_no_row_that_is_not_valid(step: str) -> None:
    q, keys, values = given(CASE)
    first, attend = padding(CASE), getattr(cuda_ref, step.partition("-")[0])
    rows = [spoiled(part, CASE) for part in (keys, values)]
    out = attend(q, *rows, left_padding=first, **STEPS[step](rows[0], first))
    expected = attend(q, keys[:], values[:], left_padding=first, **STEPS[step](keys[:], first))
    # The rows of numbers have no tiles of their own: sums run in another order.
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)


@pytest.mark.usefixtures("guarded")
def test_several_queries_attend_to_the_numbers() -> None:
    case = replace(CASE, padding=None)
    q, keys, values = given(case)
    prompt = torch.cat([q, -q], dim=2)
    for name in ("dense_attention", "sparq_attention"):
        found, expected = (
            getattr(cuda_ref, name)(prompt, *rows, return_stats="mass")
            for rows in ((keys, values), (keys[:], values[:]))
        )
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1].retained_mass, expected[1].retained_mass)


def apart(rows: PackedRows) -> PackedRows:
    """Codes of one buffer, scales and biases of buffers that lie otherwise."""
    scales = cached_rows(rows).scales
    biases = rows.biases.repeat_interleave(2, dim=3)[..., ::2]
    return PackedRows(rows.codes, scales, biases, rows.bits)


LAYOUTS: dict[str, tuple[Callable[[PackedRows], PackedRows], bool]] = {
    "as they are": (lambda rows: rows, False),
    "of a cache": (cached_rows, False),
    "of one sequence": (lambda rows: rows.kept([part[1:] for part in cached_rows(rows).parts], rows.bits), False),
    "that do not lie alike": (apart, True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("guarded")
def test_only_parts_that_do_not_lie_alike_are_copied(layout: str) -> None:
    q, keys, values = given(CASE)
    lay, copied = LAYOUTS[layout]
    laid = [lay(rows) for rows in (keys, values)]
    *codes, ranges = operands(*laid)
    places = [part.data_ptr() for part in (*codes, *list(ranges.values())[1:])]
    parts = [laid[0].codes, laid[1].codes, *laid[0].parts[1:], *laid[1].parts[1:]]
    assert (places != [part.data_ptr() for part in parts]) == copied
    chosen = torch.arange(0, CASE.S, 3, dtype=torch.int32, device=DEVICE).expand(CASE.B, CASE.Hkv, -1)
    wanted, _ = cuda_ref.attend_indices(q, keys, values, chosen)
    B = laid[0].shape[0]
    out, _ = cuda_ref.attend_indices(q[-B:], *laid, chosen[-B:])
    assert torch.equal(out, wanted[-B:])


def arguments(scores: bool) -> tuple[Any, ...]:
    q, keys, values = given(replace(CASE, padding=None, dtype="f32"))
    *codes, ranges = operands(keys, values)
    if scores:
        return q, *codes, None, 64, 16, 4, "softmax", None, 0.1, None, None, 16, None, None, None, *ranges.values()
    chosen = torch.tensor([[[1, 2, -1]] * 2] * 2, dtype=torch.int32, device=DEVICE)
    return q, *codes, chosen, 0.1, None, *ranges.values()


@pytest.mark.parametrize("name", ["attend_indices", "sparq_decode"])
@pytest.mark.usefixtures("guarded")
def test_an_operator_of_torch_takes_packed_rows_and_compiles(name: str) -> None:
    assert_keeps_its_promises_and_compiles(name, arguments(name == "sparq_decode"))


BAD: dict[str, tuple[Callable[[PackedRows], Any], type[Exception], str]] = {
    "bits": (lambda k: replace(k, bits=7), ConfigError, "keys.bits: expected one of 2, 3, 4, 5, 6, 8, got 7."),
    "codes": (
        lambda k: replace(k, codes=k.codes.view(torch.int32)),
        ConfigError,
        "keys.codes: expected uint32, got int32. Take what mx.quantize returns.",
    ),
    "axes": (
        lambda k: replace(k, codes=k.codes[0]),
        ShapeError,
        "keys.codes: expected (B, Hkv, S, n * 4 bits), got (2, 150, 8).",
    ),
    "words": (
        lambda k: replace(k, codes=k.codes[..., :7]),
        ShapeError,
        "keys.codes: expected (B, Hkv, S, n * 4 bits), got (2, 2, 150, 7).",
    ),
    "no tensor": (
        lambda k: replace(k, scales=np.zeros(3)),
        ConfigError,
        "keys.scales: expected a tensor of torch, got ndarray.",
    ),
    "groups": (
        lambda k: replace(k, scales=k.scales.repeat(1, 1, 1, 2)),
        ShapeError,
        "keys.scales: expected (2, 2, 150, 2) or (2, 2, 150, 1), got (2, 2, 150, 4).",
    ),
    "biases": (
        lambda k: replace(k, biases=k.biases[..., :1]),
        ShapeError,
        "keys.biases: expected shape (2, 2, 150, 2), got (2, 2, 150, 1).",
    ),
    "one type": (
        lambda k: replace(k, biases=k.biases.float()),
        ConfigError,
        "keys.biases: expected the type of the other tensors, float16, got float32.",
    ),
    "of the queries": (
        lambda k: k.kept([k.codes, k.scales.float(), k.biases.float()], k.bits),
        ConfigError,
        "keys.scales: expected the type of the other tensors, float16, got float32.",
    ),
    "place": (
        lambda k: replace(k, scales=k.scales.to("meta")),
        ConfigError,
        "keys.scales: expected a tensor on",
    ),
    "numbers": (lambda k: k[:], ConfigError, "values: expected a tensor like keys, got 4 bits in groups of 32."),
    "another form": (
        lambda k: packed(CASE, bits=8),
        ConfigError,
        "values: expected 8 bits in groups of 32 like keys, got 4 bits in groups of 32.",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_packed_rows_that_are_none_are_refused(bad: str) -> None:
    q, keys, values = given(CASE)
    spoil, error, message = BAD[bad]
    with pytest.raises(error, match=re.escape(message)):
        cuda_ref.sparq_attention(q, spoil(keys), values, top_k=32)


def test_queries_and_prompts_are_to_be_numbers() -> None:
    q, keys, values = given(CASE)
    with pytest.raises(ConfigError, match="queries: expected a tensor of torch, got PackedRows"):
        cuda_ref.sparq_attention(keys, keys, values)
    for name, arrays, wrong in (
        ("sample_attention", (q, keys, values), "keys"),
        ("sample_attention", (q, keys[:], values), "values"),
        ("sample_select", (q, keys), "keys"),
        ("saap_assign", (keys, torch.zeros(2, 3, 64, device=DEVICE)), "keys"),
    ):
        with pytest.raises(
            ConfigError, match=rf"{wrong}: expected a tensor of torch, got PackedRows. Pass {wrong}\[:\]"
        ):
            getattr(cuda_ref, name)(*arrays)
    with pytest.raises(ConfigError, match="keys_t: expected a tensor of torch, got PackedRows"):
        cuda_ref.sparq_attention(q, keys, values, keys_t=keys)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("guarded")
def test_a_bias_that_is_no_number_shows(dtype: str) -> None:
    rows = packed(Case(1, 2, 1, 2, 32, dtype))
    rows.biases[0, 0, 1] = NAN
    q = torch.ones(1, 2, 1, 32, device=DEVICE).to(rows.dtype)
    for key, shows in ((0, False), (1, True)):
        chosen = torch.tensor([[[key]]], dtype=torch.int32, device=DEVICE)
        for result in cuda_ref.attend_indices(q, rows, rows, chosen):
            assert result.isnan().all() == result.isnan().any() == shows
