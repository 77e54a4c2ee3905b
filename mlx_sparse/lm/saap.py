"""SAAP's part of a plan: the routers of a model's layers, and the indices of its caches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from .. import artefact as artefacts
from ..cache.kv_cache import SparseCache
from ..cache.saap_state import BucketIndex, Router, fold, kmeans_network
from ..checks import ConfigError
from ..common import reasons
from ..methods import SAAP, registry
from .figures import BucketCounts
from .rope import Recorder, Source
from .tracing import Seen, find_sources


def load_artefact(config: SAAP) -> artefacts.Artefact | None:
    """The file that ``config`` names; None in the online mode.

    Raises:
        ArtefactError: it cannot be read.
        ConfigError: there is none where one is needed, or it has fewer buckets than ``probes``.
    """
    if config.file is None:
        return None
    artefact = artefacts.load(config.file)
    if config.probes > artefact.buckets:
        most = f"the {artefact.buckets} buckets of {config.file}"
        raise ConfigError(f"probes: expected at most {most}, got {config.probes}.")
    return artefact


def find_routers(config: SAAP, model: Any) -> dict[int, Router | str]:
    """What routes each attention layer, or why it stays dense, by the position of its cache. ``model`` is not enabled.

    Raises:
        ArtefactError, ConfigError: as `load_artefact`, or the artefact is another model's.
    """
    artefact = load_artefact(config)
    if artefact is not None:
        artefact.check_model(model)
    scales: dict[int, float] = {}

    def note_scale(seen: Seen) -> None:
        scales[seen.layer] = seen.scale

    found: dict[int, Router | str] = {}
    for place, (layer, source) in enumerate(sorted(find_sources(model, note_scale).items())):
        scale = scales[layer]
        if place < config.dense_layers:
            found[layer] = reasons.FIRST_LAYERS
        elif artefact is not None and artefact.space == "roped":
            # The baseline that clusters keys as they are cached.
            found[layer] = _trained(config.mode, artefact, layer, Source(), scale)
        elif isinstance(source, str):
            found[layer] = source
        elif artefact is not None:
            found[layer] = _trained(config.mode, artefact, layer, source, scale)
        else:
            found[layer] = source.irreversible or Router(source, scale, config.fitted_buckets)
    return found


def _trained(mode: str, artefact: artefacts.Artefact, layer: int, source: Source, scale: float) -> Router | str:
    """The router that the artefact has for a layer, or why there is none."""
    arrays = artefact.layers.get(layer)
    if arrays is None:
        return reasons.NOT_IN_ARTEFACT
    if mode == "kmeans":
        network = kmeans_network(arrays.centroids, scale)
    elif arrays.trained:
        network = {name: array for name, array in arrays.arrays().items() if name != "centroids"}
    else:
        return reasons.NOT_TRAINED
    return Router(source, scale, artefact.buckets, arrays.centroids, network)


class Buckets:
    """SAAP of one model, the same for all its calls: settings, and what routes the layers."""

    def __init__(self, config: SAAP, routers: dict[int, Router | str], model: Any) -> None:
        self.config = config
        self.routers = routers
        self.recorder = Recorder(model)
        # Now: only the thread that made an array may evaluate it, and all threads route with these.
        mx.eval([[router.centroids, router.network] for router in routers.values() if isinstance(router, Router)])

    def open(self) -> None:
        """From now on the model's ropes are watched."""
        self.recorder.__enter__()

    def close(self) -> None:
        self.recorder.__exit__()

    def of_call(self, caches: list[Any]) -> Indices:
        """A call of the model starts with these caches."""
        return Indices(self, caches)


class Indices:
    """The indices of the caches of one call: keeps them up to date, and attends by them."""

    def __init__(self, buckets: Buckets, caches: list[Any]) -> None:
        self.config = buckets.config
        self._routers, self._recorder = buckets.routers, buckets.recorder
        self._layers = {id(cache): layer for layer, cache in enumerate(caches)}
        self._caches: list[SparseCache] = []
        self._unsubmitted: list[mx.array] = []
        self._writer: SparseCache | None = None
        self._counts = BucketCounts()
        for layer, cache in enumerate(caches):
            router = self._routers.get(layer)
            if not isinstance(cache, SparseCache) or not isinstance(router, Router):
                continue
            if cache.index is None or cache.index.router is not router:
                cache.index = BucketIndex(router)
            cache.index.listening = True
            self._caches.append(cache)

    def end(self) -> None:
        """The call is over, well or not: its caches are the caller's alone again."""
        for cache in self._caches:
            if cache.index is not None:
                cache.index.listening, cache.index.received = False, None
        self._recorder.clear()

    def submit(self) -> BucketCounts | None:
        """Start computing what was counted, and what prompts assigned: waiting for that would hold on to the keys."""
        if self._unsubmitted:
            mx.async_eval(self._unsubmitted)  # type: ignore[no-untyped-call]
        return self._counts.submit()

    def refusal(self, cache: Any) -> str | None:
        """Why the layer of ``cache`` stays dense at every step."""
        router = self._routers.get(self._layers.get(id(cache), -1), reasons.NOT_WRITTEN)
        return router if isinstance(router, str) else None

    def take_in(self, cache: SparseCache) -> None:
        """The layer has written keys: index them."""
        index = cache.index
        self._writer = None
        if index is None or index.received is None:
            return
        self._writer = cache
        (start, keys), index.received = index.received, None
        offset = start if cache.padding is None else start - cache.padding
        before = index.router.source.before(self._recorder, keys, offset)
        if before is None:
            return
        ids = index.write(start, before)
        if ids is not None:
            self._unsubmitted.append(ids)

    @contextlib.contextmanager
    def lending(
        self, cache: SparseCache, sequence: int, one: SparseCache, first: int, queries: mx.array, part: mx.array
    ) -> Iterator[None]:
        """Meanwhile ``one`` is a sequence of ``cache`` from row ``first`` on, for one step of that layer.

        Args:
            queries: of the batch; ``part`` is the last one of the sequence among them.
        """
        if cache.index is None or self._writer is not cache:
            yield
            return
        one.index = cache.index.alone(sequence, first, first + one.length)
        at = first + one.length - (cache.length - queries.shape[2])
        self._recorder.note_part(queries, part, (slice(sequence, sequence + 1), slice(None), slice(at - 1, at)))
        kept = self._layers, self._caches, self._writer
        self._layers, self._caches, self._writer = {id(one): self._layers[id(cache)]}, [one], one
        try:
            yield
        finally:
            self._layers, self._caches, self._writer = kept
        cache.index.put(sequence, one.index, first, len(cache.keys))

    def step_reasons(self, cache: SparseCache) -> Iterator[str]:
        """Why this step of a layer attends densely. The first reason counts; others need not hold then."""
        refusal = self.refusal(cache)
        if refusal is not None:
            yield refusal
        if cache.index is None or self._writer is not cache:
            yield reasons.NOT_WRITTEN
            return
        irreversible = cache.index.router.source.irreversible
        if irreversible is not None and cache.index.length < cache.length:
            yield irreversible

    def sizes(self, cache: SparseCache) -> dict[str, int]:
        """What a step's `Step` says about the index."""
        if cache.index is None:
            return {}
        router = cache.index.router
        network = sum(array.nbytes for array in (router.network or {}).values())
        if router.network is None:
            network = cache.keys.shape[1] * cache.keys.shape[3] * router.buckets * cache.keys.itemsize
        return {"buckets": router.buckets, "network": network // cache.keys.shape[1]}

    def step(
        self, queries: mx.array, cache: SparseCache, served: list[int], *, scale: float, backend: str
    ) -> tuple[mx.array, mx.array]:
        """One decode step of a layer, whose keys have been taken in: ``out`` and ``lse``.

        Args:
            served: the sequences whose results are wanted; those of the others are anything.
        """
        index, S, padding = cache.index, cache.length, cache.padding
        assert index is not None
        first_rows = cache.first_rows(self._caches)
        if index.unfitted(served) or index.due(first_rows, S, self.config):
            # All layers at once: they wait for the device once.
            others = [one for one in self._caches if one is not cache and self._folds_along(one, S, served)]
            fold([cache, *others], S, self.config, served)
        offset = S - 1 if padding is None else S - 1 - padding
        before = index.router.source.before(self._recorder, queries, offset)
        assert before is not None, "find_source checks that it is recorded where it cannot be turned back"
        indices, counts = index.lists(before, S, self.config, padding, backend)
        keys, values, length = cache.rows(backend)
        attend = registry.load("attend_indices", backend)
        attended: tuple[mx.array, mx.array] = attend(
            queries, keys, values, indices, scale=scale, counts=counts, **length
        )
        B, Hkv, _, D = keys.shape
        if len(served) < B:
            counts = counts[mx.array(served)]
            mx.async_eval(counts)  # type: ignore[no-untyped-call]
        valid = Hkv * sum(S - first_rows[sequence] for sequence in served)
        listed = sum(index.listed[sequence] for sequence in served)
        self._counts.add(counts, (2 * D + 1) * keys.itemsize, valid=valid, listed=listed)
        return attended

    def _folds_along(self, cache: SparseCache, S: int, served: list[int]) -> bool:
        """Whether the step of another layer at length ``S``, taken or to come, wants a fold too, and can have it."""
        index = cache.index
        if index is None or cache.keys is None or not S - 1 <= cache.length <= S:
            return False
        # Centroids are fitted at the layer's own step, when its last key is there.
        if index.unfitted(served) or not index.due(cache.first_rows(self._caches), S, self.config):
            return False
        return index.length >= cache.length or index.router.source.irreversible is None
