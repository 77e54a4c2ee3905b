"""Time of prefill attention: each method against dense attention, piece by piece in turns in one run.

A prompt is attended as mlx-lm does it: in pieces, the queries of each against all keys so far. A prompt's time is the
sum of its pieces'.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import oracle
from ..cache import SparseKVCache
from ..config import BigBird, MInference, Prefill, Sample
from ..forms import table
from ..layout import Layout
from ..oracle.prefill import minference_select
from ..patterns import bigbird_pattern, streaming_pattern
from ..stats import prefill_elements
from .decode import Case
from .rows import Row, Times
from .timing import Run, cache_of, dense_ways, double, fused, in_turns, plain, read, too_large

Array = npt.NDArray[Any]
Qkv = tuple[mx.array, mx.array, mx.array]
Piece = tuple[mx.array, SparseKVCache]  # its queries, and a cache of the keys and values up to the last of them

PEAK = 14.0  # logits by which keys stand out
CHECKED = 8  # queries whose result is compared with float64
DIFFERENT = 0.01  # of the blocks, which scores may choose otherwise in float64


@dataclass
class Entrant:
    """A method on a backend, and what it moves and attends over all pieces."""

    config: Prefill
    backend: str
    elements: int = 0
    attended: int = 0
    causal: int = 0

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


def measure(case: Case, step: int, methods: Sequence[tuple[Prefill, str]], repeat: int) -> list[Row]:
    """Check the result of every method for the last piece, then time those that are right: a row for each.

    Args:
        step: queries per piece.
        methods: configurations and the backends that run them.
    """
    shape, entrants = case.shape, [Entrant(*method) for method in methods]
    details = {"step": step, "density": None, "last_step_ratio": None}
    prompt_bytes = sum(case.bytes * min(stop, case.S) // case.S for stop in range(step, case.S + step, step))
    found = [
        Row(str(one.config), one.backend, case.dtype, shape, case.B, case.S, details, None, prompt_bytes)
        for one in entrants
    ]
    # On a CPU dense attention holds all scores of a piece. The prompt is made in float32, in a few parts.
    scores = 4 * case.B * shape.Hq * step * case.S if mx.default_device().type == mx.cpu else 0
    if large := too_large(1.2 * scores + 16 * case.B * case.S * shape.D * (shape.Hq + shape.Hkv)):
        return [row.without_times(large) for row in found]
    prompt = pieces(inputs(case), step)
    right = []
    for place, one in enumerate(entrants):
        if wrong := wrong_result(prompt[-1], one):
            found[place] = found[place].without_times(wrong, failed=True)
        else:
            right.append(place)
        gc.collect()
    times = _times(prompt, [entrants[place] for place in right], repeat) if right else []
    for place, (whole, last) in zip(right, times, strict=True):
        one = entrants[place]
        more = {"step": step, "density": one.density, "last_step_ratio": last.ratio}
        found[place] = replace(found[place], times=whole, details=more, bytes_formula=one.elements * case.kind.size)
    return found


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
    result = tuple(mx.array(array).astype(case.kind) for array in (queries, keys, values))
    mx.eval(result)
    return result[0], result[1], result[2]


def pieces(prompt: Qkv, step: int) -> list[Piece]:
    """Queries of each piece, and a cache of the keys and values so far."""
    queries, keys, values = prompt
    S = keys.shape[2]
    ends = [*range(0, S, step), S]
    return [(queries[:, :, start:stop], cache_of(keys, values, stop)) for start, stop in pairwise(ends)]


def _times(prompt: Sequence[Piece], entrants: Sequence[Entrant], repeat: int) -> list[tuple[Times, Times]]:
    """Of each method and of dense attention in the same turns: the whole prompt, and its last piece."""
    first = prompt[0][0]
    ways = dense_ways(first.dtype, first.shape[2])
    timed: list[dict[str, list[float]]] = []
    for piece in prompt:
        queries, cache = piece
        keys, values, _ = cache.rows("ops")
        runs: dict[str, Run] = {name: partial(way, queries, keys, values) for name, way in ways.items()}
        runs["read"] = partial(read, cache)
        for i, one in enumerate(entrants):
            one.count(piece)
            runs[f"method {i}"] = partial(one.attend, piece)
        timed.append(in_turns(runs, repeat, warm_up=not timed))
    whole = {name: [sum(turn) for turn in zip(*(found[name] for found in timed), strict=True)] for name in timed[0]}

    def sides(samples: Mapping[str, Sequence[float]], i: int) -> Times:
        return Times.of({name: samples[name] for name in ways}, samples[f"method {i}"], samples["read"])

    return [(sides(whole, i), sides(timed[-1], i)) for i in range(len(entrants))]


def wrong_result(piece: Piece, one: Entrant) -> str | None:
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
    ulp = float(mx.finfo(queries.dtype).eps) * float(np.abs(right).max())
    allowed = 2 * float(np.abs(dense).max()) + ulp
    error = float(np.abs(at_rows(out) - right).max())
    return None if error <= allowed else f"wrong result: error {error:.1e}, allowed {allowed:.1e}"


def expected_blocks(config: Prefill, queries: Array, keys: Array, layout: Layout) -> Array:
    """The oracle's choice, or the pattern that sizes alone give."""
    settings = config.parameters()
    if isinstance(config, Sample):
        return oracle.sample_select(queries, keys, **settings).blocks
    if isinstance(config, MInference):
        return minference_select(queries, keys, **settings)
    del settings["block_size"]
    pattern = (bigbird_pattern if isinstance(config, BigBird) else streaming_pattern)(layout, **settings)
    return oracle.block_lists(np.broadcast_to(pattern, (*queries.shape[:2], *pattern.shape)))


def text(rows: Sequence[Row]) -> str:
    """The rows for people."""
    header = ["method", "backend", "type", "heads", "batch", "keys", "step", "density", "dense, ms", "by", "sparse, ms"]
    header += ["dense / sparse", "in the last step"]
    lines = []
    for row in rows:
        cells = [row.method, row.backend, row.dtype, row.shape, row.batch, f"{row.S:,}", row.details["step"]]
        if row.times is None:
            lines.append([*cells, "", "", "", row.note, "", ""])
            continue
        dense, sparse = (side.scaled(1e-3) for side in (row.times.dense, row.times.sparse))
        cells += [f"{row.details['density']:.2f}", dense, row.times.by, sparse, f"{row.times.ratio:.2f}"]
        lines.append([*cells, f"{row.details['last_step_ratio']:.2f}"])
    return f"The attention of a prompt in one layer, median (first to third quartile):\n\n{table(header, lines)}"
