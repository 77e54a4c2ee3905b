"""Prompts: each method against dense attention, piece by piece in turns in one run.

A prompt is attended as mlx-lm does it: in pieces, the queries of each against all keys so far. A prompt's time is the
sum of its pieces'.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .... import oracle
from ....cache.kv_cache import SparseKVCache
from ....methods.block_layout import Layout
from ....methods.stats import prefill_elements
from ...formats import table
from .. import inputs
from ..core import Case, Row, Sample, Turns
from .dense import cache_of, dense_ways, double, fused, read, timed, wrong_result
from .rows import MethodContender, compare, measure, method_row

Array = npt.NDArray[Any]
Piece = tuple[mx.array, SparseKVCache]  # its queries, and a cache of the keys and values up to the last of them

CHECKED = 8  # queries whose result is compared with float64
DIFFERENT = 0.01  # of the blocks, or rows, which scores may choose otherwise in float64
SHORT = 512  # queries of a prompt that the oracle attends itself


@dataclass(frozen=True)
class Prompt(Case):
    """``S`` tokens that come in pieces of ``step``."""

    step: int

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that all pieces of the prompt read."""
        stops = range(self.step, self.S + self.step, self.step)
        return sum(2 * self.keys * min(stop, self.S) // self.S for stop in stops)

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"step": self.step}

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.step:,} at a time"


class Pieces:
    """The pieces of a prompt, made when they are needed."""

    def __init__(self, case: Prompt) -> None:
        self._case = case

    @cached_property
    def all(self) -> list[Piece]:
        """Queries of each piece, and a cache of the keys and values so far."""
        kind, S = getattr(mx, self._case.dtype), self._case.S
        queries, keys, values = (mx.array(array).astype(kind) for array in inputs.prompt(self._case))
        mx.eval(queries, keys, values)
        ends = [*range(0, S, self._case.step), S]
        return [(queries[:, :, start:stop], cache_of(keys, values, stop)) for start, stop in pairwise(ends)]

    def sides(self) -> tuple[dict[str, Through], Through]:
        """Every way to attend densely, and a plain read."""

        def densely(way: Callable[..., mx.array]) -> Through:
            return Through(self.all, lambda piece: way(piece[0], *piece[1].rows("ops")[:2]))

        first = self.all[0][0]
        ways = {name: densely(way) for name, way in dense_ways(first.dtype, first.shape[2]).items()}
        return ways, Through(self.all, lambda piece: read(piece[1]))


class Through:
    """A step through all pieces; ``last`` are the seconds of the last piece in each turn."""

    def __init__(self, pieces: Sequence[Piece], attend: Callable[[Piece], Any]) -> None:
        self._runs = [timed(lambda piece=piece: attend(piece)) for piece in pieces]  # type: ignore[misc]
        self.last: list[float] = []
        self._runs[0](0)  # what is compiled or touched for the first time is not timed

    def __call__(self, turn: int) -> Sample:
        seconds = [run(turn).seconds for run in self._runs]
        self.last.append(seconds[-1])
        return Sample(sum(seconds))


class MethodPrompt(MethodContender):
    """A method on a backend, and what it moves and attends over all pieces."""

    def __init__(self, case: Prompt, config: Any, backend: str, pieces: Pieces | None = None) -> None:
        details = {"density": None, "last_step_ratio": None, "bytes_plain": case.bytes}
        super().__init__(method_row(case, str(config), backend, details))
        self.case, self.config, self.backend, self._pieces = case, config, backend, pieces or Pieces(case)
        self.elements = self.attended = self.causal = 0

    def prepare(self) -> None:
        self._through = Through(self._pieces.all, self.attend)

    def check(self) -> str | None:
        """What is wrong with the result for the last piece; None if nothing is."""
        found = self.wrong(self._pieces.all[-1])
        gc.collect()
        return found

    def step(self, turn: int) -> Sample:
        return self._through(turn)

    def attend(self, piece: Piece) -> tuple[mx.array, mx.array]:
        """What is timed, as an enabled model runs it, and the blocks that it chose."""
        queries, cache = piece
        config = self.config.at(cache.length)
        out, _, blocks = cache.attend_prompt(queries, config, scale=self.case.scale, backend=self.backend)
        return out, blocks

    def layout(self, piece: Piece) -> Layout:
        """The blocks of a piece."""
        queries, cache = piece
        found: Layout = self.config.at(cache.length).layout(queries.shape[2], cache.length)
        return found

    def count(self, piece: Piece) -> None:
        """Add what a piece attends."""
        (B, Hq, _, D), layout = piece[0].shape, self.layout(piece)
        chosen: Any = (self.attend(piece)[1] >= 0).sum().item()
        causal = layout.causal_pairs * B * Hq
        self.attended, self.causal = self.attended + chosen, self.causal + causal
        self.elements += B * Hq * prefill_elements(layout, D, chosen / causal)

    def finish(self, dense: Mapping[str, Any], look: Any) -> None:
        """Say what it moves and attends, and how fast it is in the last piece."""
        last = method_row(self.case, self.row.name, self.backend, {})
        compare(last, {way: step.last for way, step in dense.items()}, self._through.last, look.last)
        for piece in self._pieces.all:
            self.count(piece)
        self.row.details |= {"density": self.attended / self.causal, "last_step_ratio": last.details["ratio"]}
        self.row.details["bytes_formula"] = self.elements * self.case.item

    def wrong(self, piece: Piece) -> str | None:
        """What is wrong with the result for one piece.

        The blocks of the first group of heads must be the oracle's, but for ties, and some queries of all heads must
        attend those chosen as plain float64 attention does, twice as far off as MLX's dense attention at most.
        """
        queries, cache = piece
        keys, values, _ = cache.rows("ops")
        L, S, G, layout = queries.shape[2], cache.length, self.case.G, self.layout(piece)
        out, listed = self.attend(piece)
        blocks, config = np.array(listed), self.config.at(S)
        select = getattr(oracle, f"{config.name}_select", None)
        if select is None:
            return self._wrong_start(queries, keys, values)
        found = select(double(queries[:1, :G]), double(keys[:1, :1]), **config.parameters())
        expected = getattr(found, "blocks", found)
        masks = [oracle.block_mask(lists, layout.key_blocks) for lists in (blocks[:1, :G], expected)]
        share = float((masks[0] != masks[1]).sum() / masks[1].sum())
        if share > DIFFERENT:
            return f"wrong blocks: {share:.1%} are not the oracle's"

        row = np.linspace(0, L - 1, min(CHECKED, L)).astype(int)
        position, key = S - L + row, np.arange(S)
        size = config.block_size
        mask = oracle.block_mask(blocks[:, :, position // size - layout.first_block], layout.key_blocks)
        causal = np.broadcast_to(key <= position[:, None], (*queries.shape[:2], len(row), S))
        listed_keys = np.take(mask, key // size, axis=-1) & causal

        def grouped(array: Array) -> Array:
            return array.reshape(*keys.shape[:2], G * len(row), array.shape[-1])

        def at_rows(array: mx.array) -> Array:
            return grouped(double(array[:, :, mx.array(row)]))

        q, k, v = at_rows(queries), double(keys), double(values)
        right = inputs.attention(q, k, v, grouped(listed_keys))
        dense = at_rows(fused(queries, keys, values)) - inputs.attention(q, k, v, grouped(causal))
        return wrong_result(at_rows(out), right, float(np.abs(dense).max()), queries.dtype)

    def _wrong_start(self, *qkv: mx.array) -> str | None:
        """Of a method that chooses single keys for single queries: nearly all of a short prompt must be the oracle's.

        A hash on the edge may fall to either side.
        """
        short = [array[:, :, : min(SHORT, qkv[0].shape[2])] for array in qkv]
        piece = short[0], cache_of(mx.contiguous(short[1]), mx.contiguous(short[2]))
        right = getattr(oracle, f"{self.config.name}_attention")(*map(double, short), **self.config.parameters())
        error = float(np.abs(double(fused(*short)) - oracle.dense_attention(*map(double, short))).max())
        out = double(self.attend(piece)[0])
        rows = [wrong_result(*pair, error, short[0].dtype) for pair in zip(_rows(out), _rows(right), strict=True)]
        off = sum(row is not None for row in rows) / len(rows)
        return None if off <= DIFFERENT else f"wrong result: {off:.1%} of the rows are not the oracle's"


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1])


def measure_prompts(case: Any, methods: Sequence[tuple[Any, str]], repeat: int) -> list[Row]:
    """A row for each method on a backend, timed in turns."""
    # On a CPU dense attention holds all scores of a piece. The prompt is made in float32, in a few parts.
    scores = 4 * case.B * case.Hq * case.step * case.S if mx.default_device().type == mx.cpu else 0
    needed = 1.2 * scores + 16 * case.B * case.S * case.D * (case.Hq + case.Hkv)
    pieces = Pieces(case)
    contenders = [MethodPrompt(case, *method, pieces) for method in methods]
    return measure(contenders, needed, pieces.sides, Turns(repeat))


HEADER = [
    *("method", "backend", "type", "heads", "batch", "keys", "step", "density", "dense, ms", "by", "sparse, ms"),
    *("dense / sparse", "in the last step"),
]


def text(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = []
    for row in rows:
        case, found = row.case, row.details
        cells = [row.name, found["backend"], case.dtype, case.shape, case.B, f"{case.S:,}", case.step]
        dense, sparse = row.spreads["dense_us"], row.spreads["sparse_us"]
        if dense is None or sparse is None:
            lines.append([*cells, "", "", "", row.note, "", ""])
            continue
        cells += [f"{found['density']:.2f}", dense.scaled(1e-3), found["dense"], sparse.scaled(1e-3)]
        lines.append([*cells, f"{found['ratio']:.2f}", f"{found['last_step_ratio']:.2f}"])
    return f"The attention of a prompt in one layer, median (first to third quartile):\n\n{table(HEADER, lines)}"
