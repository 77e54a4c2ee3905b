"""SparQ attention on the GPU: docs/spec/sparq.md, equations (sparq.1) to (sparq.10), (sparq.21).

Three launches: the logits of all keys, the best keys of each tile, and attention over the best of those. One more finds
these where the mean value is mixed in or a list of more than 512 keys is shared out, and one merges its parts.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..methods.scoring_keys import GROUP, WORDS, KeyCodes
from ..ops.packed_rows import Rows
from .attend import Reallocation, attend_candidates, attend_indices, takes_candidates
from .launch import KEPT, Form, Kernel, Launch, integer, padding_or_zeros, parts_of, real, row_template
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


def sparq_scores(
    B: int, Hkv: int, G: int, D: int, length: int, *, rank: int, scale: float, weighted: bool, aligned: bool
) -> Launch:
    """Approximate logits of all keys from ``rank`` components (sparq.3).

    Args:
        weighted: whether there is a component weight.
        aligned: whether rows of ``keys_t`` hold a multiple of 4 keys.

    Returns:
        What makes float32 ``logits (B, Hkv, stride, G)``, -inf for invalid keys, with ``stride`` the next multiple of
        4, and ``statistics (B, Hkv, tiles, G, 2)``: largest logit and sum of ``exp(logit - largest)`` of each tile of
        1,024 keys.
    """
    tiles = -(-length // (KEYS * THREADS))
    return Launch(
        SCORES,
        [((B, Hkv, -(-length // KEYS) * KEYS, G), mx.float32), ((B, Hkv, tiles, G, 2), mx.float32)],
        [integer(rank), integer(length), real(scale)],
        template={"D": D, "G": G, "WEIGHTED": weighted, "ALIGNED": aligned},
        groups=(tiles, Hkv, B),
        threads=THREADS,
    )


def keys_per_thread(G: int) -> int:
    """Of `sparq_code_scores`: more would not fit into the registers."""
    return 8 if G <= 4 else 4


def sparq_code_scores(
    B: int,
    Hkv: int,
    G: int,
    D: int,
    length: int,
    *,
    rank: int,
    scale: float,
    weighted: bool,
    narrow: bool,
    form: Form,
) -> Launch:
    """Approximate logits of all keys from codes of ``rank`` components (sparq.21).

    Args:
        narrow: whether the logits are written in 8 bits.

    Returns:
        What makes those of `sparq_scores`, but for a stride of a multiple of 8 and one more tile, the tail; or uint8
        ``logits``, sixteenths of a nat below the largest of their tile.
    """
    per_thread = keys_per_thread(G)
    template = {"D": D, "G": G, "WEIGHTED": weighted, "KEYS": per_thread}
    return Launch(
        CODE_SCORES_PACKED if form else CODE_SCORES,
        _scored(B, Hkv, G, length, narrow),
        [integer(rank), integer(length), real(scale)],
        template=template | row_template(form),
        groups=(_code_tiles(length), Hkv, B),
        threads=CODE_TILE // per_thread,
    )


def sparq_row_scores(
    B: int, Hkv: int, G: int, D: int, length: int, *, scale: float, narrow: bool, form: Form
) -> Launch:
    """Those of `sparq_code_scores` from all components of packed rows (quantised.2)."""
    return Launch(
        ROW_SCORES,
        _scored(B, Hkv, G, length, narrow),
        [integer(length), real(scale)],
        template={"D": D, "G": G, "KEYS": KEYS, **row_template(form)},
        groups=(_code_tiles(length), Hkv, B),
        threads=CODE_TILE // KEYS,
    )


def _code_tiles(length: int) -> int:
    """Tiles of keys in full groups, and one for the tail."""
    return -(-(length // GROUP * GROUP) // CODE_TILE) + 1


def _scored(B: int, Hkv: int, G: int, length: int, narrow: bool) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Logits and statistics of such tiles."""
    logits = (B, Hkv, -(-length // 8) * 8, G)
    return [(logits, mx.uint8 if narrow else mx.float32), ((B, Hkv, _code_tiles(length), G, 2), mx.float32)]


def sparq_candidates(B: int, Hkv: int, G: int, length: int, *, top_k: int, local_window: int, narrow: bool) -> Launch:
    """The best keys of each tile (sparq.6) and the softmax of the logits (sparq.4).

    Returns:
        What makes ``bits`` and ``indices`` of a `select.listing`, and float32 ``softmax (B, Hkv, G, 2)``: largest logit
        and one over the sum of ``exp(logit - largest)``.
    """
    return listing(
        CODE_CANDIDATES if narrow else CANDIDATES,
        B,
        Hkv,
        length,
        top_k,
        [integer(length), integer(local_window), integer(top_k)],
        more=[((B, Hkv, G, 2), mx.float32)],
        template={"G": G},
    )


class Launches(NamedTuple):
    """What a step launches.

    Attributes:
        attend: None where one launch cannot attend to the best of all tiles.
    """

    scores: Launch
    candidates: Launch
    attend: Launch | None


@lru_cache(maxsize=KEPT)
def launches(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    dtype: mx.Dtype,
    length: int,
    rank: int,
    top_k: int,
    local_window: int,
    scale: float,
    weighted: bool,
    coded: bool,
    exact: bool,
    aligned: bool,
    form: Form,
    by_rows: bool,
) -> Launches:
    """Those of a step over arrays of these shapes, with the parameters of `choose`; ``by_rows`` are keys scored."""
    B, Hq, _, D = queries
    Hkv = keys[1]
    sizes = (B, Hkv, Hq // Hkv, D, length)
    narrow = (by_rows or coded) and not exact
    how: dict[str, Any] = {"rank": rank, "scale": scale, "weighted": weighted}
    if by_rows:
        scores = sparq_row_scores(*sizes, scale=scale, narrow=narrow, form=form)
    elif coded:
        scores = sparq_code_scores(*sizes, **how, narrow=narrow, form=form)
    else:
        scores = sparq_scores(*sizes, **how, aligned=aligned)
    candidates = sparq_candidates(B, Hkv, Hq // Hkv, length, top_k=top_k, local_window=local_window, narrow=narrow)
    tiles, _, slots = tiles_of(length, top_k)
    left = tiles * slots
    fits = not exact and left > top_k and takes_candidates(D, Hq // Hkv, left, top_k)
    attend = attend_candidates(B, Hq, Hkv, D, dtype, length, scale, top_k, form) if fits else None
    return Launches(scores, candidates, attend)


class Choice(NamedTuple):
    """What a step's first two launches make.

    Attributes:
        bits, indices: of a `select.listing`.
        logits: of `sparq_scores`, `sparq_code_scores` or `sparq_row_scores`.
        softmax: of `sparq_candidates`.
        attend: of `launches`.
    """

    bits: mx.array
    indices: mx.array
    logits: mx.array
    softmax: mx.array
    attend: Launch | None


def choose(
    queries: mx.array,
    keys: Rows,
    *,
    rank: int,
    top_k: int,
    local_window: int,
    component_weight: mx.array | None,
    scale: float,
    left_padding: mx.array | None,
    keys_t: mx.array | KeyCodes | None,
    exact: bool = False,
    length: int | None = None,
) -> Choice:
    """Find the best keys of each tile from ``rank`` components.

    Args:
        component_weight: float32 ``(B, Hkv, D)``, or None for the paper's rule.
        keys_t: ``(B, Hkv, D, capacity)`` component-major keys. Without them packed keys are scored by their rows if
            ``rank`` is D, and others transposed first, which costs more than dense attention. Or codes of at least
            the full groups.
        exact: whether the logits have to be float32, as reallocation reads them. Those of keys that are not coded
            always are.
        length: keys in use; all of them when None.
    """
    length = keys.shape[2] if length is None else length
    weight = _no_weight() if component_weight is None else component_weight
    rows, form = parts_of(keys)
    by_rows = form is not None and keys_t is None and rank == keys.shape[3]
    scored: tuple[mx.array, ...]
    aligned = True
    if by_rows:
        scored = rows
    elif isinstance(keys_t, KeyCodes):
        scored = (weight, *_some(keys_t), *rows)
    else:
        columns = mx.contiguous(keys[:].swapaxes(-1, -2)) if keys_t is None else keys_t
        scored, aligned = (weight, columns), columns.shape[3] % KEYS == 0
    step = launches(
        queries.shape,
        keys.shape,
        queries.dtype,
        length,
        rank,
        top_k,
        local_window,
        scale,
        component_weight is not None,
        isinstance(keys_t, KeyCodes),
        exact,
        aligned,
        form,
        by_rows,
    )
    padding = padding_or_zeros(left_padding, keys.shape[0])
    logits, *statistics = step.scores(queries, *scored, padding)
    bits, indices, softmax = step.candidates(logits, *statistics, padding)
    return Choice(bits, indices, logits, softmax, step.attend)


def _some(coded: KeyCodes) -> KeyCodes:
    """The codes, with room for a group: a kernel takes no empty arrays."""
    if coded.lo.shape[-1] > 0:
        return coded
    codes, lo, step = (mx.pad(array, [(0, 0)] * 3 + [(0, WORDS)]) for array in coded[:3])
    return KeyCodes(codes, lo, step, coded.centre)


def sparq_select(queries: mx.array, keys: Rows, *, top_k: int, **how: Any) -> mx.array:
    """The keys of one decode step: ``(B, Hkv, min(top_k, S))`` int32, ascending, -1 in slots that no key fills.

    Args:
        how: the other parameters of `choose`.
    """
    found = choose(queries, keys, top_k=top_k, **how)
    return merge(found.bits, found.indices, top_k)


def sparq_attention(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    *,
    top_k: int,
    reallocate: bool,
    scale: float,
    value_mean: mx.array | None,
    length: int | None = None,
    **selection: Any,
) -> tuple[mx.array, mx.array]:
    """One decode step: ``out (B, Hq, 1, D)`` in the type of ``queries`` and float32 ``lse (B, Hq, 1)``.

    Args:
        keys, values: ``(B, Hkv, capacity, D)`` with ``length`` rows in use; whole buffers, which are not copied.
        value_mean: float32 ``(B, Hkv, D)``; needed to reallocate.
        selection: the other parameters of `choose`.
    """
    found = choose(queries, keys, top_k=top_k, scale=scale, length=length, exact=reallocate, **selection)
    if found.attend is not None:
        rows = *parts_of(keys)[0], *parts_of(values)[0]
        out, lse = found.attend(queries, *rows, found.bits, found.indices)
        return out, lse
    reallocation = None
    if reallocate:
        assert value_mean is not None
        reallocation = Reallocation(found.logits, found.softmax, value_mean.astype(mx.float32))
    indices = merge(found.bits, found.indices, top_k)
    return attend_indices(queries, keys, values, indices, scale=scale, length=length, reallocation=reallocation)


@cache
def _no_weight() -> mx.array:
    return mx.array([0.0], mx.float32)
