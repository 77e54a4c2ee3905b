"""The selection of the Triton backend against the oracle: the k largest scores of rows of any length, and ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mlx_sparse.cuda_ref.launchers import configs, select
from torch_arrays import DEVICE, to_numpy

from mlx_sparse import cuda_ref, oracle

pytestmark = pytest.mark.usefixtures("guarded")


@pytest.mark.parametrize("S", [1, 15, 16, 17, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize(("top_k", "local_window"), [(1, 0), (1, 1), (37, 9), (128, 0), (3000, 100)])
def test_top_k_select_is_exact_for_any_length(S: int, top_k: int, local_window: int) -> None:
    scores = np.random.default_rng(S).standard_t(2, size=(2, 3, S)).astype(np.float32)
    first = np.array([0, S // 3])
    expected = oracle.top_k_select(scores, top_k=top_k, local_window=local_window, left_padding=first)
    got = cuda_ref.top_k_select(
        torch.tensor(scores, device=DEVICE), top_k=top_k, local_window=local_window, left_padding=first
    )
    np.testing.assert_array_equal(to_numpy(got), expected)


SPECIAL = {
    "equal": np.zeros_like,
    "few values": np.round,
    "signed zeros": lambda s: np.where(s > 0, 0.0, -0.0),
    "negative": lambda s: -np.abs(s) - 1,
    "last bit": lambda s: np.float32(1) + np.round(s) * np.float32(2**-23),
    "subnormal": lambda s: np.round(s) * np.float32(2**-149),
    "nothing but -inf": lambda s: np.full_like(s, -np.inf),
    "some -inf": lambda s: np.where(s > 0.5, s, -np.inf),
    "infinite": lambda s: np.where(s > 1, np.inf, s),
}


@pytest.mark.parametrize("S", [700, 2500])
@pytest.mark.parametrize("kind", SPECIAL)
def test_top_k_select_breaks_ties_as_the_oracle(kind: str, S: int) -> None:
    scores = SPECIAL[kind](np.random.default_rng(7).normal(size=(1, 2, S)).astype(np.float32))
    for top_k, window in ((50, 0), (50, 20), (1500, 3)):
        expected = oracle.top_k_select(scores, top_k=top_k, local_window=window)
        got = cuda_ref.top_k_select(torch.tensor(scores, device=DEVICE), top_k=top_k, local_window=window)
        np.testing.assert_array_equal(to_numpy(got), expected)


def test_ties_are_taken_in_order_when_candidates_fill_several_blocks() -> None:
    scores = np.random.default_rng(7).normal(size=(1, 1, 9000)).astype(np.float32).round()
    expected = oracle.top_k_select(scores, top_k=3000, local_window=10)
    got = cuda_ref.top_k_select(torch.tensor(scores, device=DEVICE), top_k=3000, local_window=10)
    np.testing.assert_array_equal(to_numpy(got), expected)


@pytest.mark.parametrize("nan", [torch.nan, -torch.nan], ids=["positive", "negative"])
def test_a_score_that_is_nan_counts_as_infinity(nan: float) -> None:
    scores = torch.arange(40.0, device=DEVICE).expand(1, 1, 40).clone()
    scores[..., [3, 5]], scores[..., 4] = nan, torch.inf
    got = cuda_ref.top_k_select(scores, top_k=5, local_window=1)
    assert got.flatten().tolist() == [3, 4, 5, 38, 39]
    got = cuda_ref.top_k_select(scores, top_k=3, local_window=1)
    assert got.flatten().tolist() == [3, 4, 39]


@pytest.mark.parametrize("top_k", [2**31, 2**70])
def test_more_keys_than_there_are_may_be_asked_for(top_k: int) -> None:
    scores = torch.arange(40.0, device=DEVICE)[None, None]
    chosen = cuda_ref.top_k_select(scores, top_k=top_k, local_window=top_k)
    assert chosen.flatten().tolist() == list(range(40))


@pytest.mark.parametrize("S", [1, 1024, 4096, 16384, 65536, 1 << 19])
@pytest.mark.parametrize("top_k", [1, 128, 4096, 100_000])
def test_candidates_of_all_tiles_fit_into_one_block_where_that_can_be(S: int, top_k: int) -> None:
    block = select.block_size(S, top_k)
    assert block in configs.SELECT_WARPS
    candidates = -(-S // block) * min(top_k, block)
    assert candidates <= block or block == max(configs.SELECT_WARPS)
