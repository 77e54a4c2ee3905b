"""Time of prefill attention: SampleAttention against MLX's dense attention, step by step in turns in one run.

A prompt is attended as mlx-lm does it: in steps, the queries of each against all keys so far. Each step's time is the
least of all repetitions, a prompt's the sum of its steps': other programs can only add to it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import oracle, registry
from ..api import dense_attention, sample_attention
from ..config import Sample
from ..machine import memory
from .dense import Shape

Array = npt.NDArray[Any]
Qkv = tuple[mx.array, mx.array, mx.array]

LARGEST_SHARE = 0.6  # of the memory of the machine
PEAK = 14.0  # logits by which keys stand out
CHECKED = 8  # queries whose result is compared with float64
DIFFERENT = 0.01  # of the blocks, which scores may choose otherwise in float64


@dataclass(frozen=True)
class Row:
    """One shape, type, length and step.

    Attributes:
        step: queries per call.
        density: share of the causal block pairs that were attended, over all steps and heads.
        dense, sparse: seconds of each step in turn, the least of all repetitions; None with a ``note``.
        note: why there are no times.
        failed: the result was wrong.
    """

    dtype: str
    shape: Shape
    S: int
    step: int
    method: str
    backend: str
    density: float | None = None
    dense: tuple[float, ...] | None = None
    sparse: tuple[float, ...] | None = None
    note: str | None = None
    failed: bool = False

    @property
    def ratios(self) -> tuple[float, float] | None:
        """Dense time over sparse time: of the whole prompt, of its last step."""
        if not self.dense or not self.sparse:
            return None
        return sum(self.dense) / sum(self.sparse), self.dense[-1] / self.sparse[-1]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        row = vars(self) | vars(self.shape) | {"shape": str(self.shape)}
        if self.ratios:
            row |= dict(zip(("ratio", "last_step_ratio"), self.ratios, strict=True))
        return row


def measure(shape: Shape, S: int, step: int, dtype: str, config: Sample, backend: str, repeat: int) -> Row:
    """Check the last step's result, then time all."""
    backend = registry.resolve(backend, "sample", D=shape.D, G=shape.G)
    kind = getattr(mx, dtype)
    row = partial(Row, dtype, shape, S, step, str(config), backend)
    # On a CPU dense attention holds all scores of a step. The prompt is made in float32, in a few pieces.
    scores = 4 * shape.Hq * step * S if mx.default_device().type == mx.cpu else 0
    needed = 1.2 * scores + 16 * S * shape.D * (shape.Hq + shape.Hkv)
    if needed > LARGEST_SHARE * memory():
        return row(note=f"needs {needed / 1e9:.0f} GB of this machine's {memory() / 1e9:.0f} GB")
    pieces = steps(inputs(shape, S, kind), step)
    wrong = parity(pieces[-1], config.at(S), backend)
    gc.collect()
    if wrong:
        return row(note=wrong, failed=True)
    dense, sparse = times(pieces, config, backend, repeat)
    return row(density=density(pieces, config, backend), dense=dense, sparse=sparse)


def inputs(shape: Shape, S: int, dtype: mx.Dtype) -> Qkv:
    """A prompt whose heads look at the first keys, at a few others, nearby, or at a distance of their own.

    Half of the components are waves of the position, turned back by each head's distance: the product peaks there.
    Along one direction of the other half the first keys and a few more stand out.
    """
    rng = np.random.default_rng(0)
    waves = shape.D // 4
    frequency = np.geomspace(1.0, 0.01, waves)
    distance = np.where(np.arange(shape.Hq) % 2, rng.integers(0, S // 2, shape.Hq), 0)[:, None]
    share = rng.uniform(0.3, 1.0, (2, shape.Hq, 1, 1)).astype(np.float32)
    queries = rng.standard_normal((shape.Hq, S, shape.D), np.float32)
    keys, values = rng.standard_normal((2, shape.Hkv, S, shape.D), np.float32)

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
    result = tuple(mx.array(array[None]).astype(dtype) for array in (queries, keys, values))
    mx.eval(result)
    return result[0], result[1], result[2]


def steps(prompt: Qkv, step: int) -> list[Qkv]:
    """Queries of each step, and the keys and values so far."""
    queries, keys, values = prompt
    S = keys.shape[2]
    ends = [*range(0, S, step), S]
    return [(queries[:, :, start:stop], keys[:, :, :stop], values[:, :, :stop]) for start, stop in pairwise(ends)]


def times(
    pieces: Sequence[Qkv], config: Sample, backend: str, repeat: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of each step, dense and sparse, in turns."""
    found = []
    for piece in pieces:
        pairs = [
            (_seconds(partial(dense_attention, *piece)), _seconds(partial(attention, piece, config, backend)))
            for _ in range(repeat)
        ]
        found.append(tuple(map(min, zip(*pairs, strict=True))))
    dense, sparse = zip(*found, strict=True)
    return dense, sparse


def attention(piece: Qkv, config: Sample, backend: str) -> mx.array:
    """What is timed: the public function."""
    settings = config.at(piece[1].shape[2]).parameters()
    out: mx.array = sample_attention(*piece, **settings, backend=backend)
    return out


def density(pieces: Sequence[Qkv], config: Sample, backend: str) -> float:
    """Attended block pairs over causal ones."""
    attended, causal = 0.0, 0
    for queries, keys, values in pieces:
        settings = config.at(keys.shape[2]).parameters()
        _, stats = sample_attention(queries, keys, values, **settings, backend=backend, return_stats=True)
        pairs = config.layout(queries.shape[2], keys.shape[2]).causal_pairs
        attended, causal = attended + stats.density * pairs, causal + pairs
    return attended / causal


def parity(piece: Qkv, config: Sample, backend: str) -> str | None:
    """What is wrong with one step's result; None if nothing is.

    The blocks of the first group of heads must be the oracle's, but for ties, and some queries of all heads must attend
    those chosen as plain float64 attention does, twice as far off as MLX's dense attention at most.
    """
    queries, keys, _ = piece
    _, Hq, L, D = queries.shape
    Hkv, S = keys.shape[1:3]
    settings = config.parameters() | {"scale": D**-0.5}
    layout = config.layout(L, S)
    if layout.everything:
        return None
    out, _, listed = registry.load("sample", backend)(*piece, **settings)
    blocks = np.array(listed)
    some = slice(0, Hq // Hkv)
    expected = oracle.sample_select(_double(queries[:, some]), _double(keys[:, :1]), **settings).blocks
    masks = [oracle.block_mask(lists, layout.key_blocks) for lists in (blocks[:, some], expected)]
    share = float((masks[0] != masks[1]).sum() / masks[1].sum())
    if share > DIFFERENT:
        return f"wrong blocks: {share:.1%} are not the oracle's"

    row = np.linspace(0, L - 1, min(CHECKED, L)).astype(int)
    position = S - L + row
    mask = oracle.block_mask(blocks[0][:, position // config.block_size - layout.first_block], layout.key_blocks)
    causal = np.arange(S) <= position[:, None]
    listed_keys = np.repeat(mask, config.block_size, axis=-1)[..., :S] & causal
    q, k, v = (_double(array)[0] for array in (queries[:, :, mx.array(row)], *piece[1:]))
    right = _plain(q, k, v, listed_keys)
    dense = _double(dense_attention(*piece)[:, :, mx.array(row)])[0]
    ulp = float(mx.finfo(queries.dtype).eps) * float(np.abs(right).max())
    allowed = 2 * float(np.abs(dense - _plain(q, k, v, np.broadcast_to(causal, listed_keys.shape))).max()) + ulp
    error = float(np.abs(_double(out[:, :, mx.array(row)])[0] - right).max())
    return None if error <= allowed else f"wrong result: error {error:.1e}, allowed {allowed:.1e}"


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = [
        "| type | query heads | KV heads | D | S | step | method | density | dense, ms | sample, ms | dense / sample "
        "| in the last step |",
        "|" + "---|" * 12,
    ]
    for row in rows:
        shape = row.shape
        cells = [row.dtype, shape.Hq, shape.Hkv, shape.D, row.S, row.step, row.method]
        if row.ratios and row.dense and row.sparse:
            whole, last = row.ratios
            cells += [f"{row.density:.2f}", f"{1e3 * sum(row.dense):.0f}", f"{1e3 * sum(row.sparse):.0f}"]
            cells += [f"{whole:.2f}", f"{last:.2f}"]
        else:
            cells += [row.note, *[""] * 4]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _plain(queries: Array, keys: Array, values: Array, mask: Array) -> Array:
    """Float64 attention of ``queries (Hq, n, D)`` where ``mask (Hq, n, S)``."""
    G = len(queries) // len(keys)
    result = []
    for head, query in enumerate(queries):
        scores = np.where(mask[head], query @ keys[head // G].T * query.shape[-1] ** -0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result.append(weights @ values[head // G] / weights.sum(axis=-1, keepdims=True))
    return np.stack(result)


def _double(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32), np.float64)


def _seconds(run: Callable[[], mx.array]) -> float:
    start = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - start
