"""The operators of torch behind the signatures that all backends share: what `mlx_sparse.methods.table` names.

Arguments have been checked. Slices of larger buffers are taken as they are.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mlx_sparse.methods.scoring_keys import KeyCodes

from ..checks import check_head_dim, check_real, rows
from ..launchers import saap as launchers
from ..launchers import torch_ops

ASSIGNED_AT_ONCE = 1 << 26  # inner products of keys with centroids that are held at once
MASS_BLOCK = 128  # any block size gives the same log-sum-exp


def dense_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    left_padding: torch.Tensor | None,
) -> torch.Tensor:
    """One query by our split-KV kernel, several by torch's attention."""
    if queries.shape[2] > 1:
        return _prompt(queries, keys, values, scale, left_padding)
    out: torch.Tensor = torch_ops.dense_decode(queries, rows(keys), rows(values), scale, left_padding)[0]
    return out


def dense_lse(
    queries: torch.Tensor, keys: torch.Tensor, *, scale: float, left_padding: torch.Tensor | None
) -> torch.Tensor:
    """Float32 log-sum-exp of dense causal attention, ``(B, Hq, L)``: what retained mass is measured against."""
    L, S = queries.shape[2], keys.shape[2]
    queries, keys = rows(queries), rows(keys)
    lse: torch.Tensor
    if L == 1:
        lse = torch_ops.dense_decode(queries, keys, keys, scale, left_padding)[1]
        return lse
    if left_padding is None:
        lse = torch_ops.attend_blocks(queries, keys, keys, None, MASS_BLOCK, scale)[1]
        return lse
    # The kernel has no padding: each sequence is attended from its first valid key on.
    lse = torch.full(queries.shape[:3], -torch.inf, device=queries.device)
    for b, first in enumerate(left_padding.tolist()):
        if first < S:
            q, k = queries[b : b + 1, :, max(0, L - S + first) :], keys[b : b + 1, :, first:]
            lse[b, :, -q.shape[2] :] = torch_ops.attend_blocks(q, k, k, None, MASS_BLOCK, scale)[1]
    return lse


def sparq_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    rank: int,
    top_k: int,
    local_window: int,
    reallocate: bool,
    component_weight: torch.Tensor | None,
    keys_t: torch.Tensor | KeyCodes | None,
    value_mean: torch.Tensor | None,
    scale: float,
    left_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of SparQ (sparq.1) to (sparq.10), (sparq.21)."""
    if keys_t is None:
        keys_t = keys.transpose(-1, -2)
    coded = tuple(keys_t) if isinstance(keys_t, KeyCodes) else (keys_t,)
    result: tuple[torch.Tensor, torch.Tensor] = torch_ops.sparq_decode(
        queries,
        rows(keys),
        rows(values),
        coded[0],
        rank,
        top_k,
        local_window,
        component_weight,
        scale,
        left_padding,
        value_mean if reallocate else None,
        *coded[1:],
    )
    return result


def attend_indices(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over listed keys (sparq.7)."""
    if indices.dtype != torch.int32:  # a number of 64 bits must not become a key's by losing some
        indices = torch.where((indices >= 0) & (indices < keys.shape[2]), indices, -1).to(torch.int32)
    result: tuple[torch.Tensor, torch.Tensor] = torch_ops.attend_indices(
        queries, rows(keys), rows(values), indices, scale
    )
    return result


def attend_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    *,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over listed key blocks (sample.8)."""
    check_head_dim(queries.shape[3])
    key_blocks = -(-keys.shape[2] // block_size)
    fresh = (blocks >= 0) & (blocks < key_blocks)  # a number of 64 bits must not become a block's by losing some
    fresh[..., 1:] &= blocks[..., 1:] != blocks[..., :-1]  # a block that is listed twice is attended once
    listed = torch.where(fresh, blocks.to(torch.int32), -1)
    result: tuple[torch.Tensor, torch.Tensor] = torch_ops.attend_blocks(
        rows(queries), rows(keys), rows(values), listed, block_size, scale
    )
    return result


def sample_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    alpha_column: float,
    alpha_slash: float,
    chunks: int,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A prompt by SampleAttention; third, how many key blocks each row block attends, int32 ``(B, Hq, R)``."""
    check_head_dim(queries.shape[3])
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch_ops.sample_prefill(
        rows(queries), rows(keys), rows(values), alpha_column, alpha_slash, chunks, block_size, scale
    )
    return result


def sample_select(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    alpha_column: float,
    alpha_slash: float,
    chunks: int,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """The key blocks of every row block (sample.1) to (sample.7): ``(B, Hq, R, Nk)`` int32, as wide as all of them."""
    check_head_dim(queries.shape[3])
    blocks: torch.Tensor = torch_ops.sample_select(
        rows(queries), rows(keys), alpha_column, alpha_slash, chunks, block_size, scale
    )
    return blocks


def saap_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    bucket_ids: torch.Tensor,
    visited: torch.Tensor,
    sink_tokens: int,
    recent_tokens: int,
    scale: float,
    left_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step over visited buckets, with an index built for it (saap.9) to (saap.11)."""
    S = keys.shape[2]
    covered = S - recent_tokens
    places, slots = _as_slots(bucket_ids[..., :covered], visited)
    offsets, key_ids = launchers.saap_index(
        places, buckets=visited.shape[2], sink_tokens=sink_tokens, left_padding=left_padding
    )
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch_ops.saap_decode(
        queries, rows(keys), rows(values), slots, offsets, key_ids, covered, sink_tokens, S, scale, left_padding
    )
    return result


def saap_assign(keys: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Bucket of each key (saap.1), by torch's matrix product."""
    columns = centroids.float().mT
    step = max(1, ASSIGNED_AT_ONCE // (keys.shape[0] * columns.shape[0] * columns.shape[2]))
    ids = torch.empty(keys.shape[:3], dtype=torch.int32, device=keys.device)
    for first in range(0, keys.shape[2], step):
        part = slice(first, first + step)
        best = (keys[:, :, part].float() @ columns).max(dim=3)
        ids[:, :, part] = best.indices.where(best.values.isfinite(), 0)
    return ids


def saap_route(queries: torch.Tensor, *, probes: int, **network: torch.Tensor | None) -> torch.Tensor:
    """The buckets that each KV head visits (saap.5), (saap.8)."""
    for name, array in network.items():
        if array is not None:
            check_real(name, array)
    visited: torch.Tensor = torch_ops.saap_route(queries, **network, probes=probes)
    return visited


def masked_mean(rows: torch.Tensor, left_padding: torch.Tensor | None) -> torch.Tensor:
    """(sparq.9) float32 mean of ``rows (B, Hkv, S, D)`` over the valid keys: ``(B, Hkv, D)``."""
    if left_padding is None:
        return rows.mean(dim=2, dtype=torch.float32)
    S = rows.shape[2]
    valid = torch.arange(S, device=rows.device) >= left_padding[:, None]
    count = (S - left_padding).clamp(min=1)[:, None, None]
    return torch.where(valid[:, None, :, None], rows, 0).sum(dim=2, dtype=torch.float32) / count


def deviation(keys: torch.Tensor, left_padding: torch.Tensor | None) -> torch.Tensor:
    """(sparq.1) float32 standard deviation of each component over the valid keys: ``(B, Hkv, D)``."""
    centred = keys.float() - masked_mean(keys, left_padding)[:, :, None, :]
    return masked_mean(centred**2, left_padding).sqrt()


def _as_slots(bucket_ids: torch.Tensor, visited: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same visit with the slots of ``visited`` as buckets, so that a bucket's number may be as large as it likes.

    Returns:
        For each key the first slot that holds its bucket, -1 if there is none; and the slots, ``(B, Hkv, n)`` int32.
    """
    slots = torch.arange(visited.shape[2], dtype=torch.int32, device=visited.device).expand(visited.shape).contiguous()
    if not visited.shape[2]:
        return torch.full_like(bucket_ids, -1), slots
    wanted, ids = visited.long().sort(dim=2).values.contiguous(), bucket_ids.long().contiguous()
    place = torch.searchsorted(wanted, ids).clamp(max=visited.shape[2] - 1)
    return torch.where((ids >= 0) & (wanted.gather(2, place) == ids), place, -1), slots


def _prompt(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    padding: torch.Tensor | None,
) -> torch.Tensor:
    """Several queries: torch's own attention, which has a fast causal form for a whole prompt only."""
    L, S, grouped = queries.shape[2], keys.shape[2], queries.shape[1] > keys.shape[1]
    if padding is None and L == S:
        return functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
        )
    position = torch.arange(S, device=queries.device)
    mask = position <= position[S - L :, None]
    if padding is not None:
        valid = position >= padding[:, None]
        mask = mask & valid[:, None, None, :]
        # Padded rows may hold anything, and 0 * inf is NaN.
        keys, values = (torch.where(valid[:, None, :, None], rows, 0) for rows in (keys, values))
    out = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
    )
    return torch.where(mask.any(dim=-1, keepdim=True), out, 0)
