"""Prompts: SampleAttention at stated densities against torch's attention and our own dense kernel, in turns in one run.

What blocks are attended is drawn at random, as columns and offset bins with a probability that gives the density: so a
density can be stated, which a sample of random keys does not have. The sample is scored all the same, and that time is
part of "included".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mlx_sparse.layout import Layout

from .. import sample
from ..availability import interpreted
from ..blocks import Prefill, attend_blocks
from .contenders import BACKENDS, flex
from .inputs import Expected, attention, plain_attention
from .run import LARGEST_SHARE, free_memory, machine, reason
from .timing import Output, Run, Step, record

K = 1024
DENSITIES = (0.05, 0.1, 0.2, 0.5)
BARS = {32 * K: 4.0, 64 * K: 5.0, 128 * K: 6.0, 256 * K: 6.0}  # included, at `HELD`, against the fastest dense
HELD = 0.1
KERNEL_SHARE = 0.7  # of our dense kernel's operations a second, that listed blocks have to reach
BLOCK_SIZE = 128
TURNS = 5
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


@dataclass(frozen=True)
class Case:
    """One prompt of S tokens."""

    Hq: int
    Hkv: int
    D: int
    S: int
    dtype: str

    @property
    def layout(self) -> Layout:
        return Layout(self.S, self.S, 1, BLOCK_SIZE)

    @property
    def scale(self) -> float:
        return float(self.D**-0.5)

    @property
    def memory(self) -> int:
        """Bytes of everything alive at once, in two bytes an element: inputs, and results, lists and parts twice.

        They are made before a step is recorded, and when it is.
        """
        made = 2 * self.Hq * self.S * self.D + 12 * self.Hq * self.S + sample.LIST_BYTES
        return 2 * self.S * self.D * (2 * self.Hkv + self.Hq) + 2 * made

    def flops(self, density: float = 1.0) -> float:
        """Of both products over the attended block pairs, whole blocks on the diagonal."""
        return 4.0 * self.Hq * self.D * BLOCK_SIZE**2 * self.layout.causal_pairs * density

    @property
    def sampled_flops(self) -> float:
        """Of the sample's scores."""
        return 2.0 * self.Hq * self.D * BLOCK_SIZE * self.S

    def __str__(self) -> str:
        return f"{self.Hq}/{self.Hkv} heads D={self.D} S={self.S}"


@dataclass
class Row:
    """One contender; ``asked`` is the density that was asked for, ``density`` what the drawn blocks have."""

    case: Case
    contender: str
    asked: float | None = None
    density: float = 1.0
    times: list[float] = field(default_factory=list)
    note: str | None = None
    failed: bool = False

    @property
    def median(self) -> float | None:
        """Microseconds."""
        return median(self.times) if self.times else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        case = {name: getattr(self.case, name) for name in ("Hq", "Hkv", "D", "S", "dtype")}
        found = {"median_us": self.median, "min_us": min(self.times, default=None), "turns": len(self.times)}
        return {
            "kind": "row",
            "stage": "prefill",
            **case,
            "contender": self.contender,
            "asked": self.asked,
            "density": self.density,
            **found,
            "note": self.note,
            "failed": self.failed,
        }


class Inputs:
    """Queries, keys and values, and which rows are checked."""

    def __init__(self, case: Case, device: torch.device) -> None:
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
        case, layout = self.case, self.case.layout
        exact, plain = [], []
        counts = torch.empty(1, case.Hq, layout.row_blocks, dtype=torch.int32, device=self.device)
        for row in self.checked:
            block = row // BLOCK_SIZE
            keys = torch.ones(case.Hq, layout.key_blocks, dtype=torch.bool, device=self.device)
            if kept is not None:
                listed = sample.merge(kept, layout, block, block + 1, block + 1, counts)[0, :, 0].long()
                keys = torch.zeros_like(keys).scatter_(1, listed.clamp(min=0), listed >= 0)
                keys[:, 0] = True  # always attended; an empty slot has cleared it
            keys = keys.repeat_interleave(BLOCK_SIZE, dim=1)[:, : row + 1]
            for h in range(case.Hq):
                k, v = (array[0, h // (case.Hq // case.Hkv), : row + 1][keys[h]][None] for array in self.qkv[1:])
                q = self.qkv[0][0, h, row][None, None]
                exact.append(attention(q, k, v, case.scale))
                plain.append(plain_attention(q, k, v, case.scale))
        return Expected.of(torch.cat(exact), torch.cat(plain))

    def wrong(self, expected: Callable[[], Expected]) -> Callable[[Output], str | None]:
        """What is wrong with an output."""
        return lambda out: expected().wrong(out[0][0, :, self.checked].transpose(0, 1))


def contenders(
    inputs: Inputs, densities: Sequence[float]
) -> Iterator[tuple[Row, Step, Callable[[Output], str | None]]]:
    """Who takes part: a row, what is timed, and what is wrong with what it gave."""
    case, layout, (q, k, v) = inputs.case, inputs.case.layout, inputs.qkv
    dense = cache(partial(inputs.expected, None))
    for name in ("flash", "cudnn"):
        yield Row(case, name), _torch(name, inputs), inputs.wrong(dense)

    def everything(_: int) -> Output:
        return attend_blocks(q, k, v, None, block_size=BLOCK_SIZE, scale=case.scale)

    yield Row(case, "dense"), everything, inputs.wrong(dense)

    def sampling(_: int) -> Output:
        return tuple(sample.choose(q, k, layout, alpha_column=0.95, alpha_slash=0.95, scale=case.scale))

    yield Row(case, "sampling"), sampling, lambda out: wrong_sample(inputs, out)
    for asked in densities:
        kept, counts = inputs.drawn(asked)
        density = float(counts.sum() / case.Hq / layout.causal_pairs)
        expected = cache(partial(inputs.expected, kept))

        def attend(_: int, kept: sample.Kept = kept, counts: torch.Tensor = counts) -> Output:
            prefill = Prefill(q, k, v, layout, case.scale)
            for first, stop in sample.portions(layout, 4 * case.Hq):
                prefill.attend(sample.merge(kept, layout, first, stop, stop, counts), first, stop)
            return prefill.result()

        def included(n: int, attend: Step = attend) -> Output:
            sampling(n)
            return attend(n)

        yield Row(case, "attend", asked, density), attend, inputs.wrong(expected)
        yield Row(case, "included", asked, density), included, inputs.wrong(expected)
        if asked == HELD and case.S <= 128 * K:  # its tables are four bytes a pair of blocks and head
            yield Row(case, "flex", asked, density), _later(partial(_flex, inputs, kept)), inputs.wrong(expected)


def _torch(name: str, inputs: Inputs) -> Step:
    q, k, v = inputs.qkv

    def step(_: int) -> Output:
        with sdpa_kernel(BACKENDS[name]):
            return (scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1]),)

    return step


def _later(make: Callable[[], Step]) -> Step:
    """What ``make`` makes when the step is first taken, so that what it raises counts as this contender's."""
    made = cache(make)

    def step(n: int) -> Output:
        return made()(n)

    return step


def _flex(inputs: Inputs, kept: sample.Kept) -> Step:
    """flex_attention over the same blocks: those below the diagonal as full ones, to which it applies no mask.

    Without compiling it knows the mask alone, so that has the blocks too.
    """
    from torch.nn.attention.flex_attention import BlockMask

    layout, (q, k, v) = inputs.case.layout, inputs.qkv
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
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=lambda b, h, i, j: (i >= j) & attended[b, h, i // BLOCK_SIZE, j // BLOCK_SIZE],
        seq_lengths=(inputs.case.S, inputs.case.S),
    )
    attend = flex(inputs.device)
    return lambda _: (attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] > k.shape[1]),)


def wrong_sample(inputs: Inputs, out: Output) -> str | None:
    """Check of what is kept: the mass of the first and of the last head's kept columns, in float64."""
    case, kept = inputs.case, out[0]
    rows = slice(case.S - BLOCK_SIZE, case.S)
    for h in {0, case.Hq - 1}:
        keys = inputs.qkv[1][0, h // (case.Hq // case.Hkv)].double()
        scores = inputs.qkv[0][0, h, rows].double() @ keys.T * case.scale
        position = torch.arange(case.S, device=inputs.device)
        scores = scores.masked_fill(position > position[rows, None], -torch.inf).softmax(dim=1).sum(dim=0)
        blocks = torch.nn.functional.pad(scores, (0, -case.S % BLOCK_SIZE)).view(-1, BLOCK_SIZE).sum(dim=1)
        taken = blocks[kept[0, h, 0] != 0]
        share = float(taken.sum() / blocks.sum())
        if share < 0.95 - 1e-5 or float((taken.sum() - taken.min()) / blocks.sum()) > 0.95 + 1e-5:
            return f"wrong choice: {share:.6f} of the mass, expected just 0.95"
    return None


def run(cases: Sequence[Case], densities: Sequence[float], budget: float, emit: Callable[[Any], None]) -> Any:
    """Measure ``cases`` in order within ``budget`` seconds; gives the machine and the rows."""
    end = time.monotonic() + budget
    device = torch.device("cpu" if interpreted() else "cuda")
    facts = machine(device)
    emit({"kind": "machine"} | facts)
    rows: list[Row] = []
    for number, case in enumerate(cases):
        left = end - time.monotonic()
        if left <= 0:
            found = [Row(case, "", note=f"left out: the {budget:g} s were over")]
        elif case.memory > LARGEST_SHARE * free_memory(device):
            found = [Row(case, "", note=f"left out: needs {case.memory / 1e9:.0f} GB")]
        else:
            # Times grow with the square of the length: the last case takes most.
            found = measure_case(case, densities, device, left / min(2, len(cases) - number))
        rows += found
        for row in found:
            emit(row.as_dict())
    return facts, rows


def measure_case(case: Case, densities: Sequence[float], device: torch.device, seconds: float) -> list[Row]:
    """Rows of one case; turns end when it has taken ``seconds``, after the first at the earliest."""
    end = time.monotonic() + seconds
    rows, entered, rest = [], [], Row(case, "")
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    with failing(rest):  # what comes before a contender's step: inputs, and blocks drawn
        for row, step, wrong in contenders(Inputs(case, device), densities):
            rows.append(row)
            with failing(row):
                steps = record(step, 1, 1, device, pool)
                steps.run()
                row.note = wrong(steps.outputs[0])
                row.failed = row.note is not None
                steps.outputs.clear()  # their memory is the next one's: results are as large as the queries
                if not row.failed:
                    entered.append((row, steps))
    if rest.note:
        rows.append(rest)
    for _ in range(TURNS):
        measure_turn(entered)
        if time.monotonic() > end:
            break
    return rows


def measure_turn(entered: Sequence[tuple[Row, Run]]) -> None:
    """Every contender once."""
    for row, steps in entered:
        row.times.append(steps.sample())


@contextmanager
def failing(row: Row) -> Iterator[None]:
    """Whatever a library raises, the others can still be measured; what ours raises is a failure."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        row.note = reason(error, [])
    except Exception as error:
        row.note, row.failed = reason(error, []), row.contender not in ("flash", "cudnn", "flex")


def plan(lengths: Sequence[int], shapes: Sequence[tuple[int, int, int]], dtype: str) -> list[Case]:
    """Every case, the shorter ones first."""
    return [Case(*shape, S, dtype) for S in sorted(lengths) for shape in shapes]
