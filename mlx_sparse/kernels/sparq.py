"""SparQ attention on the GPU: docs/spec/sparq.md, equations (sparq.1) to (sparq.10), (sparq.21).

A decode step has three launches: the logits of all keys, the best keys of each tile, and attention over the best of
these. If the mean value is mixed in or more than 512 keys are selected, another launch selects the keys. One more
merges the parts of a split list.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..methods.scoring_keys import GROUP, WORDS, KeyCodes
from ..methods.sparq import Selection
from ..ops.packed_rows import Rows
from .attend import Listed, Reallocation, attend_candidates, attend_indices, takes_candidates
from .launch import KEPT, Form, Kernel, Launch, Outputs, integer, padding_or_zeros, parts_of, real, row_template
from .select import listing, merge, tiles_of

KEYS = 4  # per thread: SCORE_KEYS
THREADS = 256

CODE_TILE = 1024  # coded keys of a threadgroup: SCORE_TILE

SCORES = Kernel(
    "sparq_scores",
    "sparq_scores.h",
    ("queries", "component_weight", "keys_t", "left_padding", "rank", "length", "scale"),
    ("logits", "statistics"),
)
CANDIDATES = Kernel(
    "sparq_candidates",
    "sparq_candidates.h",
    ("logits", "statistics", "left_padding", "length", "local_window", "top_k"),
    ("bits", "indices", "softmax"),
)
_CODED = ("queries", "component_weight", "codes", "lo", "step", "centre")
_PACKED = ("key_codes", "key_scales", "key_biases")
_GIVEN = ("left_padding", "rank", "length", "scale")
CODE_SCORES = Kernel("sparq_code_scores", "sparq_code_scores.h", (*_CODED, "keys", *_GIVEN), ("logits", "statistics"))
CODE_SCORES_PACKED = Kernel(
    "sparq_code_scores_packed", "sparq_code_scores.h", (*_CODED, *_PACKED, *_GIVEN), ("logits", "statistics")
)
ROW_SCORES = Kernel(
    "sparq_row_scores",
    "sparq_row_scores.h",
    ("queries", *_PACKED, "left_padding", "length", "scale"),
    ("logits", "statistics"),
)
CODE_CANDIDATES = Kernel(
    "sparq_code_candidates",
    "sparq_code_candidates.h",
    ("logits", "statistics", "left_padding", "length", "local_window", "top_k"),
    ("bits", "indices", "softmax"),
)


class Sizes(NamedTuple):
    """Everything that determines the launches of a decode step, except its arrays.

    Attributes:
        dtype: type of the queries and of the output.
        length: keys in use.
        weighted: the components have a weight.
        scored: source of the scores: "columns" of component-major keys, int4 "codes", or quantized "rows".
        exact: the logits must be float32, because reallocation reads them. Logits from columns always are.
        aligned: each column holds a multiple of 4 keys.
        form: form of quantized rows.
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
    exact: bool
    aligned: bool
    form: Form

    @property
    def narrow(self) -> bool:
        """True if the logits are written in 8 bits: sixteenths of a nat below the largest of their tile."""
        return self.scored != "columns" and not self.exact

    @property
    def code_tiles(self) -> int:
        """Number of tiles: those of the keys in full groups, and one for the tail."""
        return -(-(self.length // GROUP * GROUP) // CODE_TILE) + 1


def sparq_scores(n: Sizes) -> Launch:
    """Build the launch that writes approximate logits of all keys from ``rank`` components (sparq.3).

    The outputs are float32 ``logits (B, Hkv, stride, G)``, -inf for invalid keys, with ``stride`` the next multiple of
    4, and ``statistics (B, Hkv, tiles, G, 2)``: largest logit and sum of ``exp(logit - largest)`` of each tile of 1,024
    keys.
    """
    tiles = -(-n.length // (KEYS * THREADS))
    logits = (n.B, n.Hkv, -(-n.length // KEYS) * KEYS, n.G)
    return Launch(
        SCORES,
        [(logits, mx.float32), ((n.B, n.Hkv, tiles, n.G, 2), mx.float32)],
        [integer(n.rank), integer(n.length), real(n.scale)],
        template={"D": n.D, "G": n.G, "WEIGHTED": n.weighted, "ALIGNED": n.aligned},
        groups=(tiles, n.Hkv, n.B),
        threads=THREADS,
    )


def sparq_code_scores(n: Sizes) -> Launch:
    """Build the launch that writes approximate logits (sparq.21) of all keys from int4 codes.

    The outputs are those of `sparq_scores`, with a stride that is a multiple of 8 and one more tile for the tail.
    `narrow` logits are uint8.
    """
    per_thread = 8 if n.G <= 4 else 4  # more do not fit into the registers
    template = {"D": n.D, "G": n.G, "WEIGHTED": n.weighted, "KEYS": per_thread}
    return Launch(
        CODE_SCORES_PACKED if n.form else CODE_SCORES,
        _scored(n),
        [integer(n.rank), integer(n.length), real(n.scale)],
        template=template | row_template(n.form),
        groups=(n.code_tiles, n.Hkv, n.B),
        threads=CODE_TILE // per_thread,
    )


def sparq_row_scores(n: Sizes) -> Launch:
    """Build the launch that scores quantized rows with all components (quantized.2); outputs as `sparq_code_scores`."""
    return Launch(
        ROW_SCORES,
        _scored(n),
        [integer(n.length), real(n.scale)],
        template={"D": n.D, "G": n.G, "KEYS": KEYS, **row_template(n.form)},
        groups=(n.code_tiles, n.Hkv, n.B),
        threads=CODE_TILE // KEYS,
    )


def _scored(n: Sizes) -> Outputs:
    """Return shapes and types of the logits and statistics of `code_tiles`."""
    logits = (n.B, n.Hkv, -(-n.length // 8) * 8, n.G)
    return [(logits, mx.uint8 if n.narrow else mx.float32), ((n.B, n.Hkv, n.code_tiles, n.G, 2), mx.float32)]


def sparq_candidates(n: Sizes) -> Launch:
    """Build the launch that lists the best keys of each tile (sparq.6) and the softmax of the logits (sparq.4).

    The outputs are ``bits`` and ``indices`` of a `select.listing`, and float32 ``softmax (B, Hkv, G, 2)``: largest
    logit and ``1 / sum(exp(logit - largest))``.
    """
    return listing(
        CODE_CANDIDATES if n.narrow else CANDIDATES,
        n.B,
        n.Hkv,
        n.length,
        n.top_k,
        [integer(n.length), integer(n.local_window), integer(n.top_k)],
        more=[((n.B, n.Hkv, n.G, 2), mx.float32)],
        template={"G": n.G},
    )


SCORING = {"columns": sparq_scores, "codes": sparq_code_scores, "rows": sparq_row_scores}


class Launches(NamedTuple):
    """Launches of a decode step.

    Attributes:
        attend: selects the best keys of all tiles and attends to them; None if that needs several launches.
    """

    scores: Launch
    candidates: Launch
    attend: Launch | None


@lru_cache(maxsize=KEPT)
def launches(n: Sizes) -> Launches:
    """Build the launches of a decode step; layers of the same sizes share them."""
    tiles, _, slots = tiles_of(n.length, n.top_k)
    left = tiles * slots
    fits = not n.exact and left > n.top_k and takes_candidates(n.D, n.G, left, n.top_k)
    listed = Listed(n.B, n.Hkv * n.G, n.Hkv, n.D, n.dtype, n.length, n.scale, n.form)
    return Launches(SCORING[n.scored](n), sparq_candidates(n), attend_candidates(listed, n.top_k) if fits else None)


class Candidates(NamedTuple):
    """Results of the first two launches of a decode step.

    Attributes:
        bits, indices: outputs of a `select.listing`.
        logits: output of `sparq_scores`, `sparq_code_scores` or `sparq_row_scores`.
        softmax: output of `sparq_candidates`.
        attend: see `Launches`.
    """

    bits: mx.array
    indices: mx.array
    logits: mx.array
    softmax: mx.array
    attend: Launch | None


def find_candidates(
    queries: mx.array, keys: Rows, how: Selection, *, exact: bool = False, length: int | None = None
) -> Candidates:
    """Find the best keys of each tile from ``rank`` components.

    Args:
        how: parameters. Codes in ``keys_t (B, Hkv, D, capacity)`` include at least all full groups. Without ``keys_t``,
            quantized keys are scored by their rows if ``rank`` is D. Other keys are transposed first, which costs more
            than dense attention.
        exact: see `Sizes`.
        length: keys in use; all of them when None.
    """
    (B, Hq, _, D), Hkv = queries.shape, keys.shape[1]
    weight = _no_weight() if how.component_weight is None else how.component_weight
    rows, form = parts_of(keys)
    arrays: tuple[mx.array, ...]
    aligned = True
    if isinstance(how.keys_t, KeyCodes):
        scored, arrays = "codes", (weight, *_not_empty(how.keys_t), *rows)
    elif form is not None and how.keys_t is None and how.rank == D:
        scored, arrays = "rows", rows
    else:
        columns = mx.contiguous(keys[:].swapaxes(-1, -2)) if how.keys_t is None else how.keys_t
        scored, arrays, aligned = "columns", (weight, columns), columns.shape[3] % KEYS == 0
    length = keys.shape[2] if length is None else length
    chosen = how.rank, how.top_k, how.local_window, how.scale, how.component_weight is not None
    step = launches(Sizes(B, Hkv, Hq // Hkv, D, queries.dtype, length, *chosen, scored, exact, aligned, form))
    padding = padding_or_zeros(how.left_padding, B)
    logits, *statistics = step.scores(queries, *arrays, padding)
    bits, indices, softmax = step.candidates(logits, *statistics, padding)
    return Candidates(bits, indices, logits, softmax, step.attend)


def _not_empty(coded: KeyCodes) -> KeyCodes:
    """Return codes that have room for one group at least, because a kernel does not accept empty arrays."""
    if coded.lo.shape[-1] > 0:
        return coded
    codes, lo, step = (mx.pad(array, [(0, 0)] * 3 + [(0, WORDS)]) for array in coded[:3])
    return KeyCodes(codes, lo, step, coded.centre)


def sparq_select(
    queries: mx.array, keys: Rows, how: Selection, *, exact: bool = False, length: int | None = None
) -> mx.array:
    """Select the keys of one decode step: ``(B, Hkv, min(top_k, S))`` int32, ascending, -1 in empty slots."""
    found = find_candidates(queries, keys, how, exact=exact, length=length)
    return merge(found.bits, found.indices, how.top_k)


def sparq_attention(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    *,
    reallocate: bool,
    value_mean: mx.array | None,
    length: int | None = None,
    **selection: Any,
) -> tuple[mx.array, mx.array]:
    """Run one decode step: ``out (B, Hq, 1, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, 1)``.

    Args:
        keys, values: ``(B, Hkv, capacity, D)`` with ``length`` rows in use; whole buffers, which are not copied.
        value_mean: float32 ``(B, Hkv, D)``; needed to reallocate.
        selection: the fields of a `Selection`.
    """
    how = Selection(**selection)
    found = find_candidates(queries, keys, how, exact=reallocate, length=length)
    if found.attend is not None:
        rows = *parts_of(keys)[0], *parts_of(values)[0]
        out, lse = found.attend(queries, *rows, found.bits, found.indices)
        return out, lse
    reallocation = None
    if reallocate:
        assert value_mean is not None
        reallocation = Reallocation(found.logits, found.softmax, value_mean.astype(mx.float32))
    indices = merge(found.bits, found.indices, how.top_k)
    return attend_indices(queries, keys, values, indices, scale=how.scale, length=length, reallocation=reallocation)


@cache
def _no_weight() -> mx.array:
    return mx.array([0.0], mx.float32)
