"""Methods for prompts: docs/spec/sample.md.

Every row block of ``block_size`` queries attends the key blocks that a method selects for it, per query head. Blocks
count from position 0, so that pieces of a prompt after a cached prefix (``L < S``) have the same ones. With the `ops`
backend attention waits for the chosen blocks, which `mx.compile` refuses.
"""

from __future__ import annotations

from typing import Any

from ..checks import ShapeError, check_block_size, check_sample
from ..methods.block_layout import Layout
from .checked_call import Call, Library

Array = Any  # of the library that the functions are for


class PrefillFunctions:
    """Functions of a prompt, or of a piece of one."""

    _library: Library

    def attend_blocks(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        blocks: Array,
        *,
        block_size: int,
        scale: float | None = None,
        backend: str = "auto",
    ) -> tuple[Array, Array]:
        """Exact causal attention of every query over the listed key blocks of its row block (sample.8).

        Args:
            blocks: ``(B, Hq, R, N)`` int32, R the row blocks that hold a query; ascending; ``-1``, or any number that
                is no block's, = empty slot.

        Returns:
            ``out (B, Hq, L, D)`` and float32 ``lse (B, Hq, L)``; 0 and -inf for queries with nothing to attend.
        """
        call = Call(self._library, "attend_blocks", (queries, keys, values), scale=scale, backend=backend)
        n = call.sizes
        check_block_size(block_size)
        expected = (n.B, n.Hq, Layout(n.L, n.S, 1, block_size).row_blocks)
        self._library.check_array("blocks", blocks, queries, integers=True)
        if len(blocks.shape) != 4 or tuple(blocks.shape[:3]) != expected:
            raise ShapeError(f"blocks: expected shape (B, Hq, R, N) with {expected} first, got {tuple(blocks.shape)}.")
        run = call.load("attend_blocks")
        result: tuple[Array, Array] = run(queries, keys, values, blocks, block_size=block_size, scale=call.scale)
        return result

    def sample_select(
        self,
        queries: Array,
        keys: Array,
        *,
        alpha_column: float = 0.95,
        alpha_slash: float = 0.95,
        chunks: int = 1,
        block_size: int = 128,
        scale: float | None = None,
        backend: str = "auto",
    ) -> Array:
        """The key blocks that SampleAttention attends (sample.1 to sample.7).

        Returns:
            ``(B, Hq, R, N)`` int32 for `attend_blocks`.
        """
        call = Call(self._library, "sample_select", (queries, keys, keys), scale=scale, backend=backend)
        check_sample(alpha_column, alpha_slash, chunks, block_size)
        blocks: Array = call.load("sample_select")(
            queries,
            keys,
            alpha_column=float(alpha_column),
            alpha_slash=float(alpha_slash),
            chunks=chunks,
            block_size=block_size,
            scale=call.scale,
        )
        return blocks

    def sample_attention(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        *,
        alpha_column: float = 0.95,
        alpha_slash: float = 0.95,
        chunks: int = 1,
        block_size: int = 128,
        scale: float | None = None,
        backend: str = "auto",
        return_stats: bool | str = False,
    ) -> Any:
        """A prompt, or a piece of one, by SampleAttention (MLSys 2025, Algorithm 1).

        Attention is dense where an alpha is 1 or every row block holds a sampled row, a piece of one block for example.

        Args:
            alpha_column, alpha_slash: share of the sample's attention mass that the kept key blocks, and the kept
                distances, must each hold; above 0, at most 1.
            chunks: regions of the queries with a sample of their own.
            block_size: 32, 64 or 128 tokens.
        """
        call = Call(self._library, "sample", (queries, keys, values), scale, None, backend, return_stats)
        check_sample(alpha_column, alpha_slash, chunks, block_size)
        layout = Layout(call.sizes.L, call.sizes.S, chunks, block_size)
        if alpha_column >= 1 or alpha_slash >= 1 or layout.everything:
            return call.dense(layout)
        return call.prefill(
            layout,
            alpha_column=float(alpha_column),
            alpha_slash=float(alpha_slash),
            chunks=chunks,
            block_size=block_size,
        )
