"""Define the parameters of gathered prefill, and divide calls into chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import Any, ClassVar, NamedTuple

from ...checks import check_share
from ...core import reasons
from ...core.base import Prefill, Step
from ...core.blocks.layout import Layout


class Chunk(NamedTuple):
    """Consecutive queries of a call that share their selected keys.

    Attributes:
        start, exact, stop: the queries ``[start, exact)`` are sparse, and the queries ``[exact, stop)`` are dense.
        earlier: number of keys before the first query.
        kept: number of earlier keys that the sparse queries attend to.
    """

    start: int
    exact: int
    stop: int
    earlier: int
    kept: int

    @property
    def sparse(self) -> int:
        """Number of sparse queries."""
        return self.exact - self.start


@dataclass(frozen=True)
class GatherLayout(Layout):
    """Chunks of a call with L queries over S keys, for the parameters of `Gather`."""

    share: float = 1.0
    chunk: int = 1
    samples: int = 1
    exact_tail: int = 0
    neighbors: int = 0
    dense_below: int = 0

    @cached_property
    def pieces(self) -> tuple[Chunk, ...]:
        """Chunks of the call (gather.1), (gather.2), (gather.9)."""
        offset, tail, found = self.S - self.L, max(self.L - self.exact_tail, 0), []
        edges = [offset, *range((offset // self.chunk + 1) * self.chunk, self.S, self.chunk), self.S]
        for earlier, end in pairwise(edges):
            start, stop, kept = earlier - offset, end - offset, ceil(self.share * earlier)
            dense = kept >= earlier or earlier < self.dense_below
            found.append(Chunk(start, start if dense else max(start, min(stop, tail)), stop, earlier, kept))
        return tuple(found)

    @property
    def sampled_share(self) -> float:
        return sum(min(self.samples, piece.stop - piece.start) for piece in self.pieces if piece.sparse) / self.L


@dataclass(frozen=True)
class Gather(Prefill):
    """Select single earlier keys for each chunk of a prefill from the attention of sampled queries.

    See docs/spec/gather.md.

    Attributes:
        share: share of the earlier keys that a chunk attends to; above 0, at most 1.
        chunk: number of tokens per chunk. Chunks start at multiples of this number.
        samples: number of queries per chunk whose attention scores the keys.
        exact_tail: number of last queries of a call that attend to all keys.
        neighbors: number of keys before and after a key that share its score, if theirs is lower. The default of
            ``gather_attention`` is 0.
        dense_below: number of earlier keys below which a chunk attends to all keys.
    """

    name: ClassVar[str] = "gather"
    source: ClassVar[str] = "this project, after QUOKA, arXiv 2602.08722"
    reads: ClassVar[str] = (
        "the share of the earlier keys with most of a sample's attention, per KV head ([gather](docs/spec/gather.md))"
    )
    limits: ClassVar[Mapping[str, int]] = {"chunk": 1, "samples": 1, "exact_tail": 0, "neighbors": 0, "dense_below": 0}
    function_defaults: ClassVar[Mapping[str, Any]] = {"neighbors": 0, "dense_below": 0}
    selects_keys: ClassVar[bool] = True

    share: float = 0.5
    chunk: int = 1024
    samples: int = 64
    exact_tail: int = 128
    neighbors: int = 16
    dense_below: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("share", self.share)

    def layout(self, L: int, S: int) -> GatherLayout:
        return GatherLayout(L, S, 1, self.block_size, 0, **self.parameters())

    def parameters(self, G: int = 1) -> dict[str, Any]:
        return super().parameters(G) | {"dense_below": self.dense_below}

    def shortest_context(self, step: Step | None = None) -> int:
        return self.dense_below

    def dense_reason(self, L: int, S: int) -> str | None:
        layout = self.layout(L, S)
        if all(piece.earlier < self.dense_below for piece in layout.pieces):
            return reasons.shorter_than(self.dense_below)
        return None if any(piece.sparse for piece in layout.pieces) else reasons.ALL_KEPT
