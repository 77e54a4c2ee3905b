"""Keys in few bits by operations of torch: docs/spec/sparq.md, equations (sparq.17) to (sparq.20), (sparq.22).

A group is coded once in 64 tokens, so this needs no kernel.
"""

from __future__ import annotations

import torch

from mlx_sparse.methods.scoring_keys import GROUP, LARGEST, LARGEST_CODE, KeyCodes

from .steps import deviation


def code_keys(keys: torch.Tensor, left_padding: torch.Tensor | None) -> KeyCodes:
    """Code the full groups of each row of ``keys (B, Hkv, S, D)``; 0 behind a row's last.

    Args:
        left_padding: ``(B,)`` first valid key of each row, from which its groups are counted.
    """
    if left_padding is None:
        return code_groups(keys)
    S = keys.shape[2]
    groups = S // GROUP
    # Every row from its first valid key on; what follows its last is not in a full group.
    place = left_padding[:, None] + torch.arange(groups * GROUP, device=keys.device)
    rows = torch.take_along_dim(keys, place.clamp(max=S - 1)[:, None, :, None], dim=2)
    codes, lo, step, centre = code_groups(rows)
    behind = ~_full(groups, S, left_padding)
    for array in (lo, step):
        array.masked_fill_(behind, 0)
    codes.unflatten(-1, (groups, GROUP // 2)).masked_fill_(behind[..., None], 0)
    centre.masked_fill_((S - left_padding < GROUP)[:, None, None], 0)
    return KeyCodes(codes, lo, step, centre)


def code_groups(keys: torch.Tensor, centre: torch.Tensor | None = None) -> KeyCodes:
    """Code the full groups of valid ``keys (B, Hkv, S, D)``, the first of which begins with the first key.

    Args:
        centre: float32 ``(B, Hkv, D)`` of the groups before these; None where there are none.
    """
    B, Hkv, S, D = keys.shape
    groups = S // GROUP
    rows = keys[:, :, : groups * GROUP].float().reshape(B, Hkv, groups, GROUP, D)
    least, most = rows.amin(dim=3), rows.amax(dim=3)
    if centre is None:
        centre = _centre(least, most)
    # (sparq.18): rounding keeps the order, so the least of the differences is that of the least
    least, most = (bound - centre[:, :, None] for bound in (least, most))
    # (sparq.19)
    odd = ~(least.isfinite() & most.isfinite())
    lo = torch.where(odd, torch.nan, least.clamp(-LARGEST, LARGEST)).half()
    # Divided by a tensor: on a GPU torch multiplies by one over a number, which rounds twice.
    width = (most - least) / torch.full_like(most, LARGEST_CODE)
    step = torch.where(odd, torch.nan, width.clamp(max=LARGEST)).half()
    # (sparq.20)
    lows, steps = (array.float()[:, :, :, None] for array in (lo, step))
    code = ((rows - centre[:, :, None, None] - lows) / steps).round().clamp(0, LARGEST_CODE)
    code = torch.where(steps > 0, code, 0.0).to(torch.uint8)
    code = code.permute(0, 1, 4, 2, 3).reshape(B, Hkv, D, groups * GROUP)
    code = code[..., 0::2] | code[..., 1::2] << 4
    return KeyCodes(code.contiguous(), lo.mT.contiguous(), step.mT.contiguous(), centre)


def _centre(least: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """(sparq.17) ``(B, Hkv, D)`` from the bounds ``(B, Hkv, groups, D)`` of groups."""
    B, Hkv, groups, D = least.shape
    if groups == 0:
        return least.new_zeros(B, Hkv, D)
    middle = least[:, :, 0] * 0.5 + most[:, :, 0] * 0.5
    return torch.where(middle.isfinite(), middle, 0.0)


def _full(groups: int, S: int, left_padding: torch.Tensor) -> torch.Tensor:
    """Which of the ``groups`` of each row are full: ``(B, 1, 1, groups)``."""
    full = (S - left_padding) // GROUP
    return torch.arange(groups, device=left_padding.device) < full[:, None, None, None]


def key_spread(coded: KeyCodes, keys: torch.Tensor, left_padding: torch.Tensor | None) -> torch.Tensor:
    """(sparq.22) of each component over the valid ones of ``keys (B, Hkv, S, D)``: float32 ``(B, Hkv, D)``."""
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
    # A row without a full group has all its valid keys among the last of the buffer.
    last = S - GROUP + 1
    return torch.where(there[..., 0], found, deviation(keys[:, :, last:], left_padding - last))
