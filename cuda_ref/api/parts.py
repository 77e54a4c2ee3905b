"""Provide single steps of SparQ, SampleAttention and SAAP as functions for caches and benchmarks on NVIDIA GPUs."""

from __future__ import annotations

import torch

from mlx_sparse.api.checked_call import Call
from mlx_sparse.checks import ShapeError, Sizes, check_int, check_local_window, check_sample

from ..checks import Padding, as_padding, check_backend, check_device, check_head_dim, check_integers, check_tensor
from ..launchers import saap as launchers
from ..launchers import sample, select
from . import Torch


def top_k_select(
    scores: torch.Tensor, *, top_k: int, local_window: int, left_padding: Padding = None, backend: str = "auto"
) -> torch.Tensor:
    """Select ``top_k`` keys, which are the last ``local_window`` valid keys and the best remaining keys (sparq.6).

    Args:
        scores: ``(B, Hkv, S)``. Invalid keys and keys with score -inf are never selected. NaN counts as +inf.

    Returns:
        Ascending int32 key indices ``(B, Hkv, min(top_k, S))``, padded with -1. Ties go to the lower index.
    """
    check_tensor("scores", scores)
    check_backend(backend, scores.device)
    if scores.ndim != 3 or 0 in scores.shape:
        raise ShapeError(f"scores: expected 3 axes (B, Hkv, S), none of them empty, got {tuple(scores.shape)}.")
    B, Hkv, S = scores.shape
    check_int("top_k", top_k, 1)
    window = check_local_window(local_window, top_k)
    padding = as_padding(left_padding, Sizes(B, Hkv, Hkv, 1, S, 1), scores.device)
    chosen: torch.Tensor = select.top_k_select(scores.float(), min(top_k, S), min(window, S), padding)
    return chosen


def sample_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    chunks: int = 1,
    block_size: int = 128,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the softmax weights of the sampled queries in each region, per key block and per offset bin.

    An offset bin is a range of ``block_size`` distances between query and key.

    Returns:
        The sums ``column`` per key block (sample.4) and ``slash`` per offset bin (sample.5), both float32
        ``(B, Hq, C, Nk)``.
    """
    call = Call(Torch(), "sample_scores", (queries, keys, keys), scale=scale, backend=backend)
    check_sample(1.0, 1.0, chunks, block_size)
    check_head_dim(call.sizes.D)
    result: tuple[torch.Tensor, torch.Tensor] = sample.sample_scores(queries, keys, chunks, block_size, call.scale)
    return result


def saap_index(
    bucket_ids: torch.Tensor, *, buckets: int, sink_tokens: int, left_padding: Padding = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the keys by bucket with torch.sort (saap.9). Sinks and padding are omitted.

    Args:
        bucket_ids: ``(B, Hkv, n)`` int bucket of each key. Keys with a bucket outside ``0 .. buckets - 1`` are omitted.

    Returns:
        int32 ``offsets (B, Hkv, buckets + 1)`` and ``key_ids (B, Hkv, n)``. Bucket c contains the keys
        ``key_ids[offsets[c] : offsets[c + 1]]``, ascending. Slots at ``offsets[buckets]`` and above are undefined.
    """
    B, Hkv, n = _check_rows("bucket_ids", bucket_ids)
    check_int("buckets", buckets, 1)
    check_int("sink_tokens", sink_tokens, 0)
    padding = as_padding(left_padding, Sizes(B, Hkv, Hkv, 1, n, 1), bucket_ids.device)
    return launchers.saap_index(bucket_ids, buckets=buckets, sink_tokens=sink_tokens, left_padding=padding)


def saap_indices(
    visited: torch.Tensor,
    offsets: torch.Tensor,
    key_ids: torch.Tensor,
    *,
    length: int,
    covered: int,
    sink_tokens: int,
    capacity: int,
    left_padding: Padding = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the keys that a decode step attends to (saap.10).

    Each list contains the sinks, then the keys at index ``covered`` and later, then the keys in the visited buckets.

    Args:
        visited: ``(B, Hkv, n)`` distinct int bucket ids. A number that is not a bucket id is an empty slot.
        offsets, key_ids: results of `saap_index` for keys 0..covered-1.
        capacity: number of slots in each list. Keys that do not fit are omitted.

    Returns:
        int32 ``indices (B, Hkv, capacity)``, padded with -1, and int32 ``counts (B, Hkv)``, the number of used slots in
        each list.
    """
    B, Hkv, _ = _check_rows("visited", visited)
    check_backend(backend, visited.device)
    for name, array in (("offsets", offsets), ("key_ids", key_ids)):
        shape = _check_rows(name, array)
        check_device(name, array, visited.device)
        if shape[:2] != (B, Hkv) or (name == "offsets" and shape[2] < 1):
            raise ShapeError(f"{name}: expected (B={B}, Hkv={Hkv}, ...), got {shape}.")
    check_int("length", length, 1)
    check_int("covered", covered, 0, length)
    check_int("sink_tokens", sink_tokens, 0)
    check_int("capacity", capacity, 0)
    padding = as_padding(left_padding, Sizes(B, Hkv, Hkv, 1, length, 1), visited.device)
    # An int64 number must not wrap to a valid bucket.
    slots = torch.where((visited >= 0) & (visited < offsets.shape[2] - 1), visited, -1).to(torch.int32)
    result: tuple[torch.Tensor, torch.Tensor] = launchers.saap_indices(
        slots, offsets.to(torch.int32), key_ids.to(torch.int32), length, covered, sink_tokens, capacity, padding
    )
    return result


def _check_rows(name: str, array: torch.Tensor) -> tuple[int, int, int]:
    """Validate ``array`` as an integer tensor ``(B, Hkv, n)`` and return its shape."""
    check_tensor(name, array)
    if array.ndim != 3 or 0 in array.shape[:2]:
        raise ShapeError(f"{name}: expected shape (B, Hkv, n), got {tuple(array.shape)}.")
    check_integers(name, array)
    B, Hkv, n = array.shape
    return B, Hkv, n
