"""Run SparQ attention on the GPU (docs/spec/sparq.md, equations (sparq.1) to (sparq.10), (sparq.21)).

A decode step has three launches. The first computes approximate logits of all keys. The second lists the best keys of
each tile. The third selects ``top_k`` of these keys and attends to them. If the mean value is mixed in or more than 512
keys are selected, selection is a separate launch. If the list is split, one more launch merges the results.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ...core.attend.metal import Listed, Reallocation, attend_candidates, attend_listed, takes_candidates
from ...core.launch import (
    LAUNCH_CACHE_SIZE,
    Kernel,
    Launch,
    Outputs,
    RowFormat,
    integer,
    packed_parts,
    padding_or_zeros,
    parts_of,
    real,
    row_template,
    unread,
)
from ...core.packed_rows import Rows
from ...core.select.metal import merge, tiles_of, top_k_launch
from .config import Selection
from .low_rank import project

# Running statistics and int4 codes replace these functions after the first decode step.
from .ops import code_keys as code_keys
from .ops import deviation as deviation
from .ops import key_spread as key_spread
from .ops import masked_mean as masked_mean
from .scoring_keys import GROUP, WORDS, KeyCodes

KEYS = 4  # keys per thread: SCORE_KEYS
THREADS = 256

CODE_TILE = 1024  # int4 keys per threadgroup: SCORE_TILE

# Constants for the bits of selected keys, as in metal/group_scores.h.
LOCAL, LOCAL_SHARES, ALWAYS = 0xFF800001, 8388605.0, 0xFFFFFFFF

_GIVEN = ("left_padding", "bias", "rank", "length", "scale")
SCORES = Kernel(
    "sparq_scores",
    "sparq_scores.h",
    ("queries", "component_weight", "keys_t", *_GIVEN),
    ("logits", "statistics"),
)
CANDIDATES = Kernel(
    "sparq_candidates",
    "sparq_candidates.h",
    ("logits", "statistics", "left_padding", "bias", "length", "local_window", "top_k"),
    ("bits", "indices", "softmax"),
)
_CODED = ("queries", "component_weight", "codes", "lo", "step", "center")
CODE_SCORES = Kernel("sparq_code_scores", "sparq_code_scores.h", (*_CODED, "keys", *_GIVEN), ("logits", "statistics"))
ROW_SCORES = Kernel(
    "sparq_row_scores",
    "sparq_row_scores.h",
    ("queries", *packed_parts("keys"), "left_padding", "bias", "length", "scale"),
    ("logits", "statistics"),
)
CODE_CANDIDATES = Kernel(
    "sparq_code_candidates",
    "sparq_candidates.h",
    ("logits", "statistics", "left_padding", "bias", "length", "local_window", "top_k"),
    ("bits", "indices", "softmax"),
)


class Sizes(NamedTuple):
    """Sizes and parameters that determine the launches of a decode step.

    Attributes:
        dtype: type of the queries and the output.
        length: number of keys in use.
        weighted: True if the components have weights (sparq.1).
        scored: "columns" for component-major scoring keys, "codes" for int4, "projected" for int4 codes of projected
            latents, or "rows" for a quantized KV cache.
        biased: True if a bias is added to the logits.
        exact: True if reallocation needs float32 logits. Logits from "columns" are always float32.
        aligned: True if the capacity of component-major keys is a multiple of 4.
        row_format: bits and group size of the KV cache; None if the KV cache is not quantized.
    """

    B: int
    Hkv: int
    G: int
    D: int
    dtype: mx.Dtype
    length: int
    rank: int
    top_k: int
    local_window: int
    scale: float
    weighted: bool
    scored: str
    biased: bool
    exact: bool
    aligned: bool
    row_format: RowFormat

    @property
    def narrow(self) -> bool:
        """True if logits are 8-bit distances from the largest logit of their tile, in sixteenths of a nat."""
        return self.scored != "columns" and not self.exact

    @property
    def width(self) -> int:
        """Number of components of the scoring keys."""
        return self.rank if self.scored == "projected" else self.D

    @property
    def heads(self) -> int:
        """Number of query heads per threadgroup that scores keys. Their logits and components must fit into it."""
        return next(n for n in range(self.G, 0, -1) if self.G % n == 0 and n <= 16 and n * self.width <= 4608)

    @property
    def shares(self) -> int:
        """Number of threadgroups that share the query heads of all KV heads of a sequence."""
        return self.Hkv * self.G // self.heads

    @property
    def code_tiles(self) -> int:
        """Number of tiles for the keys in full quantization groups, plus one for the remaining keys (the tail)."""
        return -(-(self.length // GROUP * GROUP) // CODE_TILE) + 1


def sparq_scores(n: Sizes) -> Launch:
    """Build the launch that computes approximate logits of all keys from ``rank`` components (sparq.3).

    The outputs are float32. ``logits (B, shares, stride, heads)`` are -inf for invalid keys; ``stride`` is ``length``
    rounded up to a multiple of 4. ``statistics (B, shares, tiles, heads, 2)`` are the largest logit and the sum of
    ``exp(logit - largest)`` for each tile of 1,024 keys.
    """
    tiles = -(-n.length // (KEYS * THREADS))
    logits = (n.B, n.shares, -(-n.length // KEYS) * KEYS, n.heads)
    template = {"D": n.D, "G": n.G, "HEADS": n.heads, "WEIGHTED": n.weighted, "ALIGNED": n.aligned, "BIAS": n.biased}
    return Launch(
        SCORES,
        [(logits, mx.float32), ((n.B, n.shares, tiles, n.heads, 2), mx.float32)],
        [integer(n.rank), integer(n.length), real(n.scale)],
        template=template,
        groups=(tiles, n.shares, n.B),
        threads=THREADS,
    )


def sparq_code_scores(n: Sizes) -> Launch:
    """Build the launch that computes approximate logits of all keys from int4 scoring keys (sparq.21).

    The outputs differ from the outputs of `sparq_scores` in three ways. ``stride`` is a multiple of 8. The keys after
    the last full group have their own tile. The logits are uint8 if ``n.narrow`` is True.
    """
    per_thread = 8 if n.heads <= 4 else 4  # keys; more keys do not fit into the registers
    row_format = None if n.scored == "projected" else n.row_format
    template = {"D": n.width, "G": n.G, "HEADS": n.heads, "WEIGHTED": n.weighted, "KEYS": per_thread, "BIAS": n.biased}
    return Launch(
        CODE_SCORES.of_rows(row_format),
        _scored(n),
        [integer(n.rank), integer(n.length), real(n.scale)],
        template=template | row_template(row_format),
        groups=(n.code_tiles, n.shares, n.B),
        threads=CODE_TILE // per_thread,
    )


def sparq_row_scores(n: Sizes) -> Launch:
    """Build the launch that computes the logits of all keys in a quantized KV cache from all components (quantized.2).

    The outputs are the same as for `sparq_code_scores`.
    """
    template = {"D": n.D, "G": n.G, "HEADS": n.heads, "KEYS": KEYS, "BIAS": n.biased}
    return Launch(
        ROW_SCORES,
        _scored(n),
        [integer(n.length), real(n.scale)],
        template=template | row_template(n.row_format),
        groups=(n.code_tiles, n.shares, n.B),
        threads=CODE_TILE // KEYS,
    )


def _scored(n: Sizes) -> Outputs:
    """Return the output shapes and types of `sparq_code_scores` and `sparq_row_scores`."""
    logits = (n.B, n.shares, -(-n.length // 8) * 8, n.heads)
    return [(logits, mx.uint8 if n.narrow else mx.float32), ((n.B, n.shares, n.code_tiles, n.heads, 2), mx.float32)]


def sparq_candidates(n: Sizes) -> Launch:
    """Build the launch that lists the best keys of each tile (sparq.6) and computes the logits' softmax (sparq.4).

    The outputs are the ``bits`` and ``indices`` of a `top_k_launch`, and float32 ``softmax (B, Hkv, G, 2)``. For
    each query head, ``softmax`` contains the largest logit and ``1 / sum(exp(logit - largest))``.
    """
    return top_k_launch(
        CODE_CANDIDATES if n.narrow else CANDIDATES,
        n.B,
        n.Hkv,
        n.length,
        n.top_k,
        [integer(n.length), integer(n.local_window), integer(n.top_k)],
        more=[((n.B, n.Hkv, n.G, 2), mx.float32)],
        template={"G": n.G, "HEADS": n.heads, "BIAS": n.biased},
    )


SCORING = {"columns": sparq_scores, "rows": sparq_row_scores}


class Launches(NamedTuple):
    """Launches of a decode step.

    Attributes:
        scores: launch that computes approximate logits of all keys.
        candidates: launch that lists the best keys of each tile.
        attend: launch that selects the best keys of all tiles and attends to these keys; None if these operations need
            several launches.
    """

    scores: Launch
    candidates: Launch
    attend: Launch | None


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def launches(n: Sizes) -> Launches:
    """Build the launches of a decode step. Layers with the same sizes share the cached launches."""
    tiles, _, slots = tiles_of(n.length, n.top_k)
    left = tiles * slots
    fits = not n.exact and left > n.top_k and takes_candidates(n.D, n.G, left, n.top_k)
    listed = Listed(n.B, n.Hkv * n.G, n.Hkv, n.D, n.dtype, n.length, n.scale, n.row_format, n.biased)
    score = SCORING.get(n.scored, sparq_code_scores)
    return Launches(score(n), sparq_candidates(n), attend_candidates(listed, n.top_k) if fits else None)


class Candidates(NamedTuple):
    """Results of the first two launches of a decode step.

    Attributes:
        bits, indices: scores and indices of the best keys of each tile, from `sparq_candidates`.
        logits: approximate logits from `sparq_scores`, `sparq_code_scores` or `sparq_row_scores`.
        softmax: largest logit and ``1 / sum(exp(logit - largest))`` per query head, from `sparq_candidates`.
        attend: third launch of the step; None if the remaining work needs several launches.
    """

    bits: mx.array
    indices: mx.array
    logits: mx.array
    softmax: mx.array
    attend: Launch | None


def find_candidates(
    queries: mx.array, keys: Rows, selection: Selection, *, exact: bool = False, length: int | None = None
) -> Candidates:
    """Score all keys with ``rank`` components and list the best keys of each tile.

    Args:
        selection: parameters for the selection. If ``keys_t`` is a `KeyCodes`, it must cover all full groups. A
            projection needs `KeyCodes`. If ``keys_t`` is None and ``rank`` is D, a quantized KV cache is scored
            directly. If ``keys_t`` is None in any other case, the keys are transposed first, which takes longer than
            dense attention.
        exact: True if reallocation needs float32 logits.
        length: number of keys in use. If None, all keys are in use.
    """
    (B, Hq, _, D), Hkv = queries.shape, keys.shape[1]
    weight = unread() if selection.component_weight is None else selection.component_weight
    bias = unread() if selection.bias is None else selection.bias
    length = keys.shape[2] if length is None else length
    rows, row_format = parts_of(keys)
    arrays: tuple[mx.array, ...]
    given, aligned = queries, True
    if selection.projection is not None:
        given, projected = project(selection.projection, queries, keys)
        first = max(length - GROUP, 0)  # the tail has less than GROUP keys
        arrays = (weight, *_not_empty(selection.keys_t), projected[:, :, first : first + GROUP])
        scored = "projected"
    elif isinstance(selection.keys_t, KeyCodes):
        scored, arrays = "codes", (weight, *_not_empty(selection.keys_t), *rows)
    elif row_format is not None and selection.keys_t is None and selection.rank == D:
        scored, arrays = "rows", rows
    else:
        columns = mx.contiguous(keys[:].swapaxes(-1, -2)) if selection.keys_t is None else selection.keys_t
        scored, arrays, aligned = "columns", (weight, columns), columns.shape[3] % KEYS == 0
    chosen = (
        selection.rank,
        selection.top_k,
        selection.local_window,
        selection.scale,
        selection.component_weight is not None,
    )
    how = (selection.bias is not None, exact, aligned, row_format)
    step = launches(Sizes(B, Hkv, Hq // Hkv, D, queries.dtype, length, *chosen, scored, *how))
    padding = padding_or_zeros(selection.left_padding, B)
    logits, *statistics = step.scores(given, *arrays, padding, bias)
    bits, indices, softmax = step.candidates(logits, *statistics, padding, bias)
    return Candidates(bits, indices, logits, softmax, step.attend)


def _not_empty(coded: KeyCodes) -> KeyCodes:
    """Pad ``coded`` to one group if it is empty, because kernels accept no empty arrays."""
    if coded.lo.shape[-1] > 0:
        return coded
    codes, lo, step = (mx.pad(array, [(0, 0)] * 3 + [(0, WORDS)]) for array in coded[:3])
    return KeyCodes(codes, lo, step, coded.center)


def sparq_select(
    queries: mx.array, keys: Rows, selection: Selection, *, exact: bool = False, length: int | None = None
) -> mx.array:
    """Select the keys of a decode step. Return ascending int32 indices ``(B, Hkv, min(top_k, S))``, padded with -1."""
    found = find_candidates(queries, keys, selection, exact=exact, length=length)
    return merge(found.bits, found.indices, selection.top_k)[1]


def sparq_attention(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    *,
    reallocate: bool,
    value_mean: mx.array | None,
    length: int | None = None,
    **parameters: Any,
) -> tuple[mx.array, ...]:
    """Run a SparQ decode step over whole buffers. See `methods.sparq.ops.sparq_attention`."""
    selection = Selection(**parameters)
    found = find_candidates(queries, keys, selection, exact=reallocate, length=length)
    if found.attend is not None:
        rows = *parts_of(keys)[0], *parts_of(values)[0]
        bias = unread() if selection.bias is None else selection.bias
        out, lse, recall = found.attend(queries, *rows, found.bits, found.indices, bias)
        return out, lse, recall
    reallocation = None
    if reallocate:
        assert value_mean is not None
        reallocation = Reallocation(found.logits, found.softmax, value_mean.astype(mx.float32))
    bits, indices = merge(found.bits, found.indices, selection.top_k)
    recall = selected_shares(bits, queries.shape[1] // keys.shape[1]).sum(axis=-1)
    how: dict[str, Any] = {"scale": selection.scale, "length": length, "bias": selection.bias}
    out, lse, *alpha = attend_listed(queries, (keys, values), indices, **how, reallocation=reallocation)
    recall = alpha[0].reshape(*recall.shape, -1).mean(axis=-1) if alpha else recall
    return out, lse, recall


def selected_shares(bits: mx.array, G: int) -> mx.array:
    """Return the shares of the group scores of the keys with ``bits (B, Hkv, N)`` (sparq.24).

    metal/group_scores.h describes the bits and computes the same share.
    """
    local = (bits - LOCAL).astype(mx.float32) / LOCAL_SHARES
    scores = (bits & 0x7FFFFFFF).view(mx.float32) / G
    shares = mx.where(bits >= LOCAL, local, mx.where(bits == 0, 0.0, scores))
    return mx.where((bits == LOCAL - 1) | (bits == ALWAYS), mx.nan, shares)
