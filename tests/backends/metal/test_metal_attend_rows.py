"""Test dense multi-token decode on Metal, with several queries of all query heads of a KV head."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cases import Case, assert_as_good_as_plain, lse_tolerance, plain_attention, round_to
from mlx_arrays import DTYPES, to_mlx, to_numpy, whole
from msl import Metal, Report

from mlx_sparse.core import registry
from mlx_sparse.core.attend import metal_rows as attend_rows
from mlx_sparse.core.attend.oracle import dense_attention, dense_lse
from mlx_sparse.core.blocks import metal as blocks

# one verification step


def check(case: Case, L: int) -> None:
    """Compare with the oracle, with NaN and inf in unused rows and in padding."""
    q, k, v = case.inputs(L=L)
    scale, padding = case.D**-0.5, case.padding
    expected = dense_attention(q, k, v, scale=scale, left_padding=padding)
    expected_lse = dense_lse(q, k, scale=scale, left_padding=padding)
    keys, values = (whole(rows, case.S + 3, case.dtype) for rows in (k, v))
    for b, first in enumerate(padding or ()):
        keys[b, :, :first], values[b, :, :first] = mx.nan, mx.inf
    first_rows = None if padding is None else mx.array(padding)
    out, lse = attend_rows.attend_rows(
        to_mlx(q, case.dtype), keys, values, scale=scale, length=case.S, left_padding=first_rows
    )
    assert (out.dtype, lse.dtype) == (DTYPES[case.dtype], mx.float32)
    plain, off = np.zeros_like(expected), 0.0
    for i in range(L):
        indices = np.broadcast_to(np.arange(case.S - L + i + 1), (case.B, case.Hkv, case.S - L + i + 1)).copy()
        for b, first in enumerate(padding or ()):
            indices[b, :, :first] = -1
        own = q[:, :, i : i + 1], k
        plain[:, :, i : i + 1] = plain_attention(*own, v, indices, scale, case.dtype)
        off = max(off, lse_tolerance(*own, indices, scale, expected_lse))
    assert_as_good_as_plain(to_numpy(out), expected, plain, case.dtype)
    np.testing.assert_allclose(np.array(lse), expected_lse, rtol=0, atol=off)


CHECKS = [
    *((2, 1, 64, "f16"), (4, 4, 128, "bf16"), (16, 8, 64, "f32"), (8, 8, 128, "f16")),
    *((3, 2, 80, "bf16"), (5, 3, 256, "f32"), (1, 8, 16, "f32"), (7, 1, 192, "bf16")),
]


@pytest.mark.parametrize(("L", "G", "D", "dtype"), CHECKS)
def test_a_verification_step_attends_as_the_oracle(metal: Metal, L: int, G: int, D: int, dtype: str) -> None:
    check(Case(1, 2 * G, 2, 97 if G * L > 16 else 150, D, dtype), L)


@pytest.mark.parametrize("padding", [(0, 5, 41, 59, 60), (3, 60, 32, 57, 0)], ids=str)
def test_keys_before_the_first_valid_key_are_not_attended(metal: Metal, padding: tuple[int, ...]) -> None:
    """Test queries before the first valid key, whose output is zero."""
    check(Case(5, 8, 2, 60, 64, "f32", padding=padding), 4)


@pytest.mark.parametrize(("G", "L", "S", "padding"), [(4, 2, 1300, None), (1, 3, 1025, (700, 0)), (8, 8, 2100, None)])
def test_a_long_context_is_split_and_merged(
    metal: Metal, G: int, L: int, S: int, padding: tuple[int, ...] | None
) -> None:
    case = Case(len(padding or (0,)), G, 1, S, 64, "f16", padding=padding)
    assert attend_rows.splits_of(S, case.B, G * L) > 1
    check(case, L)
    if metal.emulated:
        assert [report.kernel for report in metal.launches] == ["attend_rows", "merge_parts"]


def test_rows_that_exceed_the_registers_are_divided_among_threadgroups(metal: Metal) -> None:
    check(Case(1, 16, 2, 40, 256, "f16"), 9)
    if metal.emulated:
        assert [report.grid[1] for report in metal.launches] == [4]


def test_a_cache_shorter_than_its_buffer_has_as_many_keys_as_queries(metal: Metal) -> None:
    check(Case(1, 4, 2, 5, 64, "f32"), 5)


def test_keys_and_values_of_other_types_than_queries_are_attended(metal: Metal) -> None:
    q, k, v = (to_mlx(array, "f16") for array in Case(1, 4, 2, 70, 64, "f16").inputs(L=3))
    same, _ = attend_rows.attend_rows(q, k, v, scale=0.1)
    for rows in ([k.astype(mx.float32), v.astype(mx.float32)], [k, v.astype(mx.float32)]):
        out, _ = attend_rows.attend_rows(q.astype(mx.float32), *rows, scale=0.1)
        np.testing.assert_array_equal(to_numpy(out.astype(mx.float16)), to_numpy(same))


# launches


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [2, 8, 9, 64, 65, 128])
def test_every_head_dim_fits_into_threadgroup_memory_and_reads_rows_once_up_to_128(rows: int, itemsize: int) -> None:
    for D in range(16, 257, 16):
        assert registry.unsupported("metal", "attend_rows", D, rows) is None
        together, staged = attend_rows.shape_of(D, itemsize, rows)
        padding = 16 // itemsize
        assert max(D * (staged + padding), staged * (D + padding)) * itemsize + 4 * staged <= blocks.THREADGROUP_MEMORY
        assert together % 8 == 0 and together <= (128 if D <= 128 else 64)
        assert -(-rows // together) == (1 if D <= 128 or rows <= 64 else 2)
    assert registry.unsupported("metal", "attend_rows", 72, rows)


def read(report: Report, level: str, *names: str) -> int:
    return sum(getattr(traffic, level) for name, traffic in report.reads.items() if not names or name in names)


@pytest.mark.skipif(mx.metal.is_available(), reason="only the harness counts bytes")
@pytest.mark.parametrize(("L", "G"), [(2, 4), (16, 8)])
def test_a_verification_step_reads_each_key_and_value_once(metal: Metal, L: int, G: int) -> None:
    """Count the bytes of keys and values. The call also reads queries and the results of the splits."""
    S, D = 2300, 64
    q, k, v = (to_mlx(array, "f16") for array in Case(1, G, 1, S, D, "f16").inputs(L=L))
    attend_rows.attend_rows(q, k, v, scale=0.1)
    once = 2 * S * D * 2
    for level in ("lane", "threadgroup", "dispatch"):
        assert sum(read(report, level, "keys", "values") for report in metal.launches) == once
    own = read(metal.launches[0], "dispatch", "queries")
    assert own <= G * L * D * 2
    assert sum(read(report, "dispatch") for report in metal.launches) <= 1.1 * once + own + 128 * 10
    written = sum(t.dispatch for report in metal.launches for t in report.writes.values())
    assert written <= 0.1 * once + round_to(np.array(G * L * (D * 2 + 4)), "f32")


def test_results_of_parts_are_an_eighth_of_what_the_parts_read() -> None:
    for rows in (2, 16, 40, 128):
        for N in (100, 513, 2049, 16_384, 131_072):
            splits = attend_rows.splits_of(N, 8, rows)
            assert splits == 1 or 2 * splits * rows * 4 <= 1.25 / 8 * 2 * N * 2
            assert splits * 8 <= attend_rows.GROUPS or N > 500_000
            assert N > 512 or splits == 1
