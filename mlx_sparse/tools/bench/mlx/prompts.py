"""Prompts: each method against dense attention, piece by piece in turns in one run.

A prompt is attended as mlx-lm does it: in pieces, the queries of each against all keys so far. A prompt's time is the
sum of its pieces'.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .... import oracle
from ....cache.kv_cache import SparseKVCache
from ....common.block_layout import Layout
from ....common.block_patterns import bigbird_pattern, streaming_pattern
from ....common.stats import prefill_elements
from ....methods import BigBird, MInference, Prefill
from ....methods import Sample as SampleAttention
from ....oracle.prefill import minference_select
from ...environment import memory
from ...formats import table
from ..core import Case, Contender, Row, Sample, Turns, enter, take_turns, too_large
from .dense import LARGEST_SHARE, Dense, cache_of, dense_ways, double, fused, plain, read, timed, wrong
from .rows import compare, method_row

Array = npt.NDArray[Any]
Qkv = tuple[mx.array, mx.array, mx.array]
Piece = tuple[mx.array, SparseKVCache]  # its queries, and a cache of the keys and values up to the last of them

PEAK = 14.0  # logits by which keys stand out
CHECKED = 8  # queries whose result is compared with float64
DIFFERENT = 0.01  # of the blocks, which scores may choose otherwise in float64


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


class MethodPrompt(Contender):
    """A method on a backend, and what it moves and attends over all pieces."""

    def __init__(self, case: Prompt, config: Prefill, backend: str, pieces: Sequence[Piece] = ()) -> None:
        details = {"density": None, "last_step_ratio": None, "bytes_plain": case.bytes}
        super().__init__(method_row(case, str(config), backend, details))
        self.config, self.backend, self.pieces = config, backend, pieces
        self.elements = self.attended = self.causal = 0

    def prepare(self) -> None:
        self.through = Through(self.pieces, self.attend)

    def check(self) -> str | None:
        found = wrong_result(self.pieces[-1], self)
        gc.collect()
        return found

    def step(self, turn: int) -> Sample:
        return self.through(turn)

    def attend(self, piece: Piece) -> tuple[mx.array, mx.array]:
        """What is timed, as an enabled model runs it, and the blocks that it chose."""
        queries, cache = piece
        config, scale = self.config.at(cache.length), queries.shape[-1] ** -0.5
        out, _, blocks = cache.attend_prompt(queries, config, scale=scale, backend=self.backend)
        return out, blocks

    def layout(self, piece: Piece) -> Layout:
        """The blocks of a piece."""
        queries, cache = piece
        return self.config.at(cache.length).layout(queries.shape[2], cache.length)

    def count(self, piece: Piece) -> None:
        """Add what a piece attends."""
        (B, Hq, _, D), layout = piece[0].shape, self.layout(piece)
        chosen: Any = (self.attend(piece)[1] >= 0).sum().item()
        causal = layout.causal_pairs * B * Hq
        self.attended, self.causal = self.attended + chosen, self.causal + causal
        self.elements += B * Hq * prefill_elements(layout, D, chosen / causal)

    @property
    def density(self) -> float:
        """Attended block pairs over causal ones."""
        return self.attended / self.causal


def measure(case: Prompt, methods: Sequence[tuple[Prefill, str]], repeat: int) -> list[Row]:
    """Check the result of every method for the last piece, then time those that are right: a row for each.

    Args:
        methods: configurations and the backends that run them.
    """
    shape = case.shape
    # On a CPU dense attention holds all scores of a piece. The prompt is made in float32, in a few parts.
    scores = 4 * case.B * shape.Hq * case.step * case.S if mx.default_device().type == mx.cpu else 0
    needed = 1.2 * scores + 16 * case.B * case.S * shape.D * (shape.Hq + shape.Hkv)
    if large := too_large(needed, memory(), LARGEST_SHARE):
        found = [MethodPrompt(case, *method).row for method in methods]
        for row in found:
            row.note = large
        return found
    pieces = pieces_of(inputs(case), case.step)
    contenders = [MethodPrompt(case, *method, pieces) for method in methods]
    entered = [one for one in contenders if enter(one)]
    if entered:
        _time(pieces, entered, repeat)
    return [one.row for one in contenders]


def _time(pieces: Sequence[Piece], entered: Sequence[MethodPrompt], repeat: int) -> None:
    """Put the times of each method and of dense attention into the rows: of the whole prompt, and of its last piece."""
    ways = dense_ways(pieces[0][0].dtype, pieces[0][0].shape[2])
    dense = {name: Through(pieces, _densely(way)) for name, way in ways.items()}
    look = Through(pieces, lambda piece: read(piece[1]))
    ours = {f"method {i}": one.through for i, one in enumerate(entered)}
    taken = take_turns({**dense, "read": look, **ours}, Turns(repeat))
    for name, one in zip(ours, entered, strict=True):
        last = method_row(one.row.case, one.row.name, one.backend, {})
        compare(last, {way: dense[way].last for way in ways}, one.through.last, look.last)
        for piece in pieces:
            one.count(piece)
        one.row.details |= {"density": one.density, "last_step_ratio": last.details["ratio"]}
        one.row.details["bytes_formula"] = one.elements * one.row.case.item
        compare(one.row, {way: taken[way].seconds for way in ways}, taken[name].seconds, taken["read"].seconds)


def _densely(way: Dense) -> Callable[[Piece], mx.array]:
    def attend(piece: Piece) -> mx.array:
        keys, values, _ = piece[1].rows("ops")
        return way(piece[0], keys, values)

    return attend


def inputs(case: Case) -> Qkv:
    """A prompt whose heads look at the first keys, at a few others, nearby, or at a distance of their own.

    Half of the components are waves of the position, turned back by each head's distance: the product peaks there.
    Along one direction of the other half the first keys and a few more stand out.
    """
    shape, B, S = case.shape, case.B, case.S
    rng = np.random.default_rng(0)
    waves = max(shape.D // 4, 1)
    frequency = np.geomspace(1.0, 0.01, waves)
    distance = np.where(np.arange(shape.Hq) % 2, rng.integers(0, max(S // 2, 1), shape.Hq), 0)[:, None]
    share = rng.uniform(0.3, 1.0, (2, shape.Hq, 1, 1)).astype(np.float32)
    queries = rng.standard_normal((B, shape.Hq, S, shape.D), np.float32)
    keys, values = rng.standard_normal((2, B, shape.Hkv, S, shape.D), np.float32)

    def wave(position: Array) -> Array:
        angle = position[..., None] * frequency
        return np.concatenate([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)

    keys[..., : 2 * waves] = wave(np.arange(S))
    queries[..., : 2 * waves] = share[0] * wave(np.arange(S) - distance) * (PEAK * shape.D**0.5 / waves)
    direction = rng.standard_normal((shape.Hkv, 1, shape.D - 2 * waves), np.float32)
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    found = (rng.random((shape.Hkv, S, 1)) < 4 / S) | (np.arange(S) < 4)[:, None]
    strength = PEAK**0.5 * shape.D**0.25
    keys[..., 2 * waves :] += found * direction * strength
    queries[..., 2 * waves :] += share[1] * np.repeat(direction, shape.G, axis=0) * strength
    result = tuple(mx.array(array).astype(getattr(mx, case.dtype)) for array in (queries, keys, values))
    mx.eval(result)
    return result[0], result[1], result[2]


def pieces_of(prompt: Qkv, step: int) -> list[Piece]:
    """Queries of each piece, and a cache of the keys and values so far."""
    queries, keys, values = prompt
    S = keys.shape[2]
    ends = [*range(0, S, step), S]
    return [(queries[:, :, start:stop], cache_of(keys, values, stop)) for start, stop in pairwise(ends)]


def wrong_result(piece: Piece, one: MethodPrompt) -> str | None:
    """What is wrong with the result for one piece; None if nothing is.

    The blocks of the first group of heads must be the oracle's, but for ties, and some queries of all heads must attend
    those chosen as plain float64 attention does, twice as far off as MLX's dense attention at most.
    """
    queries, cache = piece
    keys, values, _ = cache.rows("ops")
    L, S = queries.shape[2], cache.length
    G, layout = queries.shape[1] // keys.shape[1], one.layout(piece)
    out, listed = one.attend(piece)
    blocks = np.array(listed)
    expected = expected_blocks(one.config.at(S), double(queries[:1, :G]), double(keys[:1, :1]), layout)
    masks = [oracle.block_mask(lists, layout.key_blocks) for lists in (blocks[:1, :G], expected)]
    share = float((masks[0] != masks[1]).sum() / masks[1].sum())
    if share > DIFFERENT:
        return f"wrong blocks: {share:.1%} are not the oracle's"

    row = np.linspace(0, L - 1, min(CHECKED, L)).astype(int)
    position, key = S - L + row, np.arange(S)
    size = one.config.block_size
    mask = oracle.block_mask(blocks[:, :, position // size - layout.first_block], layout.key_blocks)
    causal = np.broadcast_to(key <= position[:, None], (*queries.shape[:2], len(row), S))
    listed_keys = np.take(mask, key // size, axis=-1) & causal

    def grouped(array: Array) -> Array:
        return array.reshape(*keys.shape[:2], G * len(row), array.shape[-1])

    def at_rows(array: mx.array) -> Array:
        return grouped(double(array[:, :, mx.array(row)]))

    q, k, v = at_rows(queries), double(keys), double(values)
    right = plain(q, k, v, grouped(listed_keys))
    dense = at_rows(fused(queries, keys, values)) - plain(q, k, v, grouped(causal))
    return wrong(at_rows(out), right, float(np.abs(dense).max()), queries.dtype)


def expected_blocks(config: Prefill, queries: Array, keys: Array, layout: Layout) -> Array:
    """The oracle's choice, or the pattern that sizes alone give."""
    settings = config.parameters()
    if isinstance(config, SampleAttention):
        return oracle.sample_select(queries, keys, **settings).blocks
    if isinstance(config, MInference):
        return minference_select(queries, keys, **settings)
    del settings["block_size"]
    pattern = (bigbird_pattern if isinstance(config, BigBird) else streaming_pattern)(layout, **settings)
    return oracle.block_lists(np.broadcast_to(pattern, (*queries.shape[:2], *pattern.shape)))


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
