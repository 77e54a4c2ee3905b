"""Time attention on MLX: all decode and prefill methods on all backends, and two baselines.

The baselines are dense attention, and a read of all keys and values, which measures the memory traffic alone. A decode
step runs several layers with separate caches, as in a model. In a single layer, attention over few keys would take less
time on a GPU than the overhead of `mx.eval`. The KV cache of a single layer would stay in the last-level cache. A
prompt is processed in chunks, as in mlx-lm.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from ... import blas
from ...cache.kv_cache import SparseKVCache, adopt
from ...calibrate.timing import seconds_of
from ...checks import BackendUnavailable, ConfigError
from ...core import registry
from ...core.base import Method, Step
from ...core.packed_rows import BITS
from ...files import cache_directory
from ...methods.saap.lists import attended_keys, rebuild_lists
from ...methods.saap.state import BucketIndex, Router, index_of
from ..environment import machine, memory
from .core import Case, Request, Variant, check_memory
from .inputs import Index, Problem, Prompt, buckets_of, check_request, planted_problem, random_problem

Attend = Callable[[mx.array, SparseKVCache], mx.array]

LARGEST_SHARE = 0.6  # share of the machine's memory for one case
WORKING_SET = 256 << 20  # bytes of keys and values per step, larger than a last-level cache
MAX_LAYERS = 32
GROUP = 64  # group size of quantized KV caches, as in mlx-lm
REBUILDS = 3  # timed rebuilds of SAAP's lists

__all__ = ["check", "machine", "variants"]


def check(request: Request) -> None:
    """Check a request before anything runs."""
    blas.load(cache_directory())
    check_request(request, ("auto", *registry.BACKENDS), shared_only=False)
    for config, case, bits in product(request.methods, request.cases, request.kv_bits):
        if bits not in BITS or case.shape.D % GROUP or config.pre_rope:
            sizes = f"{', '.join(map(str, BITS))} with a head dim divisible by {GROUP} and a method except saap"
            raise ConfigError(f"--kv-bits: expected some of {sizes}, got {bits} for {case.shape} and {config.name}.")
    every = [found for case in request.cases for found in serving(request, case)]
    if all(why for _, _, why in every):
        config, name, why = every[0]
        raise BackendUnavailable(f"--backend: expected one that has {config.name} here, got {name} ({why}).")


def serving(request: Request, case: Case) -> Iterator[tuple[Method, str, str | None]]:
    """Yield each method with each backend, and either None or the reason why the backend cannot run the method."""
    D, G = case.shape.D, case.shape.G
    for config in request.methods:
        found: dict[str, str | None] = {}
        for given in request.backends:
            name = registry.resolve("auto", config.name, D=D, G=G) if given == "auto" else given
            found[name] = registry.refusal(name, config.name, registry.unsupported(name, config.name, D, G))
        yield from ((config, name, why) for name, why in found.items())


def variants(request: Request, case: Case) -> Iterator[Variant]:
    """Yield the variants to time on a case. They are dense attention, a read of all keys and values, each method."""
    B, S, shape = case.B, case.S, case.shape
    on_cpu = mx.default_device().type == mx.cpu
    if case.step is None:
        count = len(request.methods) * len(request.backends) * (1 + len(request.kv_bits))
        needed = 2 * case.keys * layers_of(case) * (1 + 0.5 * count)
    else:
        # On a CPU, dense attention stores all scores of a chunk. Generating the prompt takes temporary float32 arrays.
        scores = 4 * B * shape.Hq * case.step * S if on_cpu else 0
        needed = 1.2 * scores + 16 * B * S * shape.D * (shape.Hq + shape.Hkv)
    check_memory(needed, memory(), LARGEST_SHARE)
    kind: Any = MlxStep if case.step is None else MlxPrefill
    shared: Any = Layers(case) if case.step is None else Chunks(case)
    yield from (
        kind(case, shared, name=name, implementation=implementation)
        for name, implementation in dense_implementations().items()
    )
    yield kind(case, shared, name="read", implementation=read)
    for config, backend, why in serving(request, case):
        made = (SaapStep if config.pre_rope else kind)(case, shared, config, backend)
        made.row.note = made.row.note or (f"{backend}: {why}" if why else None)
        yield made
        for bits in () if why else request.kv_bits:
            reads = registry.unsupported(backend, config.name, shape.D, shape.G, bits) is None
            yield MlxStep(case, shared, config, backend if reads else "ops", bits)


def to_mlx(array: np.ndarray, dtype: str) -> mx.array:
    """Convert a NumPy array to an MLX array of type ``dtype``."""
    found: mx.array = mx.array(array).astype(getattr(mx, dtype))
    return found


def to_numpy(array: mx.array) -> np.ndarray:
    """Convert an MLX array to a float32 NumPy array."""
    return np.array(array.astype(mx.float32))


def cache_of(keys: mx.array, values: mx.array, length: int | None = None) -> SparseKVCache:
    """Return a cache with the first ``length`` rows of ``keys`` and ``values``. If ``length`` is None, use all rows."""
    cache = SparseKVCache()  # type: ignore[no-untyped-call]
    cache.keys, cache.values, cache.offset = keys, values, length or keys.shape[2]
    mx.eval(keys, values)
    return cache


# Dense attention


def dense_implementations() -> dict[str, Attend]:
    """Return a dict from the name of each implementation of dense attention on this machine to the implementation.

    The fastest implementation is the baseline.
    """
    implementations: dict[str, Attend] = {"mlx": fused}
    if registry.unavailable("cpu") is None:
        implementations["cpu"] = native
    return implementations


def fused(queries: mx.array, cache: SparseKVCache) -> mx.array:
    """Compute attention with MLX's fused kernel, as mlx-lm does."""
    keys, values, _ = cache.rows("ops")
    mask = "causal" if queries.shape[2] > 1 else None
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=queries.shape[-1] ** -0.5, mask=mask)


def native(queries: mx.array, cache: SparseKVCache) -> mx.array:
    """Compute attention with the native kernels, as an enabled model does."""
    keys, values, length = cache.rows("cpu")
    out: mx.array = registry.load("attend_all", "cpu")(
        queries, keys, values, scale=queries.shape[-1] ** -0.5, **length
    )[0]
    return out


def read(queries: mx.array, cache: SparseKVCache) -> mx.array:
    """Sum all cached keys and values as unsigned integers. The time of the sum is the time to read the cache once."""
    kind = mx.uint32 if cache.keys.shape[-1] * cache.keys.itemsize % 4 == 0 else mx.uint16
    keys, values = (array.view(kind)[:, :, : cache.length].sum() for array in (cache.keys, cache.values))
    return mx.add(keys, values)


# Decode steps


def layers_of(case: Case) -> int:
    """Return the number of layers in a timed decode step."""
    return max(1, min(MAX_LAYERS, WORKING_SET // (2 * case.keys)))


class Layers:
    """The query ``(B, Hq, 1, D)`` and the KV caches of all layers, generated on first use."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def _normal(self, heads: int, length: int) -> mx.array:
        sizes = self._case.B, heads, length, self._case.shape.D
        return mx.random.normal(sizes, dtype=getattr(mx, self._case.dtype))

    @cached_property
    def queries(self) -> mx.array:
        return self._normal(self._case.shape.Hq, 1)

    @cached_property
    def plain(self) -> list[SparseKVCache]:
        sizes = self._case.shape.Hkv, self._case.S
        return [cache_of(self._normal(*sizes), self._normal(*sizes)) for _ in range(layers_of(self._case))]


class MlxVariant(Variant):
    """A method on one backend. If ``config`` is None, a baseline: dense attention or a read of keys and values."""

    def __init__(
        self,
        case: Case,
        shared: Any,
        config: Any = None,
        backend: str = "",
        *,
        name: str = "",
        implementation: Attend | None = None,
    ) -> None:
        super().__init__(case, str(config or "dense"), backend, dense=name or None)
        self.role = "sparse" if config else "read" if implementation is read else "dense"
        self.shared, self.config, self.backend = shared, config, backend
        self.implementation: Attend = implementation or self.attend

    @abstractmethod
    def attend(self, queries: mx.array, cache: SparseKVCache) -> mx.array:
        """Compute attention with the method, as an enabled model does."""


class MlxStep(MlxVariant):
    """A decode step through all layers. If ``bits`` is not 0, the KV caches are quantized."""

    def __init__(
        self, case: Case, layers: Layers, config: Any = None, backend: str = "", bits: int = 0, **implementation: Any
    ) -> None:
        super().__init__(case, layers, config, backend, **implementation)
        self.bits = bits
        self.row.details["layers"] = layers_of(case)
        if config is not None:
            self.row.details |= {"bytes_formula": self.bytes(), "bytes_plain": 2 * case.keys}
            self.row.details |= {"kv_bits": bits} if bits else {}
            self.row.note = f"dense: all of {case.S:,} keys are attended" if config.attended >= case.S else None

    def prepare(self) -> None:
        plain = self.shared.plain
        self.caches = [self.cache(cache.keys, cache.values) for cache in plain] if self.config else plain

    def check(self) -> str | None:
        if self.role == "read":
            return None
        problem = self.problem()
        queries, *rows = (self.batch(array) for array in (problem.queries, problem.keys, problem.values))
        out = to_numpy(self.implementation(queries, self.cache(*rows)))
        if self.bits:  # the expected result uses the dequantized rows
            packed = (mx.quantize(array, group_size=GROUP, bits=self.bits) for array in rows)
            keys, values = (to_numpy(mx.dequantize(*one, group_size=GROUP, bits=self.bits))[:1] for one in packed)
            problem = replace(problem, keys=keys, values=values)
        return problem.wrong(out)

    def problem(self) -> Problem:
        return (
            random_problem(self.case)
            if self.config is None
            else planted_problem(self.case, self.config.at(self.case.S))
        )

    def batch(self, array: np.ndarray) -> mx.array:
        """Convert an array of a problem to MLX, and repeat it for each sequence of the batch."""
        return mx.contiguous(mx.repeat(to_mlx(array, self.case.dtype), self.case.B, axis=0))

    def cache(self, keys: mx.array, values: mx.array) -> SparseKVCache:
        """Return a cache with ``keys`` and ``values``. If ``bits`` is not 0, the cache is quantized."""
        if not self.bits:
            return cache_of(keys, values)
        cache: SparseKVCache = cache_of(keys, values).to_quantized(group_size=GROUP, bits=self.bits)
        adopt(cache)
        mx.eval(cache.keys, cache.values)
        return cache

    def run(self, turn: int) -> float:
        """Run all layers. The output of a layer is the query of the next layer."""

        def step() -> list[mx.array]:
            found = [self.shared.queries]
            for cache in self.caches:
                found.append(self.implementation(found[0] if self.role == "read" else found[-1], cache))
            return found

        return seconds_of(step)

    def attend(self, queries: mx.array, cache: SparseKVCache) -> mx.array:
        return cache.attend(queries, self.config, scale=self.case.shape.D**-0.5, backend=self.backend)[0]

    def bytes(self) -> int:
        """Return the modeled number of bytes that a decode step moves in one layer."""
        case, D = self.case, self.case.shape.D
        row = Step(case.rows, case.shape.G, D, case.item, packed=(self.bits, GROUP) if self.bits else None).row_bytes
        sizes: dict[str, Any] = {"itemsize": case.item, "row_bytes": row, "G": case.shape.G, "backend": self.backend}
        return int(case.rows * self.config.step_bytes(case.S, D, **sizes))


class SaapStep(MlxStep):
    """A SAAP decode step with random router weights. Each layer selects buckets and attends to the keys in them.

    The router is a network with 2 D hidden units, the default of `mlx-sparse train-saap`. In online mode, the
    router uses centroids instead. ``upkeep`` is the time to rebuild the bucket lists, divided by the number of steps
    between two rebuilds.
    """

    def __init__(self, case: Case, layers: Layers, config: Any, backend: str) -> None:
        self.index = Index.of(case, config, 0 if config.mode == "online" else 2 * case.shape.D)
        self.known = self.index.problem(case, config, config.merge_every)
        super().__init__(case, layers, config, backend)

    def problem(self) -> Problem:
        return self.known

    def prepare(self) -> None:
        super().prepare()
        rebuild = partial(rebuild_lists, list(self.caches), self.case.S, self.config)
        self.upkeep = median(seconds_of(rebuild) for _ in range(REBUILDS)) / self.config.merge_every

    def cache(self, keys: mx.array, values: mx.array) -> SparseKVCache:
        case, C = self.case, buckets_of(self.config)
        weights = {name: mx.array(array) for name, array in self.index.network.items() if array.size}
        centroids = mx.random.normal((case.shape.Hkv, C, case.shape.D), dtype=keys.dtype)
        nothing: Any = None  # no source of pre-RoPE keys, because all keys have buckets
        index = BucketIndex(Router(nothing, case.shape.D**-0.5, C, centroids, weights))
        index.ids = mx.array(np.broadcast_to(self.index.bucket_ids, (case.B, *self.index.bucket_ids.shape)))
        cache = cache_of(keys, values)
        cache.add_state(self.config.name, index)
        rebuild_lists([cache], case.S, self.config)
        return cache

    def attend(self, queries: mx.array, cache: SparseKVCache) -> mx.array:
        """Compute attention as an enabled model does between two rebuilds of the bucket lists."""
        index = index_of(cache)
        assert index is not None
        indices, counts = attended_keys(index, queries, cache.length, self.config, None, self.backend)
        keys, values, length = cache.rows(self.backend)
        run = registry.load("attend_indices", self.backend)
        scale = self.case.shape.D**-0.5
        out: mx.array = run(queries, keys, values, indices, scale=scale, counts=counts, **length)[0]
        return out

    def bytes(self) -> int:
        return self.index.bytes(self.known, self.case)


# Prefill


class Chunks(Prompt):
    """The chunks of a prompt as MLX arrays."""

    @cached_property
    def all(self) -> list[tuple[mx.array, SparseKVCache]]:
        """List with one pair per chunk: the queries of the batch, and a cache with all keys up to the chunk's end."""
        repeated = [
            mx.repeat(to_mlx(array, self.case.dtype), self.case.B, axis=0)
            for array in (self.queries, self.keys, self.values)
        ]
        queries, keys, values = map(mx.contiguous, repeated)
        return [(queries[:, :, start:stop], cache_of(keys, values, stop)) for start, stop in self.chunks]


class MlxPrefill(MlxVariant):
    """The attention calls of one layer in a prefill, one call per chunk."""

    def prepare(self) -> None:
        self.row.details["density"] = self.shared.density(self.config) if self.config else None

    def check(self) -> str | None:
        last = self.shared.all[-1]
        return None if self.role == "read" else self.shared.wrong(to_numpy(self.implementation(*last)), self.config)

    def run(self, turn: int) -> float:
        return sum(seconds_of(partial(self.implementation, *chunk)) for chunk in self.shared.all)

    def attend(self, queries: mx.array, cache: SparseKVCache) -> mx.array:
        config = self.config.at(cache.length)
        return cache.attend_prefill(queries, config, scale=self.case.shape.D**-0.5, backend=self.backend)[0]
