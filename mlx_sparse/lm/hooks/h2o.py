"""Define the hooks for H2O. The hooks sum the attention that each key receives in dense calls, mainly in prefill."""

from __future__ import annotations

import mlx.core as mx

from ...cache.kv_cache import Mask, is_padding_mask
from ...cache.sparse_cache import SparseCache
from ...core import reasons
from ...methods import H2O
from ...methods.baselines.state import H2OState
from . import CallHooks, ModelHooks


class Observer(CallHooks):
    """H2O's hooks for one forward pass. The hooks add the attention weights of dense calls to the key scores."""

    def step_reason(self, cache: SparseCache) -> str | None:
        return None if _counted(cache, cache.length - 1) else reasons.UNCOUNTED

    def observe(
        self, queries: mx.array, keys: mx.array, cache: SparseCache, scale: float, mask: Mask, sinks: mx.array | None
    ) -> None:
        """Add the attention weights of a dense call to the key scores, if the call is causal and has no sinks."""
        L, S = queries.shape[2], keys.shape[2]
        causal = is_padding_mask(mask, self.caches) if mask is not None else L == 1
        ragged = getattr(cache, "_right_padding", None) is not None  # some queries are padding
        if causal and not ragged and sinks is None and _counted(cache, S - L):
            received = cache.state_of(H2O.name)
            assert isinstance(received, H2OState)
            received.add(queries, keys, scale=scale, left_padding=cache.padding)

    def submit(self) -> None:
        for cache in self.caches:
            received = cache.aux_states.get(H2O.name) if isinstance(cache, SparseCache) else None
            if isinstance(received, H2OState):
                received.submit()


class H2OHooks(ModelHooks):
    """H2O's hooks for one model. Each forward pass uses an `Observer`."""

    call_hooks = Observer


def _counted(cache: SparseCache, length: int) -> bool:
    """Return True if the H2O scores of ``cache`` include exactly the queries of rows ``[0, length)``."""
    received = cache.aux_states.get(H2O.name)
    return length == (received.length if isinstance(received, H2OState) else 0)
