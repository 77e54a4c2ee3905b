"""Define the public functions for dense attention and for the decode methods."""

from __future__ import annotations

from functools import partial
from typing import Any, Generic

from ..checks import (
    ShapeError,
    check_choice,
    check_decode_step,
    check_int,
    check_local_window,
    check_rank,
)
from ..core import stats
from ..methods.sparq.scoring_keys import KEY_BITS, KeyCodes
from .checked_call import Array, Call, Library


class DecodeFunctions(Generic[Array]):
    """Public functions for dense attention and for decode steps, which have one query per sequence."""

    _library: Library[Array]

    def attend_indices(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        indices: Array,
        *,
        scale: float | None = None,
        bias: Array | None = None,
        backend: str = "auto",
    ) -> tuple[Array, Array]:
        """Compute exact attention of one query per head over the keys that ``indices`` lists (sparq.7).

        Args:
            indices: ``(B, Hkv, N)`` int32 key indices, ascending. ``-1``, or any number that is not a key index,
                marks an empty slot.
            bias: as in `sparq_attention`, for all S keys.

        Returns:
            ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``. If all slots are empty, ``out`` is 0 and ``lse`` is
            -inf.
        """
        call = Call(self._library, "attend_indices", (queries, keys, values), scale, backend=backend, bias=bias)
        n = call.sizes
        check_decode_step(n, "attend_indices")
        self._library.check_array("indices", indices, queries, integers=True)
        if len(indices.shape) != 3 or tuple(indices.shape[:2]) != (n.B, n.Hkv):
            raise ShapeError(f"indices: expected shape (B={n.B}, Hkv={n.Hkv}, N), got {tuple(indices.shape)}.")
        run = call.load("attend_indices")
        result: tuple[Array, Array] = run(queries, keys, values, indices, scale=call.scale, **call.biased)
        return result

    def dense_attention(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        *,
        scale: float | None = None,
        left_padding: Array | None = None,
        backend: str = "auto",
        return_stats: bool | str = False,
    ) -> Any:
        """Compute dense causal attention over all valid keys. This is the baseline for all methods."""
        call = Call(self._library, "dense", (queries, keys, values), scale, left_padding, backend, return_stats)
        return call.dense()

    def sparq_attention(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        *,
        rank: int = 32,
        top_k: int = 128,
        local_window: int | None = None,
        reallocate: str | bool = "auto",
        component_score: str = "query",
        key_bits: int = 16,
        scale: float | None = None,
        bias: Array | None = None,
        left_padding: Array | None = None,
        keys_t: Array | KeyCodes | None = None,
        value_mean: Array | None = None,
        backend: str = "auto",
        return_stats: bool | str = False,
    ) -> Any:
        """Run one decode step of SparQ. Default: the paper's setting; `--attn sparq` uses the measured setting.

        The defaults are `sparq:preset=paper` (docs/spec/sparq.md; arXiv 2312.04985, Algorithm 1). For the setting of
        `--attn sparq`, pass ``**SparQ.preset("default")`` of `mlx_sparse.methods`.

        Args:
            rank: number r of query components used to score each key, 1..D.
            top_k: number of attended keys per KV head, including the local window.
            local_window: number of last valid keys that are always attended to; None means ``top_k // 4``.
            reallocate: if True, add the mean value, weighted by the softmax mass of the skipped keys. "auto" means True
                if each KV head has one query head.
            component_score: rank components by |q| ("query", as in the paper) or by |q| times the standard deviation
                of the keys ("query_key").
            key_bits: number of bits per component of the scoring keys: 16 (as in the paper) or 4.
            bias: ``(B, Hq, 1, S)`` numbers that are added to the scaled logits, for one query per sequence. -inf or the
                lowest finite number of the type hides a key from a head. `triton` and exported files take no bias.
            keys_t: ``(B, Hkv, D, S)`` component-major keys; if ``key_bits`` is 4, the `KeyCodes` from `code_keys`.
                If None, the call is slower than dense attention. The `metal` backend copies ``keys_t`` on every call
                if it is a slice of a larger buffer.
            value_mean: ``(B, Hkv, Dv)`` mean of the valid values, including the current value. If None, the call
                computes the mean.

        Returns:
            ``out (B, Hq, L, D)`` in the dtype of ``queries``, and a `Stats` if ``return_stats`` is set.
        """
        call = Call(self._library, "sparq", (queries, keys, values), scale, left_padding, backend, return_stats, bias)
        n = call.sizes
        check_rank(rank, n.D)
        check_int("top_k", top_k, 1)
        window = check_local_window(local_window, top_k)
        check_choice("reallocate", reallocate, ("auto", True, False))
        check_choice("component_score", component_score, ("query", "query_key"))
        check_choice("key_bits", key_bits, KEY_BITS)
        call.check_keys_t(keys_t, key_bits)
        call.check("value_mean", value_mean, (n.B, n.Hkv, n.Dv))
        if not call.sparse(top_k):
            return call.dense()
        reallocates = (n.G == 1 if reallocate == "auto" else bool(reallocate)) and n.S > top_k
        if reallocates and value_mean is None:
            value_mean = call.load("masked_mean")(values, call.left_padding, **call.biased)
        weight = None
        if key_bits < 16:
            if keys_t is None:
                keys_t = call.load("code_keys")(keys, call.left_padding)
            if component_score == "query_key":
                weight = call.load("key_spread")(keys_t, keys, call.left_padding)
        elif component_score == "query_key":
            weight = call.load("deviation")(keys, call.left_padding)
        return call.decode(
            partial(stats.sparq_elements, rank=rank, key_bits=key_bits),
            top_k,
            means=2,
            top_k=top_k,
            rank=rank,
            local_window=window,
            reallocate=reallocates,
            component_weight=weight,
            keys_t=keys_t,
            value_mean=value_mean,
        )

    def code_keys(self, keys: Array, *, left_padding: Array | None = None, backend: str = "auto") -> KeyCodes:
        """Quantize ``keys`` to int4 scoring keys (sparq.17 to sparq.20).

        Pass the result to `sparq_attention` as the argument ``keys_t``, and set ``key_bits=4``.
        """
        call = Call(self._library, "code_keys", (keys, keys, keys), left_padding=left_padding, backend=backend)
        coded: KeyCodes = call.load("code_keys")(keys, call.left_padding)
        return coded

    def h2o_scores(
        self,
        queries: Array,
        keys: Array,
        *,
        scale: float | None = None,
        left_padding: Array | None = None,
        backend: str = "auto",
    ) -> Array:
        """Compute the initial ``scores`` for `h2o_attention`. A score is the sum of a key's causal softmax weights.

        Returns:
            float32 scores ``(B, Hkv, S)``, summed over ``queries`` and averaged over the query heads of a group.
            Invalid keys have the score -inf.
        """
        call = Call(self._library, "h2o_scores", (queries, keys, keys), scale, left_padding, backend)
        run = call.load("h2o_scores")
        scores: Array = run(queries, keys, scale=call.scale, left_padding=call.left_padding)
        return scores

    def h2o_attention(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        *,
        scores: Array,
        top_k: int = 128,
        local_window: int | None = None,
        scale: float | None = None,
        left_padding: Array | None = None,
        backend: str = "auto",
        return_stats: bool | str = False,
    ) -> Any:
        """Run one decode step of H2O. Attend to the last keys and the keys with the largest scores, and evict the rest.

        Args:
            scores: ``(B, Hkv, S)`` sum of the softmax weights that each key has received. The score is 0 for the
                current key, and -inf for evicted keys.
            top_k: number of attended keys per KV head, including the last ``local_window`` keys.

        Returns:
            ``out``, the new ``scores``, and a `Stats` if ``return_stats`` is set. The score of an evicted key is -inf.
        """
        call = Call(self._library, "h2o", (queries, keys, values), scale, left_padding, backend, return_stats)
        n = call.sizes
        check_decode_step(n, "h2o")
        check_int("top_k", top_k, 1)
        window = check_local_window(local_window, top_k)
        call.check("scores", scores, (n.B, n.Hkv, n.S))
        out, lse, updated = call.run(scores=scores, top_k=top_k, local_window=window)
        if not return_stats:
            return out, updated
        return out, updated, call.record(lse, stats.h2o_elements, top_k, min(top_k, n.S) + 1)
