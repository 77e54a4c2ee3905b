"""What every KV cache that attends sparsely can do: attend, and keep what methods hold beside it.

The state of a method that is kept `beside` follows the cache through trim, growth, copies and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from ..methods import Method, Prefill, registry
from ..methods.table import WHOLE_BUFFERS
from ..ops.packed_rows import PackedRows, Rows
from .state import State

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


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """A decode method bound to a backend and to layers of ``G`` query heads per KV head.

    Attributes:
        function: the backend's.
        parameters: its arguments that are the same for every step.
    """

    config: Method
    G: int
    backend: str
    function: Callable[..., Any]
    parameters: dict[str, Any]

    @classmethod
    def bind(cls, config: Method, G: int, backend: str) -> DecodeStep:
        """Bind ``config``, as `Method.for_model` resolves it."""
        return cls(config, G, backend, registry.load(config.name, backend), config.parameters(G))


class SparseCache:
    """Mixed into mlx-lm's caches: `attend` for decode steps, `attend_prompt` for prompts, and what methods keep.

    Attributes:
        beside: what is kept beside keys and values, by method.
        sharers: machines that hold the rows of its sequence.
        layer_plan: how the model that called last attends over it; None where that is not decided, or rows moved.
    """

    keys: Any
    values: Any
    beside: Mapping[str, State] = MappingProxyType({})
    sharers = 1
    layer_plan: Any = None
    _full: tuple[Full | None, ...] = ()  # one, or one for each sequence of a batch; none where rows are new

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
        length: int = self.offset  # type: ignore[attr-defined]
        return length

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
        return [0] * (1 if self.keys is None else self.key_rows.shape[0])

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
        """Rows were permuted or replaced. Keep only the state that tracks them."""
        self.layer_plan = None
        followed = {method: follow(method, state) for method, state in self.beside.items()}
        self.beside = {method: state for method, state in followed.items() if state is not None}

    def step_bytes(self, config: Method, position: int) -> int:
        """Return the bytes that a decode step at ``position`` moves by the method's formula, on each machine."""
        keys = self.key_rows
        B, Hkv, _, D = keys.shape
        moved = config.step_bytes(position, D, itemsize=keys.itemsize, row_bytes=self.row_bytes)
        return B * Hkv * moved // self.sharers

    def attend(self, queries: mx.array, config: Method, *, scale: float, backend: str) -> tuple[mx.array, mx.array]:
        """Bind ``config`` and take one decode step, as `take_step` does."""
        G = queries.shape[1] // self.key_rows.shape[1]
        return self.take_step(queries, DecodeStep.bind(config, G, backend), scale)

    def take_step(self, queries: mx.array, step: DecodeStep, scale: float) -> tuple[mx.array, mx.array]:
        """Take one decode step over this cache.

        Args:
            queries: ``(B, Hq, 1, D)``; their keys and values have been written.

        Returns:
            ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)`` of the attended keys.
        """
        name, parameters = step.config.name, step.parameters
        keys, values, length = self.rows(step.backend)
        state = self.beside.get(name) or self.state_of(name)
        if state is not None:
            parameters = parameters | state.read(self, step.config, step.G, whole=bool(length))
        out, lse, *returned = step.function(
            queries, keys, values, scale=scale, left_padding=self.padding, **parameters, **length
        )
        if returned and state is not None:
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
