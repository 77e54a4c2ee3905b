"""Compute dense attention, statistics of keys and values, and int4 scoring keys with torch operations.

Each group of 64 scoring keys is quantized once (docs/spec/sparq.md, sparq.17 to sparq.20 and sparq.22).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mlx_sparse.methods.sparq.scoring_keys import GROUP, LARGEST, LARGEST_CODE, KeyCodes

from .launchers.attend import dense_decode
from .launchers.blocks import attend_blocks

ASSIGNED_AT_ONCE = 1 << 26  # maximum number of inner products of keys and centroids in memory
LSE_BLOCK = 128  # block size of `dense_lse`, which does not affect the result


def dense_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, left_padding: torch.Tensor | None
) -> torch.Tensor:
    """Compute dense attention. A single query uses the split-KV kernel, and several queries use torch's attention."""
    if queries.shape[2] > 1:
        return _prompt(queries, keys, values, scale, left_padding)
    out: torch.Tensor = dense_decode(queries, keys, values, scale, left_padding)[0]
    return out


def _prompt(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, padding: torch.Tensor | None
) -> torch.Tensor:
    """Compute dense causal attention of several queries with torch. The fast causal kernel of torch requires L = S."""
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
        # Padded rows may contain any number, and 0 * inf is NaN.
        keys, values = (torch.where(valid[:, None, :, None], rows, 0) for rows in (keys, values))
    out = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
    )
    return torch.where(mask.any(dim=-1, keepdim=True), out, 0)


def dense_lse(
    queries: torch.Tensor, keys: torch.Tensor, *, scale: float, left_padding: torch.Tensor | None
) -> torch.Tensor:
    """Return the float32 log-sum-exp ``(B, Hq, L)`` of dense causal attention. Attention recall is computed from it."""
    L, S = queries.shape[2], keys.shape[2]
    lse: torch.Tensor
    if L == 1:
        lse = dense_decode(queries, keys, keys, scale, left_padding)[1]
        return lse
    if left_padding is None:
        lse = attend_blocks(queries, keys, keys, None, LSE_BLOCK, scale)[1]
        return lse
    # The kernel does not support padding, so each sequence is a separate call that starts at its first valid key.
    lse = torch.full(queries.shape[:3], -torch.inf, device=queries.device)
    for b, first in enumerate(left_padding.tolist()):
        if first < S:
            q, k = queries[b : b + 1, :, max(0, L - S + first) :], keys[b : b + 1, :, first:]
            lse[b, :, -q.shape[2] :] = attend_blocks(q, k, k, None, LSE_BLOCK, scale)[1]
    return lse


def saap_assign(keys: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Compute the int32 bucket number ``(B, Hkv, S)`` of each key with torch's matrix product (saap.1)."""
    columns = centroids.float().mT
    step = max(1, ASSIGNED_AT_ONCE // (keys.shape[0] * columns.shape[0] * columns.shape[2]))
    ids = torch.empty(keys.shape[:3], dtype=torch.int32, device=keys.device)
    for first in range(0, keys.shape[2], step):
        part = slice(first, first + step)
        best = (keys[:, :, part].float() @ columns).max(dim=3)
        ids[:, :, part] = best.indices.where(best.values.isfinite(), 0)
    return ids


def masked_mean(rows: torch.Tensor, left_padding: torch.Tensor | None) -> torch.Tensor:
    """Return the float32 mean ``(B, Hkv, D)`` of ``rows (B, Hkv, S, D)`` over the valid rows (sparq.9)."""
    if left_padding is None:
        return rows.mean(dim=2, dtype=torch.float32)
    S = rows.shape[2]
    valid = torch.arange(S, device=rows.device) >= left_padding[:, None]
    count = (S - left_padding).clamp(min=1)[:, None, None]
    return torch.where(valid[:, None, :, None], rows, 0).sum(dim=2, dtype=torch.float32) / count


def deviation(keys: torch.Tensor, left_padding: torch.Tensor | None) -> torch.Tensor:
    """Return the float32 standard deviation ``(B, Hkv, D)`` of each component over the valid keys (sparq.1)."""
    centered = keys.float() - masked_mean(keys, left_padding)[:, :, None, :]
    return masked_mean(centered**2, left_padding).sqrt()


def code_keys(keys: torch.Tensor, left_padding: torch.Tensor | None) -> KeyCodes:
    """Quantize the full groups of each sequence in ``keys (B, Hkv, S, D)``. See `mlx_sparse.methods.sparq.ops`."""
    if left_padding is None:
        return code_groups(keys)
    S = keys.shape[2]
    groups = S // GROUP
    # Shift every row, so that it starts at its first valid key. No full group contains the slots after the last key.
    place = left_padding[:, None] + torch.arange(groups * GROUP, device=keys.device)
    rows = torch.take_along_dim(keys, place.clamp(max=S - 1)[:, None, :, None], dim=2)
    codes, lo, step, center = code_groups(rows)
    behind = ~_full(groups, S, left_padding)
    for array in (lo, step):
        array.masked_fill_(behind, 0)
    codes.unflatten(-1, (groups, GROUP // 2)).masked_fill_(behind[..., None], 0)
    center.masked_fill_((S - left_padding < GROUP)[:, None, None], 0)
    return KeyCodes(codes, lo, step, center)


def code_groups(keys: torch.Tensor, center: torch.Tensor | None = None) -> KeyCodes:
    """Quantize full groups of valid keys. See `mlx_sparse.methods.sparq.ops.code_groups`."""
    B, Hkv, S, D = keys.shape
    groups = S // GROUP
    rows = keys[:, :, : groups * GROUP].float().reshape(B, Hkv, groups, GROUP, D)
    least, most = rows.amin(dim=3), rows.amax(dim=3)
    if center is None:
        center = _center(least, most)
    # (sparq.18): rounding is monotonic, so the minimum of the differences is the difference of the minimum
    least, most = (bound - center[:, :, None] for bound in (least, most))
    # (sparq.19)
    odd = ~(least.isfinite() & most.isfinite())
    lo = torch.where(odd, torch.nan, least.clamp(-LARGEST, LARGEST)).half()
    # Divide by a tensor: for a Python number torch multiplies by the reciprocal on a GPU, which rounds twice.
    width = (most - least) / torch.full_like(most, LARGEST_CODE)
    step = torch.where(odd, torch.nan, width.clamp(max=LARGEST)).half()
    # (sparq.20)
    lows, steps = (array.float()[:, :, :, None] for array in (lo, step))
    code = ((rows - center[:, :, None, None] - lows) / steps).round().clamp(0, LARGEST_CODE)
    code = torch.where(steps > 0, code, 0.0).to(torch.uint8)
    code = code.permute(0, 1, 4, 2, 3).reshape(B, Hkv, D, groups * GROUP)
    code = code[..., 0::2] | code[..., 1::2] << 4
    return KeyCodes(code.contiguous(), lo.mT.contiguous(), step.mT.contiguous(), center)


def _center(least: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Return the center (sparq.17) of the first group, ``(B, Hkv, D)``.

    ``least`` and ``most (B, Hkv, groups, D)`` are the minimum and the maximum of each group.
    """
    B, Hkv, groups, D = least.shape
    if groups == 0:
        return least.new_zeros(B, Hkv, D)
    middle = least[:, :, 0] * 0.5 + most[:, :, 0] * 0.5
    return torch.where(middle.isfinite(), middle, 0.0)


def _full(groups: int, S: int, left_padding: torch.Tensor) -> torch.Tensor:
    """Return a bool mask ``(B, 1, 1, groups)`` that is True for the full groups of each sequence."""
    full = (S - left_padding) // GROUP
    return torch.arange(groups, device=left_padding.device) < full[:, None, None, None]


def key_spread(coded: KeyCodes, keys: torch.Tensor, left_padding: torch.Tensor | None) -> torch.Tensor:
    """Estimate the standard deviation of each component (sparq.22). See `mlx_sparse.methods.sparq.ops.key_spread`."""
    S, groups = keys.shape[2], coded.lo.shape[-1]
    if groups == 0:
        return deviation(keys, left_padding)
    width = coded.step.float() * LARGEST_CODE
    middle = coded.lo.float() + width / 2
    found: torch.Tensor
    if left_padding is None:
        found = (middle.var(dim=-1, correction=0) + width.square().mean(dim=-1) / 16).sqrt()
        return found
    there = _full(groups, S, left_padding)
    count = there.sum(dim=-1, keepdim=True).clamp(min=1)

    def mean(array: torch.Tensor) -> torch.Tensor:
        return torch.where(there, array, 0.0).sum(dim=-1, keepdim=True) / count

    found = (mean((middle - mean(middle)).square()) + mean(width.square()) / 16).sqrt().squeeze(-1)
    # If a row has no full group, all its valid keys are at the end of the buffer.
    last = S - GROUP + 1
    return torch.where(there[..., 0], found, deviation(keys[:, :, last:], left_padding - last))
