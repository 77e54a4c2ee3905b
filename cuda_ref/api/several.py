"""Calls of several queries by operations of torch."""

from __future__ import annotations

import torch

from ..packed_rows import Rows


def fold(queries: torch.Tensor) -> torch.Tensor:
    """Return the queries of each head as heads of one query: ``(B, Hq, L, D)`` to ``(B, Hq * L, 1, D)``."""
    B, Hq, L, D = queries.shape
    return queries if L == 1 else queries.reshape(B, Hq * L, 1, D)


def attend_own(
    queries: torch.Tensor,
    keys: Rows,
    values: Rows,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    left_padding: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(several.3), (several.4): the keys behind the first query's, and what a step over those before them gave.

    Args:
        queries: ``(B, Hq, L, D)``.
        keys, values: ``(B, Hkv, S, D)``, of which the last ``L - 1`` rows are read.
        out, lse: ``(B, Hq * L, 1, D)`` and float32 ``(B, Hq * L, 1)`` of the step.

    Returns:
        ``out (B, Hq, L, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, L)``.
    """
    B, Hq, L, D = queries.shape
    Hkv, S = keys.shape[1:3]
    out, lse = out.reshape(B, Hq, L, D), lse.reshape(B, Hq, L)
    own = slice(S - L + 1, S)
    k, v = (rows[:, :, own].float() for rows in (keys, values))
    later = torch.ones(L - 1, L - 1, dtype=torch.bool, device=queries.device).triu(1)
    if left_padding is not None:
        padded = torch.arange(own.start, S, device=queries.device) < left_padding[:, None]
        later = later | padded[:, None, None, None]
        v = v.masked_fill(padded[:, None, :, None], 0)  # padded rows may hold anything, and 0 * inf is NaN
    q = queries[:, :, 1:].reshape(B, Hkv, -1, L - 1, D).float()
    logits = (q @ k[:, :, None].mT * scale).masked_fill(later, -torch.inf)
    own_lse = logits.logsumexp(dim=-1, keepdim=True)
    own_out = (logits - _finite(own_lse)).exp() @ v[:, :, None]
    merged, merged_lse = _merged(
        out[:, :, 1:], lse[:, :, 1:], own_out.reshape(B, Hq, L - 1, D), own_lse.reshape(B, Hq, L - 1)
    )
    out = torch.cat([out[:, :, :1], merged.to(queries.dtype)], dim=2)
    return out, torch.cat([lse[:, :, :1], merged_lse], dim=2)


def _merged(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(several.4) in float32; 0 and -inf where neither attends anything."""
    both = torch.logaddexp(lse, other_lse)
    share, other_share = ((part - _finite(both)).exp()[..., None] for part in (lse, other_lse))
    return share * out.float() + other_share * other, both


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """``lse``, or 0 where it is -inf, so that exp(-inf - lse) is 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
