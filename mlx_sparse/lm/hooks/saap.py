"""Define the hooks for SAAP. The hooks find a router for each layer and update the bucket index of each cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import mlx.core as mx
from mlx import nn

from ...cache.sparse_cache import Attended, SparseCache, Step
from ...checks import ConfigError
from ...core import reasons, registry
from ...core.stats import saap_elements
from ...methods import SAAP
from ...methods.saap import artefact as artefacts
from ...methods.saap.lists import attended_keys, needs_rebuild, rebuild_lists
from ...methods.saap.state import BucketIndex, Router, index_of
from ...model_info import recorded_facts
from ...model_parts import part_of
from ..rope import Recorder, Seen, Source, find_sources
from ..statistics import BucketStatistics
from . import CallHooks, ModelHooks


def load_artefact(config: SAAP) -> artefacts.Artefact | None:
    """Load the artefact of ``config``, or return None in online mode.

    Raises:
        ArtefactError: the file cannot be read.
        ConfigError: the mode needs an artefact but none is given, or the artefact has fewer than ``probes`` buckets.
    """
    if config.file is None:
        return None
    artefact = artefacts.load(config.file)
    if config.probes > artefact.buckets:
        most = f"the {artefact.buckets} buckets of {config.file}"
        raise ConfigError(f"probes: expected at most {most}, got {config.probes}.")
    return artefact


def find_routers(config: SAAP, model: nn.Module) -> dict[int, Router | str]:
    """Return a dict from the index of a layer's cache to the layer's router, or to the reason why the layer is dense.

    Args:
        model: a model that is not enabled.

    Raises:
        ArtefactError, ConfigError: `load_artefact` failed, or the artefact was trained for another model.
    """
    artefact = load_artefact(config)
    if artefact is not None:
        artefact = artefact.part_for(model)
    scales: dict[int, float] = {}

    def note_scale(seen: Seen) -> None:
        scales[seen.layer] = seen.scale

    found: dict[int, Router | str] = {}
    sources = sorted(find_sources(model, note_scale).items())
    for place, (layer, source) in enumerate(sources, _attending_before(model)):
        scale = scales[layer]
        if place < config.dense_layers:
            found[layer] = reasons.FIRST_LAYERS
        elif isinstance(source, str):
            found[layer] = source
        elif artefact is not None:
            found[layer] = _trained(artefact, layer, source, scale)
        else:
            found[layer] = source.irreversible or Router(source, scale, config.fitted_buckets)
    return found


def _attending_before(model: nn.Module) -> int:
    """Return the number of attention layers in earlier pipeline stages; 0 for a whole model."""
    first, whole = part_of(model).first_layer, recorded_facts(model)
    return first if whole is None else sum(shape is not None for shape in whole.shapes[:first])


def _trained(artefact: artefacts.Artefact, layer: int, source: Source, scale: float) -> Router | str:
    """Return the router of ``layer`` from ``artefact``, or the reason why the artefact has no router for this layer."""
    arrays = artefact.layers.get(layer)
    if arrays is None:
        return reasons.NOT_IN_ARTEFACT
    network = {name: array for name, array in arrays.arrays().items() if name != "centroids"}
    return Router(source, scale, artefact.buckets, arrays.centroids, network)


class SAAPHooks(ModelHooks):
    """SAAP's hooks for one model.

    Attributes:
        routers: dict from the index of a layer's cache to the layer's router, or to the reason why the layer is dense.
        recorder: `Recorder` of the model's RoPE calls.
    """

    statistics = BucketStatistics()

    def __init__(self, config: SAAP, model: nn.Module) -> None:
        super().__init__(config, model)
        self.routers = find_routers(config, model)
        self.recorder = Recorder(model)
        # All threads use these arrays, but only this thread may evaluate the arrays. Evaluate now.
        mx.eval([[router.centroids, router.network] for router in self.routers.values() if isinstance(router, Router)])

    @classmethod
    def check(cls, config: SAAP) -> None:
        load_artefact(config)

    def open(self) -> None:
        self.recorder.__enter__()

    def close(self) -> None:
        self.recorder.__exit__()

    def of_call(self, caches: list[object]) -> Indices:
        return Indices(self, caches)


class Indices(CallHooks):
    """SAAP's hooks for one forward pass. The hooks update the bucket index of each cache and select keys with it."""

    config: SAAP

    def __init__(self, buckets: SAAPHooks, caches: list[object]) -> None:
        super().__init__(buckets.config, caches)
        self._routers, self._recorder = buckets.routers, buckets.recorder
        self._layers = {id(cache): layer for layer, cache in enumerate(caches)}
        self._caches: list[SparseCache] = []
        self._unsubmitted: list[mx.array] = []
        self._writer: SparseCache | None = None
        for layer, cache in enumerate(caches):
            router = self._routers.get(layer)
            if not isinstance(cache, SparseCache) or not isinstance(router, Router):
                continue
            index = index_of(cache)
            if index is None or index.router is not router:
                index = BucketIndex(router)
                cache.add_state(SAAP.name, index)
            index.listening = True
            self._caches.append(cache)

    def end(self) -> None:
        """Stop recording keys, because the caller may change the caches after the forward pass."""
        for cache in self._caches:
            if (index := index_of(cache)) is not None:
                index.listening, index.received = False, None
        self._recorder.clear()

    def submit(self) -> None:
        """Start computing bucket ids on the device. Unevaluated ids would keep old keys in memory."""
        if self._unsubmitted:
            mx.async_eval(self._unsubmitted)  # type: ignore[no-untyped-call]

    def refusal(self, cache: object) -> str | None:
        router = self._routers.get(self._layers.get(id(cache), -1), reasons.NOT_WRITTEN)
        return router if isinstance(router, str) else None

    def keys_written(self, cache: SparseCache) -> None:
        """Assign the new keys in ``cache`` to buckets."""
        index = index_of(cache)
        self._writer = None
        if index is None or index.received is None:
            return
        self._writer = cache
        (start, keys), index.received = index.received, None
        offset = start if cache.padding is None else start - cache.padding
        pre_rope = index.router.source.pre_rope(self._recorder, keys, offset)
        if pre_rope is None:
            return
        ids = index.write(start, pre_rope) if pre_rope.shape[2] else None
        if ids is not None:
            self._unsubmitted.append(ids)

    @contextlib.contextmanager
    def single_sequence(
        self, cache: SparseCache, sequence: int, one: SparseCache, first: int, queries: mx.array, part: mx.array
    ) -> Iterator[None]:
        index = index_of(cache)
        if index is None or self._writer is not cache:
            yield
            return
        own = index.extract(sequence, first + one.length, first)
        one.add_state(SAAP.name, own)
        stop = first + one.length - (cache.length - queries.shape[2])
        rows = slice(stop - part.shape[2], stop)
        self._recorder.record_part(queries, part, (slice(sequence, sequence + 1), slice(None), rows))
        saved = self._layers, self._caches, self._writer
        self._layers, self._caches, self._writer = {id(one): self._layers[id(cache)]}, [one], one
        try:
            yield
        finally:
            self._layers, self._caches, self._writer = saved
        index.insert(sequence, own, first, len(cache.keys))

    def step_reason(self, cache: SparseCache) -> str | None:
        refusal = self.refusal(cache)
        if refusal is not None:
            return refusal
        index = index_of(cache)
        if index is None or self._writer is not cache:
            return reasons.NOT_WRITTEN
        irreversible: str | None = index.router.source.irreversible
        return irreversible if index.length < cache.length else None

    def sizes(self, cache: SparseCache) -> dict[str, int]:
        index = index_of(cache)
        if index is None:
            return {}
        router = index.router
        network = sum(array.nbytes for array in (router.network or {}).values())
        if router.network is None:
            network = cache.key_rows.shape[1] * cache.key_rows.shape[3] * router.buckets * cache.key_rows.itemsize
        return {"buckets": router.buckets, "network": network // cache.key_rows.shape[1]}

    def step_bytes(self, cache: SparseCache, position: int, G: int, backend: str) -> int:
        """Return the bytes that a decode step moves, excluding the attended keys, which the device counts."""
        B, Hkv, _, D = cache.key_rows.shape
        moved = saap_elements(D, 0) - (D - cache.value_rows.shape[3])  # (sparq.27)
        known: int = B * Hkv * (cache.key_rows.itemsize * moved + self.sizes(cache)["network"])
        return known

    def bind(self, cache: SparseCache, G: int, backend: str, served: list[int]) -> Step:
        def step(queries: mx.array, cache: SparseCache, S: int, scale: float, hooks: Indices) -> Attended:
            return hooks.step(queries, cache, backend, served, scale)

        return step

    def step(
        self, queries: mx.array, cache: SparseCache, backend: str, served: list[int], scale: float
    ) -> tuple[mx.array, mx.array]:
        """Run a decode step of a layer, and count the keys that it attends to."""
        index, S, padding = index_of(cache), cache.length, cache.padding
        assert index is not None
        first_rows = cache.first_rows(self._caches)
        if index.unfitted(served) or needs_rebuild(index, first_rows, S, self.config):
            # Rebuild the lists of all layers together, so that the host waits for the device only once.
            others = [other for other in self._caches if other is not cache and self._updates_with(other, S, served)]
            rebuild_lists([cache, *others], S, self.config, served)
        offset = S - 1 if padding is None else S - 1 - padding
        pre_rope = index.router.source.pre_rope(self._recorder, queries, offset)
        assert pre_rope is not None, "find_source accepts layers without an inverse RoPE only if calls are recorded"
        indices, counts = attended_keys(index, pre_rope, cache.length, self.config, padding, backend)
        keys, values, length = cache.rows(backend)
        attend = registry.load("attend_indices", backend)
        attended: tuple[mx.array, mx.array] = attend(
            queries, keys, values, indices, scale=scale, counts=counts, **length
        )
        B, Hkv, _, _ = keys.shape
        if len(served) < B:
            counts = counts[mx.array(served)]
            mx.async_eval(counts)  # type: ignore[no-untyped-call]
        valid = Hkv * sum(cache.length - first_rows[sequence] for sequence in served)
        assert index.lists is not None
        listed = sum(index.lists.listed[sequence] for sequence in served)
        data = valid, listed, sum(cache.row_bytes) + keys.itemsize
        # `flatten` returns a new array that belongs to no other graph.
        self.counts.later("counted", BucketStatistics.read, data, counts.flatten())
        return attended

    def _updates_with(self, cache: SparseCache, S: int, served: list[int]) -> bool:
        """Return True if a rebuild of another layer's bucket lists at position ``S`` must include ``cache``.

        Only lists that are out of date are included. The cache must have ``S - 1`` or ``S`` tokens. The pre-RoPE keys
        of all rows must be available, and the sequences ``served`` must have centroids.
        """
        index = index_of(cache)
        if index is None or cache.keys is None or not S - 1 <= cache.length <= S:
            return False
        # A layer fits centroids in a decode step of this layer, after writing the last key.
        if index.unfitted(served) or not needs_rebuild(index, cache.first_rows(self._caches), S, self.config):
            return False
        return index.length >= cache.length or index.router.source.irreversible is None
