"""SparQ attention on the GPU: docs/spec/sparq.md, equations (sparq.1) to (sparq.10), (sparq.21).

Three launches: the logits of all keys, the best keys of each tile, and attention over the best of those. One more finds
these where the mean value is mixed in or a list of more than 512 keys is shared out, and one merges its parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..common.key_codes import GROUP, KeyCodes
from ..common.packed_rows import PackedRows, Rows
from .attend import Reallocation, attend_candidates, attend_indices, takes_candidates
from .launch import Kernel, integer, padding_or_zeros, real, row_inputs
from .select import candidates, merge

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
_KEYS = ("key_codes", "key_scales", "key_biases")
_GIVEN = ("left_padding", "rank", "length", "scale")
CODE_SCORES = Kernel("sparq_code_scores", "sparq_code_scores.h", (*_CODED, "keys", *_GIVEN), ("logits", "statistics"))
CODE_SCORES_PACKED = Kernel(
    "sparq_code_scores_packed", "sparq_code_scores.h", (*_CODED, *_KEYS, *_GIVEN), ("logits", "statistics")
)
ROW_SCORES = Kernel(
    "sparq_row_scores",
    "sparq_row_scores.h",
    ("queries", *_KEYS, "left_padding", "length", "scale"),
    ("logits", "statistics"),
)
CODE_CANDIDATES = Kernel(
    "sparq_code_candidates",
    "sparq_code_candidates.h",
    ("logits", "statistics", "left_padding", "length", "local_window", "top_k"),
    ("bits", "indices", "softmax"),
)


def sparq_scores(
    queries: mx.array,
    keys_t: mx.array,
    *,
    rank: int,
    component_weight: mx.array | None,
    scale: float,
    left_padding: mx.array | None,
    length: int,
) -> tuple[mx.array, mx.array]:
    """Approximate logits of all keys from ``rank`` components (sparq.3).

    Args:
        component_weight: float32 ``(B, Hkv, D)``, or None for the paper's rule.
        keys_t: ``(B, Hkv, D, capacity)`` with ``length`` columns in use.

    Returns:
        Float32 ``logits (B, Hkv, stride, G)``, -inf for invalid keys, with ``stride`` the next multiple of 4, and
        ``statistics (B, Hkv, tiles, G, 2)``: largest logit and sum of ``exp(logit - largest)`` of each tile of 1,024
        keys.
    """
    B, Hkv, D, capacity = keys_t.shape
    G = queries.shape[1] // Hkv
    tiles = -(-length // (KEYS * THREADS))
    logits, statistics = SCORES(
        {
            "queries": queries,
            "component_weight": _no_weight() if component_weight is None else component_weight,
            "keys_t": keys_t,
            "left_padding": padding_or_zeros(left_padding, B),
            "rank": integer(rank),
            "length": integer(length),
            "scale": real(scale),
        },
        [((B, Hkv, -(-length // KEYS) * KEYS, G), mx.float32), ((B, Hkv, tiles, G, 2), mx.float32)],
        template={
            "D": D,
            "G": G,
            "WEIGHTED": component_weight is not None,
            "ALIGNED": capacity % KEYS == 0,
        },
        groups=(tiles, Hkv, B),
        threads=THREADS,
    )
    return logits, statistics


def keys_per_thread(G: int, key_bits: int) -> int:
    """Of `sparq_code_scores`: more would not fit into the registers."""
    return 8 if G <= 4 and key_bits == 4 else 4


def sparq_code_scores(
    queries: mx.array,
    keys: Rows,
    coded: KeyCodes,
    *,
    key_bits: int,
    narrow: bool,
    rank: int,
    component_weight: mx.array | None,
    scale: float,
    left_padding: mx.array | None,
    length: int,
) -> tuple[mx.array, mx.array]:
    """Approximate logits of all keys from codes of ``rank`` components (sparq.21).

    Args:
        keys: ``(B, Hkv, capacity, D)`` with ``length`` rows in use, of which those that are not coded are read.
        coded: with room for at least the full groups among them.
        narrow: whether the logits are written in 8 bits.

    Returns:
        Those of `sparq_scores`, but for a stride of a multiple of 8 and one more tile, the tail; or uint8 ``logits``,
        sixteenths of a nat below the largest of their tile.
    """
    B, Hkv, _, D = keys.shape
    G = queries.shape[1] // Hkv
    if coded.lo.shape[-1] == 0:  # a kernel takes no empty arrays
        codes, lo, step = (mx.pad(array, [(0, 0)] * 3 + [(0, 2 * key_bits)]) for array in coded[:3])
        coded = KeyCodes(codes, lo, step, coded.centre)
    per_thread = keys_per_thread(G, key_bits)
    rows, form = row_inputs("key", keys)
    logits, statistics = (CODE_SCORES_PACKED if form else CODE_SCORES)(
        {
            **coded._asdict(),
            **rows,
            "queries": queries,
            "component_weight": _no_weight() if component_weight is None else component_weight,
            "left_padding": padding_or_zeros(left_padding, B),
            "rank": integer(rank),
            "length": integer(length),
            "scale": real(scale),
        },
        _scored(B, Hkv, G, length, narrow),
        template={
            **{"D": D, "G": G, "WEIGHTED": component_weight is not None, "BITS": key_bits, "KEYS": per_thread},
            **form,
        },
        groups=(_code_tiles(length), Hkv, B),
        threads=CODE_TILE // per_thread,
    )
    return logits, statistics


def sparq_row_scores(
    queries: mx.array, keys: PackedRows, *, narrow: bool, scale: float, left_padding: mx.array | None, length: int
) -> tuple[mx.array, mx.array]:
    """Logits of all keys from all components of their packed rows (quantised.2).

    Args:
        keys: ``(B, Hkv, capacity, D)`` with ``length`` rows in use.
        narrow: whether the logits are written in 8 bits.

    Returns:
        Those of `sparq_code_scores`.
    """
    B, Hkv, _, D = keys.shape
    G = queries.shape[1] // Hkv
    inputs, form = row_inputs("key", keys)
    logits, statistics = ROW_SCORES(
        {
            **inputs,
            "queries": queries,
            "left_padding": padding_or_zeros(left_padding, B),
            "length": integer(length),
            "scale": real(scale),
        },
        _scored(B, Hkv, G, length, narrow),
        template={"D": D, "G": G, "KEYS": KEYS, **form},
        groups=(_code_tiles(length), Hkv, B),
        threads=CODE_TILE // KEYS,
    )
    return logits, statistics


def _code_tiles(length: int) -> int:
    """Tiles of keys in full groups, and one for the tail."""
    return -(-(length // GROUP * GROUP) // CODE_TILE) + 1


def _scored(B: int, Hkv: int, G: int, length: int, narrow: bool) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Logits and statistics of such tiles."""
    logits = (B, Hkv, -(-length // 8) * 8, G)
    return [(logits, mx.uint8 if narrow else mx.float32), ((B, Hkv, _code_tiles(length), G, 2), mx.float32)]


def sparq_candidates(
    logits: mx.array,
    statistics: mx.array,
    *,
    top_k: int,
    local_window: int,
    group_reduce: str,
    left_padding: mx.array | None,
    length: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """The best keys of each tile (sparq.6) and the softmax of the logits (sparq.4).

    Returns:
        ``bits`` and ``indices`` of `select.candidates`, and float32 ``softmax (B, Hkv, G, 2)``: largest logit and one
        over the sum of ``exp(logit - largest)``.
    """
    B, Hkv, _, G = logits.shape
    softmax: list[mx.array] = []

    def first(tiles: int, threads: int, slots: int) -> tuple[mx.array, mx.array]:
        narrow = logits.dtype == mx.uint8
        bits, indices, merged = (CODE_CANDIDATES if narrow else CANDIDATES)(
            {
                "logits": logits,
                "statistics": statistics,
                "left_padding": padding_or_zeros(left_padding, B),
                "length": integer(length),
                "local_window": integer(local_window),
                "top_k": integer(top_k),
            },
            [
                ((B, Hkv, tiles, slots), mx.uint32),
                ((B, Hkv, tiles, slots), mx.int32),
                ((B, Hkv, G, 2), mx.float32),
            ],
            template={"G": G} if narrow else {"G": G, "SOFTMAX": group_reduce == "softmax"},
            groups=(tiles, Hkv, B),
            threads=threads,
        )
        softmax.append(merged)
        return bits, indices

    bits, indices = candidates(first, B, Hkv, length, top_k)
    return bits, indices, softmax[0]


class Choice(NamedTuple):
    """What a step's first two launches make.

    Attributes:
        bits, indices, softmax: of `sparq_candidates`.
        logits: of `sparq_scores` or `sparq_code_scores`.
    """

    bits: mx.array
    indices: mx.array
    softmax: mx.array
    logits: mx.array


def choose(
    queries: mx.array,
    keys: Rows,
    *,
    rank: int,
    top_k: int,
    local_window: int,
    group_reduce: str,
    component_weight: mx.array | None,
    scale: float,
    left_padding: mx.array | None,
    keys_t: mx.array | KeyCodes | None,
    key_bits: int = 16,
    exact: bool = False,
    length: int | None = None,
) -> Choice:
    """Find the best keys of each tile from ``rank`` components.

    Args:
        keys_t: ``(B, Hkv, D, capacity)`` component-major keys. Without them packed keys are scored by their rows if
            ``rank`` is D, and others transposed first, which costs more than dense attention. With fewer ``key_bits``
            than 16 coded ones.
        exact: whether the logits have to be float32, as reallocation reads them. Sums of logits always are, and those
            of keys that are not coded.
        length: keys in use; all of them when None.
    """
    length = keys.shape[2] if length is None else length
    scoring: dict[str, Any] = {
        "rank": rank,
        "component_weight": component_weight,
        "scale": scale,
        "left_padding": left_padding,
        "length": length,
    }
    narrow = not exact and group_reduce == "softmax"
    if isinstance(keys, PackedRows) and keys_t is None and rank == keys.shape[3]:
        logits, statistics = sparq_row_scores(
            queries, keys, narrow=narrow, scale=scale, left_padding=left_padding, length=length
        )
    elif key_bits < 16:
        assert isinstance(keys_t, KeyCodes)
        logits, statistics = sparq_code_scores(queries, keys, keys_t, key_bits=key_bits, narrow=narrow, **scoring)
    else:
        assert not isinstance(keys_t, KeyCodes)
        columns = mx.contiguous(keys[:].swapaxes(-1, -2)) if keys_t is None else keys_t
        logits, statistics = sparq_scores(queries, columns, **scoring)
    found = sparq_candidates(
        logits,
        statistics,
        top_k=top_k,
        local_window=local_window,
        group_reduce=group_reduce,
        left_padding=left_padding,
        length=length,
    )
    return Choice(*found, logits)


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
    length = keys.shape[2] if length is None else length
    rows = queries, keys, values
    found = choose(queries, keys, top_k=top_k, scale=scale, length=length, exact=reallocate, **selection)
    left, D = found.bits.shape[2], queries.shape[3]
    if not reallocate and left > top_k and takes_candidates(D, queries.shape[1] // keys.shape[1], left, top_k):
        return attend_candidates(*rows, found.bits, found.indices, top_k=top_k, scale=scale, length=length)
    reallocation = None
    if reallocate:
        assert value_mean is not None
        reallocation = Reallocation(found.logits, found.softmax, value_mean.astype(mx.float32))
    indices = merge(found.bits, found.indices, top_k)
    return attend_indices(*rows, indices, scale=scale, length=length, reallocation=reallocation)


@cache
def _no_weight() -> mx.array:
    return mx.array([0.0], mx.float32)
