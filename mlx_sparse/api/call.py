"""One checked call of a public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..checks import ShapeError, check_choice, check_qkv, check_shape
from ..common import stats
from ..common.block_layout import Layout
from ..common.stats import Stats
from ..methods import registry


class Call:
    """One checked call: its arrays, sizes and backend, and what to do once the parameters are checked too."""

    def __init__(
        self,
        function: str,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float | None,
        left_padding: Any,
        backend: str,
        return_stats: bool | str = False,
    ) -> None:
        self.sizes = check_qkv(queries, keys, values)
        check_choice("return_stats", return_stats, (False, True, "mass"))
        self.arrays = (queries, keys, values)
        self.left_padding = None if left_padding is None else mx.array(left_padding)
        check_shape("left_padding", self.left_padding, (self.sizes.B,))
        if self.left_padding is not None:
            check_integers("left_padding", self.left_padding)
            self.left_padding = mx.clip(self.left_padding, 0, self.sizes.S)
        self.scale = float(self.sizes.D**-0.5 if scale is None else scale)
        self.backend = registry.resolve(backend, function, D=self.sizes.D, G=self.sizes.G)
        self.return_stats = return_stats

    def run(self, function: str, **parameters: Any) -> Any:
        """Call ``function`` of the backend."""
        implementation = registry.load(function, self.backend)
        return implementation(*self.arrays, scale=self.scale, left_padding=self.left_padding, **parameters)

    def dense(self, layout: Layout | None = None) -> Any:
        """Dense attention, of a piece of a prompt if there is a ``layout``."""
        out = self.run("dense")
        if not self.return_stats:
            return out
        n = self.sizes
        moved = stats.dense_elements(n.S, n.D)
        record = Stats(moved, moved, 1.0, mx.ones((n.B, n.Hq, n.L)) if self.return_stats == "mass" else None)
        return out, record if layout is None else stats.as_prefill(record, layout, n.D)

    def decode(self, method: str, count: Callable[..., int], attended: int, **parameters: Any) -> Any:
        """One step of ``method``, which attends ``attended`` keys and moves ``count`` elements; dense if it is all."""
        if self.sizes.L > 1 or self.sizes.S <= attended:
            return self.dense()
        out, lse = self.run(method, **parameters)
        return (out, self.record(lse, count, attended)) if self.return_stats else out

    def record(self, lse: mx.array, count: Callable[..., int], top_k: int) -> Stats:
        n = self.sizes
        moved, dense = count(n.S, n.D, top_k=top_k), stats.dense_elements(n.S, n.D)
        return Stats(moved, dense, min(top_k, n.S) / n.S, self.mass(lse))

    def mass(self, lse: mx.array) -> mx.array | None:
        """The retained mass behind ``lse``, if it was asked for."""
        if self.return_stats != "mass":
            return None
        queries, keys, _ = self.arrays
        dense_lse = registry.load("dense_lse", self.backend)
        dense = dense_lse(queries, keys, scale=self.scale, left_padding=self.left_padding)
        # A row with no valid key has lost nothing.
        return mx.where(dense == -mx.inf, 1.0, mx.exp(lse - dense))

    def prefill(self, method: str, layout: Layout, **parameters: Any) -> Any:
        """A piece of a prompt by ``method``, which returns ``out``, ``lse`` and the blocks it attended."""
        out, lse, blocks = registry.load(method, self.backend)(*self.arrays, scale=self.scale, **parameters)
        if not self.return_stats:
            return out
        # (sample.9)
        density = (blocks >= 0).sum(axis=(2, 3)) / layout.causal_pairs
        share, D = float(density.mean()), self.sizes.D
        moved, dense = stats.prefill_elements(layout, D, share), stats.prefill_elements(layout, D)
        return out, Stats(moved, dense, share, self.mass(lse), density, layout.sampled_share)


def check_integers(name: str, array: mx.array) -> None:
    """Raise `ShapeError` unless ``array`` holds integers."""
    if not mx.issubdtype(array.dtype, mx.integer):
        raise ShapeError(f"{name}: expected integers, got {array.dtype}.")
