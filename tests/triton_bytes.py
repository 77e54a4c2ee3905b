"""What Triton kernels do to memory, watched in Triton's interpreter.

    with watched() as launches:
        sparq_attention(...)
    launches[0].traffic["keys_t"].loaded

counts bytes by kernel argument, and raises where a kernel would go wrong on a GPU but not here:

* an address outside the arguments (stores: outside of the view; loads may end at the next multiple of 16 elements);
* a store into a tensor that the launcher did not allocate;
* a load of memory that nothing has written: what torch.empty returns is filled with a bit pattern;
* accesses of two programs to one address, one of them a plain store, that no release and acquire on an atomic orders;
* accesses of one program to one address, one of them a store, without tl.debug_barrier() between: other threads make
  them; and stores without one before the atomic that is to publish them;
* one store that writes an address twice.

Programs run one after the other, in any order that is asked for. All accesses go through four functions of
triton.runtime.interpreter, so a kernel cannot hide any.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from triton.runtime import interpreter

POISON = 0x7FE5A5A57FE5A5A5  # what was never written: its upper bits are a NaN of 2 or 4 bytes, or no index of anything
ALIGNMENT = 16  # elements; masks of loads may end at multiples of this
# How often a program can release and pass barriers before its stamps run over.
RELEASES, BARRIERS = 1 << 16, 1 << 16

Array = npt.NDArray[Any]


@dataclass
class Traffic:
    """Bytes of one argument in one launch, lane by lane; ``distinct`` counts every address once."""

    loaded: int = 0
    stored: int = 0
    atomic: int = 0
    distinct: int = 0
    by_program: dict[int, int] = field(default_factory=dict)  # loaded and stored


@dataclass
class Launch:
    """One launch.

    Attributes:
        arguments: of the kernel, by name.
        traffic: by name of the argument.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    traffic: dict[str, Traffic]


class Memory:
    """One tensor argument of one launch."""

    def __init__(self, name: str, tensor: torch.Tensor, ours: bool, poisoned: bool) -> None:
        self.name, self.size, self.ours, self.poisoned = name, tensor.element_size(), ours, poisoned
        self.start = tensor.data_ptr()
        self.loads = _cells(_padded(tensor))
        self.stores = np.pad(own := _cells(tensor), (0, len(self.loads) - len(own)))
        self.count = len(own)
        self.end = self.start + self.size * len(self.loads)
        self.touched = np.zeros(len(self.loads), bool)
        self.traffic = Traffic()
        # Stamps of the last store and of the last load of each cell; -1 is none.
        self.stored = np.full(len(self.loads) if ours else 0, -1, np.int64)
        self.loaded = np.full(len(self.loads) if ours else 0, -1, np.int64)
        self.atomic = np.zeros(len(self.loads) if ours else 0, bool)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last axis up to a multiple of 16, as far as its memory goes."""
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if tensor.numel() == 0 or tensor.stride(-1) != 1:
        return tensor
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    more = min(-tensor.shape[-1] % ALIGNMENT, room - 1 - last)
    return tensor.as_strided((*tensor.shape[:-1], tensor.shape[-1] + more), tensor.stride())


def _cells(tensor: torch.Tensor) -> Array:
    """Which elements from the first on belong to the tensor."""
    if tensor.numel() == 0:
        return np.zeros(0, bool)
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    cells = np.zeros(last + 1, bool)
    np.lib.stride_tricks.as_strided(cells, tensor.shape, tensor.stride())[...] = True
    return cells


class Watch:
    """The state of `watched`."""

    def __init__(self, order: Callable[[int], Array] | None) -> None:
        self.order = order
        self.launches: list[Launch] = []
        self.allocated: dict[int, tuple[torch.Tensor, bool]] = {}  # by address of the storage; True: not filled
        self.memories: list[Memory] = []

    def allocation(self, function: Callable[..., torch.Tensor], unfilled: bool) -> Callable[..., torch.Tensor]:
        """``function`` of torch, with what it returns noted, and poisoned where it is ``unfilled``."""

        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = function(*args, **kwargs)
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.numel():
                if unfilled:
                    bits = 8 * tensor.element_size()
                    tensor.view(getattr(torch, f"int{bits}")).fill_(POISON >> (64 - bits))
                self.allocated[tensor.untyped_storage().data_ptr()] = (tensor, unfilled)  # kept: none takes its place
            return tensor

        return allocate

    # Launches

    def start(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = inspect.getfullargspec(executor.fn).args
        given = inspect.getcallargs(executor.fn, *args, **{k: v for k, v in kwargs.items() if k in names})
        self.memories = []
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and value.numel():
                _, poisoned = self.allocated.get(value.untyped_storage().data_ptr(), (None, False))
                ours = value.untyped_storage().data_ptr() in self.allocated
                self.memories.append(Memory(name, value, ours, poisoned))
        grid = tuple(executor.grid) + (1,) * (3 - len(executor.grid))
        traffic = {memory.name: memory.traffic for memory in self.memories}
        self.launches.append(Launch(executor.fn.__name__, grid, given, traffic))
        programs = int(np.prod(grid))
        self.programs = iter(np.arange(programs) if self.order is None else self.order(programs))
        self.grid = grid
        self.published: dict[int, Array] = {}  # by address of an atomic: releases of every program seen there
        self.known = np.zeros(programs, np.int64)

    def finish(self) -> None:
        for memory in self.memories:
            memory.traffic.distinct = int(memory.touched.sum()) * memory.size
        self.memories = []

    def next_program(self) -> tuple[int, int, int]:
        self.program = int(next(self.programs))
        self.releases = self.barriers = 0
        self.unpublished = ""  # what this program has stored since the last barrier
        self.known[:] = 0
        x, y, z = np.unravel_index(self.program, self.grid)
        return int(x), int(y), int(z)

    # Accesses

    def barrier(self) -> None:
        self.barriers += 1
        self.unpublished = ""

    def load(self, addresses: Array, size: int, read: Callable[[], Array]) -> None:
        """A load of ``size`` bytes each from ``addresses``; ``read`` loads them, once they are known to be harmless."""
        found = list(self.places(addresses, size, "loads"))
        values = read()
        for memory, cells, chosen in found:
            memory.traffic.loaded += len(cells) * memory.size
            if memory.poisoned:
                self.check_written(memory, cells, values[chosen])
            if memory.ours:
                self.check_order(memory, cells, memory.stored, "loads")
                memory.loaded[cells] = self.stamp()

    def store(self, addresses: Array, size: int) -> None:
        for memory, cells, _ in self.places(addresses, size, "stores"):
            memory.traffic.stored += len(cells) * memory.size
            self.check_ours(memory)
            self.check_order(memory, cells, memory.stored, "stores")
            self.check_order(memory, cells, memory.loaded, "stores")
            order = np.arange(len(cells))
            memory.stored[cells] = order
            if (memory.stored[cells] != order).any():
                raise AssertionError(f"{self.who()} stores an element of {memory.name} twice at once")
            memory.stored[cells] = self.stamp()
            memory.atomic[cells] = False
            self.unpublished = memory.name

    def atomic(self, addresses: Array, size: int, meaning: str) -> None:
        releases, acquires = meaning in ("RELEASE", "ACQUIRE_RELEASE"), meaning in ("ACQUIRE", "ACQUIRE_RELEASE")
        if releases and self.unpublished:
            raise AssertionError(
                f"{self.who()} publishes its stores to {self.unpublished} by an atomic without tl.debug_barrier()"
            )
        for memory, cells, _ in self.places(addresses, size, "changes"):
            memory.traffic.atomic += len(cells) * memory.size
            self.check_ours(memory)
            plain = cells[~memory.atomic[cells]]
            self.check_order(memory, plain, memory.stored, "changes")
            self.check_order(memory, cells, memory.loaded, "changes")
            for address in (memory.start + cells * memory.size).tolist():
                published = self.published.setdefault(address, np.zeros_like(self.known))
                if acquires:
                    np.maximum(self.known, published, out=self.known)
                if releases:
                    np.maximum(published, self.known, out=published)
                    published[self.program] = self.releases + 1
            memory.stored[cells] = self.stamp()
            memory.atomic[cells] = True
        self.releases += releases

    def places(self, addresses: Array, size: int, verb: str) -> Iterator[tuple[Memory, Array, Array]]:
        """Arguments, which of their cells are meant, and which of the addresses these are."""
        left = np.ones(len(addresses), bool)
        for memory in self.memories if len(addresses) else ():
            inside = left & (addresses >= memory.start) & (addresses < memory.end)
            if not inside.any():
                continue
            cells, beyond = np.divmod((addresses[inside] - np.uint64(memory.start)).astype(np.int64), memory.size)
            fits = (memory.loads if verb == "loads" else memory.stores)[cells]
            if not fits.all():  # in a gap between the rows of a view, where another view may lie
                inside[inside] = fits
                cells, beyond = cells[fits], beyond[fits]
            if beyond.any() or size != memory.size:
                raise AssertionError(f"{self.who()} {verb} {size} bytes across elements of {memory.name}")
            memory.touched[cells] = True
            by_program = memory.traffic.by_program
            by_program[self.program] = by_program.get(self.program, 0) + len(cells) * memory.size
            left &= ~inside
            yield memory, cells, inside
            if not left.any():
                return
        if left.any():
            raise AssertionError(f"{self.who()} {verb} outside of its arguments: {self.near(int(addresses[left][0]))}")

    # Findings

    def stamp(self) -> int:
        return (self.program * RELEASES + self.releases) * BARRIERS + self.barriers

    def check_ours(self, memory: Memory) -> None:
        if not memory.ours:
            raise AssertionError(f"{self.who()} stores to {memory.name}, which its launcher did not allocate")

    def check_written(self, memory: Memory, cells: Array, values: Array) -> None:
        unwritten = values.view(f"u{values.itemsize}") == POISON >> (64 - 8 * values.itemsize)
        unwritten &= memory.stores[cells]  # beyond the view is what a cache has not filled yet, read and masked
        if unwritten.any():
            cell = int(cells[unwritten][0])
            raise AssertionError(f"{self.who()} loads element {cell} of {memory.name}, which nothing has written")

    def check_order(self, memory: Memory, cells: Array, stamps: Array, verb: str) -> None:
        """What another program, or another thread of this one, has done to these cells must have come before."""
        stamps = stamps[cells]
        if (stamps < 0).all():
            return
        cells, stamps = cells[stamps >= 0], stamps[stamps >= 0]
        owners, moments = np.divmod(stamps, RELEASES * BARRIERS)
        releases, barriers = np.divmod(moments, BARRIERS)
        own = owners == self.program
        unordered = np.where(own, barriers == self.barriers, releases >= self.known[owners])
        if unordered.any():
            other = int(owners[unordered][0])
            whom = "itself" if other == self.program else f"program {other}"
            raise AssertionError(
                f"{self.who()} {verb} element {int(cells[unordered][0])} of {memory.name}, unordered with {whom}"
            )

    def who(self) -> str:
        return f"{self.launches[-1].kernel}: program {self.program}"

    def near(self, address: int) -> str:
        """The address, said by the nearest argument."""
        distances = [(min(abs(address - m.start), abs(address - m.end)), m) for m in self.memories]
        _, memory = min(distances, key=lambda pair: pair[0])
        return f"element {(address - memory.start) // memory.size} of {memory.count} of {memory.name}"


class _Functions:
    """Stands for the module of C functions that the interpreter calls."""

    def __init__(self, functions: Any, watch: Watch) -> None:
        self._functions, self._watch = functions, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def load(self, addresses: Array, mask: Array, other: Array, dtype: Any) -> Array:
        mask, loaded = np.broadcast_to(mask, addresses.shape), []

        def read() -> Array:
            loaded.append(self._functions.load(addresses, mask, other, dtype))
            return loaded[0][mask]

        self._watch.load(addresses[mask], np.dtype(dtype).itemsize, read)
        return loaded[0]

    def store(self, addresses: Array, values: Array, mask: Array) -> None:
        self._watch.store(addresses[np.broadcast_to(mask, addresses.shape)], values.itemsize)
        self._functions.store(addresses, values, mask)

    def atomic_rmw(self, operation: Any, addresses: Array, values: Array, mask: Array, meaning: Any) -> Array:
        self._watch.atomic(addresses[np.broadcast_to(mask, addresses.shape)], values.itemsize, meaning.name)
        return self._functions.atomic_rmw(operation, addresses, values, mask, meaning)

    def atomic_cas(self, addresses: Array, expected: Array, values: Array, meaning: Any) -> Array:
        self._watch.atomic(addresses.ravel(), values.itemsize, meaning.name)
        return self._functions.atomic_cas(addresses, expected, values, meaning)


@contextmanager
def watched(order: Callable[[int], Array] | None = None) -> Iterator[list[Launch]]:
    """What is launched inside; ``order`` permutes the programs of a launch of so many."""
    watch = Watch(order)
    execute = interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        watch.start(executor, args, kwargs)
        prepared.clear()  # it is taken back after a launch
        execute(executor, *args, **kwargs)
        watch.finish()

    # Half of the interpreter's time goes into preparing the language again at every call of a function in a kernel, and
    # into looking for integers that overflow, where it then says nothing.
    prepare = interpreter._patch_lang
    prepared: set[Any] = set()

    def prepare_once(function: Any) -> Any:
        if function in prepared:
            return interpreter._LangPatchScope()
        prepared.add(function)
        return prepare(function)

    builder = interpreter.interpreter_builder
    place_program = builder.set_grid_idx
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", prepare_once)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        patch.setattr(interpreter, "_interpreter", _Functions(interpreter._interpreter, watch))
        patch.setattr(builder, "set_grid_idx", lambda *_: place_program(*watch.next_program()))
        patch.setattr(builder, "create_barrier", watch.barrier)
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, watch.allocation(getattr(torch, name), True))
        for name in ("zeros", "zeros_like", "full", "full_like"):
            patch.setattr(torch, name, watch.allocation(getattr(torch, name), False))
        yield watch.launches


def shuffled(programs: int) -> Array:
    """The same mixed order every time."""
    return np.random.default_rng(programs).permutation(programs)
