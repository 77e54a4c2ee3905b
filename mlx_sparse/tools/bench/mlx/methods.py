"""A decode step of each method, as an enabled model takes it, and what its result has to be."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ....cache.h2o_state import Received, Scores
from ....cache.kv_cache import SparseKVCache
from ....checks import check_local_window
from ....methods import H2O, FlexGen, Method, OracleTopK, SparQ, Step, Streaming, registry
from ..core import Shape
from .dense import cache_of, double, fused, plain, wrong

Rows = npt.NDArray[np.int64]
# A step whose answer is known: queries, a cache, and by sequence and KV head the rows that are attended.
Known = tuple[mx.array, SparseKVCache, list[list[Rows]]]

# Planted keys stand out by so many logits: enough to be told by a few components, and so few that the other keys have a
# share of dense attention that shows; but nearly none where a method counts that share.
GAP, SURE = 3.0, 60.0
NOISE = 1 / 32  # of the components of keys: less than what the fewest components tell


class DecodeStep:
    """A step of a method that chooses keys by their scores.

    Attributes:
        backend: one that can run it.
    """

    def __init__(self, config: Method, backend: str, shape: Shape) -> None:
        self.config, self.backend, self.shape = config, backend, shape

    @property
    def label(self) -> str:
        """Which of a table's rows are its own."""
        return str(self.config)

    def cache(self, keys: mx.array, values: mx.array) -> SparseKVCache:
        """A cache over these rows with what the method keeps beside them, unless its first step makes that."""
        return cache_of(keys, values)

    def attend(self, queries: mx.array, cache: SparseKVCache) -> mx.array:
        """The step."""
        scale = queries.shape[-1] ** -0.5
        return cache.attend(queries, self.config, scale=scale, backend=self.backend)[0]

    def beside(self, cache: SparseKVCache) -> list[mx.array]:
        """What a step computes besides its result."""
        return []

    def upkeep(self, caches: Sequence[SparseKVCache]) -> float:
        """Seconds per step of what steps leave for once in a while."""
        return 0.0

    def bytes(self, B: int, S: int, item: int) -> int:
        """Bytes that a step moves, by the method's formula."""
        return B * self.shape.Hkv * self.config.elements(S, self.shape.D) * item

    def sizes(self, B: int, item: int) -> Step:
        """What tells from what context on the method pays."""
        gpu = registry.gpu_kind() if self.backend == "metal" else ""
        return Step(B * self.shape.Hkv, self.shape.G, self.shape.D, item, gpu)

    def known(self, B: int, S: int, dtype: mx.Dtype) -> Known:
        """As many planted keys as the method can choose, each of some weight, and the keys of its window."""
        shape, top_k = self.shape, self.config.attended
        window, gap = 0, SURE if self._counts_the_rest else GAP
        if isinstance(self.config, (SparQ, OracleTopK)):
            window = check_local_window(self.config.local_window, top_k)
        base = mx.random.normal((B, shape.Hkv, 1, shape.D))
        noise = mx.random.normal((B, shape.Hkv, shape.G, shape.D))
        queries = (base + 0.5 * noise).reshape(B, shape.Hq, 1, shape.D).astype(dtype)
        keys, values = (normal(B, shape.Hkv, S, shape.D, dtype) for _ in "kv")
        unit = np.arange(S) // self.config.together
        last = unit >= (unit[S - window] if window else unit[-1] + (self.config.together == 1))
        count = top_k // self.config.together - np.unique(unit[last]).size
        chosen = np.isin(unit, [i * np.unique(unit[~last]).size // count for i in range(count)])
        rows = np.flatnonzero(chosen | last)
        planted = (chosen | (np.arange(S) == rows[-1]))[:, None]
        direction = base * (gap * shape.D**0.5 / (base**2).sum(axis=-1, keepdims=True))
        keys = NOISE * keys + mx.where(mx.array(planted), direction.astype(dtype), 0)
        return queries, self.cache(keys, values), [[rows] * shape.Hkv] * B

    @property
    def _counts_the_rest(self) -> bool:
        """Whether the result depends on the attention that is left for keys that are not chosen."""
        if isinstance(self.config, SparQ):
            return self.config.reallocates(self.shape.G)
        return isinstance(self.config, FlexGen)

    def _random(self, B: int, S: int, dtype: mx.Dtype) -> tuple[mx.array, SparseKVCache]:
        shape = self.shape
        rows = (normal(B, shape.Hkv, S, shape.D, dtype) for _ in "kv")
        return normal(B, shape.Hq, 1, shape.D, dtype), self.cache(*rows)


class StreamingStep(DecodeStep):
    """The first keys and the last."""

    config: Streaming

    def known(self, B: int, S: int, dtype: mx.Dtype) -> Known:
        position = np.arange(S)
        rows = position[(position < self.config.sink_tokens) | (position >= S - self.config.recent_tokens)]
        return *self._random(B, S, dtype), [[rows] * self.shape.Hkv] * B


class H2OStep(DecodeStep):
    """The last keys and those that have received the most attention, here as if at random."""

    config: H2O

    def cache(self, keys: mx.array, values: mx.array) -> SparseKVCache:
        cache = cache_of(keys, values)
        B, Hkv, S, _ = keys.shape
        # All different, so that there are no ties.
        received = np.random.default_rng(0).permuted(np.tile(np.arange(S - 1, dtype=np.float32), (B, Hkv, 1)), axis=2)
        cache.hold(self.config.name, Received([Scores(S - 1, mx.array(received))]))
        return cache

    def attend(self, queries: mx.array, cache: SparseKVCache) -> mx.array:
        self._received(cache).rewind(cache.length - 1)  # the state before this step: the same step again
        return super().attend(queries, cache)

    def beside(self, cache: SparseKVCache) -> list[mx.array]:
        return [self._received(cache).states[-1].scores]

    def known(self, B: int, S: int, dtype: mx.Dtype) -> Known:
        queries, cache = self._random(B, S, dtype)
        window = self.config.parameters()["local_window"]
        older = np.array(self._received(cache).states[-1].scores)[..., : S - window]
        heavy = np.argsort(-older, axis=-1)[..., : self.config.top_k - window]
        last = np.arange(S - window, S)
        return queries, cache, [[np.concatenate([np.sort(own), last]) for own in some] for some in heavy]

    def _received(self, cache: SparseKVCache) -> Received:
        received = cache.state_of(self.config.name)
        assert isinstance(received, Received)
        return received


def wrong_result(step: DecodeStep, B: int, S: int, dtype: mx.Dtype) -> str | None:
    """What is wrong with a method's result; None if nothing is.

    Where it is known which rows it attends, it may be off from float64 attention over these rows by twice as much as
    MLX's own attention over them, and one unit in the last place.
    """
    try:
        queries, cache, rows = step.known(B, S, dtype)
    except WrongChoice as error:
        return f"wrong result: {error}"
    out = double(step.attend(queries, cache)).reshape(B, step.shape.Hkv, step.shape.G, -1)
    expected, dense = np.empty_like(out), np.empty_like(out)
    grouped = queries.reshape(B, step.shape.Hkv, step.shape.G, -1)
    for b, h in np.ndindex(out.shape[:2]):
        chosen = mx.array(rows[b][h])
        q = grouped[b, h][None, :, None]
        keys, values = (array[b, h][chosen][None, None] for array in (cache.keys, cache.values))
        expected[b, h] = plain(double(q)[0, :, 0], double(keys)[0, 0], double(values)[0, 0])
        dense[b, h] = double(fused(q, keys, values))[0, :, 0]
    return wrong(out, expected, float(np.abs(dense - expected).max()), dtype)


class WrongChoice(Exception):
    """A method has chosen what it should not."""


def normal(B: int, heads: int, length: int, D: int, dtype: mx.Dtype) -> mx.array:
    """Random rows ``(B, heads, length, D)``."""
    return mx.random.normal((B, heads, length, D), dtype=dtype)
