"""Divide a prefill chunk into blocks and regions (docs/spec/sample.md, "Blocks and regions")."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

MINFERENCE_ROWS = 64  # query rows that MInference samples


@dataclass(frozen=True)
class Region:
    """Consecutive row blocks that share one sample of query rows.

    Attributes:
        first, stop: range ``[first, stop)`` of row blocks, counted from position 0.
        sample: range ``[start, stop)`` of sampled query rows, counted from the first query of the chunk.
    """

    first: int
    stop: int
    sample: tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """Blocks and regions of a prefill chunk. The first block begins at position 0.

    Attributes:
        L: number of tokens in the chunk, which is at the end of the context.
        S: number of tokens in the context.
        chunks: requested number of regions. There is at most one region per row block.
        rows: number of query rows to sample per region; None means ``block_size``.
    """

    L: int
    S: int
    chunks: int
    block_size: int
    rows: int | None = None

    @property
    def first_block(self) -> int:
        """Index of the row block that contains the first query."""
        return (self.S - self.L) // self.block_size

    @property
    def row_blocks(self) -> int:
        """Number of row blocks that contain at least one query."""
        return self.key_blocks - self.first_block

    @property
    def key_blocks(self) -> int:
        """Number of key blocks. The last block may be partly filled."""
        return -(-self.S // self.block_size)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Regions of the chunk and the query rows that each region samples (sample.1), (sample.2)."""
        R = self.row_blocks
        rows = self.block_size if self.rows is None else self.rows
        chunks = min(self.chunks, R)
        offset = self.S - self.L
        found = []
        for c in range(chunks):
            first, stop = (self.first_block + n * R // chunks for n in (c, c + 1))
            start_row = max(first * self.block_size - offset, 0)
            stop_row = min(stop * self.block_size - offset, self.L)
            found.append(Region(first, stop, (max(stop_row - rows, start_row), stop_row)))
        return tuple(found)

    @cached_property
    def region_of(self) -> tuple[int, ...]:
        """Indices of the regions that contain the row blocks, one index per row block of the chunk."""
        return tuple(c for c, region in enumerate(self.regions) for _ in range(region.first, region.stop))

    @cached_property
    def sampled_blocks(self) -> frozenset[int]:
        """Indices of the row blocks that contain at least one sampled row. The block at position 0 has the index 0."""
        offset = self.S - self.L
        return frozenset(
            block
            for start, stop in (region.sample for region in self.regions)
            if start < stop
            for block in range((offset + start) // self.block_size, (offset + stop - 1) // self.block_size + 1)
        )

    @property
    def all_sampled(self) -> bool:
        """True if every row block contains a sampled row. Then no key block can be skipped."""
        return len(self.sampled_blocks) == self.row_blocks

    @property
    def causal_pairs(self) -> int:
        """Number of pairs (row block, key block) that causal attention computes."""
        return (self.first_block + 1 + self.key_blocks) * self.row_blocks // 2

    @property
    def sampled_share(self) -> float:
        """Share of the query rows that are sampled."""
        return sum(stop - start for start, stop in (region.sample for region in self.regions)) / self.L
