"""Compare the selection and the output of one attention call of a model with the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import reference
from cases import Array, assert_same_selection, plain_attention, plain_reallocation, plain_scores, row_sum, ulp
from sample_cases import SampleCase, attended, kept_bounds, logit_error, plain_masked_attention

from mlx_sparse import oracle
from mlx_sparse.core.base import Method, Prefill
from mlx_sparse.core.blocks.layout import MINFERENCE_ROWS
from mlx_sparse.methods import H2O, SAAP, FlexGen, MInference, OracleTopK, Sample, SparQ, Streaming
from mlx_sparse.methods.sparq.oracle import masked_mean

# Number of random summation orders that estimate the error of a plain float32 computation.
ORDERS = 16


@dataclass
class RecordedCall:
    """One attention call of a layer: inputs, selection and output.

    Attributes:
        layer: index of the layer's cache.
        config: the attention method; None if the model is not enabled.
        arrays: queries, keys and values.
        padding: index ``(B,)`` of each sequence's first valid key; None if there is no padding.
        scale: factor by which the logits are multiplied.
        sinks: logits of the attention sinks; None if the layer has no attention sinks.
        out: the output; None if the call was dense.
        chosen: the recorded selection; its format depends on the method.
        short: indices of sequences that were computed densely because they are short.
        parts: one call per sequence if the sequences were computed separately. Otherwise, the only part is this call.
        cache: the layer's KV cache.
        allowed: largest error of ``out`` that `check` allows.
        ties: number of selections in this call that rounding errors may change.
        unchecked: number of selections in this call that cannot be compared with the oracle.
    """

    layer: int
    config: Method | None
    arrays: tuple[Any, ...]
    padding: Any
    scale: float
    sinks: Any
    out: Any
    chosen: list[Any] = field(default_factory=list)
    short: list[int] = field(default_factory=list)
    parts: list[RecordedCall] = field(default_factory=list)
    cache: Any = None
    allowed: float = 0.0
    ties: int = 0
    unchecked: int = 0

    @classmethod
    def of(
        cls, layer: int, config: Any, arrays: tuple[Any, ...], cache: Any, scale: float, sinks: Any, out: Any
    ) -> RecordedCall:
        """Record a call over ``cache``. Copy the arrays, because the cache overwrites its buffers."""
        padding = getattr(cache, "left_padding", None)
        padding = None if padding is None else mx.array(padding)
        copies = tuple(mx.array(array) for array in arrays)
        return cls(layer, config, copies, padding, scale, sinks, out, cache=cache)

    def settle(self) -> None:
        """Convert the recorded arrays to NumPy."""
        if isinstance(self.arrays[0], np.ndarray):
            return
        self.arrays = tuple(np.array(array.astype(mx.float32)) for array in self.arrays)
        self.padding = None if self.padding is None else np.array(self.padding)
        self.sinks = None if self.sinks is None else np.array(self.sinks.astype(mx.float32))
        self.out = None if self.out is None else np.array(self.out.astype(mx.float32))

    @property
    def method(self) -> str:
        """Name of the attention method. For SAAP, the name includes the mode; for a dense call it is empty."""
        name = "" if self.config is None else self.config.name
        return f"{name}:mode={self.config.mode}" if isinstance(self.config, SAAP) else name

    @property
    def valid(self) -> Array:
        """Bool mask ``(B, S)`` of the valid keys."""
        B, _, S, _ = self.arrays[1].shape
        return oracle.valid_keys(B, S, self.padding)

    @property
    def sizes(self) -> dict[str, Any]:
        return {"scale": self.scale, "left_padding": self.padding}

    def check(self, received: Array) -> None:
        """Compare a sparse call with the oracle.

        For H2O, ``received (B, Hkv, S)`` is the attention that each key has received before the call.

        Raises:
            AssertionError: the selected keys are not the oracle's, or the error of ``out`` is too large.
        """
        (self._check_prompt if isinstance(self.config, Prefill) else self._check_step)(received)

    def _check_step(self, received: Array) -> None:
        queries, keys, values = self.arrays
        indices, alpha = self._check_selection(received)
        if not self.chosen and self.ties:
            self.unchecked, self.allowed = 1, np.inf  # native kernels may have selected other keys
            return
        expected, lse = oracle.attend.attend_indices(queries, keys, values, indices, scale=self.scale)
        if isinstance(self.config, FlexGen):
            values = np.where(oracle.baselines.listed(indices, keys.shape[2])[..., None], values, 0)
            expected = reference.dense_attention(queries, keys, values, **self.sizes)
            indices = lists(np.broadcast_to(self.valid[:, None], keys.shape[:3]))
        if alpha is not None:
            mean = masked_mean(values, self.padding)
            mean = np.repeat(mean, queries.shape[1] // keys.shape[1], axis=1)[:, :, None]
            # The error of a softmax weight is the error of its logit plus the error of its denominator.
            share = np.abs(alpha[..., None, None] * (expected - mean)).max()
            self.allowed = float(2 * logit_error(queries, keys, self.scale) * share)
            expected = alpha[..., None, None] * expected + (1 - alpha[..., None, None]) * mean

        def plain(components: Array, slots: Array) -> tuple[Array, Array]:
            q, k, listed = queries[..., components], keys[..., components], indices[..., slots]
            out = plain_attention(q, k, values, listed, self.scale, "f32").reshape(queries.shape)
            if alpha is not None:
                assert isinstance(self.config, SparQ)
                settings = {"rank": self.config.rank, "component_score": self.config.component_score}
                settings |= {"padding": self.padding, "scale": self.scale}
                out = plain_reallocation(out, q, k, values, listed, **settings)
            scores, top = plain_scores(q, k, listed, self.scale, "f32")
            return out, (np.log(row_sum(np.exp(scores - top))) + top).reshape(lse.shape).astype(np.float32)

        rng, sizes = np.random.default_rng(0), (keys.shape[3], indices.shape[2])
        orders = [tuple(np.arange(n) for n in sizes), *(tuple(map(rng.permutation, sizes)) for _ in range(ORDERS))]
        self._close(expected, lse, (plain(*order) for order in orders))

    def _check_selection(self, received: Array) -> tuple[Array, Array | None]:
        """Check that the call selected the oracle's keys. Ties may differ. Return the indices of the selected keys.

        If the method reallocates, the second result is the estimated softmax mass of the selected keys for each query
        head. Otherwise, the second result is None.
        """
        config, (queries, keys, _) = self.config, self.arrays
        G, D = queries.shape[1] // keys.shape[1], keys.shape[3]
        if isinstance(config, Streaming):
            first, position = np.argmax(self.valid, axis=1)[:, None], np.arange(keys.shape[2])
            exact = (position < first + config.sink_tokens) | (position >= keys.shape[2] - config.recent_tokens)
            return lists(np.broadcast_to((self.valid & exact)[:, None], keys.shape[:3])), None
        if isinstance(config, SAAP):
            return self._listed(config), None
        indices = np.array(self.chosen[0]) if self.chosen else None
        if isinstance(config, H2O):
            sizes = {**config.parameters(), "left_padding": self.padding}
            self._assert_same_selection(indices, oracle.top_k_select(received, **sizes), received)
            return indices, None
        assert config is not None
        settings: dict[str, Any] = {"rank": D, "top_k": config.attended, "local_window": 0, **self.sizes}
        if isinstance(config, SparQ | OracleTopK):
            settings["local_window"] = config.local_window
        if isinstance(config, SparQ):
            settings |= {"rank": config.rank, "component_score": config.component_score, "key_bits": config.key_bits}
        selection = reference.sparq_select(queries, keys, **settings)
        if indices is None:
            indices = selection.indices
            window = config.parameters()["local_window"]
            outside, count = selection.scores[..., : keys.shape[2] - window], config.attended - window
            left_out = -np.sort(-outside, axis=-1)[..., count]
            self.ties += not (rounding_safe(outside, count) | (left_out == 0)).all() if count else 0
        if isinstance(config, SparQ) and self._components_tie(config):
            self.ties += 1  # other components would change the scores
        else:
            self._assert_same_selection(indices, selection.indices, selection.scores)
        if not isinstance(config, SparQ) or not config.reallocates(G):
            return indices, None
        slots = np.repeat(indices, G, axis=1)
        mass = np.where(slots >= 0, np.take_along_axis(selection.s_hat, np.maximum(slots, 0), axis=-1), 0)
        return indices, mass.sum(axis=-1)

    def _components_tie(self, config: SparQ) -> bool:
        """Return True if float32 rounding may change the selected components."""
        queries, keys, _ = (array.astype(np.float64) for array in self.arrays)
        score = np.abs(queries).reshape(*keys.shape[:2], -1, keys.shape[3]).sum(axis=2)
        if config.component_score == "query_key":
            score = score * self._spread(config, keys)
        return config.rank < keys.shape[3] and not rounding_safe(score, config.rank).all()

    def _spread(self, config: SparQ, keys: Array) -> Array:
        if config.key_bits == 16:
            return oracle.sparq.deviation(keys, self.padding)
        coded = oracle.sparq.code_keys(keys, left_padding=self.padding)
        return oracle.key_spread(coded, keys, left_padding=self.padding)

    def _assert_same_selection(self, indices: Array, expected: Array, scores: Array) -> None:
        assert_same_selection(indices, expected, np.where(np.isfinite(scores), scores, 0))
        self.ties += not np.array_equal(indices, expected)

    def _listed(self, config: SAAP) -> Array:
        """Check the key list of a SAAP step, and return it.

        The list must have the sink tokens, the keys in the visited buckets, and all keys that are not indexed.
        """
        router, network, centroids, ids, covered, queries, indices, counts = self.chosen
        keys, valid = self.arrays[1], self.valid
        B, Hkv, S, _ = keys.shape
        first = np.argmax(valid, axis=1)
        for start, stop in zip(first, covered, strict=True):
            unlisted = max(S - start - config.recent_tokens, 0) - (stop - start)
            assert 0 <= unlisted < config.merge_every, f"{stop - start} of {S - start} keys are in the lists"
        listed, attended = np.array(indices), np.zeros((B, Hkv, S), bool)
        for b, h in np.ndindex(B, Hkv):
            used = listed[b, h, : int(counts[b, h])]
            attended[b, h, used] = True
            assert len(used) == attended[b, h].sum(), "a key is listed twice"
        weights = {name: np.array(array, np.float64) for name, array in network.items()}
        routed = [(queries, weights)]
        if centroids.ndim == 4:  # each sequence has its own centroids
            own = [{name: array[b] for name, array in weights.items()} for b in range(B)]
            routed = [(queries[b : b + 1], own[b]) for b in range(B)]
        scores = np.concatenate([oracle.route_scores(np.array(q), **one) for q, one in routed])
        visited = np.concatenate([oracle.saap_route(np.array(q), probes=config.probes, **one) for q, one in routed])
        sure = np.ones((B, Hkv), bool) if config.probes >= scores.shape[-1] else rounding_safe(scores, config.probes)
        self.ties += int((~sure).sum())
        last = max(covered)
        found = np.array(ids)[..., :last]
        self._check_buckets(router, found, np.array(centroids, np.float64), covered)
        position, before_window = np.arange(S), np.array(covered)[:, None]
        exact = (position < first[:, None] + config.sink_tokens) | (position >= before_window)
        expected = np.broadcast_to((valid & exact)[:, None], attended.shape).copy()
        inside = (valid & (position < before_window))[:, None, :last]
        expected[..., :last] |= (found[..., None] == visited[:, :, None]).any(axis=-1) & inside
        same = (attended == expected) | (~sure[..., None] & ~exact[:, None])
        assert same.all(), "the attended keys are not the keys of the visited buckets"
        return lists(attended)

    def _check_buckets(self, router: Any, ids: Array, centroids: Array, covered: list[int]) -> None:
        if router.source.irreversible is not None:
            self.unchecked += 1  # the pre-RoPE keys are not available
            return
        offset = 0 if self.padding is None else -mx.array(self.padding)
        before = router.source.inverse_rope(mx.array(self.arrays[1][:, :, : ids.shape[2]]), offset)
        own = np.broadcast_to(centroids, (len(before), *centroids.shape[-3:]))
        products = np.einsum("bhnd,bhcd->bhnc", np.array(before, np.float64), own)
        listed = np.arange(ids.shape[2]) < np.array(covered)[:, None]
        wrong = (ids != products.argmax(axis=-1)) & (self.valid[:, : ids.shape[2]] & listed)[:, None]
        # Keys after inverse RoPE have the rounding error of the stored keys.
        wrong &= rounding_safe(products, 1, 1 << 12)
        assert not wrong.any(), f"{wrong.sum()} keys are in wrong buckets"

    def _check_prompt(self, _: Array) -> None:
        config = self.config
        assert isinstance(config, Prefill)
        if len(self.chosen) != 1 or (self.padding is not None and self.padding.any()):
            self.unchecked += 1
            return
        blocks, case = np.array(self.chosen[0]), PrefillChunk.of(self, config)
        sure, possible = case.bounds(config)
        mask = oracle.block_mask(blocks, case.layout.key_blocks)
        assert (mask >= sure).all(), "a block is missing"
        assert (mask <= possible).all(), "an additional block"
        self.ties += not np.array_equal(sure, possible)
        sizes = {"block_size": config.block_size, "scale": self.scale}
        expected, lse = oracle.blocks.attend_blocks(*self.arrays, blocks, **sizes)
        plain = plain_masked_attention(case, *self.arrays, attended(blocks, case))
        self._close(expected, lse, [(plain, case.plain_lse(blocks))])

    def _close(self, expected: Array, lse: Array, plains: Iterable[tuple[Array, Array]]) -> None:
        """Assert that ``out`` is as accurate as a plain float32 computation.

        ``expected`` and ``lse`` are the oracle's output and log-sum-exp. ``plains`` yields the outputs and log-sum-exps
        of plain float32 computations. The tolerance is `allowed` plus twice the error of the worst of these outputs,
        plus one ulp.
        """
        expected = self._with_sinks(expected, lse)
        there = np.ones(self.out.shape[:3], bool)
        if self.padding is not None:  # ignore padded queries
            S, L = self.arrays[1].shape[2], self.out.shape[2]
            there &= (np.arange(S - L, S) >= self.padding[:, None])[:, None]
        there[self.short] = False  # mlx-lm computed these sequences
        self.unchecked += bool(self.short)
        error, mixed = float(np.abs(self.out - expected)[there].max(initial=0)), self.allowed
        for out, plain_lse in plains:
            allowed = float(2 * np.abs(self._with_sinks(out, plain_lse) - expected).max() + ulp(expected, "f32"))
            self.allowed = max(self.allowed, mixed + allowed)
            if error <= self.allowed:
                return
        raise AssertionError(f"{self.config}: layer {self.layer} is off by {error:.3g}, allowed {self.allowed:.3g}")

    def _with_sinks(self, out: Array, lse: Array) -> Array:
        """Scale the output for attention sinks, each of which adds a logit without a value to the softmax."""
        return out if self.sinks is None else out * (1 / (1 + np.exp(self.sinks[None, :, None] - lse)))[..., None]


def rounding_safe(scores: Array, count: int, ulps: int = 64) -> Array:
    """Return a bool mask ``(...)``, True if float32 rounding cannot change which ``count`` scores are the largest.

    The mask is True if the ``count`` largest of the ``scores (..., n)`` exceed all other scores by more than ``ulps``
    units in the last place.
    """
    ranked = -np.sort(-scores, axis=-1)
    sure: Array = ranked[..., count - 1] - ranked[..., count] > ulps * ulp(ranked, "f32")
    return sure


@dataclass(frozen=True, eq=False)
class PrefillChunk(SampleCase):
    """A test case with a prefill chunk that was recorded in a model."""

    arrays: Any = None
    factor: float = 1.0

    @classmethod
    def of(cls, call: RecordedCall, config: Prefill) -> PrefillChunk:
        (B, Hq, L, D), (_, Hkv, S, _) = call.arrays[0].shape, call.arrays[1].shape
        settings = {"block_size": config.block_size}
        if isinstance(config, Sample):
            settings |= {"chunks": config.chunks, "alpha_column": config.alpha_column}
            settings |= {"alpha_slash": config.alpha_slash}
        return cls(B, Hq, Hkv, L, S, D, "f32", **settings, arrays=call.arrays, factor=call.scale)

    @property
    def scale(self) -> float:
        return self.factor

    def inputs(self, seed: int = 0) -> tuple[Array, Array, Array]:
        return self.arrays

    def bounds(self, config: Prefill) -> tuple[Array, Array]:
        """Return two bool masks ``(B, Hq, R, Nk)`` of blocks that must be selected and blocks that may be selected."""
        queries, keys, values = self.arrays
        layout, error = self.layout, logit_error(queries, keys, self.scale)
        if isinstance(config, Sample):
            scores = oracle.sample_scores(queries, keys, **self.sampling)
            alphas = (config.alpha_column, config.alpha_slash)
            both = [kept_bounds(side, alpha, error) for side, alpha in zip(scores, alphas, strict=True)]
        elif isinstance(config, MInference):
            scores = oracle.sample_scores(queries, keys, **self.sampling, rows=MINFERENCE_ROWS)
            budgets = (-(-count // config.block_size) for count in (config.vertical_tokens, config.slash_tokens))
            both = [best_bounds(side, count, error) for side, count in zip(scores, budgets, strict=True)]
        else:
            found = reference.run(config.name, queries, keys, values, **config.parameters())
            mask = oracle.block_mask(found[2], layout.key_blocks)
            return mask, mask
        sure, possible = (oracle.merge_kept(column, slash, layout) for column, slash in zip(*both, strict=True))
        for block in layout.sampled_blocks if isinstance(config, Sample) else ():
            for mask in (sure, possible):
                mask[:, :, block - layout.first_block, : block + 1] = True
        return sure, possible

    def plain_lse(self, blocks: Array) -> Array:
        """Compute the log-sum-exp ``(B, Hq, L)`` over ``blocks`` in plain float32."""
        queries, keys, _ = self.arrays
        grouped = queries.reshape(self.B, self.Hkv, -1, self.L, self.D) * np.float32(self.scale)
        scores = np.where(attended(blocks, self), grouped @ keys[:, :, None].swapaxes(-1, -2), -np.inf)
        top = scores.max(axis=-1, keepdims=True)
        return (np.log(row_sum(np.exp(scores - top))) + top).reshape(queries.shape[:3]).astype(np.float32)


def best_bounds(scores: Array, count: int, error: float) -> tuple[Array, Array]:
    """Return two bool masks for the ``count`` largest scores.

    The first mask marks scores that must be among the largest, and the second mask marks scores that may be among the
    largest. ``error`` is the largest relative error of a score.
    """
    kept = oracle.prefill.select_largest(scores, count)
    best_left = np.where(kept, 0, scores).max(axis=-1, keepdims=True)
    least_kept = np.where(kept, scores, np.inf).min(axis=-1, keepdims=True)
    return kept & (scores > best_left * (1 + 4 * error)), kept | (scores >= least_kept * (1 - 4 * error))


def lists(mask: Array) -> Array:
    """Convert a mask ``(B, Hkv, S)`` to ascending int32 index lists, padded with -1."""
    S = mask.shape[-1]
    listed = np.sort(np.where(mask, np.arange(S), S), axis=-1)
    return np.where(listed < S, listed, -1).astype(np.int32)
