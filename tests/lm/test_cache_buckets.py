"""SAAP's index beside a cache: after any history every key is attended exactly once, or skipped with its bucket."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models.cache import BatchKVCache, KVCache, load_prompt_cache, save_prompt_cache

from mlx_sparse import oracle
from mlx_sparse.cache.kv_cache import SparseBatchKVCache, SparseKVCache, adopt
from mlx_sparse.cache.saap_lists import attended_keys, needs_rebuild, rebuild_lists
from mlx_sparse.cache.saap_state import TOGETHER, BucketIndex, Router, kmeans_network
from mlx_sparse.lm.rope import Source, rotate
from mlx_sparse.methods import SAAP

H, D, C = 2, 16, 8
SCALE = D**-0.5
CONFIG = SAAP(mode="online", buckets=C, probes=3, sink_tokens=2, recent_tokens=20, merge_every=16, dense_below=0)
EVERYTHING = SAAP(mode="online", buckets=C, probes=C, sink_tokens=2, recent_tokens=20, merge_every=16, dense_below=0)
PADDING = [3, 0, 1]
ROPE = nn.RoPE(D)


def router(**changes: Any) -> Router:
    centroids = mx.random.normal((H, C, D), key=mx.random.key(5))
    centroids = centroids / mx.linalg.norm(centroids, axis=-1, keepdims=True)
    values = {"centroids": centroids, "network": kmeans_network(centroids, SCALE), "source": Source(ROPE)} | changes
    return Router(scale=SCALE, buckets=C, **values)


class Decoder:
    """A cache, its index, and what it should hold: every key before RoPE."""

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
        """New keys: recorded, unless the plan could not record them."""
        cache, start = self.cache, self.cache.length
        self.before = self.before[:, :, :start]
        B = self.before.shape[0]
        # Sequences drift, so that buckets fill unevenly and in runs.
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
        """Of a step, before RoPE."""
        return self.random.normal(size=(self.before.shape[0], 2 * H, 1, D)).astype(np.float32)

    def lists(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The keys of a step at the present length, and how many there are."""
        cache, S = self.cache, self.cache.length
        index, first_rows = self.index, cache.first_rows()
        if index.unfitted(range(len(first_rows))) or needs_rebuild(index, cache, first_rows, S, self.config):
            rebuild_lists([cache], S, self.config)
        assert not needs_rebuild(index, cache, first_rows, S, self.config)
        indices, counts = attended_keys(index, mx.array(queries), S, self.config, cache.padding, "ops")
        return np.array(indices), np.array(counts)

    def check(self) -> None:
        """The lists are what the oracle's rule says, each key once."""
        cache, config, S = self.cache, self.config, self.cache.length
        if S <= config.attended:
            return  # the plan attends densely
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
        """Every id is the oracle's, to within the rounding of keys that were turned back."""
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


def test_every_key_is_attended_once_at_every_length_to_5000():
    """With every bucket visited a list is a permutation of the keys: of the window, the pending tail, the buckets."""
    decoder = Decoder(KVCache(), EVERYTHING)
    for S in range(1, 5001):
        decoder.write(1)
        if S > EVERYTHING.attended:
            indices, counts = decoder.lists(decoder.queries())
            assert (counts == S).all()
            np.testing.assert_array_equal(np.sort(indices[..., :S], axis=-1), np.broadcast_to(np.arange(S), (1, H, S)))
    decoder.check_ids()


def test_the_oracles_keys_are_attended_around_every_fold_to_5000():
    decoder, folds = Decoder(KVCache()), 0
    for S in range(1, 5001):
        decoder.write(1)
        pending = max(S - CONFIG.recent_tokens, 0) % CONFIG.merge_every
        if pending in (0, 1, CONFIG.merge_every - 1):
            decoder.check()
            folds += pending == 0
    assert folds > 300
    decoder.check_ids()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 70)),
        st.tuples(st.just("decode"), st.integers(1, 40)),
        st.tuples(st.just("unrecorded"), st.integers(1, 20)),
        st.tuples(st.just("trim"), st.integers(1, 60)),
        st.tuples(st.just("copy"), st.just(0)),
        st.tuples(st.just("reload"), st.just(0)),
    ),
    min_size=1,
    max_size=12,
)


@CACHES
@pytest.mark.parametrize("config", [EVERYTHING, CONFIG], ids=["all buckets", "some buckets"])
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(history=OPERATIONS)
def test_every_key_is_attended_once_after_any_history(make: Any, config: SAAP, history: list[tuple[str, int]]):
    decoder = Decoder(make(), config)
    decoder.write(50)
    for operation, count in history:
        if operation in ("write", "unrecorded"):
            decoder.records = operation == "write"
            decoder.write(count)
            decoder.records = True
        elif operation == "trim":
            # As mlx-lm does: not into the padding of a batch.
            decoder.cache.trim(min(count, decoder.cache.length - 5))
        elif operation == "copy":
            decoder.cache = copy.deepcopy(decoder.cache)
        elif operation == "reload":
            index = decoder.index
            decoder.cache.state = decoder.cache.state
            assert not decoder.cache.aux_states, "another text may be in it"
            decoder.cache.add_state("saap", BucketIndex(index.router))
        for _ in range(count if operation == "decode" else 1):
            decoder.write(1)
            decoder.check()
    if decoder.cache.length > config.attended:
        decoder.check_ids()


def test_decode_steps_get_their_ids_together():
    decoder = Decoder(KVCache())
    decoder.write(100)
    assert decoder.index.assigned == 100, "a piece of a prompt gets them when it is written"
    decoder.check()
    for step in range(CONFIG.merge_every - 1):  # fewer than get them together anyway
        decoder.write(1)
        decoder.check()
        assert decoder.index.assigned == 100
        assert len(decoder.index.pending) == step + 1
    decoder.write(1)
    decoder.check()
    assert decoder.index.assigned == 100 + CONFIG.merge_every
    assert not decoder.index.pending


def test_decode_steps_before_the_first_fold_get_their_ids_together_too():
    decoder = Decoder(KVCache())
    for _ in range(2 * TOGETHER + 5):
        decoder.write(1)
        assert len(decoder.index.pending) < TOGETHER
    assert decoder.index.assigned == 2 * TOGETHER
    decoder.check_ids()


def test_recorded_keys_are_indexed_without_turning_the_cache_back():
    class Broken(Source):
        def inverse_rope(self, rows: mx.array, offset: Any) -> mx.array:
            raise AssertionError("every key was recorded")

    decoder = Decoder(KVCache(), source=Broken(ROPE))
    for count in (50, 1, 1, 60, 1):
        decoder.write(count)
        decoder.check()
    decoder.cache.trim(40)
    decoder.write(1)
    decoder.check()
    decoder.check_ids()


@pytest.mark.parametrize("written", [1, CONFIG.recent_tokens + 3])
def test_a_trim_to_any_row_forgets_what_was_behind_it_and_no_more(written: int):
    """To before and behind what is listed, between rows that wait for their ids: no key is turned back after it."""

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
        twin.cache.trim(length - row)
        twin.write(written)
        twin.check()
        twin.check_ids()


def test_keys_of_unknown_history_are_turned_back_once():
    decoder = Decoder(KVCache())
    decoder.records = False
    decoder.write(100)
    decoder.records = True
    decoder.write(1)  # behind unknown rows
    assert decoder.index.length == 0
    decoder.check()
    decoder.check_ids()
    decoder.write(1)
    assert decoder.index.length == 102


@pytest.mark.parametrize("moves", ["filter", "extend", "extend by a trimmed one", "finalize"])
@pytest.mark.parametrize("fitted", [False, True], ids=["trained", "online"])
def test_ids_and_centroids_follow_rows_that_move(moves: str, fitted: bool):
    """No key that was recorded is turned back."""

    class Counting(Source):
        def inverse_rope(self, rows: mx.array, offset: Any) -> mx.array:
            turned.append(rows.shape[2])
            return super().inverse_rope(rows, offset)

    turned: list[int] = []
    own = {"centroids": None, "network": None} if fitted else {}
    decoder = Decoder(padded(), source=Counting(ROPE), **own)
    decoder.write(60)
    decoder.check()
    del turned[:]
    cache = decoder.cache
    if moves == "filter":
        cache.filter(mx.array([0, 2]))  # the padding that both share goes too
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
        del turned[:]
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
    assert not turned


def test_a_merged_batch_without_an_index_is_indexed_afresh_and_its_row_taken_out():
    decoders = [Decoder(KVCache()) for _ in range(2)]
    for decoder, length in zip(decoders, (60, 75), strict=True):
        decoder.write(length)
        decoder.check()
    batch = BatchKVCache.merge([decoder.cache for decoder in decoders])
    merged = Decoder(batch)
    assert isinstance(batch, SparseBatchKVCache)
    longest = max(decoder.before.shape[2] for decoder in decoders)
    merged.before = np.concatenate(
        [np.pad(d.before, [(0, 0), (0, 0), (longest - d.before.shape[2], 0), (0, 0)]) for d in decoders]
    )
    merged.check()
    merged.check_ids()
    one = Decoder(batch.extract(0))
    assert isinstance(one.cache, SparseKVCache)
    one.before = decoders[0].before
    one.check()
    one.check_ids()


def test_a_file_holds_what_mlx_lm_saves_and_its_keys_are_turned_back(tmp_path: Any):
    decoder = Decoder(KVCache())
    decoder.write(80)
    decoder.check()
    plain = KVCache()
    plain.update_and_fetch(*(rows[..., :80, :] for rows in decoder.cache.state[:2]))
    for name, cache in (("ours", decoder.cache), ("theirs", plain)):
        save_prompt_cache(str(tmp_path / f"{name}.safetensors"), [cache])
    ours, theirs = (mx.load(str(tmp_path / f"{name}.safetensors"), return_metadata=True) for name in ("ours", "theirs"))
    assert ours[1] == theirs[1]
    assert {name: array.tolist() for name, array in ours[0].items()} == {
        name: array.tolist() for name, array in theirs[0].items()
    }
    loaded = Decoder(load_prompt_cache(str(tmp_path / "ours.safetensors"))[0])
    loaded.before = decoder.before
    loaded.check()
    loaded.check_ids()


def test_copies_share_the_models_weights_and_nothing_else():
    decoder = Decoder(KVCache())
    decoder.write(60)
    decoder.check()
    twin = copy.deepcopy(decoder)
    assert twin.index.router is decoder.index.router
    for each, trimmed in ((decoder, 7), (twin, 30)):
        each.cache.trim(trimmed)
        each.write(20)
        each.check()
        each.check_ids()


def test_nbytes_counts_the_index_and_not_the_models_weights():
    decoder = Decoder(KVCache())
    decoder.write(60)
    own = decoder.cache.keys.nbytes + decoder.cache.values.nbytes
    assert decoder.cache.nbytes == own + 60 * H * D * 4, "the rows that wait for their ids"
    decoder.check()
    covered = 60 - CONFIG.recent_tokens - 8  # whole multiples of 16
    assert decoder.cache.nbytes == own + 60 * H * 2 + covered * H * 4 + (C + 1) * H * 4


def test_centroids_are_fitted_once_to_the_text_and_stay():
    decoder = Decoder(KVCache(), centroids=None, network=None)
    decoder.write(90)
    assert decoder.index.nbytes == 0, "nothing is kept before there is a bucket to put it in"
    decoder.check()
    centroids = decoder.index.centroids
    np.testing.assert_allclose(np.linalg.norm(np.array(centroids), axis=-1), 1, rtol=1e-5)
    # Better than the same number of directions at random.
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


def test_centroids_go_with_the_keys_that_they_were_fitted_to():
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
def test_a_text_with_fewer_keys_than_buckets_still_gets_centroids(make: Any):
    few = SAAP(mode="online", buckets=C, probes=2, sink_tokens=0, recent_tokens=2, merge_every=4, dense_below=0)
    decoder = Decoder(make(), few, centroids=None, network=None)
    decoder.write(6)
    decoder.check()


@pytest.mark.parametrize("padding", [[60], [60, 60], [59, 60]], ids=str)
def test_a_batch_of_padding_alone_gets_centroids_when_it_has_keys(padding: list[int]):
    decoder = Decoder(BatchKVCache(padding), centroids=None, network=None)
    decoder.write(60)
    rebuild_lists([decoder.cache], 60, decoder.config)
    assert decoder.index.centroids is None
    decoder.write(decoder.config.attended)  # a step over fewer keys is dense
    for _ in range(60):
        decoder.write(1)
        decoder.check()
    assert decoder.index.centroids is not None
    decoder.check_ids()


def test_the_host_waits_once_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    decoders = [Decoder(KVCache()) for _ in range(4)]
    for decoder in decoders:
        decoder.write(100)
    waits: list[int] = []
    tolist = mx.array.tolist
    stack = mx.stack
    monkeypatch.setattr(mx, "stack", lambda *args, **kwargs: waits.append(1) or stack(*args, **kwargs))
    rebuild_lists([decoder.cache for decoder in decoders], 100, CONFIG)
    assert len(waits) == 1 + len(decoders), "one small array per layer, and the one of them all that is read"
    assert tolist is mx.array.tolist
    for decoder in decoders:
        wants = {S: needs_rebuild(decoder.index, decoder.cache, [0], S, CONFIG) for S in (99, 100, 115, 116)}
        assert wants == {99: True, 100: False, 115: False, 116: True}
