"""One checked call of a public function, for any array library: what differs between libraries is a `Library`."""

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
    """The operations on arrays that the public functions need; `mlx_sparse.api.mlx_functions` has those of MLX.

    Attributes:
        xp: the library's module, for what all of them call alike.
    """

    xp: Any

    def check_array(
        self, name: str, array: Any, like: Any = None, *, integers: bool = False, same_type: bool = False
    ) -> None:
        """Raise unless ``array`` is one of this library, where ``like`` is, and of the type that it has to have."""

    def resolve(self, backend: str, function: str, sizes: Sizes, *arrays: Any) -> str:
        """The backend that runs ``function`` on these arrays.

        Raises:
            BackendUnavailable, ConfigError, ShapeError: none can.
        """

    def load(self, function: str, backend: str) -> Callable[..., Any]:
        """The backend's function: checked arrays in, ``out`` and float32 ``lse`` first among what comes out."""

    def padding(self, left_padding: Any, sizes: Sizes, like: Any) -> Any:
        """``left_padding (B,)`` as the backends take it, within 0..S; None stays None."""

    def ones(self, shape: tuple[int, ...], like: Any) -> Any:
        """Float32, where ``like`` is."""

    def visit(self, bucket_ids: Any, visited: Any) -> dict[str, Any]:
        """What the backends of `saap_attention` take for these buckets of keys and those to visit."""

    def kept(self, blocks: Any) -> Any:
        """Attended key blocks of each head ``(B, Hq)``, from what a prefill function returns third."""


class Call:
    """One checked call: its arrays, sizes and backend, and what to do once the parameters are checked too."""

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
        """Return True if a decode step that attends so many keys leaves any out; other calls are dense."""
        return self.sizes.L == 1 and self.sizes.S > attended

    def check(self, name: str, array: Any, shape: tuple[int, ...], *, same_type: bool = False) -> None:
        """Check an optional array beside keys and values; ``same_type``: the backends may want that of the keys."""
        if array is not None:
            self.library.check_array(name, array, self.arrays[0], same_type=same_type)
            check_shape(name, array, shape)

    def check_keys_t(self, keys_t: Any, key_bits: int) -> None:
        """Check component-major keys: an array like the keys, or `KeyCodes` with fewer ``key_bits`` than 16."""
        if isinstance(keys_t, KeyCodes):
            for name, array in zip(KeyCodes._fields, keys_t, strict=True):
                self.library.check_array(f"keys_t.{name}", array, self.arrays[0])
        elif keys_t is not None:
            self.library.check_array("keys_t", keys_t, self.arrays[0], same_type=True)
        check_keys_t(keys_t, self.sizes, key_bits)

    def load(self, function: str) -> Callable[..., Any]:
        """``function`` of the backend."""
        return self.library.load(function, self.backend)

    def run(self, **parameters: Any) -> Any:
        """Call the function of the backend."""
        run = self.load(self.function)
        return run(*self.arrays, scale=self.scale, left_padding=self.left_padding, **parameters)

    def dense(self, layout: Layout | None = None) -> Any:
        """Dense attention, of a piece of a prompt if there is a ``layout``."""
        out = self.load("dense")(*self.arrays, scale=self.scale, left_padding=self.left_padding)
        if not self.return_stats:
            return out
        n = self.sizes
        moved = stats.dense_elements(n.S, n.D)
        recall = self.library.ones((n.B, n.Hq, n.L), out) if self.return_stats == "recall" else None
        record = Stats(moved, moved, 1.0, recall)
        return out, record if layout is None else stats.as_prefill(record, layout, n.D)

    def decode(self, count: Callable[..., int], attended: int, **parameters: Any) -> Any:
        """One step, which attends ``attended`` keys and moves ``count`` elements; dense attention if that is all."""
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
        # A row with no valid key has lost nothing.
        return self.library.xp.where(dense == -INF, 1.0, self.library.xp.exp(lse - dense))

    def prefill(self, layout: Layout, **parameters: Any) -> Any:
        """A piece of a prompt, by a function that returns ``out``, ``lse`` and what it attended."""
        out, lse, blocks = self.load(self.function)(*self.arrays, scale=self.scale, **parameters)
        if not self.return_stats:
            return out
        # (sample.9)
        density = self.library.kept(blocks) / layout.causal_pairs
        share, D = float(density.mean()), self.sizes.D
        moved, dense = stats.prefill_elements(layout, D, share), stats.prefill_elements(layout, D)
        return out, Stats(moved, dense, share, self.recall(lse), density, layout.sampled_share)
