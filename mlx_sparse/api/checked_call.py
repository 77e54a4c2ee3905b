"""One checked call of a public function, for any array library (`Library`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..checks import Sizes, check_choice, check_qkv, check_shape
from ..methods import stats
from ..methods.block_layout import Layout
from ..methods.scoring_keys import KeyCodes, check_keys_t
from ..methods.stats import Stats

INF = float("inf")


class Library(Protocol):
    """Array operations of one library, which the public functions need.

    `mlx_sparse.api.mlx_functions.MLX` and `mlx_sparse.cuda_ref.api.Torch` implement this protocol.

    Attributes:
        xp: the module of the library, for functions that have the same name in all libraries.
    """

    xp: Any

    def check_array(
        self, name: str, array: Any, like: Any = None, *, integers: bool = False, same_type: bool = False
    ) -> None:
        """Raise unless ``array`` belongs to this library, is on the device of ``like``, and has an accepted type."""

    def resolve(self, backend: str, function: str, sizes: Sizes, *arrays: Any) -> str:
        """Return the backend that runs ``function`` on these arrays.

        Raises:
            BackendUnavailable, ConfigError, ShapeError: no backend can run the function on them.
        """

    def load(self, function: str, backend: str) -> Callable[..., Any]:
        """Return the function of the backend. It takes checked arrays and returns ``out`` and float32 ``lse`` first."""

    def padding(self, left_padding: Any, sizes: Sizes, like: Any) -> Any:
        """Return ``left_padding (B,)`` as the backends take it, clamped to 0..S; None stays None."""

    def ones(self, shape: tuple[int, ...], like: Any) -> Any:
        """Return float32 ones on the device of ``like``."""

    def visit(self, bucket_ids: Any, visited: Any) -> dict[str, Any]:
        """Return the arguments of the backends of `saap_attention` for these bucket ids and visited buckets."""

    def count_blocks(self, blocks: Any) -> Any:
        """Return the number of attended key blocks per head ``(B, Hq)`` from the third result of a prefill function."""


class Call:
    """Check the arrays of one call, and run it on its backend."""

    def __init__(
        self,
        library: Library,
        function: str,
        arrays: tuple[Any, Any, Any],
        scale: float | None = None,
        left_padding: Any = None,
        backend: str = "auto",
        return_stats: bool | str = False,
    ) -> None:
        self.library, self.function = library, function
        self.arrays = queries, keys, values = arrays
        for name, array in zip(("queries", "keys", "values"), self.arrays, strict=True):
            library.check_array(name, array)
        self.sizes = check_qkv(queries, keys, values)
        check_choice("return_stats", return_stats, (False, True, "recall"))
        self.left_padding = library.padding(left_padding, self.sizes, queries)
        self.scale = float(self.sizes.D**-0.5 if scale is None else scale)
        self.backend = library.resolve(backend, function, self.sizes, queries, keys, values)
        self.return_stats = return_stats

    def sparse(self, attended: int) -> bool:
        """Return True if a decode step that attends ``attended`` keys skips any key. Other calls are dense."""
        return self.sizes.L == 1 and self.sizes.S > attended

    def check(self, name: str, array: Any, shape: tuple[int, ...], *, same_type: bool = False) -> None:
        """Check the shape of an optional array, and with ``same_type`` that it has the type of the keys."""
        if array is not None:
            self.library.check_array(name, array, self.arrays[0], same_type=same_type)
            check_shape(name, array, shape)

    def check_keys_t(self, keys_t: Any, key_bits: int) -> None:
        """Check component-major keys: an array with the type of the keys, or `KeyCodes` if ``key_bits`` is below 16."""
        if isinstance(keys_t, KeyCodes):
            for name, array in zip(KeyCodes._fields, keys_t, strict=True):
                self.library.check_array(f"keys_t.{name}", array, self.arrays[0])
        elif keys_t is not None:
            self.library.check_array("keys_t", keys_t, self.arrays[0], same_type=True)
        check_keys_t(keys_t, self.sizes, key_bits)

    def load(self, function: str) -> Callable[..., Any]:
        """Return ``function`` of the backend."""
        return self.library.load(function, self.backend)

    def run(self, **parameters: Any) -> Any:
        """Call the function of the backend."""
        run = self.load(self.function)
        return run(*self.arrays, scale=self.scale, left_padding=self.left_padding, **parameters)

    def dense(self, layout: Layout | None = None) -> Any:
        """Run dense attention. With a ``layout``, `Stats` are in the unit of prefill."""
        out = self.load("dense")(*self.arrays, scale=self.scale, left_padding=self.left_padding)
        if not self.return_stats:
            return out
        n = self.sizes
        moved = stats.dense_elements(n.S, n.D)
        recall = self.library.ones((n.B, n.Hq, n.L), out) if self.return_stats == "recall" else None
        record = Stats(moved, moved, 1.0, recall)
        return out, record if layout is None else stats.as_prefill(record, layout, n.D)

    def decode(self, count: Callable[..., int], attended: int, **parameters: Any) -> Any:
        """Run a decode step that attends ``attended`` keys and moves ``count`` elements; dense if it skips no key."""
        if not self.sparse(attended):
            return self.dense()
        out, lse = self.run(**parameters)
        return (out, self.record(lse, count, attended)) if self.return_stats else out

    def record(self, lse: Any, count: Callable[..., int], top_k: int) -> Stats:
        """Return the `Stats` of a step that attended ``top_k`` keys."""
        n = self.sizes
        moved, dense = count(n.S, n.D, top_k=top_k), stats.dense_elements(n.S, n.D)
        return Stats(moved, dense, min(top_k, n.S) / n.S, self.recall(lse))

    def recall(self, lse: Any) -> Any:
        """Return the attention recall of ``lse`` by a dense pass over the keys; None if it was not requested."""
        if self.return_stats != "recall":
            return None
        queries, keys, _ = self.arrays
        dense = self.load("dense_lse")(queries, keys, scale=self.scale, left_padding=self.left_padding)
        # The recall of a row without valid keys is 1.
        return self.library.xp.where(dense == -INF, 1.0, self.library.xp.exp(lse - dense))

    def prefill(self, layout: Layout, **parameters: Any) -> Any:
        """Run a prefill function, which returns ``out``, ``lse`` and the attended blocks."""
        out, lse, blocks = self.load(self.function)(*self.arrays, scale=self.scale, **parameters)
        if not self.return_stats:
            return out
        # (sample.9)
        density = self.library.count_blocks(blocks) / layout.causal_pairs
        share, D = float(density.mean()), self.sizes.D
        moved, dense = stats.prefill_elements(layout, D, share), stats.prefill_elements(layout, D)
        return out, Stats(moved, dense, share, self.recall(lse), density, layout.sampled_share)
