"""Left padding, read from the causal mask that transformers makes of its 2-D padding mask."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

_NAME = "_mlx_sparse_padding"


class Padding:
    """Left padding that the mask ``(B, 1, 1, S)`` of one decode step describes.

    Every layer of a step gets the same mask. Reading it waits for the GPU, so it is read once, when the first layer
    asks, and not at all on steps that attend densely.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask.detach()  # not the object that will hold this: a cycle would keep its memory
        self._compared: tuple[torch.Tensor, bool] | None = None

    @cached_property
    def first(self) -> torch.Tensor | None:
        """First valid key of each sequence, int32 ``(B,)``; None if the mask is not left padding."""
        S = self._mask.shape[3]
        first = S - self._mask[:, 0, 0].sum(dim=1, dtype=torch.int32)
        valid = torch.arange(S, device=first.device) >= first[:, None]
        return first if self._mask.shape[1] == 1 and torch.equal(self._mask[:, 0, 0], valid) else None

    def equals(self, earlier: torch.Tensor) -> bool:
        """Return True if `first` is that of an ``earlier`` step; compared once for all layers with the same one."""
        if self._compared is None or self._compared[0] is not earlier:
            assert self.first is not None
            self._compared = earlier, torch.equal(earlier, self.first)
        return self._compared[1]


def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return sdpa's mask; that of a decode step carries its `Padding`."""
    made = sdpa_mask(*args, **kwargs)
    if made is not None and made.shape[2] == 1:
        setattr(made, _NAME, Padding(made))
    return made


def padding_of(attention_mask: torch.Tensor) -> Padding | None:
    """Return the `Padding` of a mask, or None for a mask made elsewhere or changed since."""
    found: Padding | None = getattr(attention_mask, _NAME, None)
    return found
