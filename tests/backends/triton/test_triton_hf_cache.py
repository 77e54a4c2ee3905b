"""Test the auxiliary state of a `SparQCache` layer against its rows after every change of the cache."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from cache_rows import padded, states
from cases import ulp
from mlx_sparse.cuda_ref import hf
from mlx_sparse.cuda_ref.hf import attention
from mlx_sparse.cuda_ref.hf.buffers import ROW_MULTIPLE
from mlx_sparse.cuda_ref.hf.key_codes import QUANTIZED_ROWS
from mlx_sparse.cuda_ref.hf.running_statistics import MARK_ROWS
from torch_arrays import to_numpy

from mlx_sparse import oracle
from mlx_sparse.checks import ShapeError
from mlx_sparse.methods.sparq.scoring_keys import GROUP


def assert_reads_its_rows(layer: hf.SparQLayer, first: tuple[int, ...] | None = None) -> None:
    """Check that the state of a SparQ step matches the rows in use."""
    S = layer.get_seq_length()
    padding = attention.Padding(padded(*first, length=S)[:, None, None]) if first else None
    keys_t, mean, deviation = layer.read(mean=True, spread=True, padding=padding)
    assert torch.equal(keys_t.nan_to_num(), layer.keys.transpose(-1, -2).nan_to_num())
    assert keys_t.stride(2) % ROW_MULTIPLE == 0
    keys, values = (rows.cpu().double().numpy() for rows in (layer.keys, layer.values))
    for b, start in enumerate(first or (0,) * len(keys)):
        rows = keys[b, :, start:]
        # The running mean is float32, so differences from the mean have an error of the last bit of a row.
        assert np.abs(deviation[b].cpu().numpy() - rows.std(axis=1)).max() <= ulp(rows, "f32")
        middle = values[b, :, start:].mean(axis=1)
        assert np.abs(mean[b].cpu().numpy() - middle).max() <= 4 * ulp(middle, "f32")


def assert_codes(layer: hf.SparQLayer, first: tuple[int, ...] | None = None) -> None:
    """Check that quantized scoring keys equal the oracle's for the rows in use, bit for bit."""
    S = layer.get_seq_length()
    padding = attention.Padding(padded(*first, length=S)[:, None, None]) if first else None
    coded, _, spread = layer.read(mean=True, spread=True, padding=padding, coded=True)
    rows = to_numpy(layer.keys)
    wanted = oracle.sparq.code_keys(rows, left_padding=first)
    for name, found, array in zip(coded._fields, coded, wanted, strict=True):
        assert found.shape == array.shape, name
        place = {"codes": GROUP // 2, "lo": 1, "step": 1}.get(name)
        for b, start in enumerate(first or (0,) * len(rows)):
            full = slice(place and place * (max(0, S - start) // GROUP))  # later columns are never read
            np.testing.assert_array_equal(to_numpy(found[b, ..., full]), array[b, ..., full], err_msg=name)
    expected = oracle.key_spread(wanted, rows, left_padding=first)
    np.testing.assert_allclose(to_numpy(spread), expected, rtol=1e-4)


def test_appending_a_token_copies_nothing() -> None:
    layer = hf.SparQLayer()
    layer.update(*states(2, 2, 300))
    assert_reads_its_rows(layer)
    buffers = layer.buffers
    assert buffers.keys.shape[2] == buffers.keys_t.shape[3] == 2 * ROW_MULTIPLE
    before = [array.data_ptr() for array in (buffers.keys, buffers.values, buffers.keys_t)]
    for step in range(3):
        keys, values = layer.update(*states(2, 2, 1, seed=step))
        assert torch.equal(keys[:, :, -1:], states(2, 2, 1, seed=step)[0])
        assert (keys.shape, keys.shape) == ((2, 2, 301 + step, 32), values.shape)
        assert_reads_its_rows(layer)
    assert [array.data_ptr() for array in (buffers.keys, buffers.values, buffers.keys_t)] == before
    layer.update(*states(2, 2, 300))
    assert buffers.keys.shape[2] % ROW_MULTIPLE == 0
    assert_reads_its_rows(layer)


CHANGES = {
    "crop": lambda layer: layer.crop(-7),
    "crop most": lambda layer: layer.crop(-80),
    "crop all": lambda layer: layer.crop(-1000),
    "reset": lambda layer: layer.reset(),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "select by bools": lambda layer: layer.batch_select_indices(torch.tensor([False, True])),
}
PADDING = {"reorder": (12, 12), "repeat": (5, 5, 12, 12), "select": (12,), "select by bools": (12,)}


@pytest.mark.parametrize("first", [None, (5, 12)], ids=["", "padded"])
@pytest.mark.parametrize("change", CHANGES)
def test_decode_state_follows_the_cache(change: str, first: tuple[int, ...] | None) -> None:
    layer, plain = hf.SparQLayer(), transformers.cache_utils.DynamicLayer()
    for each in (layer, plain):
        each.update(*states(2, 2, 100))
    assert_reads_its_rows(layer, first)
    CHANGES[change](layer)
    if change == "reset":
        plain = (
            transformers.cache_utils.DynamicLayer()
        )  # DynamicLayer.reset did not reset the length up to transformers 5.17
    else:
        CHANGES[change](plain)
    assert layer.get_seq_length() == plain.get_seq_length()
    B = len(PADDING.get(change, (0, 0)))
    for each in (layer, plain):
        each.update(*states(B, 2, 20, seed=1))
    assert torch.equal(layer.keys, plain.keys)
    assert torch.equal(layer.values, plain.values)
    assert_reads_its_rows(layer, PADDING.get(change, first) if first else None)


@pytest.mark.parametrize("first", [None, (5, 140)], ids=["", "padded"])
@pytest.mark.parametrize("change", CHANGES)
def test_codes_follow_the_cache(change: str, first: tuple[int, ...] | None) -> None:
    swapped = {"reorder": (140, 140), "repeat": (5, 5, 140, 140), "select": (140,), "select by bools": (140,)}
    layer = hf.SparQLayer()
    with torch.inference_mode():
        layer.update(*states(2, 2, 200))
        assert_codes(layer, first)
        layer.update(*states(2, 2, 70, seed=2))  # beyond the capacity of the buffers
        assert_codes(layer, first)
    CHANGES[change](layer)
    after = swapped.get(change, first) if first else None
    for count in (GROUP - 20, 1, 30):
        layer.update(*states(len(swapped.get(change, (0, 0))), 2, count, seed=1))
        assert_codes(layer, after)


@pytest.mark.parametrize("first", [None, (5, 140)], ids=["", "padded"])
def test_prefill_is_quantized_in_chunks(first: tuple[int, ...] | None) -> None:
    layer = hf.SparQLayer()
    layer.update(*states(2, 2, QUANTIZED_ROWS + 300))
    assert_codes(layer, first)


def test_codes_and_keys_replace_each_other() -> None:
    layer = hf.SparQLayer()
    layer.update(*states(2, 2, 300))
    assert_codes(layer)
    few = layer.buffers.codes.coded.nbytes
    assert (
        few == layer.buffers.keys.nbytes // 8 * 9 // 8 + 2 * 2 * 32 * 4
    )  # 4.5 of 32 bits per number, and the float32 center
    assert layer.buffers.keys_t is None
    assert_codes(layer, first=(0, 70))
    assert_reads_its_rows(layer)
    assert layer.buffers.codes is None


def bad_steps(layer: hf.SparQLayer, bad: float, first: tuple[int, ...] | None, count: int = 5) -> None:
    """Write bad rows and read the state after each one."""
    for _ in range(count):
        rows = torch.full_like(layer.keys[:, :, :1], bad)
        layer.update(rows, rows)
        padding = attention.Padding(padded(*first, length=layer.get_seq_length())[:, None, None]) if first else None
        layer.read(mean=True, spread=True, padding=padding)


@pytest.mark.parametrize("first", [None, (5, 112)], ids=["", "padded"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6, 1e12])
@pytest.mark.parametrize("rows", [40, MARK_ROWS - 2, 2 * MARK_ROWS + 3])
def test_cropped_rows_and_padding_leave_no_trace(rows: int, bad: float, first: tuple[int, ...] | None) -> None:
    layer = hf.SparQLayer()
    keys, values = states(2, 2, 120)
    for b, start in enumerate(first or ()):
        keys[b, :, :start] = values[b, :, :start] = bad
    layer.update(keys, values)
    layer.update(*states(2, 2, rows, seed=1))
    bad_steps(layer, bad, first)
    copied = copy.deepcopy(layer)
    for each in (layer, copied):
        each.crop(-5)
        assert_reads_its_rows(each, first)
        each.update(*states(2, 2, 9, seed=2))
        bad_steps(each, bad, first)
        each.reorder_cache(torch.tensor([1, 0]))
        swapped = first[::-1] if first else None
        each.crop(-5)
        assert_reads_its_rows(each, swapped)
        bad_steps(each, bad, swapped)
        each.crop(-rows)  # below the last summed block
        assert_reads_its_rows(each, swapped)


@pytest.mark.parametrize("first", [None, (5, 12)], ids=["", "padded"])
def test_inference_mode_state_is_usable_outside(first: tuple[int, ...] | None) -> None:
    layer = hf.SparQLayer()
    with torch.inference_mode():
        layer.update(*states(2, 2, 50))
        assert_reads_its_rows(layer, first)
        layer.reorder_cache(torch.tensor([0, 1]))
    with torch.no_grad():
        layer.update(*states(2, 2, 5, seed=1))
        assert_reads_its_rows(layer, first)
        layer.crop(-3)
        assert_reads_its_rows(layer, first)


def test_changed_padding_is_noticed() -> None:
    layer = hf.SparQLayer()
    layer.update(*states(2, 2, 50))
    for first in ((0, 3), (0, 4), None, (7, 4)):
        assert_reads_its_rows(layer, first)


def test_padding_is_read_from_the_mask_once() -> None:
    padding = attention.Padding(padded(0, 3, length=20)[:, None, None])
    assert padding.first is padding.first
    assert padding.first.tolist() == [0, 3]
    assert attention.Padding(padded(20, 19, length=20)[:, None, None]).first.tolist() == [20, 19]
    assert attention.Padding(~padded(0, 3, length=20)[:, None, None]).first is None
    by_head = padded(0, 3, length=20)[:, None, None].expand(2, 2, 1, 20)
    assert attention.Padding(by_head).first is None
    same, other = padding.first.clone(), padding.first + 1
    assert [padding.equals(earlier) for earlier in (same, other, same)] == [True, False, True]


@pytest.mark.parametrize(
    ("B", "Hkv", "D", "dtype"), [(1, 2, 32, None), (2, 1, 32, None), (2, 2, 1, None), (2, 2, 32, torch.float16)]
)
def test_rows_of_other_shapes_are_refused(B: int, Hkv: int, D: int, dtype: torch.dtype | None) -> None:
    layer = hf.SparQLayer()
    layer.update(*states(2, 2, 5))
    with pytest.raises(
        ShapeError, match=r"^past_key_values: expected rows \(B=2, Hkv=2, L=1, D=32\) in torch.float32, got"
    ):
        layer.update(*(rows.to(dtype) for rows in states(B, Hkv, 1, D)))
    assert layer.get_seq_length() == 5
