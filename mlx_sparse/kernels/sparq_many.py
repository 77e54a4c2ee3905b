"""SparQ's choice of keys for a group of many query rows, those of a call with several queries (metal/sparq_many.h).

The components, two passes over the keys, for the softmax of each row and for one score a key, and the best keys of each
tile of those.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from .launch import LANES, Form, Kernel, Launch, integer, real, row_template

ROWS = 8  # query rows of a SIMD group: MANY_ROWS
THREADS = 512  # of the threadgroup that finds the components
STATISTICS, SOFTMAX_SUMS, LOGIT_SUMS, LOGITS = 1, 2, 4, 8

_PICKED = ("chosen", "picked", "factors")
_CODED = ("codes", "lo", "step", "centre")
_PACKED = ("key_codes", "key_scales", "key_biases")
_GIVEN = ("statistics", "left_padding", "length")
COMPONENTS = Kernel("sparq_components", "sparq_components.h", ("queries", "component_weight", "rank", "scale"), _PICKED)
COLUMNS = Kernel("sparq_many_scores", "sparq_many.h", (*_PICKED, "keys_t", *_GIVEN), ("made",))
CODES = Kernel("sparq_many_code_scores", "sparq_many.h", (*_PICKED, *_CODED, "keys", *_GIVEN), ("made",))
CODES_PACKED = Kernel(
    "sparq_many_code_scores_packed", "sparq_many.h", (*_PICKED, *_CODED, *_PACKED, *_GIVEN), ("made",)
)
PACKED_ROWS = Kernel("sparq_many_row_scores", "sparq_many.h", (*_PICKED, *_PACKED, *_GIVEN), ("made",))


class Passes:
    """Launched like a kernel that scores keys, on the same arrays: first the components, then the passes."""

    def __init__(
        self,
        sizes: tuple[int, int, int, int, int],
        *,
        rank: int,
        scale: float,
        weighted: bool,
        key_bits: int,
        form: Form,
        by_rows: bool,
        tiles: int,
        makes: int,
    ) -> None:
        """For ``sizes`` of B, Hkv, G, D and keys, which so many ``tiles`` share.

        Args:
            makes: SOFTMAX_SUMS, LOGIT_SUMS or LOGITS.
        """
        B, Hkv, G, D, length = sizes
        rows = -(-G // ROWS) * ROWS
        shape = {"D": D, "G": G, "ROWS": rows}
        coded = {} if key_bits == 16 else {"BITS": key_bits}
        plain, packed = (CODES, CODES_PACKED) if coded else (COLUMNS, PACKED_ROWS)
        packs = form is not None and (by_rows or bool(coded))

        def making(what: int, *made: int) -> Launch:
            return Launch(
                packed if packs else plain,
                [((B, Hkv, *made), mx.float32)],
                [integer(length)],
                template={**shape, "MAKES": what, **coded, **(row_template(form) if packs else {})},
                groups=(tiles, Hkv, B),
                threads=rows * LANES // ROWS,
            )

        self.by_rows, self.makes = by_rows, makes
        self.components = Launch(
            COMPONENTS,
            [((B, Hkv, rank), mx.int32), ((B, Hkv, rank, rows), mx.float32), ((B, Hkv, rows), mx.float32)],
            [integer(rank), real(scale)],
            template={**shape, "WEIGHTED": weighted},
            groups=(1, Hkv, B),
            threads=THREADS,
        )
        self.statistics = making(STATISTICS, tiles, G, 2)
        self.scores = making(makes, length, *([G] if makes == LOGITS else []))

    def __call__(self, queries: mx.array, *given: mx.array) -> list[mx.array]:
        """Float32 scores of keys ``(B, Hkv, S)``, or of LOGITS ``(B, Hkv, S, G)`` and the statistics of their tiles.

        Args:
            given: a component weight, but for packed rows; keys as the kernel takes them; left padding.
        """
        weight, keys = (_nothing(), given) if self.by_rows else (given[0], given[1:])
        picked = self.components(queries, weight)
        statistics = _nothing()
        if self.makes != LOGIT_SUMS:
            (statistics,) = self.statistics(*picked, *keys[:-1], statistics, keys[-1])
        made = self.scores(*picked, *keys[:-1], statistics, keys[-1])
        return [*made, statistics] if self.makes == LOGITS else made


@cache
def _nothing() -> mx.array:
    """What stands for an array that is not read."""
    return mx.array([0.0] * 8, mx.float32)
