"""Check the arguments of a public function for any array library, select a backend and compute `Stats`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from ..checks import Shaped, Sizes, check_choice, check_decode_step, check_qkv, check_shape
from ..core import registry, stats
from ..core.blocks.layout import Layout
from ..core.decide import skips_keys
from ..core.stats import Stats
from ..methods.sparq.scoring_keys import KeyCodes, check_keys_t

INF = float("inf")
Array = TypeVar("Array", bound=Shaped)  # array type of the library


class Library(Protocol[Array]):
    """Operations of an array library that the public functions use.

    `MLX` and `NumPy` in this package and `mlx_sparse.cuda_ref.api.Torch` implement this protocol.

    Attributes:
        xp: module of the array library. Callers use only functions that have the same name in all libraries.
    """

    xp: ModuleType

    def check_array(
        self, name: str, array: Array, like: Array | None = None, *, integers: bool = False, same_type: bool = False
    ) -> None:
        """Raise an error if ``array`` has an unsupported type or dtype, or is not on the device of ``like``."""

    def resolve(self, backend: str, function: str, sizes: Sizes, *arrays: Array, bias: Array | None = None) -> str:
        """Return the backend that runs ``function`` on ``arrays``, with ``bias`` unless it is None.

        Raises:
            BackendUnavailable, ConfigError, ShapeError: the backend cannot run the function on ``arrays``.
        """

    def padding(self, left_padding: Array | None, sizes: Sizes, like: Array) -> Array | None:
        """Convert ``left_padding (B,)`` to an array clamped to 0..S; None stays None."""

    def ones(self, shape: tuple[int, ...], like: Array) -> Array:
        """Return a float32 array of ones in the given ``shape`` on the device of ``like``."""

    def visit(self, bucket_ids: Array, visited: Array) -> dict[str, object]:
        """Check bucket ids and visited buckets. Return a dict of arguments for a backend's `saap_attention`."""


class Call(Generic[Array]):
    """A call of a public function. The constructor checks the arrays and selects the backend."""

    def __init__(
        self,
        library: Library[Array],
        function: str,
        arrays: tuple[Array, Array, Array],
        scale: float | None = None,
        left_padding: Array | None = None,
        backend: str = "auto",
        return_stats: bool | str = False,
        bias: Array | None = None,
    ) -> None:
        self.library, self.function, self.bias = library, function, bias
        self.arrays = queries, keys, values = arrays
        for name, array in zip(("queries", "keys", "values"), self.arrays, strict=True):
            library.check_array(name, array)
        self.sizes = check_qkv(queries, keys, values)
        check_choice("return_stats", return_stats, (False, True, "recall"))
        self.left_padding: Any = library.padding(left_padding, self.sizes, queries)
        self.scale = float(self.sizes.D**-0.5 if scale is None else scale)
        if bias is not None:
            check_decode_step(self.sizes, "a bias")
            library.check_array("bias", bias, queries)
            check_shape("bias", bias, (self.sizes.B, self.sizes.Hq, 1, self.sizes.S))
        self.backend = library.resolve(backend, function, self.sizes, queries, keys, values, bias=bias)
        self.return_stats = return_stats

    def sparse(self, attended: int) -> bool:
        """Return True if the call is a decode step over more than ``attended`` keys. All other calls are dense.

        A call with a bias always runs the method, because the function for dense attention takes no bias.
        """
        return self.bias is not None or skips_keys(attended, self.sizes.L, self.sizes.S)

    @property
    def biased(self) -> dict[str, Array]:
        """Keyword argument ``bias`` of an implementation; empty without a bias."""
        return {} if self.bias is None else {"bias": self.bias}

    def check(self, name: str, array: Array | None, shape: tuple[int, ...], *, same_type: bool = False) -> None:
        """Check an array that may be None. If ``same_type`` is True, the array must have the dtype of the queries."""
        if array is not None:
            self.library.check_array(name, array, self.arrays[0], same_type=same_type)
            check_shape(name, array, shape)

    def check_keys_t(self, keys_t: Array | KeyCodes | None, key_bits: int) -> None:
        """Check that ``keys_t`` is an array in the queries' dtype, or `KeyCodes` if ``key_bits`` is below 16."""
        if isinstance(keys_t, KeyCodes):
            for name, array in zip(KeyCodes._fields, keys_t, strict=True):
                self.library.check_array(f"keys_t.{name}", array, self.arrays[0])
        elif keys_t is not None:
            self.library.check_array("keys_t", keys_t, self.arrays[0], same_type=True)
        check_keys_t(keys_t, self.sizes, key_bits)

    def load(self, function: str) -> Callable[..., Any]:
        """Return the implementation of ``function`` in the selected backend. It does not check its arguments.

        The first two results of most implementations are ``out`` and the float32 ``lse``.
        """
        return registry.load(function, self.backend)

    def run(self, **parameters: object) -> Any:
        """Run the function in the selected backend and return its results."""
        run = self.load(self.function)
        return run(*self.arrays, scale=self.scale, left_padding=self.left_padding, **self.biased, **parameters)

    def dense(self, layout: Layout | None = None) -> Any:
        """Run dense attention. If ``layout`` is set, `Stats` counts the elements per query head."""
        out = self.load("dense")(*self.arrays, scale=self.scale, left_padding=self.left_padding)
        if not self.return_stats:
            return out
        n = self.sizes
        moved = stats.dense_elements(n.S, n.D, n.Dv)
        recall = self.library.ones((n.B, n.Hq, n.L), out) if self.return_stats == "recall" else None
        record = Stats(moved, moved, 1.0, recall)
        return out, record if layout is None else stats.as_prefill(record, layout, n.D, n.Dv)

    def decode(self, count: Callable[..., int], attended: int, means: int = 0, **parameters: object) -> Any:
        """Run a sparse decode step, or dense attention if a sparse step would attend to every key.

        Args:
            count: function of S, D and ``top_k`` that returns the number of elements that the step moves per KV head.
            attended: number of keys that a sparse step attends to.
            means: how often the step reads or writes the mean value.
        """
        if not self.sparse(attended):
            return self.dense()
        out, lse, *estimate = self.run(**parameters)  # SparQ on MLX also estimates the attention recall
        if not self.return_stats:
            return out
        return out, self.record(lse, count, attended, min(attended, self.sizes.S) + 1 + means, *estimate)

    def record(
        self,
        lse: Array,
        count: Callable[..., int],
        top_k: int,
        value_rows: int,
        estimated_recall: Array | None = None,
    ) -> Stats:
        """Return the `Stats` of a decode step that attended to ``top_k`` keys and moved ``value_rows`` values."""
        n = self.sizes
        dense = moved = stats.dense_elements(n.S, n.D, n.Dv)
        if self.bias is None or top_k < n.S:
            moved = count(n.S, n.D, top_k=top_k) - value_rows * (n.D - n.Dv)  # (sparq.27)
        density = min(top_k, n.S) / n.S
        return Stats(moved, dense, density, self.recall(lse), estimated_recall=estimated_recall)

    def recall(self, lse: Array) -> Any:
        """Compute the attention recall from ``lse`` and a dense pass over the keys, or return None if not requested."""
        if self.return_stats != "recall":
            return None
        queries, keys, _ = self.arrays
        how = {"scale": self.scale, "left_padding": self.left_padding, **self.biased}
        dense = self.load("dense_lse")(queries, keys, **how)
        xp, empty = self.library.xp, dense == -INF
        # The recall of a row without valid keys is 1.
        return xp.where(empty, 1.0, xp.exp(lse - xp.where(empty, 0.0, dense)))

    def prefill(self, layout: Layout, **parameters: object) -> Any:
        """Run a prefill method. Return ``out``, and a `Stats` if ``return_stats`` is set."""
        rows = [array[:] for array in self.arrays]  # dequantizes a quantized KV cache
        out, lse, found, *estimate = self.load(self.function)(*rows, scale=self.scale, **parameters)
        if not self.return_stats:
            return out
        # (sample.9)
        density = stats.attended_pairs(found) / layout.causal_pairs
        share, D, Dv = float(density.mean()), self.sizes.D, self.sizes.Dv
        moved, dense = (stats.prefill_elements(layout, D, part, Dv) for part in (share, None))
        return out, Stats(moved, dense, share, self.recall(lse), density, layout.sampled_share, 0.0, *estimate)
