"""Compare the selection of key blocks from scores with the oracle."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_sparse.core.blocks import ops
from mlx_sparse.core.blocks.layout import Layout
from mlx_sparse.methods.sample import oracle as oracle_sample


def scores(shape: tuple[int, ...], seed: int, *, ties: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    # Sums of quarters are exact in float32 and float64, so that both keep the same scores.
    return (
        rng.integers(0, 4, shape) / 4 + 0.25
        if ties
        else rng.permuted(np.arange(1, 1 + np.prod(shape))).reshape(shape) / 4
    )


def keep(backend: Any, scores: np.ndarray, alpha: float) -> np.ndarray:
    if backend.name == "ops":
        return backend.numpy(ops.select_share(backend.array(scores, "f32"), alpha))
    from mlx_sparse.cuda_ref.launchers import sample

    return backend.numpy(sample.select_share(backend.array(scores, "f32"), alpha)).astype(bool)


by_backend = pytest.mark.parametrize("backend", ["ops", "triton"], indirect=True)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("alpha", [1e-3, 0.3, 0.5, 0.8, 0.95, 0.999])
@by_backend
def test_keep_equals_the_oracle(backend: Any, alpha: float, ties: bool) -> None:
    for n in (1, 2, 7, 40):
        x = scores((2, 3, 2, n), n, ties=ties)
        np.testing.assert_array_equal(keep(backend, x, alpha), oracle_sample.select_share(x, alpha))


@pytest.mark.parametrize(("short", "count"), [(-1e-5, 1), (0.0, 1), (4e-7, 1), (4e-6, 2)])
@by_backend
def test_a_share_that_reaches_alpha_except_for_rounding_is_enough(backend: Any, short: float, count: int) -> None:
    """Test the threshold ``alpha - 1e-6`` (sample.6), because a sum of float32 shares may be smaller than alpha."""
    x = np.array([[0.8 - short, 0.2 + short]], np.float32)
    assert keep(backend, x, 0.8).sum() == oracle_sample.select_share(x.astype(float), 0.8).sum() == count


@by_backend
def test_equal_shares_are_kept_up_to_alpha_in_any_rounding(backend: Any) -> None:
    for count in range(1, 26):
        assert keep(backend, np.full((1, 25), 0.3), count / 25).sum() == count


def test_a_given_width_builds_lists_lazily() -> None:
    """Build the lists as a graph, without any evaluation."""
    layout = Layout(300, 300, 4, 32)
    column = mx.random.uniform(shape=(1, 2, 4, layout.key_blocks))
    lists = ops.select_blocks(column, column, layout, alpha_column=0.5, alpha_slash=0.5)
    assert lists.shape == (1, 2, layout.row_blocks, layout.key_blocks)
    traced = mx.compile(
        lambda x: ops.select_blocks(x, x, layout, alpha_column=0.5, alpha_slash=0.5)
    )  # compilation fails if a value is needed
    assert mx.array_equal(traced(column), lists)
