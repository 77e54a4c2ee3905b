"""The Metal kernel that attends to lists of key blocks: every head dim, whole cache buffers, pieces."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cases import Array, covering
from mlx_arrays import DTYPES, to_mlx, to_numpy, whole
from msl import Metal
from sample_cases import SampleCase, assert_attends

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.kernels import blocks as kernels
from mlx_sparse.kernels import launch_split
from mlx_sparse.methods import registry


def attend(case: SampleCase, lists: Array, *, spare: int = 0) -> tuple[mx.array, mx.array]:
    q, k, v = case.inputs()
    return kernels.attend_blocks(
        to_mlx(q, case.dtype),
        whole(k, case.S + spare, case.dtype),
        whole(v, case.S + spare, case.dtype),
        mx.array(lists),
        block_size=case.block_size,
        scale=case.scale,
        length=case.S,
    )


def check(case: SampleCase, lists: Array, *, spare: int = 0) -> None:
    out, lse = attend(case, lists, spare=spare)
    assert_attends(to_numpy(out), np.array(lse), case, lists)


def some_lists(case: SampleCase, *, seed: int = 0, share: float = 0.5) -> Array:
    """Random lists, some of them empty, not all with their diagonal."""
    layout = case.layout
    mask = np.random.default_rng(seed).random((case.B, case.Hq, layout.row_blocks, layout.key_blocks)) < share
    mask[:, 0, 0] = False
    row = np.arange(layout.first_block, layout.key_blocks)[:, None]
    return oracle.block_lists(mask & (np.arange(layout.key_blocks) <= row))


@pytest.mark.parametrize(("D", "dtype"), covering([16, 80, 96, 192, 256], list(DTYPES)))
def test_every_head_dim_is_right(metal: Metal, D: int, dtype: str) -> None:
    case = SampleCase(1, 2, 1, 45, 130, D, dtype, 32)
    check(case, some_lists(case))


def test_a_long_prompt_is_work_in_bounded_pieces(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch may have more multiply-adds than a piece even if its lists held everything, and none shares a command
    buffer: each is sent off before the next is made.
    """
    case = SampleCase(1, 4, 2, 300, 410, 64, "f32", 32)
    lists = some_lists(case)
    together = attend(case, lists)
    most = 2 * 4 * 64 * case.S * 64  # 64 rows
    sent: list[int] = []
    send = mx.async_eval
    monkeypatch.setattr(launch_split, "PIECE", most)
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (sent.append(len(metal.launches)), send(*arrays))[1])
    metal.clear()
    apart = attend(case, lists)
    assert all(mx.array_equal(a, b) for a, b in zip(apart, together, strict=True))
    assert len(sent) > 4
    if metal.emulated:
        assert sent == list(range(1, len(metal.launches) + 1))
        for report in metal.launches:
            rows = report.grid[0] // 4  # eight rows of a tile have a SIMD group
            heads = report.grid[1] * report.grid[2]
            assert 2 * rows * heads * case.S * case.D <= most + 2 * 32 * heads * case.S * case.D  # a tile may be ragged


def test_nothing_recompiles_as_the_context_grows(metal: Metal) -> None:
    texts: set[str] = set()
    for L, S in ((40, 90), (64, 200), (33, 300)):
        case = SampleCase(1, 4, 2, L, S, 64, "f16", 32)
        attend(case, some_lists(case), spare=7)
        if metal.emulated:
            texts.add(metal.texts["attend_blocks"])
    assert len(texts) <= 1


def test_head_dims_that_do_not_fit_are_left_to_ops(metal: Metal) -> None:
    for D in (8, 72, 272):
        assert registry.resolve("auto", "sample", D=D, G=4) == "ops"
        with pytest.raises(mlx_sparse.BackendUnavailable, match=f"multiples of 16 up to 256, not {D}"):
            registry.resolve("metal", "attend_blocks", D=D, G=4)
    assert registry.resolve("auto", "sample", D=80, G=32) == "metal"
