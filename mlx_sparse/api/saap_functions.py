"""Define SAAP's public functions, which assign keys to buckets, route queries, and attend to visited buckets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic

from ..checks import MAX_BUCKETS, Sizes, check_centroids, check_int, check_router, check_saap
from ..core import registry, stats
from .checked_call import Array, Call, Library


class SaapFunctions(Generic[Array]):
    """Public functions for the steps of SAAP."""

    _library: Library[Array]

    def saap_assign(self, keys: Array, centroids: Array, *, backend: str = "auto") -> Array:
        """Assign each key to the bucket of the centroid with the largest inner product (saap.1).

        Args:
            keys: ``(B, Hkv, n, D)`` pre-RoPE keys.
            centroids: ``(Hkv, C, D)``, one centroid per bucket.

        Returns:
            int32 bucket ids ``(B, Hkv, n)``. Keys with NaN or inf get bucket 0.
        """
        library = self._library
        library.check_array("keys", keys)
        library.check_array("centroids", centroids, keys)
        check_centroids(keys, centroids)
        check_int("buckets", centroids.shape[1], 1, MAX_BUCKETS)
        B, Hkv, n, D = keys.shape
        chosen = library.resolve(backend, "saap_assign", Sizes(B, Hkv, Hkv, 1, n, D), keys)
        ids: Array = registry.load("saap_assign", chosen)(keys, centroids)
        return ids

    def saap_route(
        self,
        queries: Array,
        *,
        out_weight: Array,
        out_bias: Array | None = None,
        hidden_weight: Array | None = None,
        hidden_bias: Array | None = None,
        probes: int = 32,
        backend: str = "auto",
    ) -> Array:
        """Select ``probes`` buckets per KV head. All query heads of a KV head share the buckets (saap.5), (saap.8).

        Args:
            queries: ``(B, Hq, 1, D)`` pre-RoPE queries.
            out_weight: ``(Hkv, H, C)`` weight of the output layer. If there is no hidden layer, H is D. If you have no
                trained network, pass ``scale`` times the transposed centroids.
            out_bias: ``(Hkv, C)`` bias of the output layer; None means 0.
            hidden_weight: ``(Hkv, D, H)`` weight of the hidden layer; None means no hidden layer.
            hidden_bias: ``(Hkv, H)`` bias of the hidden layer; None means 0.
            probes: number of buckets to visit, 1..C.

        Returns:
            int32 bucket ids ``(B, Hkv, probes)`` in ascending order. A NaN score counts as +inf.
        """
        network: dict[str, Any] = {"out_weight": out_weight, "out_bias": out_bias}
        network |= {"hidden_weight": hidden_weight, "hidden_bias": hidden_bias}
        library = self._library
        library.check_array("queries", queries)
        for name, array in network.items():
            if array is not None or name == "out_weight":
                library.check_array(name, array, queries)
        C = check_router(queries, **network)
        check_int("buckets", C, 1, MAX_BUCKETS)
        check_int("probes", probes, 1, C)
        B, Hq, _, D = queries.shape
        chosen = library.resolve(backend, "saap_route", Sizes(B, Hq, out_weight.shape[0], 1, 1, D), queries)
        visited: Array = registry.load("saap_route", chosen)(queries, **network, probes=probes)
        return visited

    def saap_attention(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        *,
        bucket_ids: Array,
        visited: Array,
        sink_tokens: int = 1,
        recent_tokens: int = 2047,
        scale: float | None = None,
        left_padding: Array | None = None,
        backend: str = "auto",
        return_stats: bool | str = False,
    ) -> Any:
        """Run one decode step of SAAP attention (docs/spec/saap.md; arXiv 2502.08246).

        The step attends to the first ``sink_tokens`` valid keys and to all keys in the visited buckets. It also attends
        to the last ``recent_tokens`` valid keys, including the current key. Each call builds a bucket index.

        Args:
            bucket_ids: ``(B, Hkv, S)`` int bucket of each key. -1, or any number that is not a bucket index, means that
                the key is in no bucket.
            visited: ``(B, Hkv, n)`` int ids of the visited buckets. Negative ids and duplicates are ignored.
        """
        call = Call(self._library, "saap", (queries, keys, values), scale, left_padding, backend, return_stats)
        n = call.sizes
        self._library.check_array("bucket_ids", bucket_ids, queries, integers=True)
        self._library.check_array("visited", visited, queries, integers=True)
        check_saap(n, bucket_ids, visited, sink_tokens, recent_tokens)
        if not call.sparse(sink_tokens + recent_tokens):
            return call.dense()
        window = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
        out, lse, counts = call.run(**self._library.visit(bucket_ids, visited), **window)
        if not return_stats:
            return out
        # (saap.12), (saap.14)
        listed = counts.tolist()
        padding = [0] * n.B if call.left_padding is None else call.left_padding.tolist()
        attended = sum(map(sum, listed)) / (n.B * n.Hkv)
        shares = []
        for of_row, first in zip(listed, padding, strict=True):
            exact = max(min(n.S - first, sink_tokens + recent_tokens), 0)
            shares += [(count - exact) / max(n.S - first - exact, 1) for count in of_row]
        selectivity = sum(shares) / len(shares)
        rows = round(attended)
        record = call.record(lse, lambda S, D, top_k: stats.saap_elements(D, rows), 0, rows + 1)
        return out, replace(record, density=attended / n.S, selectivity=selectivity)
