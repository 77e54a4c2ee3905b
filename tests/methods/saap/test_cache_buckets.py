"""Test the index of SAAP: every key is attended once, or skipped with its bucket, after any cache operation."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_sparse import oracle
from mlx_sparse.cache.kv_cache import adopt
from mlx_sparse.lm.rope import Source, rotate
from mlx_sparse.methods import SAAP
from mlx_sparse.methods.saap.lists import attended_keys, needs_rebuild, rebuild_lists
from mlx_sparse.methods.saap.state import PENDING_ROWS, BucketIndex, Router, kmeans_network

H, D, C = 2, 16, 8
SCALE = D**-0.5
CONFIG = SAAP(mode="online", buckets=C, probes=3, sink_tokens=2, recent_tokens=20, merge_every=16, dense_below=0)
PADDING = [3, 0, 1]
ROPE = nn.RoPE(D)


def router(**changes: Any) -> Router:
    centroids = mx.random.normal((H, C, D), key=mx.random.key(5))
    centroids = centroids / mx.linalg.norm(centroids, axis=-1, keepdims=True)
    values = {"centroids": centroids, "network": kmeans_network(centroids, SCALE), "source": Source(ROPE)} | changes
    return Router(scale=SCALE, buckets=C, **values)


class Decoder:
    """A cache with its index, and the expected pre-RoPE keys."""

    def __init__(self, cache: Any, config: SAAP = CONFIG, **changes: Any) -> None:
        adopt(cache)
        self.cache, self.config, self.own = cache, config, changes
        self.cache.add_state("saap", BucketIndex(router(**changes)))
        self.random = np.random.default_rng(0)
        self.before = np.zeros((cache.left_padding.size if isinstance(cache, BatchKVCache) else 1, H, 0, D), np.float32)
        self.records = True

    @property
    def index(self) -> Any:
        return self.cache.aux_states["saap"]

    def write(self, count: int) -> None:
        """Append keys. If ``records`` is True, record the pre-RoPE keys too."""
        cache, start = self.cache, self.cache.length
        self.before = self.before[:, :, :start]
        B = self.before.shape[0]
        # A drift makes buckets fill unevenly and in runs.
        drift = np.sin(np.arange(start, start + count)[:, None] / 50 + np.arange(D))
        before = (self.random.normal(size=(B, H, count, D)) + 2 * drift).astype(np.float32)
        offset = start if cache.padding is None else start - cache.padding
        keys = rotate(ROPE, mx.array(before), offset)
        self.index.listening = True
        cache.update_and_fetch(keys, mx.array(before))
        self.index.listening = False
        assert self.index.received is not None
        (at, written), self.index.received = self.index.received, None
        assert (at, written is keys) == (start, True)
        if self.records:
            self.index.write(start, mx.array(before))
        self.before = np.concatenate([self.before, before], axis=2)

    def queries(self) -> np.ndarray:
        """Return the pre-RoPE queries of a decode step."""
        return self.random.normal(size=(self.before.shape[0], 2 * H, 1, D)).astype(np.float32)

    def lists(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the keys of a decode step, and their counts."""
        cache, S = self.cache, self.cache.length
        index, first_rows = self.index, cache.first_rows()
        if index.unfitted(range(len(first_rows))) or needs_rebuild(index, first_rows, S, self.config):
            rebuild_lists([cache], S, self.config)
        assert not needs_rebuild(index, first_rows, S, self.config)
        indices, counts = attended_keys(index, mx.array(queries), S, self.config, cache.padding, "ops")
        return np.array(indices), np.array(counts)

    def check(self) -> None:
        """Compare the lists with the oracle. Every key must occur once."""
        cache, config, S = self.cache, self.config, self.cache.length
        if S <= config.attended:
            return  # such a step is dense
        queries, index = self.queries(), self.index
        indices, counts = self.lists(queries)
        network = {name: np.array(array) for name, array in index.network.items()}
        if "centroids" in self.own:
            routes = [{name: array[b] for name, array in network.items()} for b in range(len(indices))]
            routed = [oracle.saap_route(queries[b][None], probes=config.probes, **one) for b, one in enumerate(routes)]
            visited = np.concatenate(routed)
        else:
            visited = oracle.saap_route(queries, probes=config.probes, **network)
        padding = [0] * len(indices) if cache.padding is None else cache.padding.tolist()
        ids = np.array(index.ids)
        for b, h in np.ndindex(indices.shape[:2]):
            listed = indices[b, h, : counts[b, h]]
            position = np.arange(padding[b], S)
            covered = index.lists.covered[b]
            length = covered - padding[b]
            assert length % config.merge_every == 0
            assert length <= max(len(position) - config.recent_tokens, 0) < length + config.merge_every
            exact = (position < padding[b] + config.sink_tokens) | (position >= covered)
            inside = np.isin(ids[b, h, np.minimum(position, ids.shape[2] - 1)], visited[b, h]) & ~exact
            np.testing.assert_array_equal(np.sort(listed), position[exact | inside])
            assert (indices[b, h, counts[b, h] :] == -1).all()
        ends = zip(index.lists.covered, padding, strict=True)
        assert index.lists.listed == [max(covered - first - config.sink_tokens, 0) * H for covered, first in ends]

    def check_ids(self) -> None:
        """Compare the bucket ids with the oracle, up to the rounding of the inverse RoPE."""
        index, first = self.index, [0] if self.cache.padding is None else self.cache.padding.tolist()
        index.complete(self.cache, self.config)
        assert index.assigned == index.length == self.cache.length
        before, centroids = (
            self.before[:, :, : index.assigned].astype(np.float64),
            np.array(index.centroids, np.float64),
        )
        products = before @ centroids.swapaxes(-1, -2)
        chosen = np.take_along_axis(products, np.array(index.ids)[..., None].astype(np.int64), axis=-1)[..., 0]
        for b, start in enumerate(first):
            np.testing.assert_allclose(chosen[b, :, start:], products[b, :, start:].max(axis=-1), rtol=1e-5)


def single() -> Any:
    return KVCache()


def padded() -> Any:
    return BatchKVCache(PADDING)


CACHES = pytest.mark.parametrize("make", [single, padded])


def test_attended_keys_equal_the_oracle_around_every_rebuild():
    decoder, folds = Decoder(KVCache()), 0
    for S in range(1, 5001):
        decoder.write(1)
        pending = max(S - CONFIG.recent_tokens, 0) % CONFIG.merge_every
        if pending in (0, 1, CONFIG.merge_every - 1):
            decoder.check()
            folds += pending == 0
    assert folds > 300
    decoder.check_ids()


def test_bucket_ids_of_decode_steps_are_assigned_in_groups():
    decoder = Decoder(KVCache())
    decoder.write(100)
    assert decoder.index.assigned == 100, "the ids of a chunk are assigned when it is written"
    decoder.check()
    for step in range(CONFIG.merge_every - 1):  # fewer than PENDING_ROWS
        decoder.write(1)
        decoder.check()
        assert decoder.index.assigned == 100
        assert len(decoder.index.pending) == step + 1
    decoder.write(1)
    decoder.check()
    assert decoder.index.assigned == 100 + CONFIG.merge_every
    assert not decoder.index.pending


def test_bucket_ids_are_assigned_in_groups_before_the_first_rebuild():
    decoder = Decoder(KVCache())
    for _ in range(2 * PENDING_ROWS + 5):
        decoder.write(1)
        assert len(decoder.index.pending) < PENDING_ROWS
    assert decoder.index.assigned == 2 * PENDING_ROWS
    decoder.check_ids()


@pytest.mark.parametrize("written", [1, CONFIG.recent_tokens + 3])
def test_trim_to_any_row_keeps_the_index_of_the_remaining_rows(written: int):
    """Trim to rows on both sides of the end of the lists and of the assigned ids. No key needs the inverse RoPE."""

    class Broken(Source):
        def inverse_rope(self, rows: mx.array, offset: Any) -> mx.array:
            raise AssertionError("every key was recorded")

    decoder = Decoder(KVCache(), source=Broken(ROPE))
    for count in (70, 1, 1, 5, 3):
        decoder.write(count)
        decoder.check()
    (covered,), length = decoder.index.lists.covered, decoder.cache.length
    assert decoder.index.assigned < length - 8
    for row in range(covered - 3, length):
        twin = copy.deepcopy(decoder)
        assert twin.index.router is decoder.index.router, "copies share the model's weights"
        twin.cache.trim(length - row)
        twin.write(written)
        twin.check()
        twin.check_ids()


def test_unrecorded_keys_get_the_inverse_rope_once():
    decoder = Decoder(KVCache())
    decoder.records = False
    decoder.write(100)
    decoder.records = True
    decoder.write(1)  # after unrecorded rows
    assert decoder.index.length == 0
    decoder.check()
    decoder.check_ids()
    decoder.write(1)
    assert decoder.index.length == 102


@pytest.mark.parametrize("moves", ["filter", "extend", "extend by a trimmed one", "finalize"])
@pytest.mark.parametrize("fitted", [False, True], ids=["trained", "online"])
def test_ids_and_centroids_follow_moved_rows(moves: str, fitted: bool):
    """Move rows of a batch. Recorded keys must not need the inverse RoPE."""

    class Counting(Source):
        def inverse_rope(self, rows: mx.array, offset: Any) -> mx.array:
            inverted.append(rows.shape[2])
            return super().inverse_rope(rows, offset)

    inverted: list[int] = []
    own = {"centroids": None, "network": None} if fitted else {}
    decoder = Decoder(padded(), source=Counting(ROPE), **own)
    decoder.write(60)
    decoder.check()
    del inverted[:]
    cache = decoder.cache
    if moves == "filter":
        cache.filter(mx.array([0, 2]))  # removes the shared padding too
        decoder.before = decoder.before[[0, 2], :, 1:]
    elif moves.startswith("extend"):
        other = Decoder(BatchKVCache([0]))
        other.cache.add_state("saap", BucketIndex(decoder.index.router))
        other.own = own
        other.write(70)
        other.check()
        if moves != "extend":
            other.write(5)
            other.cache.trim(5)
            other.before = other.before[:, :, :70]
        del inverted[:]
        cache.extend(other.cache)
        longer = other.before.shape[2] - 60
        before = np.pad(decoder.before, [(0, 0), (0, 0), (longer, 0), (0, 0)])
        decoder.before = np.concatenate([before, other.before])
    else:
        cache.prepare(right_padding=[2, 0, 5], lengths=[6, 8, 3])
        decoder.write(8)
        cache.finalize()
        decoder.before = np.stack(
            [np.roll(rows, by, axis=1) for rows, by in zip(decoder.before, [2, 0, 5], strict=True)]
        )
    assert decoder.index.length == cache.length
    decoder.check()
    decoder.check_ids()
    decoder.write(1)
    decoder.check()
    assert not inverted


def test_nbytes_counts_the_index_without_model_weights():
    decoder = Decoder(KVCache())
    decoder.write(60)
    own = decoder.cache.keys.nbytes + decoder.cache.values.nbytes
    assert decoder.cache.nbytes == own + 60 * H * D * 4, "rows without ids"
    decoder.check()
    covered = 60 - CONFIG.recent_tokens - 8  # whole multiples of 16
    assert decoder.cache.nbytes == own + 60 * H * 2 + covered * H * 4 + (C + 1) * H * 4


def test_centroids_are_fitted_once_and_stay_fixed():
    decoder = Decoder(KVCache(), centroids=None, network=None)
    decoder.write(90)
    assert decoder.index.nbytes == 0, "there are no buckets yet"
    decoder.check()
    centroids = decoder.index.centroids
    np.testing.assert_allclose(np.linalg.norm(np.array(centroids), axis=-1), 1, rtol=1e-5)
    # These centroids fit better than random directions.
    before = decoder.before.astype(np.float64)
    best = (before @ np.array(centroids, np.float64).swapaxes(-1, -2)).max(axis=-1).mean()
    assert best > 1.2 * (before @ np.array(router().centroids, np.float64).swapaxes(-1, -2)).max(axis=-1).mean()
    for count in (1, 40, 1):
        decoder.write(count)
        decoder.check()
    decoder.cache.trim(40)
    decoder.write(1)
    decoder.check()
    assert decoder.index.centroids is centroids
    twin = copy.deepcopy(decoder)
    twin.write(1)
    twin.check()
    assert mx.array_equal(twin.index.centroids, centroids)


def test_centroids_are_fitted_again_after_a_trim_of_fitted_keys():
    decoder = Decoder(KVCache(), centroids=None, network=None)
    decoder.write(90)
    decoder.check()
    centroids = decoder.index.centroids
    twin = copy.deepcopy(decoder)
    for one, trimmed in ((decoder, 60), (twin, 90)):
        one.cache.trim(trimmed)
        one.write(80)
        one.check()
        one.check_ids()
        fresh = Decoder(KVCache(), centroids=None, network=None)
        fresh.cache.state = one.cache.state
        fresh.cache.add_state("saap", BucketIndex(one.index.router))
        fresh.lists(one.queries())
        assert mx.allclose(one.index.centroids, fresh.index.centroids, atol=1e-5)
        assert not mx.allclose(one.index.centroids, centroids, atol=1e-2)


@CACHES
def test_centroids_exist_with_fewer_keys_than_buckets(make: Any):
    few = SAAP(mode="online", buckets=C, probes=2, sink_tokens=0, recent_tokens=2, merge_every=4, dense_below=0)
    decoder = Decoder(make(), few, centroids=None, network=None)
    decoder.write(6)
    decoder.check()


@pytest.mark.parametrize("padding", [[60], [60, 60], [59, 60]], ids=str)
def test_batch_of_padding_gets_centroids_with_its_first_keys(padding: list[int]):
    decoder = Decoder(BatchKVCache(padding), centroids=None, network=None)
    decoder.write(60)
    rebuild_lists([decoder.cache], 60, decoder.config)
    assert decoder.index.centroids is None
    decoder.write(decoder.config.attended)  # decode steps over fewer keys are dense
    for _ in range(60):
        decoder.write(1)
        decoder.check()
    assert decoder.index.centroids is not None
    decoder.check_ids()


def test_rebuild_synchronizes_once_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    decoders = [Decoder(KVCache()) for _ in range(4)]
    for decoder in decoders:
        decoder.write(100)
    waits: list[int] = []
    tolist = mx.array.tolist
    stack = mx.stack
    monkeypatch.setattr(mx, "stack", lambda *args, **kwargs: waits.append(1) or stack(*args, **kwargs))
    rebuild_lists([decoder.cache for decoder in decoders], 100, CONFIG)
    assert len(waits) == 1 + len(decoders), "one small array per layer, and one array of all layers that is read"
    assert tolist is mx.array.tolist
    for decoder in decoders:
        wants = {S: needs_rebuild(decoder.index, [0], S, CONFIG) for S in (99, 100, 115, 116)}
        assert wants == {99: True, 100: False, 115: False, 116: True}
