"""Test the running statistics of SparQ: trimmed, moved and padded rows have no effect."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_sparse.cache.kv_cache import adopt
from mlx_sparse.methods import SparQ
from mlx_sparse.methods.sparq.running_statistics import MARK_ROWS, MERGED_ROWS, RunningStatistics

H, D, S = 2, 16, 300
READS = {
    "query_key": {"component_score": "query_key", "reallocate": False, "key_bits": 16},
    "reallocate": {"component_score": "query", "reallocate": True, "key_bits": 16},
}
CHOICE: dict[str, Any] = {"rank": 5, "top_k": 12, "local_window": 3}

reads = pytest.mark.parametrize("read", READS)
bad_numbers = pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6, 1e12])


def some_rows(B: int, count: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Return keys and values far from 0."""
    random = np.random.default_rng(seed)
    spread = np.linspace(0.2, 2, D)
    keys = random.normal(np.linspace(-30, 30, D), spread, (B, H, count, D))
    return mx.array(keys.astype(np.float32)), mx.array(random.normal(2, spread, (B, H, count, D)).astype(np.float32))


def bad_rows(B: int, count: int, bad: float) -> tuple[mx.array, mx.array]:
    return mx.full((B, H, count, D), bad), mx.full((B, H, count, D), bad)


def adopted(cache: Any) -> Any:
    adopt(cache)
    return cache


def filled(cache: Any, *parts: tuple[mx.array, mx.array]) -> Any:
    for keys, values in parts:
        cache.update_and_fetch(keys, values)
    return adopted(cache)


def attend(cache: Any, read: str) -> mx.array:
    queries = mx.random.normal((cache.keys.shape[0], 2 * H, 1, D), key=mx.random.key(7))
    return cache.attend(queries, SparQ(**CHOICE, **READS[read], dense_below=0), scale=D**-0.5, backend="ops")[0]


def check_sums(cache: Any) -> None:
    """Compare the running statistics of the valid rows with float64."""
    side, first = cache.aux_states["sparq"], [0] * len(cache.keys) if cache.padding is None else cache.padding.tolist()
    for b, start in enumerate(first):
        keys, values = (np.array(rows[b, :, start : cache.length]).astype(np.float64) for rows in cache.state[:2])
        unit = np.finfo(np.float32).eps
        if keys.size and side.keys is not None:
            found, atol = np.array(side.keys.deviation())[b], unit * np.abs(keys).max()
            np.testing.assert_allclose(found, keys.std(axis=1), rtol=1e-5, atol=atol)
        if values.size and side.values is not None:
            found, atol = np.array(side.values.mean())[b], 4 * unit * np.abs(values).max()
            np.testing.assert_allclose(found, values.mean(axis=1), rtol=0, atol=atol)


def check(cache: Any, read: str) -> None:
    """Compare a decode step with a step over a new cache with the same rows, and with the oracle."""
    found = np.array(attend(cache, read))
    check_sums(cache)
    fresh = adopted(KVCache() if cache.padding is None else BatchKVCache([0] * len(cache.keys)))
    fresh.state = cache.state
    np.testing.assert_allclose(found, np.array(attend(fresh, read)), rtol=0, atol=2e-6)

    queries = np.array(mx.random.normal((len(cache.keys), 2 * H, 1, D), key=mx.random.key(7)))
    keys, values = (np.array(rows[..., : cache.length, :]) for rows in (cache.keys, cache.values))
    padding = None if cache.padding is None else np.array(cache.padding)
    wanted = reference.sparq_attention(queries, keys, values, **CHOICE, **READS[read], left_padding=padding)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def seen(cache: Any, bad: float, read: str, count: int = 5) -> Any:
    """Append ``count`` bad rows to ``cache``, one per decode step."""
    attend(cache, read)
    for _ in range(count):
        cache.update_and_fetch(*bad_rows(cache.keys.shape[0], 1, bad))
        mx.eval(attend(cache, read))
    return cache


def trimmed(cache: Any, bad: float, read: str) -> Any:
    seen(cache, bad, read).trim(5)
    return cache


def trimmed_far(cache: Any, bad: float, read: str) -> Any:
    """Trim to a length before the last complete block."""
    rows = some_rows(cache.keys.shape[0], 3 * MARK_ROWS, seed=1)
    seen(cache, bad, read).update_and_fetch(*rows)
    attend(cache, read)
    cache.trim(5 + 3 * MARK_ROWS)
    return cache


def trimmed_in_a_block(cache: Any, bad: float, read: str) -> Any:
    """Trim a few rows many times, as after rejected drafts."""
    for step in range(40):
        seen(cache, bad, read, 2).trim(2)
        cache.update_and_fetch(*some_rows(cache.keys.shape[0], 1, seed=step))
    return cache


def overwritten(cache: Any, bad: float, read: str) -> Any:
    trimmed(cache, bad, read).update_and_fetch(*some_rows(cache.keys.shape[0], 9, seed=1))
    return cache


def copied(cache: Any, bad: float, read: str) -> Any:
    twin = copy.deepcopy(seen(cache, bad, read))
    twin.trim(5)
    seen(cache, bad, read)
    return twin


def merged(cache: Any, bad: float, read: str) -> Any:
    trimmed(cache, bad, read)
    batch = adopted(type(cache).merge([cache, filled(KVCache(), some_rows(1, 40, seed=2))]))
    seen(batch, bad, read).trim(5)
    return batch


ANY = [trimmed, trimmed_far, trimmed_in_a_block, overwritten, copied]


@reads
@bad_numbers
@pytest.mark.parametrize("history", [*ANY, merged])
def test_trimmed_rows_leave_the_running_statistics(history: Callable[..., Any], bad: float, read: str):
    check(history(filled(KVCache(), some_rows(1, S)), bad, read), read)


def filtered(cache: Any, bad: float, read: str) -> Any:
    trimmed(cache, bad, read)
    cache.filter(mx.array([0, 2]))
    return trimmed(cache, bad, read)


def extended(cache: Any, bad: float, read: str) -> Any:
    other = filled(BatchKVCache([3, 0]), some_rows(2, S + 50, seed=3))
    trimmed(cache, bad, read).extend(trimmed(other, bad, read))
    return trimmed(cache, bad, read)


@reads
@bad_numbers
@pytest.mark.parametrize("history", [*ANY, filtered, extended])
def test_trimmed_and_padded_rows_of_a_batch_leave_the_running_statistics(
    history: Callable[..., Any], bad: float, read: str
):
    cache = filled(BatchKVCache([90, 0, 200]), some_rows(3, S))
    padding = mx.arange(S)[:, None] < cache.left_padding[:, None, None, None]
    for name in ("keys", "values"):
        setattr(cache, name, mx.where(padding, bad, getattr(cache, name)[..., :S, :]))
    check(cache, read)
    check(history(cache, bad, read), read)


@pytest.mark.parametrize("padded_with", [0.0, np.nan, np.inf])
def test_padding_does_not_change_the_deviation_of_keys_far_from_0(padded_with: float):
    keys, values = some_rows(2, 2000)
    padding = mx.arange(2000)[:, None] < mx.array([1900, 0])[:, None, None, None]
    rows = mx.where(padding, padded_with, keys + 1000), mx.where(padding, padded_with, values)
    cache = filled(BatchKVCache([1900, 0]), rows)
    for step in range(3):
        for read in READS:
            attend(cache, read)
        check_sums(cache)
        cache.update_and_fetch(*(rows + far for rows, far in zip(some_rows(2, 1, step), (1000, 0), strict=True)))


@reads
def test_sequence_may_start_without_valid_rows(read: str):
    cache = filled(BatchKVCache([0, 45]), some_rows(2, 30))
    attend(cache, read)
    for step, count in enumerate((10, 1, 1, 1, 1, 1, 1, 1, 1, 10)):  # rows 40 to 47 are appended one by one
        cache.update_and_fetch(*some_rows(2, count, step))
        attend(cache, read)
        check_sums(cache)
    check(cache, read)
    cache.trim(10)
    check(cache, read)


@pytest.mark.parametrize(
    "length", [1, 2, MARK_ROWS - 1, MARK_ROWS, MARK_ROWS + 1, 3 * MARK_ROWS, 2 * MERGED_ROWS + 3 * MARK_ROWS + 5]
)
@pytest.mark.parametrize("padding", [None, [0, 700]], ids=["", "padded"])
def test_statistics_of_any_length_equal_float64(length: int, padding: list[int] | None):
    buffer = some_rows(2, length, seed=length)[0] + 1000
    steps = range(max(length - 3 * MARK_ROWS, 1), length + 1)
    for lengths in ([length], steps, [*steps, length // 2, length]):
        moments = RunningStatistics(None if padding is None else mx.array(padding), spread=True)
        for stop in lengths:
            moments.extend(buffer, stop)
        assert moments.state.length == length
        for b, first in enumerate(padding or [0, 0]):
            rows = np.array(buffer)[b, :, first:].astype(np.float64)
            if rows.shape[1]:
                np.testing.assert_allclose(np.array(moments.mean())[b], rows.mean(axis=1), rtol=1e-6)
                np.testing.assert_allclose(np.array(moments.deviation())[b], rows.std(axis=1), rtol=1e-4, atol=2e-4)


def test_rounding_errors_do_not_accumulate_over_steps():
    tokens = 6000
    random = np.random.default_rng(0)
    # The final sums are multiples of 0.5. Row by row, every sum would be rounded in the same direction.
    rows = (1003.1 + random.normal(0, 0.02, (1, 1, tokens, 4))).astype(np.float32)
    moments, buffer = RunningStatistics(None, spread=True), mx.array(rows)
    for stop in range(1, tokens + 1):
        moments.extend(buffer, stop)
        mx.eval(moments.state.sums)
    rows = rows.astype(np.float64)
    last_bit = float(np.spacing(np.float32(rows.sum(axis=2).max())))
    np.testing.assert_allclose(np.array(moments.mean()), rows.mean(axis=2), rtol=0, atol=last_bit / MARK_ROWS)
    np.testing.assert_allclose(np.array(moments.deviation()), rows.std(axis=2), rtol=2e-2)


@reads
def test_rejected_drafts_recompute_at_most_one_block(read: str):
    cache = filled(KVCache(), some_rows(1, 3 * MARK_ROWS - 20))
    for length in range(cache.length + 1, 5 * MARK_ROWS):
        for _ in range(8):
            cache.update_and_fetch(*some_rows(1, 1))
            attend(cache, read)
        cache.trim(cache.length - length)
        cache.aux_states["sparq"].rewind(cache.length)
        moments = cache.aux_states["sparq"].keys or cache.aux_states["sparq"].values
        assert length - moments.state.length < (MARK_ROWS if length % MARK_ROWS > MARK_ROWS - 8 else 1)
