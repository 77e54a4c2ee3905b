"""Define the public functions for block-sparse prefill and SampleAttention (docs/spec/sample.md).

A row block is ``block_size`` consecutive queries. For each query head, a row block attends to a list of key blocks.
Blocks start at multiples of ``block_size`` from position 0, even if the first ``S - L`` tokens are cached. The `ops`
backend evaluates the block lists. Therefore the functions do not work inside `mx.compile`.
"""

from __future__ import annotations

from typing import Any, Generic

from ..checks import ShapeError, check_block_size, check_sample
from ..core.blocks.layout import Layout
from .checked_call import Array, Call, Library


class PrefillFunctions(Generic[Array]):
    """Public functions for block-sparse prefill."""

    _library: Library[Array]

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
        """Compute exact causal attention of each query over the key blocks that its row block attends to (sample.8).

        Args:
            blocks: ``(B, Hq, R, N)`` int32 indices of key blocks, ascending, for the R row blocks that contain a query.
                ``-1``, or any number that is not a block index, marks an empty slot.

        Returns:
            ``out (B, Hq, L, D)`` and float32 ``lse (B, Hq, L)``. If a query attends to no key, its ``out`` is 0 and its
            ``lse`` is -inf.
        """
        call = Call(self._library, "attend_blocks", (queries, keys, values), scale=scale, backend=backend)
        n = call.sizes
        check_block_size(block_size)
        expected = (n.B, n.Hq, Layout(n.L, n.S, 1, block_size).row_blocks)
        self._library.check_array("blocks", blocks, queries, integers=True)
        if len(blocks.shape) != 4 or tuple(blocks.shape[:3]) != expected:
            raise ShapeError(f"blocks: expected shape (B, Hq, R, N) with {expected} first, got {tuple(blocks.shape)}.")
        run = call.load("attend_blocks")
        result: tuple[Array, Array] = run(queries, keys[:], values[:], blocks, block_size=block_size, scale=call.scale)
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
        """Select the key blocks that SampleAttention attends to (sample.1 to sample.7).

        Returns:
            int32 indices of key blocks ``(B, Hq, R, N)``, the argument ``blocks`` of `attend_blocks`.
        """
        call = Call(self._library, "sample_select", (queries, keys, keys), scale=scale, backend=backend)
        check_sample(alpha_column, alpha_slash, chunks, block_size)
        blocks: Array = call.load("sample_select")(
            queries,
            keys[:],
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
        """Run SampleAttention on a prefill chunk (MLSys 2025, Algorithm 1).

        Attention is dense if ``alpha_column`` or ``alpha_slash`` is 1. It is also dense if every row block contains a
        sampled row, for example in a chunk of one block.

        Args:
            alpha_column: share of the sample's attention that the selected key blocks must cover; above 0, at most 1.
            alpha_slash: share of the sample's attention that the selected diagonals must cover; above 0, at most 1.
            chunks: number of regions. The queries are divided into regions, and each region has its own sample.
            block_size: number of tokens per block: 32, 64 or 128.
        """
        call = Call(self._library, "sample", (queries, keys, values), scale, None, backend, return_stats)
        check_sample(alpha_column, alpha_slash, chunks, block_size)
        layout = Layout(call.sizes.L, call.sizes.S, chunks, block_size)
        if alpha_column >= 1 or alpha_slash >= 1 or layout.all_sampled:
            return call.dense(layout)
        return call.prefill(
            layout,
            alpha_column=float(alpha_column),
            alpha_slash=float(alpha_slash),
            chunks=chunks,
            block_size=block_size,
        )
