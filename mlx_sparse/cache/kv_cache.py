"""KV caches that attend sparsely: mlx-lm's own caches with something beside them that their ``state`` does not show.

A cache is adopted in place (`adopt`): its keys, values and offset stay mlx-lm's, so files, trimming, merging and
batching work as before. What a method keeps `beside` follows the cache through trim, growth, copies and batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from ..common.packed_rows import PackedRows, Rows
from ..common.several import fold
from ..methods import Method, Prefill, registry
from ..methods.table import WHOLE_BUFFERS
from .state import State

# Bytes of keys and values that are unpacked at a time for a prompt, of one KV head at least.
UNPACKED = 16 << 20

# Query heads, their queries, keys, values and further parameters to what is made of them, along axis 1.
Run = Callable[[slice, mx.array, Any, Any, dict[str, int]], tuple[mx.array, ...]]


@dataclass(frozen=True)
class Full:
    """Settings and keys with which a sample kept too many blocks to be worth while."""

    config: Prefill
    fullest: float
    keys: int

    def holds(self, config: Prefill, fullest: float, S: int) -> bool:
        """Whether it need not be tried over ``S`` keys: density falls slowly, so not before they have doubled."""
        return (self.config, self.fullest) == (config, fullest) and self.keys <= S < 2 * self.keys


class SparseCache:
    """Mixed into mlx-lm's caches: `attend` for decode steps, `attend_prompt` for prompts, and what methods keep.

    Attributes:
        beside: what is kept beside keys and values, by method.
        sharers: machines that hold the rows of its sequence.
    """

    keys: Any
    values: Any
    beside: Mapping[str, State] = MappingProxyType({})
    sharers = 1
    _full: tuple[Full | None, ...] = ()  # one, or one for each sequence of a batch; none where rows are new

    length_name = "offset"  # where mlx-lm's class keeps the number of rows in use

    @property
    def key_rows(self) -> Rows:
        """The buffer of keys ``(B, Hkv, capacity, D)``."""
        rows: mx.array = self.keys
        return rows

    @property
    def value_rows(self) -> Rows:
        """The buffer of values ``(B, Hkv, capacity, D)``."""
        rows: mx.array = self.values
        return rows

    @property
    def row_bytes(self) -> int:
        """Of a key or value of one head."""
        rows = self.key_rows
        return rows.row_bytes if isinstance(rows, PackedRows) else rows.shape[3] * rows.itemsize

    @property
    def length(self) -> int:
        """Rows in use."""
        return int(getattr(self, self.length_name))

    @property
    def position(self) -> int:
        """Positions of the sequence, of which these rows may be a share."""
        return self.length

    def rows_before(self, position: int) -> int:
        """Rows that hold earlier positions."""
        return position

    def own(self, start: int, rows: mx.array) -> tuple[int, mx.array]:
        """Of ``rows (B, H, n, D)`` at positions from ``start`` on those that this cache keeps, and where they begin."""
        return start, rows

    def runs(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Its rows ``[start, stop)`` as runs of consecutive positions: first row, row behind the last, position."""
        return [(start, stop, start)]

    @property
    def padding(self) -> mx.array | None:
        """``(B,)`` first valid row of each sequence, or None."""
        return None

    @property
    def state(self) -> Any:
        """What mlx-lm saves and evaluates: exactly its own."""
        return super().state  # type: ignore[misc]

    @state.setter
    def state(self, value: Any) -> None:
        self._moved(lambda method, state: None)
        self._full = ()
        super(SparseCache, type(self)).state.fset(self, value)  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        own: int = super().nbytes  # type: ignore[misc]
        return own + sum(state.nbytes for state in self.beside.values())

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        for state in self.beside.values():
            state.receive(self.length, keys)
        if any(self._full):
            rows = [self.length - first for first in self.first_rows()]
            kept = zip(self._full, rows, strict=False)  # one for all rows of a batch that nothing pads
            self._full = tuple(full if full and full.keys <= length else None for full, length in kept)
        return super().update_and_fetch(keys, values)  # type: ignore[misc]

    def first_rows(self, others: Iterable[Any] = ()) -> list[int]:
        """The first valid row of each sequence. Of a batch, ``others`` are the caches of the other layers."""
        return [0] * self.key_rows.shape[0]

    def hold(self, method: str, state: State) -> State:
        """Keep ``state`` beside the rows from now on."""
        self.beside = {**self.beside, method: state}
        return state

    def state_of(self, method: str) -> State | None:
        """What ``method`` keeps beside the rows, begun if need be; None if it keeps nothing that a cache can begin."""
        state = self.beside.get(method)
        if state is None and (begin := registry.load_state(method)) is not None:
            state = self.hold(method, begin())
        return state

    def _moved(self, follow: Callable[[str, State], State | None]) -> None:
        """Rows move, or are others: only what follows them stays."""
        followed = {method: follow(method, state) for method, state in self.beside.items()}
        self.beside = {method: state for method, state in followed.items() if state is not None}

    @contextlib.contextmanager
    def earlier(self, rows: int) -> Iterator[None]:
        """Meanwhile the cache is as it was before its last ``rows`` were written, to all who ask it."""
        length = getattr(self, self.length_name)
        setattr(self, self.length_name, length - rows)
        try:
            yield
        finally:
            setattr(self, self.length_name, length)

    def attend(self, queries: mx.array, config: Method, *, scale: float, backend: str) -> tuple[mx.array, mx.array]:
        """One decode step over this cache.

        Args:
            queries: ``(B, Hq, L, D)``; the keys and values of the first have been written. Several make one choice of
                keys, among the same (several.2).
            config: method and settings, as `Method.for_model` resolves them.

        Returns:
            ``out (B, Hq * L, 1, D)`` and float32 ``lse (B, Hq * L, 1)`` of the attended keys.
        """
        G = queries.shape[1] // self.key_rows.shape[1]
        keys, values, length = self.rows(backend)
        state = self.state_of(config.name)
        parameters = config.parameters(G)
        if state is not None:
            parameters |= state.read(self, config, G, whole=bool(length))
        function = registry.load(config.name, backend)
        out, lse, *returned = function(
            fold(queries), keys, values, scale=scale, left_padding=self.padding, **parameters, **length
        )
        if state is not None and returned:
            state.take_back(*returned)
        return out, lse

    def select_prompt(
        self, queries: mx.array, config: Prefill, *, scale: float, backend: str, fullest: float
    ) -> mx.array | None:
        """The blocks for `attend_prompt` if they are at most the share ``fullest`` of all, for which this waits."""
        S = self.length
        if any(full is not None and full.holds(config, fullest, S) for full in self._full):
            return None
        select = registry.load(f"{config.name}_select", backend)

        def choose(heads: slice, queries: mx.array, keys: Any, values: Any, length: Any) -> tuple[mx.array]:
            return (select(queries, keys, scale=scale, **config.parameters(), **length),)

        (blocks,) = self.by_heads(choose, queries, backend)
        pairs = config.layout(queries.shape[2], S).causal_pairs
        kept: Any = (blocks >= 0).sum().item()
        full = kept > fullest * pairs * queries.shape[0] * queries.shape[1]
        self._full = (Full(config, fullest, S),) if full else ()
        return None if full else blocks

    def attend_prompt(
        self, queries: mx.array, config: Prefill, *, scale: float, backend: str, blocks: mx.array | None = None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """A piece of a prompt over this cache, which is not a padded batch.

        Args:
            queries: ``(B, Hq, L, D)``; their keys and values have been written.
            config: method and parameters, as `Prefill.at` gives them for this context.
            blocks: what `select_prompt` chose, if it was asked.

        Returns:
            ``out (B, Hq, L, D)``, float32 ``lse (B, Hq, L)`` of the attended keys and the blocks they are in,
            ``(B, Hq, R, N)``.
        """
        name = config.name if blocks is None else "attend_blocks"
        function = registry.load(name, backend)

        def attend(heads: slice, queries: mx.array, keys: Any, values: Any, length: Any) -> tuple[mx.array, ...]:
            if blocks is None:
                parameters = config.parameters()
            else:
                parameters = {"blocks": blocks[:, heads], "block_size": config.block_size}
            found: tuple[mx.array, ...] = function(queries, keys, values, scale=scale, **parameters, **length)
            return found

        out, lse, *chosen = self.by_heads(attend, queries, backend)
        return out, lse, chosen[0] if blocks is None else blocks

    def rows(self, backend: str) -> tuple[Any, Any, dict[str, int]]:
        """Keys, values and further parameters: whole buffers and the length if ``backend`` reads those, or slices."""
        S = self.length
        if backend in WHOLE_BUFFERS:
            return self.key_rows, self.value_rows, {"length": S}
        return self.keys[..., :S, :], self.values[..., :S, :], {}

    def by_heads(self, run: Run, queries: mx.array, backend: str) -> tuple[mx.array, ...]:
        """What ``run`` makes of ``queries (B, Hq, L, D)`` and `rows`: of all heads at once, or of some after others."""
        keys, values, length = self.rows(backend)
        return run(slice(None), queries, keys, values, length)


class SparseKVCache(SparseCache, KVCache):
    """`mlx_lm.models.cache.KVCache` that can attend sparsely."""

    @classmethod
    def merge(cls, caches: Any) -> Any:
        merged = super().merge(caches)  # type: ignore[no-untyped-call]
        kept = [getattr(cache, "beside", {}) for cache in caches]
        for method, state in kept[0].items():
            parts = [(one.get(method), cache.offset) for one, cache in zip(kept, caches, strict=True)]
            if (found := state.merge(parts)) is not None:
                adopt(merged)
                merged.hold(method, found)
        return merged

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        packed: Any = super().to_quantized(group_size=group_size, bits=bits)
        for method, state in self.beside.items():
            if (found := state.pack()) is not None:
                adopt(packed)
                packed.hold(method, found)
        return packed


class SparseQuantizedKVCache(SparseCache, QuantizedKVCache):
    """`mlx_lm.models.cache.QuantizedKVCache` that can attend sparsely. Steps read its rows as they are."""

    @property
    def key_rows(self) -> PackedRows:
        return PackedRows.kept(self.keys, self.bits)

    @property
    def value_rows(self) -> PackedRows:
        return PackedRows.kept(self.values, self.bits)

    def rows(self, backend: str) -> tuple[PackedRows, PackedRows, dict[str, int]]:
        keys, values, S = self.key_rows, self.value_rows, self.length
        if backend in WHOLE_BUFFERS:
            return keys, values, {"length": S}
        return keys.first(S), values.first(S), {}

    def by_heads(self, run: Run, queries: mx.array, backend: str) -> tuple[mx.array, ...]:
        # The rows of as many KV heads as `UNPACKED` bytes hold are there, and no others until these are done with.
        keys, values, S = self.key_rows, self.value_rows, self.length
        B, Hkv, _, D = keys.shape
        G, step = queries.shape[1] // Hkv, max(1, UNPACKED // (2 * B * S * D * keys.itemsize))
        length = {"length": S} if backend in WHOLE_BUFFERS else {}
        parts: list[tuple[mx.array, ...]] = []
        for first in range(0, Hkv, step):
            if parts:
                keys, values = keys.after(parts[-1][0]), values.after(parts[-1][0])
            kv, heads = slice(first, first + step), slice(first * G, (first + step) * G)
            parts.append(run(heads, queries[:, heads], keys[:, kv, :S], values[:, kv, :S], length))
        return tuple(mx.concatenate(list(found), axis=1) for found in zip(*parts, strict=True))


class SparseBatchKVCache(SparseCache, BatchKVCache):
    """`mlx_lm.models.cache.BatchKVCache`, the server's left-padded batch, that can attend sparsely."""

    length_name = "_idx"
    padding_mask: mx.array | None = None
    _first: list[int] | None = None  # row of each sequence; None: not looked at since rows moved
    # While mlx-lm processes ragged prompts, which it pads on the right: where each ends, of which `lm.seam` takes note.
    prompt_ends: list[int] | None = None

    @property
    def padding(self) -> mx.array | None:
        padding: mx.array = self.left_padding
        return padding

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        mask: mx.array = super().make_mask(N, return_array, **kwargs)
        # Remembered so that a mask that says no more than `left_padding` is known by identity.
        self.padding_mask = mask if kwargs.get("window_size") is None else None
        return mask

    def _moved(self, follow: Callable[[str, State], State | None]) -> None:
        super()._moved(follow)
        self._first = None

    def first_rows(self, others: Iterable[Any] = ()) -> list[int]:
        # Finding out waits for the GPU: once for each composition of the batch, and for all layers together.
        if self._first is None:
            batches = [entry for entry in (self, *others) if isinstance(entry, SparseBatchKVCache)]
            batches = [entry for entry in batches if entry.left_padding.size == self.left_padding.size]
            found: Any = mx.stack([entry.left_padding for entry in batches]).tolist()
            for entry, first in zip(batches, found, strict=True):
                entry._first = first
        assert self._first is not None
        return self._first

    def extents(self, others: Iterable[Any]) -> list[tuple[int, int]] | None:
        """Rows ``[first, stop)`` of each sequence; None where mlx-lm pads on the right and has not said how much.

        Args:
            others: as for `first_rows`.
        """
        first_rows = self.first_rows(others)
        ends: list[int] | None = [self.length] * len(first_rows)
        if getattr(self, "_right_padding", None) is not None:  # a cache from a file has no such attribute
            ends = self.prompt_ends
        if ends is None:
            return None
        ends = [min(end, self.length) for end in ends]
        return [(min(first, end), end) for first, end in zip(first_rows, ends, strict=True)]

    def alone(self, sequence: int, first: int, stop: int) -> SparseKVCache:
        """The sequence in rows ``[first, stop)`` as a cache of its own; `keep` what it learns."""
        one = SparseKVCache()  # type: ignore[no-untyped-call]
        # From row 0 on it is a view of the buffer, which kernels can read as it is.
        rows = slice(0, None) if first == 0 else slice(first, stop)
        one.keys, one.values = (array[sequence : sequence + 1, :, rows] for array in (self.keys, self.values))
        one.offset = stop - first
        one._full = self._fulls[sequence : sequence + 1]
        return one

    def keep(self, sequence: int, one: SparseKVCache) -> None:
        """Remember that the sample of a sequence was too full, or no longer is."""
        known = self._fulls
        self._full = (*known[:sequence], *(one._full or (None,)), *known[sequence + 1 :])

    @property
    def _fulls(self) -> tuple[Full | None, ...]:
        return self._full or (None,) * self.left_padding.size

    # These move rows.

    def prepare(self, **kwargs: Any) -> None:
        self._moved(lambda method, state: state.roll(None, self.length))
        super().prepare(**kwargs)  # type: ignore[no-untyped-call]

    def finalize(self) -> None:
        self._moved(lambda method, state: state.roll(self._right_padding, self.length))
        super().finalize()  # type: ignore[no-untyped-call]

    def filter(self, batch_indices: Any) -> None:
        length = self.length
        kept: Any = mx.array(batch_indices).tolist()
        fulls = self._fulls
        self._full = tuple(fulls[sequence] for sequence in kept)
        super().filter(batch_indices)  # type: ignore[no-untyped-call]
        self._moved(lambda method, state: state.filter(kept, length, length - self.length))

    def extend(self, other: Any) -> None:
        adopt(other)
        self._full = self._fulls + other._fulls
        self._moved(lambda method, state: state.join(self, other.beside.get(method), other))
        super().extend(other)  # type: ignore[no-untyped-call]

    def extract(self, idx: int) -> Any:
        one = super().extract(idx)  # type: ignore[no-untyped-call]
        for method, state in self.beside.items():
            if (found := state.extract(idx, self.length, self.length - one.offset)) is not None:
                adopt(one)
                one.hold(method, found)
        return one


# mlx-lm saves a cache under its class name and finds it again by that name: files stay its own.
SparseKVCache.__name__ = KVCache.__name__
SparseBatchKVCache.__name__ = BatchKVCache.__name__
SparseQuantizedKVCache.__name__ = QuantizedKVCache.__name__

SPARSE_CLASSES: dict[type, type] = {
    KVCache: SparseKVCache,
    BatchKVCache: SparseBatchKVCache,
    QuantizedKVCache: SparseQuantizedKVCache,
}


def adopt(cache: Any) -> None:
    """Let ``cache`` attend sparsely, in place, if it is one of mlx-lm's plain caches; lists and CacheList too."""
    if isinstance(cache, (list, tuple)):
        for entry in cache:
            adopt(entry)
    elif hasattr(cache, "caches"):
        adopt(cache.caches)
    elif type(cache) in SPARSE_CLASSES:
        cache.__class__ = SPARSE_CLASSES[type(cache)]


def is_padding_mask(mask: Any, caches: Iterable[Any]) -> bool:
    """Whether ``mask`` is causal and no more, or what a batch of ``caches`` made of its left padding besides."""
    if isinstance(mask, str):
        return True  # mlx-lm knows one: "causal"
    return any(isinstance(cache, SparseBatchKVCache) and cache.padding_mask is mask for cache in caches)
