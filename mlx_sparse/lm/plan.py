"""What an enabled model does at each attention call: sparse or dense, and why."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .. import registry
from ..cache import SparseBatchKVCache, SparseCache, adopt
from ..call_report import Report
from ..checks import check_rank
from ..config import NEVER, FlexGen, MethodConfig, SparQ, Step
from ..stats import dense_elements

# More queries than this in one call are a prompt; fewer, after a prompt, are draft tokens to verify or a short turn.
VERIFY_QUERIES = 16


class Plan:
    """The method of one model and the count of its calls."""

    def __init__(self, config: MethodConfig, backend: str, report: Report) -> None:
        self.config = config
        self.backend = backend
        self.report = report
        self.decodes = True  # False where a command only processes a prompt
        self._probed: list[tuple[Any, str | None]] | None = None
        self._backends: set[str] = set()  # what served layers resolve to
        self._caches: Any = None

    def begin(self, caches: Any) -> None:
        """A call of the model starts: its plain caches become ours."""
        if caches is not None:
            adopt(caches)
        self._caches = caches

    def end(self) -> None:
        """The call is over: its caches are the caller's alone again."""
        self._caches = None

    def probe(self) -> list[tuple[Any, str | None]]:
        """From now on until `end_probe`, note per call its cache and why the layer stays dense, None if it need not."""
        self._probed = []
        return self._probed

    def end_probe(self) -> None:
        self._probed = None
        self.report.backend = " and ".join(sorted(self._backends)) or self.backend

    def attend(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array | None:
        """The sparse result of one attention call, or None to let mlx-lm attend densely."""
        reason = self._layer_reason(keys, values, cache)
        if reason is None and sinks is not None and not self._serves_sinks(queries, keys):
            reason = "with attention sinks"
        if self._probed is not None:
            if reason is None and mask is not None and not self._is_padding_mask(mask):
                reason = "with an array mask"
            if reason is None and isinstance(self.config, SparQ):
                check_rank(self.config.rank, queries.shape[-1])
            if reason is None:
                self._backends.add(self._resolve(queries, keys))
            self._probed.append((cache, reason))
            return None
        backend = ""
        if reason is None:
            backend = self._resolve(queries, keys)
            reason = self._call_reason(queries, keys, mask, backend)
        if reason is not None:
            self.report.dense_calls[reason] += 1
            return None
        out: mx.array
        out, lse = cache.attend(queries, self.config, scale=scale, backend=backend)
        if sinks is not None:
            # A sink is one more logit in the softmax with nothing behind it.
            kept = mx.sigmoid(lse - sinks.astype(mx.float32)[None, :, None])
            out = (out.astype(mx.float32) * kept[..., None]).astype(out.dtype)
        self._count(queries, keys)
        return out

    def _resolve(self, queries: mx.array, keys: mx.array) -> str:
        """The backend for these sizes."""
        Hq, D = queries.shape[1], queries.shape[3]
        return registry.resolve(self.backend, self.config.name, D=D, G=Hq // keys.shape[1])

    def _layer_reason(self, keys: Any, values: Any, cache: Any) -> str | None:
        """Why this layer can never attend sparsely."""
        if cache is None:
            return "without a KV cache"
        if hasattr(cache, "bits"):
            return "with a quantised KV cache"
        if not isinstance(cache, SparseCache):
            name = type(cache).__name__
            return f"with a sliding window ({name})" if "Rotating" in name else f"with a {name}"
        if keys.shape != values.shape:
            return "with key and value head dims that differ (MLA)"
        for rows, kept in ((keys, cache.keys), (values, cache.values)):
            if rows.shape[1:] != (kept.shape[1], cache.length, kept.shape[3]):
                return "with keys or values that are not the cache's (MLA)"
        return None

    def _serves_sinks(self, queries: mx.array, keys: mx.array) -> bool:
        """Whether a sink's share can be told from the log-sum-exp of the attended keys: if nothing else is mixed in."""
        if isinstance(self.config, SparQ):
            auto = queries.shape[1] == keys.shape[1]
            return not (auto if self.config.reallocate == "auto" else self.config.reallocate)
        return not isinstance(self.config, FlexGen)

    def _call_reason(self, queries: mx.array, keys: mx.array, mask: Any, backend: str) -> str | None:
        """Why this call attends densely."""
        L, S = queries.shape[2], keys.shape[2]
        if L > 1:
            verifying = L <= VERIFY_QUERIES and S > L
            few = "of a few queries at once (verification or short prompt)"
            return few if verifying else "of several queries at once (prompt)"
        if not self.decodes:
            return "of the prompt's last token"
        if mask is not None and not self._is_padding_mask(mask):
            return "with an array mask"
        shortest = self._shortest_context(queries, keys, backend)
        if shortest >= NEVER:
            return "whose scores would move more bytes than they save"
        return f"over fewer than {shortest:,} keys" if S < shortest else None

    def _shortest_context(self, queries: mx.array, keys: mx.array, backend: str) -> int:
        B, Hkv, _, D = keys.shape
        gpu = registry.gpu_kind() if backend == "metal" else ""
        return self.config.shortest_context(Step(B * Hkv, queries.shape[1] // Hkv, D, keys.itemsize, gpu))

    def _is_padding_mask(self, mask: Any) -> bool:
        """Whether ``mask`` is the one a batch cache made of its left padding, which the sparse step honours itself."""
        if isinstance(mask, str):
            return True  # "causal" says nothing about a single query
        return any(isinstance(c, SparseBatchKVCache) and c.padding_mask is mask for c in leaves(self._caches))

    def _count(self, queries: mx.array, keys: mx.array) -> None:
        B, Hkv, S, D = keys.shape
        size = B * Hkv * keys.itemsize
        self.report.sparse_calls += 1
        self.report.sparse_bytes += size * self.config.elements(S, D)
        self.report.dense_bytes += size * dense_elements(S, D)


def leaves(caches: Any) -> list[Any]:
    """The caches of a model's list, those inside a CacheList too."""
    if isinstance(caches, (list, tuple)):
        return [leaf for entry in caches for leaf in leaves(entry)]
    return leaves(caches.caches) if hasattr(caches, "caches") else [caches]
