"""Add sparse attention and auxiliary cache state to mlx-lm's KV caches.

The auxiliary state stays valid when a cache is trimmed, extended, copied or batched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from ..core import registry
from ..core.base import Method, Prefill
from ..core.packed_rows import PackedRows, Rows
from .state import State

Length = dict[str, int]  # keyword argument ``length`` of functions that take whole buffers; empty for the others

# Function for `SparseCache.by_heads`. Arguments: slice of the query heads, queries of these heads, keys, values, and
# keyword arguments with the length. The heads are on axis 1 of every result.
Run = Callable[[slice, mx.array, Rows, Rows, Length], tuple[mx.array, ...]]

# Result of a decode step: ``out (B, Hq, 1, D)``, float32 ``lse (B, Hq, 1)``, which is the log-sum-exp of the attended
# scores, and the estimated attention recall ``(B, Hkv)`` if the method makes an estimate.
Attended = tuple[mx.array, ...]
# Function that runs a decode step. Arguments: queries ``(B, Hq, 1, D)``, the cache, its length, which includes this
# token's key and value, the scale, and the `CallHooks` of the forward pass.
Step = Callable[..., Attended]


@dataclass(frozen=True)
class FullSample:
    """Record of the context length ``keys`` at which the blocks that ``config`` selected exceeded ``max_density``."""

    config: Prefill
    max_density: float
    keys: int

    def covers(self, config: Prefill, max_density: float, S: int) -> bool:
        """Return True if a selection by ``config`` at ``S`` keys is likely to exceed ``max_density``.

        The result is True if ``config`` and ``max_density`` equal the recorded values, and ``keys <= S < 2 * keys``.
        """
        return (self.config, self.max_density) == (config, max_density) and self.keys <= S < 2 * self.keys


class SparseCache:
    """Mixin that adds sparse attention (`attend` for decode steps, `attend_prefill` for chunks) to mlx-lm's caches.

    Attributes:
        aux_states: dict from the method name to the auxiliary cache state of the method.
        latent: True if attention uses the keys also as values. ``values`` then has other data of the model (MLA).
        layer_plan: `lm.plan.LayerPlan` from the last decode step; None before the first step and after rows have moved.
    """

    keys: Any
    values: Any
    aux_states: Mapping[str, State] = MappingProxyType({})
    latent = False
    layer_plan: Any = None
    _full_samples: tuple[FullSample | None, ...] = ()  # one entry, or one per sequence of a batch
    # Function that returns the length and the arrays that the auxiliary state depends on. It takes this cache.
    _contents: Callable[[Any], tuple[object, ...]] = staticmethod(attrgetter("offset", "keys", "values"))
    _recorded: tuple[object, ...] = (None,)  # result of `_contents` after the last change by a method of this class

    @property
    def key_rows(self) -> Rows:
        """Key buffer ``(B, Hkv, capacity, D)``."""
        rows: mx.array = self.keys
        return rows

    @property
    def value_rows(self) -> Rows:
        """Value buffer ``(B, Hkv, capacity, Dv)``."""
        rows: mx.array = self.keys if self.latent else self.values
        return rows

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Number of bytes in one head's key row, and in the value row if the cache stores values."""
        return _row_bytes(self.key_rows), 0 if self.latent else _row_bytes(self.value_rows)

    @property
    def length(self) -> int:
        """Number of rows in use."""
        length: int = self.offset  # type: ignore[attr-defined]
        return length

    @property
    def padding(self) -> mx.array | None:
        """Index of the first valid row of each sequence, ``(B,)``; None if no row is padding."""
        return None

    @property
    def state(self) -> object:
        """Keys and values, which mlx-lm saves and evaluates. The auxiliary state is not included."""
        return super().state  # type: ignore[misc]

    @state.setter
    def state(self, value: object) -> None:
        self._drop_states()
        super(SparseCache, type(self)).state.fset(self, value)  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        own: int = super().nbytes  # type: ignore[misc]
        return own + sum(state.nbytes for state in self.aux_states.values())

    def drop_stale_states(self) -> None:
        """Drop the auxiliary state if a program has replaced an array or set the length since the last own change.

        This compares identities and does not wait for the device. Writes into the same array are not noticed.
        """
        contents = self._contents(self)
        if not all(map(is_, self._recorded, contents)):
            self._drop_states()
            self._recorded = contents

    def _drop_states(self) -> None:
        self._moved(lambda method, state: None)
        self._full_samples = ()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change rows in a ``with`` block that also updates the auxiliary state."""
        self.drop_stale_states()
        yield
        self._recorded = self._contents(self)

    def accept_arrays(self) -> None:
        """Keep the auxiliary state although a forward pass has replaced arrays after the rows were written.

        Models of mlx-lm wrap ``keys`` in `mx.depends`, which does not change the rows.
        """
        contents = self._contents(self)
        if contents[0] is self._recorded[0]:
            self._recorded = contents

    def trim(self, n: int) -> int:
        with self._changing():
            trimmed: int = super().trim(n)  # type: ignore[misc]
        return trimmed

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> object:
        self.drop_stale_states()
        for state in self.aux_states.values():
            state.rewind(self.length)
            if state.listening:
                state.received = self.length, keys
        if any(self._full_samples):
            rows = [self.length - first for first in self.first_rows()]
            kept = zip(self._full_samples, rows, strict=False)  # a batch without padding may share one record
            self._full_samples = tuple(full if full and full.keys <= length else None for full, length in kept)
        fetched = super().update_and_fetch(keys, values)  # type: ignore[misc]
        self._recorded = self._contents(self)
        return fetched

    def first_rows(self, others: Iterable[object] = ()) -> list[int]:
        """Return the first valid row of each sequence. Wait for the device only once for this cache and ``others``."""
        return [0] * (1 if self.keys is None else self.key_rows.shape[0])

    def add_state(self, method: str, state: State) -> State:
        """Add ``state`` as the auxiliary state of ``method``, and return it."""
        self.drop_stale_states()
        self.aux_states = {**self.aux_states, method: state}
        self.layer_plan = None  # it is bound to the previous state
        return state

    def state_of(self, method: str) -> State | None:
        """Return the auxiliary state of ``method``, or None if the method needs none. Create the state on first use."""
        state = self.aux_states.get(method)
        if state is None and (begin := registry.load_class(method, "state")) is not None:
            state = self.add_state(method, begin())
        return state

    def _moved(self, follow: Callable[[str, State], State | None]) -> None:
        """Replace each auxiliary state with ``follow(method, state)``. If ``follow`` returns None, drop the state."""
        self.layer_plan = None
        followed = {method: follow(method, state) for method, state in self.aux_states.items()}
        self.aux_states = {method: state for method, state in followed.items() if state is not None}

    def step_bytes(self, config: Method, S: int, G: int, backend: str) -> int:
        """Return the bytes that a decode step over ``S`` keys moves on ``backend``, summed over all KV heads."""
        keys = self.key_rows
        B, Hkv, _, D = keys.shape
        row, value = self.row_bytes
        moved = config.step_bytes(S, D, itemsize=keys.itemsize, row_bytes=row, G=G, backend=backend)
        return B * Hkv * (moved - config.value_rows(S) * (row - value))

    def attend(
        self, queries: mx.array, config: Method, *, scale: float, backend: str, bias: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Run one decode step with the method ``config``. See `Step` for the arguments and results."""
        step = self.bind(config, queries.shape[1] // self.key_rows.shape[1], backend)
        out, lse, *_ = step(queries, self, self.length, scale, bias=bias)
        return out, lse

    def bind(self, config: Method, G: int, backend: str, **layer: Any) -> Step:
        """Return a function that runs decode steps over this cache with ``G`` query heads per KV head.

        ``layer`` has arguments for `State.bind` that depend on the layer.

        Call `Method.for_model` first to replace "auto" values. The function is valid until the next call of `bind`,
        until `layer_plan` becomes None, and until the length reaches a power of two (`Method.at`).
        """
        self.layer_plan = None
        function, parameters = registry.load(config.name, backend), config.at(self.length).parameters(G)
        state, whole = self.state_of(config.name), backend in registry.WHOLE_BUFFERS
        read = None if state is None else state.bind(self, config, G, whole=whole, **layer)
        keep, padding = None if state is None else state.keep, self.padding

        def step(
            queries: mx.array,
            cache: SparseCache,
            S: int,
            scale: float,
            hooks: object = None,
            bias: mx.array | None = None,
        ) -> Attended:
            given = parameters if read is None else parameters | read(cache, S)
            if bias is not None:
                given = given | {"bias": bias}
            keys, values, length = cache.rows(backend, S)
            given = given | length
            out, lse, *more = function(queries, keys, values, scale=scale, left_padding=padding, **given)
            if keep is None:
                return out, lse, *more
            keep(*more)
            return out, lse

        return step

    def select_prefill(
        self, queries: mx.array, config: Prefill, *, scale: float, backend: str, max_density: float
    ) -> mx.array | None:
        """Select the key blocks for `attend_prefill`, wait for the device and return the blocks.

        Return None if the density of the blocks exceeds ``max_density``. Also return None if an earlier `FullSample`
        shows that the density is likely to exceed the limit.
        """
        S = self.length
        if any(full is not None and full.covers(config, max_density, S) for full in self._full_samples):
            return None
        select = registry.load(f"{config.name}_select", backend)

        def choose(heads: slice, queries: mx.array, keys: Rows, values: Rows, length: Length) -> tuple[mx.array]:
            return (select(queries, keys, scale=scale, **config.parameters(), **length),)

        (blocks,) = self.by_heads(choose, queries, backend)
        pairs = config.layout(queries.shape[2], S).causal_pairs
        kept = int((blocks >= 0).sum())
        full = kept > max_density * pairs * queries.shape[0] * queries.shape[1]
        self._full_samples = (FullSample(config, max_density, S),) if full else ()
        return None if full else blocks

    def attend_prefill(
        self,
        queries: mx.array,
        config: Prefill,
        *,
        scale: float,
        backend: str,
        blocks: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> Attended:
        """Run a prefill chunk over this cache, which must not be a padded batch.

        Args:
            queries: ``(B, Hq, L, D)``. Write the chunk's keys and values to the cache before the call.
            config: prefill method with the parameters for this context length (`Prefill.at`).
            blocks: result of `select_prefill`; None to select the blocks in this call.
            sinks: ``(Hq,)`` logits of attention sinks, for methods that select single keys. ``out`` is not rescaled.

        Returns:
            ``out (B, Hq, L, D)``, float32 ``lse (B, Hq, L)``, the argument of `stats.attended_pairs`, and the estimated
            attention recall ``(B, Hkv)`` if the method makes an estimate. ``lse`` is the log-sum-exp of the attended
            scores.
        """
        name = config.name if blocks is None else "attend_blocks"
        function = registry.load(name, backend)

        def attend(heads: slice, queries: mx.array, keys: Rows, values: Rows, length: Length) -> Attended:
            parameters = config.parameters()
            if blocks is not None:
                parameters = {"blocks": blocks[:, heads], "block_size": config.block_size}
            elif config.selects_keys:
                parameters["sinks"] = None if sinks is None else sinks[heads]
            found: Attended = function(queries, keys, values, scale=scale, **parameters, **length)
            return found

        found = self.by_heads(attend, queries, backend, packed=config.selects_keys)
        return found if blocks is None else (*found, blocks)

    def rows(self, backend: str, S: int | None = None) -> tuple[Any, Any, Length]:
        """Return keys, values and a dict of keyword arguments for a function of ``backend``.

        If ``backend`` takes whole buffers, the dict contains the ``length`` in use. Otherwise the dict is empty.
        ``S`` is the length, if the caller knows it.
        """
        S = self.length if S is None else S
        if backend in registry.WHOLE_BUFFERS:
            return self.key_rows, self.value_rows, {"length": S}
        return self.keys[..., :S, :], (self.keys if self.latent else self.values)[..., :S, :], {}

    def by_heads(self, run: Run, queries: mx.array, backend: str, *, packed: bool = False) -> tuple[mx.array, ...]:
        """Call ``run`` on ``queries (B, Hq, L, D)`` and this cache's rows. Subclasses may run a few heads at a time.

        If ``packed`` is True, ``run`` gets the rows of a quantized cache as `PackedRows`.
        """
        keys, values, length = self.rows(backend)
        return run(slice(None), queries, keys, values, length)


def _row_bytes(rows: Rows) -> int:
    return rows.row_bytes if isinstance(rows, PackedRows) else rows.shape[3] * rows.itemsize
