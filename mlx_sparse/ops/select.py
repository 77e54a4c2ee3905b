"""Select the top-k keys by score, for all top-k methods."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .packed_rows import Rows

LARGEST = 3.4028234663852886e38  # largest finite float32
SMALLEST = 2.0**-126  # smallest normal float32 above 0


def valid_keys(S: int, left_padding: mx.array) -> mx.array:
    """Return a mask ``(B, S)``, True for key j of sequence b if ``j >= left_padding[b]``."""
    return mx.arange(S) >= left_padding[:, None]


def take_rows(array: Rows, rows: mx.array) -> mx.array:
    """Gather the rows of ``array (B, H, N, M)`` at the indices ``rows (B, H, n)`` into ``(B, H, n, M)``.

    On a CPU, indexing copies whole rows and takes 0.3 ms for 96 rows of 16,384 numbers. `mx.take_along_axis` copies
    single elements and takes 11 ms.
    """
    B, H, _ = rows.shape
    return array[mx.arange(B)[:, None, None], mx.arange(H)[None, :, None], rows]


def keep_fewest(
    indices: mx.array, shares: mx.array, local: mx.array, selection: Any, S: int
) -> tuple[mx.array, mx.array]:
    """Keep the local window and the fewest best keys whose shares sum to at least ``selection.recall`` (sparq.25).

    A sequence with at most ``selection.top_k`` valid keys keeps all of them.

    Args:
        indices: int32 ``(B, Hkv, N)``, -1 in empty slots.
        shares: float32 ``(B, Hkv, N)``, scores of the keys as shares of the sum of all scores.
        local: bool ``(B, Hkv, N)``, True for keys of the local window.
        selection: `methods.sparq.Selection`.
        S: number of keys, including the padding.

    Returns:
        int32 indices ``(B, Hkv, N)``, ascending, -1 in empty slots, and the sum ``(B, Hkv)`` of the shares of the keys.
    """
    recall: Any = max(selection.recall, SMALLEST)
    if selection.left_padding is not None:
        recall = mx.where(S - selection.left_padding <= selection.top_k, mx.inf, recall)[:, None, None]
    last = mx.array(2**31 - 1, mx.int32)
    empty = indices < 0
    ranks = mx.where(local, -mx.inf, mx.where(mx.isnan(shares), -LARGEST, -shares))
    order = mx.argsort(mx.where(empty, mx.inf, ranks), axis=-1)
    ordered = mx.take_along_axis(mx.where(empty, 0.0, shares), order, axis=-1)
    # A sum of NaN reaches no share, but a share that was reached before NaN remains reached.
    before = mx.cumsum(mx.where(mx.isnan(ordered), -LARGEST, ordered), axis=-1, inclusive=False)
    before = mx.where(mx.take_along_axis(local, order, axis=-1), -LARGEST, before)
    kept = mx.cummax(before, axis=-1) < recall
    chosen = mx.where(kept, mx.take_along_axis(mx.where(empty, last, indices), order, axis=-1), last)
    chosen = mx.sort(chosen, axis=-1)
    return mx.where(chosen < last, chosen, -1), mx.where(kept, ordered, 0.0).sum(axis=-1)


def top_k_select(scores: mx.array, *, top_k: int, local_window: int, left_padding: mx.array | None) -> mx.array:
    """Select ``top_k`` keys, which are the last ``local_window`` valid keys and the best remaining keys (sparq.6).

    Args:
        scores: float32 ``(B, Hkv, S)``. Scores of invalid keys are ignored. -inf is never selected, and NaN counts as
            +inf.

    Returns:
        Ascending int32 key indices ``(B, Hkv, min(top_k, S))``, padded with -1.
    """
    S = scores.shape[-1]
    n = min(top_k, S)
    # A score of +inf always selects a local key. Adding 1 to its score would not be enough, because probabilities
    # summed over the group can exceed 1. Other scores are clipped to the largest finite number.
    scores = mx.where(scores < LARGEST, scores, LARGEST)
    scores = mx.where(mx.arange(S) >= S - local_window, mx.inf, scores)
    if left_padding is not None:
        scores = mx.where(valid_keys(S, left_padding)[:, None, :], scores, -mx.inf)
    order = mx.argpartition(-scores, kth=n - 1, axis=-1)[..., :n] if n < S else mx.arange(S)
    order = mx.broadcast_to(order, (*scores.shape[:2], n)).astype(mx.int32)
    chosen = mx.take_along_axis(scores, order, axis=-1) > -mx.inf
    indices = mx.sort(mx.where(chosen, order, S), axis=-1)
    return mx.where(indices < S, indices, -1)
