"""Keys in few bits by operations of torch: docs/spec/sparq.md, equations (sparq.17) to (sparq.20), (sparq.22).

A group is coded once in 64 tokens, so this needs no kernel.
"""

from __future__ import annotations

import torch

from mlx_sparse.common.key_codes import GROUP, LARGEST, KeyCodes

from .steps import deviation


def code_keys(
    keys: torch.Tensor, left_padding: torch.Tensor | None, *, key_bits: int, centre: torch.Tensor | None = None
) -> KeyCodes:
    """Code the full groups of ``keys (B, Hkv, S, D)``, the first of which begins with the first row.

    Args:
        left_padding: ``(B,)`` first valid key of each row, negative where that lies before these rows.
        centre: of the groups before these rows; None where there are none.
    """
    B, Hkv, S, D = keys.shape
    groups, largest = S // GROUP, 2**key_bits - 1
    rows = keys[:, :, : groups * GROUP].float().reshape(B, Hkv, groups, GROUP, D)
    valid = some = torch.ones((), dtype=torch.bool, device=keys.device)
    least, most = rows.amin(dim=3), rows.amax(dim=3)
    if left_padding is not None:
        valid = _valid(groups * GROUP, left_padding).reshape(B, 1, groups, GROUP, 1)
        some = valid.any(dim=3)
        # Invalid keys may be NaN, which a minimum passes on.
        inf = torch.inf
        least, most = torch.where(valid, rows, inf).amin(dim=3), torch.where(valid, rows, -inf).amax(dim=3)
    centre = _centre(least, most, left_padding, centre)
    # (sparq.18): rounding keeps the order, so the least of the differences is that of the least
    least, most = (torch.where(some, bound - centre[:, :, None], 0.0) for bound in (least, most))
    # (sparq.19)
    odd = ~(least.isfinite() & most.isfinite())
    lo = torch.where(odd, torch.nan, least.clamp(-LARGEST, LARGEST)).half()
    # Divided by a tensor: on a GPU torch multiplies by one over a number, which rounds twice.
    width = (most - least) / torch.full_like(most, largest)
    step = torch.where(odd, torch.nan, width.clamp(max=LARGEST)).half()
    # (sparq.20)
    lows, steps = (array.float()[:, :, :, None] for array in (lo, step))
    code = ((rows - centre[:, :, None, None] - lows) / steps).round().clamp(0, largest)
    code = torch.where(valid & (steps > 0), code, 0.0).to(torch.uint8)
    code = code.permute(0, 1, 4, 2, 3).reshape(B, Hkv, D, groups * GROUP)
    if key_bits == 4:
        code = code[..., 0::2] | code[..., 1::2] << 4
    return KeyCodes(code.contiguous(), lo.mT.contiguous(), step.mT.contiguous(), centre)


def _valid(S: int, left_padding: torch.Tensor) -> torch.Tensor:
    """``(B, S)``."""
    return torch.arange(S, device=left_padding.device) >= left_padding[:, None]


def _centre(
    least: torch.Tensor, most: torch.Tensor, left_padding: torch.Tensor | None, centre: torch.Tensor | None
) -> torch.Tensor:
    """(sparq.17) from the bounds ``(B, Hkv, groups, D)`` of keys; kept where a group before these had a valid key."""
    B, Hkv, groups, D = least.shape
    if groups == 0:
        return least.new_zeros(B, Hkv, D) if centre is None else centre
    if left_padding is None:
        if centre is not None:
            return centre
        found = least[:, :, 0] * 0.5 + most[:, :, 0] * 0.5
    else:
        first = (left_padding // GROUP).clamp(0, groups - 1).long()
        sequences = torch.arange(B, device=first.device)
        found = least[sequences, :, first] * 0.5 + most[sequences, :, first] * 0.5  # inf - inf without a valid key
    found = torch.where(found.isfinite(), found, 0.0)
    if centre is None or left_padding is None:
        return found
    return torch.where((left_padding < 0)[:, None, None], centre, found)


def key_spread(
    coded: KeyCodes, keys: torch.Tensor, left_padding: torch.Tensor | None, *, key_bits: int
) -> torch.Tensor:
    """(sparq.22) of each component over the valid ones of ``keys (B, Hkv, S, D)``: float32 ``(B, Hkv, D)``."""
    groups = coded.lo.shape[-1]
    tail = groups * GROUP
    if groups == 0:
        return deviation(keys, left_padding)
    width = coded.step.float() * (2**key_bits - 1)
    middle = coded.lo.float() + width / 2
    found: torch.Tensor
    if left_padding is None:
        found = (middle.var(dim=-1, correction=0) + width.square().mean(dim=-1) / 16).sqrt()
        return found
    there = _valid(tail, left_padding)[:, None, None, GROUP - 1 :: GROUP]
    count = there.sum(dim=-1, keepdim=True).clamp(min=1)

    def mean(array: torch.Tensor) -> torch.Tensor:
        return torch.where(there, array, 0.0).sum(dim=-1, keepdim=True) / count

    found = (mean((middle - mean(middle)).square()) + mean(width.square()) / 16).sqrt().squeeze(-1)
    # Where nothing valid is coded, all valid keys are in the tail.
    return torch.where(there.any(dim=-1), found, deviation(keys[:, :, tail:], left_padding - tail))
