"""Prompts: SampleAttention at stated densities against torch's attention and our own dense kernel, in turns in one run.

What blocks are attended is drawn at random, as columns and offset bins with a probability that gives the density: so a
density can be stated, which a sample of random keys does not have. The sample is scored all the same, and that time is
part of "included".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mlx_sparse.tools.bench.core import Row

from ..launchers import sample
from ..launchers.blocks import Prefill, attend_blocks
from .cases import HELD, Density, K, Prompt
from .dense import BACKENDS, flex
from .device import Device, Output, Recorded, Step, Wrong
from .inputs import Expected

CHECKED_ROWS = 4  # queries of every head whose results are computed in float64
NAMES = {
    "flash": "torch SDPA flash",
    "cudnn": "torch SDPA cuDNN",
    "dense": "our attend_blocks, all blocks",
    "flex": "torch flex_attention, the same blocks",
    "sampling": "stage 1: scores and choice",
    "attend": "stage 2: lists and attend_blocks",
    "included": "both",
}
DENSE = ("flash", "cudnn", "dense")
FOREIGN = ("flash", "cudnn", "flex")


class PromptInputs:
    """Queries, keys and values, and which rows are checked."""

    def __init__(self, case: Prompt, device: torch.device) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(1)
        dtype = getattr(torch, case.dtype)
        sizes = [(1, heads, case.S, case.D) for heads in (case.Hq, case.Hkv, case.Hkv)]
        self.qkv = [torch.empty(size, dtype=dtype, device=device).normal_(generator=self.generator) for size in sizes]
        self.checked = [case.S - 1 - n * case.S // CHECKED_ROWS for n in range(CHECKED_ROWS)]

    def drawn(self, density: float) -> tuple[sample.Kept, torch.Tensor]:
        """Columns and bins that give about this density, and all lists' lengths, ``(1, Hq, R)``."""
        case, layout = self.case, self.case.layout
        always = 3 * (layout.row_blocks - 1) / layout.causal_pairs  # first column, diagonal, last row
        rest = (density - always) / (1 - always) if density > always else 0.0
        chance = 1 - (1 - rest) ** (1 / 3)  # a block is attended by its column, or by one of two bins
        shape = (1, case.Hq, 1, layout.key_blocks)
        flags = [torch.rand(shape, device=self.device, generator=self.generator) < chance for _ in range(2)]
        kept = sample.Kept(*(flag.to(torch.uint8) for flag in flags))
        counts = torch.empty(1, case.Hq, layout.row_blocks, dtype=torch.int32, device=self.device)
        for first, stop in sample.portions(layout, 4 * case.Hq):
            sample.merge(kept, layout, first, stop, stop, counts)
        return kept, counts

    def expected(self, kept: sample.Kept | None) -> Expected:
        """The checked rows in float64, ``(Hq, checked, D)``, over the kept blocks or all."""
        return Expected.over(self._rows(kept), self.case.scale)

    def _rows(self, kept: sample.Kept | None) -> Iterator[tuple[torch.Tensor, ...]]:
        """The query, keys and values of each checked row and head, one at a time: they are large."""
        case, layout = self.case, self.case.layout
        counts = torch.empty(1, case.Hq, layout.row_blocks, dtype=torch.int32, device=self.device)
        for row in self.checked:
            block = row // case.block_size
            keys = torch.ones(case.Hq, layout.key_blocks, dtype=torch.bool, device=self.device)
            if kept is not None:
                listed = sample.merge(kept, layout, block, block + 1, block + 1, counts)[0, :, 0].long()
                keys = torch.zeros_like(keys).scatter_(1, listed.clamp(min=0), listed >= 0)
                keys[:, 0] = True  # always attended; an empty slot has cleared it
            keys = keys.repeat_interleave(case.block_size, dim=1)[:, : row + 1]
            for h in range(case.Hq):
                k, v = (array[0, h // case.G, : row + 1][keys[h]][None] for array in self.qkv[1:])
                yield self.qkv[0][0, h, row][None, None], k, v

    def wrong(self, expected: Callable[[], Expected]) -> Callable[[Output], str | None]:
        """What is wrong with an output."""
        return lambda out: expected().wrong(out[0][0, :, self.checked].transpose(0, 1))


def contenders(case: Prompt, densities: Sequence[float], device: Device) -> Iterator[Recorded]:
    """Who takes part."""
    pool = device.pool()
    for row, make in _field(PromptInputs(case, device.torch), densities):
        yield Recorded(row, make, device, ours=row.name not in FOREIGN, pool=pool)


def _field(inputs: PromptInputs, densities: Sequence[float]) -> Iterator[tuple[Row, Callable[[], tuple[Step, Wrong]]]]:
    """Rows, and what makes a step and its check."""
    case, layout, (q, k, v) = inputs.case, inputs.case.layout, inputs.qkv
    dense = inputs.wrong(cache(partial(inputs.expected, None)))
    all_ = {"asked": None, "density": 1.0}

    def everything(_: int) -> Output:
        result: Output = attend_blocks(q, k, v, None, block_size=case.block_size, scale=case.scale)
        return result

    def sampling(_: int) -> Output:
        return tuple(sample.choose(q, k, layout, alpha_column=0.95, alpha_slash=0.95, scale=case.scale))

    for name in ("flash", "cudnn"):
        yield Row(case, name, details=dict(all_)), partial(_torch, name, inputs, dense)
    yield Row(case, "dense", details=dict(all_)), lambda: (everything, dense)
    yield Row(case, "sampling", details=dict(all_)), lambda: (sampling, partial(wrong_sample, inputs))
    for asked in densities:
        kept, counts = inputs.drawn(asked)
        density = Density(asked, float(counts.sum() / case.Hq / layout.causal_pairs))
        wrong = inputs.wrong(cache(partial(inputs.expected, kept)))

        def attend(_: int, kept: sample.Kept = kept, counts: torch.Tensor = counts) -> Output:
            prefill = Prefill(q, k, v, layout, case.scale)
            for first, stop in sample.portions(layout, 4 * case.Hq):
                prefill.attend(sample.merge(kept, layout, first, stop, stop, counts), first, stop)
            return prefill.result()

        def included(n: int, attend: Step = attend) -> Output:
            sampling(n)
            return attend(n)

        for name, step in (("attend", attend), ("included", included)):
            yield Row(case, name, density), partial(_pair, step, wrong)
        if asked == HELD and case.S <= 128 * K:  # its tables are four bytes a pair of blocks and head
            yield Row(case, "flex", density), partial(_flex, inputs, kept, wrong)


def _pair(step: Step, wrong: Wrong) -> tuple[Step, Wrong]:
    return step, wrong


def _torch(name: str, inputs: PromptInputs, wrong: Wrong) -> tuple[Step, Wrong]:
    q, k, v = inputs.qkv

    def step(_: int) -> Output:
        with sdpa_kernel(BACKENDS[name]):
            return (scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1]),)

    return step, wrong


def _flex(inputs: PromptInputs, kept: sample.Kept, wrong: Wrong) -> tuple[Step, Wrong]:
    """flex_attention over the same blocks: those below the diagonal as full ones, to which it applies no mask.

    Without compiling it knows the mask alone, so that has the blocks too.
    """
    from torch.nn.attention.flex_attention import BlockMask

    layout, size, (q, k, v) = inputs.case.layout, inputs.case.block_size, inputs.qkv
    counts = torch.empty(1, inputs.case.Hq, layout.row_blocks, dtype=torch.int32, device=inputs.device)
    lists = sample.merge(kept, layout, 0, layout.row_blocks, layout.key_blocks, counts)
    diagonal = torch.zeros_like(lists)
    diagonal[..., 0] = torch.arange(layout.row_blocks, device=inputs.device)
    attended = torch.zeros(lists.shape, dtype=torch.bool, device=inputs.device)
    attended.scatter_(3, lists.clamp(min=0).long(), lists >= 0)
    attended[..., 0] = True  # always; an empty slot has cleared it
    mask = BlockMask.from_kv_blocks(
        torch.ones_like(counts),
        diagonal,
        counts - 1,  # the diagonal is the last of a list
        lists.clamp(min=0),
        BLOCK_SIZE=size,
        mask_mod=lambda b, h, i, j: (i >= j) & attended[b, h, i // size, j // size],
        seq_lengths=(inputs.case.S, inputs.case.S),
    )
    attend = flex(inputs.device)
    return (lambda _: (attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] > k.shape[1]),)), wrong


def wrong_sample(inputs: PromptInputs, out: Output) -> str | None:
    """Check of what is kept: the mass of the first and of the last head's kept columns, in float64."""
    case, size, kept = inputs.case, inputs.case.block_size, out[0]
    rows = slice(case.S - size, case.S)
    for h in {0, case.Hq - 1}:
        keys = inputs.qkv[1][0, h // (case.Hq // case.Hkv)].double()
        scores = inputs.qkv[0][0, h, rows].double() @ keys.T * case.scale
        position = torch.arange(case.S, device=inputs.device)
        scores = scores.masked_fill(position > position[rows, None], -torch.inf).softmax(dim=1).sum(dim=0)
        blocks = torch.nn.functional.pad(scores, (0, -case.S % size)).view(-1, size).sum(dim=1)
        taken = blocks[kept[0, h, 0] != 0]
        share = float(taken.sum() / blocks.sum())
        if share < 0.95 - 1e-5 or float((taken.sum() - taken.min()) / blocks.sum()) > 0.95 + 1e-5:
            return f"wrong choice: {share:.6f} of the mass, expected just 0.95"
    return None
