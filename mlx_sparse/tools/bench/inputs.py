"""Generate the NumPy inputs of a benchmark case and the expected result in float64. All runtimes use this module.

The inputs have one sequence. If the batch is larger, each variant repeats the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from ... import oracle
from ...checks import ConfigError, check_choice, check_int
from ...core.base import Method, Prefill
from ...core.blocks.layout import Layout
from ...core.stats import saap_elements
from ...methods import SAAP
from ...methods.patterns.block_patterns import bigbird_pattern, streaming_pattern
from .core import Case, Request

Array = np.ndarray

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
DISTINCT = 4096  # distinct random keys; longer contexts repeat them
NOISE = 1 / 32  # scale of the keys that are not planted; small enough that a few components rank them lower
# Difference in logits between planted and other keys. With GAP, a few components find the planted keys, and the other
# keys have a measurable softmax mass. LARGE_GAP, for methods that estimate this mass, makes the mass nearly 0.
GAP, LARGE_GAP = 3.0, 60.0
SHARED_METHODS = ("sparq", "saap", "sample")  # methods on ONNX Runtime and CUDA
BUCKETS = 1024  # default number of buckets of SAAP's index
LOAD_FACTOR = 2  # average size of a visited bucket, divided by the average size of all buckets
VISIT_LOGIT = 100.0  # bias of the visited buckets, large enough to determine the routing
PEAK = 14.0  # logit of the important keys of a prompt
PATTERNS: dict[str, Callable[..., np.ndarray]] = {"bigbird": bigbird_pattern, "streaming_prefill": streaming_pattern}
CHECKED = 8  # queries of a prompt that are compared with float64
# Rounding a float32 sum may change which blocks are selected. At most SHARE_DIFFERENT of the checked rows may therefore
# differ, with a relative error of at most MAX_DIFFERENCE.
SHARE_DIFFERENT, MAX_DIFFERENCE = 1 / 16, 0.1


def rounded(array: Array, dtype: str) -> Array:
    """Round a float32 array to ``dtype`` if ``dtype`` is float16 or bfloat16. Otherwise, return the array itself."""
    if dtype == "float16":
        return array.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    return array


def attention(queries: Array, keys: Array, values: Array, dtype: str = "", mask: Array | None = None) -> Array:
    """Compute the attention of ``queries (n, D)`` to ``keys (N, D)`` where ``mask (n, N)`` is True.

    If ``dtype`` is empty, compute in float64. Otherwise, compute in float32, and round scores, weights and the result
    to ``dtype``.
    """
    q, k, v = (array if dtype else array.astype(np.float64) for array in (queries, keys, values))
    scores = rounded(q @ k.swapaxes(-1, -2) * np.asarray(k.shape[-1] ** -0.5, k.dtype), dtype)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf).astype(k.dtype)
    weights = rounded(np.exp(scores - scores.max(axis=-1, keepdims=True)), dtype)
    return rounded(weights @ v / weights.sum(axis=-1, keepdims=True), dtype)


def allowed_error(exact: Array, plain: Array, values: Array, dtype: str) -> float:
    """Return the largest error that is allowed in an attention output of type ``dtype``.

    ``exact`` is the output in float64, and ``plain`` is the output in ``dtype``. The allowed error is twice the error
    of ``plain``, plus rounding errors of ``dtype`` and of float32 sums.
    """
    units = EPSILON[dtype] * float(np.abs(exact).max()) + 8 * EPSILON["float32"] * float(np.abs(values).max())
    return 2 * float(np.abs(plain - exact).max()) + units


def wrong(error: float, allowed: float) -> str | None:
    """Return a message if ``error`` is NaN or larger than ``allowed``, else None."""
    return None if error <= allowed else f"wrong result: error {error:.1e}, allowed {allowed:.1e}"


@dataclass(frozen=True)
class Problem:
    """Inputs for a decode step, and the keys that the step must attend to. All numbers are rounded to ``dtype``.

    Attributes:
        queries: float32 ``(1, Hq, 1, D)``.
        keys, values: float32 ``(1, Hkv, S, D)``.
        selected: indices of the attended keys for each KV head; None for all keys.
    """

    dtype: str
    queries: Array
    keys: Array
    values: Array
    selected: list[Array] | None = None

    @cached_property
    def expected(self) -> tuple[Array, float]:
        """Attention output ``(1, Hq, 1, D)`` in float64, and the largest allowed error."""
        grouped = self.queries.reshape(self.keys.shape[1], -1, self.keys.shape[3])
        exact, plain = [], []
        for h, q in enumerate(grouped):
            chosen = slice(None) if self.selected is None else self.selected[h]
            k, v = self.keys[0, h, chosen], self.values[0, h, chosen]
            exact.append(attention(q, k, v))
            plain.append(attention(q, k, v, self.dtype))
        both = [np.stack(some).reshape(self.queries.shape) for some in (exact, plain)]
        return both[0], allowed_error(both[0], both[1], self.values, self.dtype)

    def wrong(self, out: Array) -> str | None:
        """Return a message if the output ``out (B, Hq, 1, D)`` is wrong, else None."""
        exact, allowed = self.expected
        return wrong(float(np.abs(out.astype(np.float64) - exact).max()), allowed)


def normal(case: Case, heads: int, length: int, seed: int = 0) -> Array:
    """Draw standard normal numbers ``(1, heads, length, D)``. The first `DISTINCT` rows repeat along the length."""
    drawn = np.random.default_rng(seed).standard_normal((1, heads, min(length, DISTINCT), case.shape.D), np.float32)
    return np.take(drawn, np.arange(length) % DISTINCT, axis=2)


def random_problem(case: Case) -> Problem:
    """Generate a random problem for dense attention."""
    shape = case.shape
    keys, values = (normal(case, shape.Hkv, case.S, seed=seed) for seed in (1, 2))
    q, k, v = (rounded(array, case.dtype) for array in (normal(case, shape.Hq, 1), keys, values))
    return Problem(case.dtype, q, k, v)


def planted_problem(case: Case, config: Method) -> Problem:
    """Generate a problem with large logits for the keys that ``config`` must select, and small logits for the rest."""
    S, Hkv, D = case.S, case.shape.Hkv, case.shape.D
    base = normal(case, Hkv, 1, seed=3)
    queries = base + 0.5 * normal(case, case.shape.Hq, 1).reshape(1, Hkv, -1, D)
    position, together = np.arange(S), config.unit
    first, last = config.always_attended
    unit = position // together
    always = (position < first) | (unit >= (unit[S - last] if last else unit[-1] + (together == 1)))
    count = config.attended // together - np.unique(unit[always]).size
    selected = np.isin(unit, [i * np.unique(unit[~always]).size // count for i in range(count)])
    rows = np.flatnonzero(selected | always)
    gap = GAP if config.supports_sinks(case.shape.G) else LARGE_GAP
    keys = NOISE * normal(case, Hkv, S, seed=1)
    planted = selected | (position == rows[-1])
    keys[:, :, planted] += base * (gap * D**0.5 / (base**2).sum(axis=-1, keepdims=True))
    arrays = queries.reshape(1, case.shape.Hq, 1, D), keys, normal(case, Hkv, S, seed=2)
    q, k, v = (rounded(array, case.dtype) for array in arrays)
    return Problem(case.dtype, q, k, v, [rows] * Hkv)


@dataclass(frozen=True)
class Index:
    """SAAP's index over the keys of a problem, and a router whose biases determine the visited buckets.

    Attributes:
        visited: ids of the buckets that the router selects, in ascending order, int64 ``(Hkv, probes)``.
        bucket_ids: bucket of each key, int16 ``(Hkv, S)``.
        network: the router's float16 weights: ``hidden_weight (Hkv, D, H)``, ``hidden_bias``,
            ``out_weight (Hkv, H, C)`` and ``out_bias``. If H is 0, there is no hidden layer, and the output layer
            reads the query.
    """

    visited: Array
    bucket_ids: Array
    network: Mapping[str, Array]

    @classmethod
    def of(cls, case: Case, config: SAAP, hidden: int) -> Index:
        """Generate an index whose visited buckets have `LOAD_FACTOR` times as many keys as the average bucket.

        The router has ``hidden`` hidden units.
        """
        C, (Hkv, D), rng = buckets_of(config), (case.shape.Hkv, case.shape.D), np.random.default_rng(4)
        visited = np.stack([np.sort(rng.permutation(C)[: config.probes]) for _ in range(Hkv)])
        every, key = max(C // (LOAD_FACTOR * config.probes), 2), np.arange(case.S)
        ids = np.empty((Hkv, case.S), np.int16)
        for row, own in zip(ids, visited, strict=True):
            others = np.setdiff1d(np.arange(C), own)
            row[:] = np.where(key % every == 1, own[key // every % len(own)], others[key % len(others)])
        shapes = {"hidden_weight": (D, hidden), "hidden_bias": (hidden,), "out_weight": (hidden or D, C)}
        network = {
            name: (max(shape[0], 1) ** -0.5 * rng.standard_normal((Hkv, *shape), np.float32)).astype(np.float16)
            for name, shape in shapes.items()
        }
        network["out_bias"] = np.zeros((Hkv, C), np.float16)
        np.put_along_axis(network["out_bias"], visited, np.float16(VISIT_LOGIT), axis=1)
        return cls(visited, ids, network)

    def problem(self, case: Case, config: SAAP, merge_every: int = 1) -> Problem:
        """Generate a problem whose query attends to sinks, to keys in visited buckets and to the most recent keys.

        The most recent keys are not yet in the bucket lists. The lists cover a multiple of ``merge_every`` keys.
        """
        key = np.arange(case.S)
        covered = (case.S - config.recent_tokens) // merge_every * merge_every
        exact = (key < config.sink_tokens) | (key >= covered)
        pairs = zip(self.bucket_ids, self.visited, strict=True)
        random = random_problem(case)
        selected = [np.flatnonzero(exact | np.isin(ids, seen)) for ids, seen in pairs]
        return Problem(case.dtype, random.queries, random.keys, random.values, selected)

    def bytes(self, problem: Problem, case: Case) -> int:
        """Return how many bytes of the router network and of the attended keys and values a decode step moves."""
        assert problem.selected is not None
        attended = sum(map(len, problem.selected)) // case.shape.Hkv
        network = sum(array.nbytes for array in self.network.values())
        return case.rows * saap_elements(case.shape.D, attended) * case.item + case.B * network


def buckets_of(config: Any) -> int:
    """Return the number of buckets in SAAP's index. In online mode, ``config`` sets the number instead of `BUCKETS`."""
    return config.fitted_buckets if config.mode == "online" else BUCKETS


def check_request(request: Request, backends: tuple[str, ...], shared_only: bool = True) -> None:
    """Check the backends, methods and shapes of a request.

    Args:
        shared_only: True if only the methods in `SHARED_METHODS` are available.
    """
    for name in request.backends:
        check_choice("--backend", name, backends)
    for config, shape in product(request.methods, {case.shape for case in request.cases}):
        if shared_only and (config.name not in SHARED_METHODS or getattr(config, "mode", "") == "online"):
            raise ConfigError(
                f"--attn: expected {', '.join(SHARED_METHODS)} without mode=online with this --runtime, got {config}."
            )
        if config.observes_prefill or (request.stage == "prefill" and getattr(config, "block_size", 1) == 1):
            raise ConfigError(f"--attn: expected a method that selects keys or blocks by scores, got {config.name}.")
        config.check_head_dim(shape.D)
        if config.pre_rope:
            check_int("probes", config.parameters()["probes"], 1, buckets_of(config) - 1)


def prompt(case: Case) -> tuple[Array, Array, Array]:
    """Generate a prompt whose heads attend to the first keys, to a few random keys, and to keys at a fixed distance.

    One half of the head dim encodes the position as sines and cosines. Each query head shifts the position by a
    distance, so that its logits peak at that distance. In the other half of the head dim, all queries of a head share
    one direction. The first keys and a few random keys are large along that direction.

    Returns:
        Queries ``(1, Hq, S, D)``, keys and values ``(1, Hkv, S, D)``. All are float32, rounded to ``case.dtype``.
    """
    (Hq, Hkv, D), S = (case.shape.Hq, case.shape.Hkv, case.shape.D), case.S
    rng = np.random.default_rng(0)
    waves = max(D // 4, 1)
    frequency = np.geomspace(1.0, 0.01, waves)
    distance = np.where(np.arange(Hq) % 2, rng.integers(0, max(S // 2, 1), Hq), 0)[:, None]
    share = rng.uniform(0.3, 1.0, (2, Hq, 1, 1)).astype(np.float32)
    queries = rng.standard_normal((1, Hq, S, D), np.float32)
    keys, values = rng.standard_normal((2, 1, Hkv, S, D), np.float32)

    def wave(position: Array) -> Array:
        angle = position[..., None] * frequency
        return np.concatenate([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)

    keys[..., : 2 * waves] = wave(np.arange(S))
    queries[..., : 2 * waves] = share[0] * wave(np.arange(S) - distance) * (PEAK * D**0.5 / waves)
    direction = rng.standard_normal((Hkv, 1, D - 2 * waves), np.float32)
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    found = (rng.random((Hkv, S, 1)) < 4 / S) | (np.arange(S) < 4)[:, None]
    strength = PEAK**0.5 * D**0.25
    keys[..., 2 * waves :] += found * direction * strength
    queries[..., 2 * waves :] += share[1] * np.repeat(direction, Hq // Hkv, axis=0) * strength
    return rounded(queries, case.dtype), rounded(keys, case.dtype), rounded(values, case.dtype)


class Prompt:
    """Inputs for a prefill in chunks of ``case.step`` tokens. Only the output of the last chunk is checked."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.queries, self.keys, self.values = prompt(case)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Range ``(start, stop)`` of the token positions in each chunk."""
        step = self.case.step or self.case.S
        return [(start, min(start + step, self.case.S)) for start in range(0, self.case.S, step)]

    def density(self, config: Prefill) -> float:
        """Return the share of the causal block pairs that the reference `oracle` selects in all chunks and heads."""
        attended = causal = 0
        for start, stop in self.chunks:
            for mask, layout in self._masks(config.at(stop), start, stop):
                attended += int(mask.sum())
                causal += layout.causal_pairs * len(mask)
        return attended / causal

    def _masks(self, config: Prefill, start: int, stop: int) -> Iterator[tuple[Array, Layout]]:
        """Yield the oracle's block mask ``(G, row blocks, key blocks)`` and the block layout for each KV head."""
        layout, G, settings = config.layout(stop - start, stop), self.case.shape.G, config.parameters()
        if config.name in PATTERNS:  # the same blocks for every head
            del settings["block_size"]
            pattern = PATTERNS[config.name](layout, **settings)
            yield from [(np.broadcast_to(pattern, (G, *pattern.shape)), layout)] * self.case.shape.Hkv
            return
        select = getattr(oracle, f"{config.name}_select")
        for h in range(self.case.shape.Hkv):
            queries = self.queries[:, h * G : (h + 1) * G, start:stop].astype(np.float64)
            keys = self.keys[:, h : h + 1, :stop].astype(np.float64)
            listed = select(queries, keys, **settings, scale=keys.shape[3] ** -0.5)[0]
            mask = np.zeros((*listed.shape[:2], layout.key_blocks + 1), bool)
            np.put_along_axis(mask, np.where(listed < 0, layout.key_blocks, listed), True, axis=2)
            yield mask[..., :-1], layout

    def wrong(self, out: Array, config: Prefill | None = None) -> str | None:
        """Return a message if the output ``out (B, Hq, L, D)`` of the last chunk is wrong, else None.

        For `CHECKED` queries of each head, compare with float64 attention to the blocks that the reference `oracle`
        selects. If ``config`` is None, compare with attention to all blocks.
        """
        start, S = self.chunks[-1]
        row = np.unique(np.linspace(start, S - 1, CHECKED).astype(int))
        key, G, D = np.arange(S), self.case.shape.G, self.case.shape.D
        masks = iter(()) if config is None else self._masks(config.at(S), start, S)
        errors, allowed, largest = [], 0.0, 0.0
        for h in range(self.case.shape.Hkv):
            heads = slice(h * G, (h + 1) * G)
            mask = np.broadcast_to(key <= row[:, None], (G, len(row), S))
            if config is not None:
                blocks, layout = next(masks)
                size = config.block_size
                listed = blocks[:, row // size - layout.first_block]
                mask = mask & np.take(listed, key // size, axis=-1)
            q, k, v = self.queries[0][heads][:, row], self.keys[0, h], self.values[0, h]
            exact, plain = (attention(q, k, v, dtype, mask) for dtype in ("", self.case.dtype))
            allowed = max(allowed, allowed_error(exact, plain, self.values, self.case.dtype))
            largest = max(largest, float(np.abs(exact).max()))
            errors.append(
                np.abs(out[:, heads][:, :, row - start].astype(np.float64) - exact).reshape(-1, D).max(axis=1)
            )
        error = np.concatenate(errors)
        off = float((~(error <= allowed)).mean())
        if config is None or off > SHARE_DIFFERENT:
            return wrong(float(error.max()), allowed)
        return wrong(float(error.max()), max(allowed, MAX_DIFFERENCE * largest))
