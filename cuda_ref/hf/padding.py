"""Left padding, read from the causal mask that transformers makes of its 2-D padding mask."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

from mlx_sparse.methods import reasons

_NAME = "_mlx_sparse_padding"


class Padding:
    """What the mask ``(B, 1, L, S)`` of one decode step, or of a call of a few queries, says about left padding.

    Every layer of a step gets the same mask. Reading it waits for the GPU, so it is read once, when the first layer
    asks, and not at all on steps that attend densely.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask.detach()  # not the object that will hold this: a cycle would keep its memory
        self._compared: tuple[torch.Tensor, bool] | None = None

    @cached_property
    def first(self) -> torch.Tensor | None:
        """int32 ``(B,)`` first valid key of each sequence; None if the mask is not left padding, and causal."""
        L, S = self._mask.shape[2:]
        first = S - self._mask[:, 0, -1].sum(dim=1, dtype=torch.int32)
        position = torch.arange(S, device=first.device)
        valid = (position >= first[:, None, None]) & (position <= position[S - L :, None])
        if self._mask.shape[1] != 1 or not torch.equal(self._mask[:, 0], valid):
            return None
        return None if L > 1 and bool((first > S - L).any()) else first  # of several queries the first sees a key

    @cached_property
    def without(self) -> bool:
        """Whether no sequence is padded. transformers makes no mask for one query then, but does for a few."""
        return self.first is not None and not bool(self.first.any())

    def equals(self, earlier: torch.Tensor) -> bool:
        """Whether `first` is what it was on an ``earlier`` step; compared once for all layers that hold the same."""
        if self._compared is None or self._compared[0] is not earlier:
            assert self.first is not None
            self._compared = earlier, torch.equal(earlier, self.first)
        return self._compared[1]


def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask function of ``attn_implementation="sparq"``: sdpa's, with a note of what it means for a few queries."""
    made = sdpa_mask(*args, **kwargs)
    if made is not None and made.shape[2] <= reasons.VERIFY_QUERIES:
        setattr(made, _NAME, Padding(made))
    return made


def padding_of(attention_mask: torch.Tensor) -> Padding | None:
    """What `mask` remembered; None for a mask made elsewhere or changed since."""
    found: Padding | None = getattr(attention_mask, _NAME, None)
    return found
