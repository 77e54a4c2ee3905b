"""Caches that the contenders of the benchmark read: enough copies that none stays in a processor's cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mlx_sparse.methods.scoring_keys import KeyCodes
from mlx_sparse.oracle import code_keys
from mlx_sparse.tools.bench.core import Case

from ..defaults import lanes_for
from ..operators import CODE_RECORD, coded_axes
from ..runtime import memory

Array = npt.NDArray[Any]

IN_PLAY = 600_000_000  # bytes that a contender goes through before it sees the same ones again
CODED_BITS = 4
GAP = 60.0  # logits by which planted keys stand out, so that they hold all of the attention by a few components too
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}


@dataclass(frozen=True)
class Problem(Case):
    """One decode step: S keys, the last of them new; SparQ's rank r, number of keys k and window l.

    Caches of every type are read in the same turns, so a type belongs to a contender.
    """

    rank: int
    top_k: int
    window: int

    @property
    def lanes(self) -> int:
        """Keys per chunk of the component-major cache."""
        return lanes_for(self.S)

    @property
    def C(self) -> int:
        """Capacity: S in whole chunks."""
        return -(-self.S // self.lanes) * self.lanes

    @cached_property
    def planted(self) -> Array:
        """Positions of as many keys as SparQ can choose beside its window."""
        count = max(1, self.top_k - self.window)
        return np.arange(count) * (self.S - self.window) // count

    @cached_property
    def base(self) -> Array:
        """The direction of each KV head that its queries share."""
        return np.random.default_rng(1).standard_normal((self.Hkv, 1, self.D), np.float32)

    @cached_property
    def queries(self) -> Array:
        """(Hkv, G, D)."""
        noise: Array = np.random.default_rng(2).standard_normal((self.Hkv, self.G, self.D), np.float32)
        made: Array = self.base + np.float32(0.5) * noise
        return made

    def bytes(self, dtype: str) -> int:
        """Of one cache of keys or values."""
        return int(self.Hkv * self.C * self.D * np.dtype(DTYPES[dtype]).itemsize)

    def copies(self, dtype: str) -> tuple[int, int]:
        """How many sets of keys and values there are, and how many of component-major keys.

        Of the latter a step reads a part of ``rank / D``, by which there are the more of them.
        """
        both, read = 2 * self.bytes(dtype), self.bytes(dtype) * self.rank // self.D
        return max(2, -(-IN_PLAY // both)), max(2, -(-IN_PLAY // max(1, read)))

    @property
    def coded_bytes(self) -> int:
        """Of one set of codes."""
        return self.Hkv * self.D * coded_axes(self.C)["groups"] * CODE_RECORD

    def coded_copies(self, dtype: str) -> int:
        """How many of them there are; a step reads a part of ``rank / D``."""
        return max(2, -(-IN_PLAY * self.D // (self.coded_bytes * self.rank)))

    def memory(self, dtypes: Iterable[str]) -> int:
        """Bytes of the caches of these types together."""
        total = 0
        for dtype in dtypes:
            sets, sets_t = self.copies(dtype)
            total += self.bytes(dtype) * (2 * sets + (sets_t if dtype in ("float32", "float16") else 0))
            total += self.coded_bytes * self.coded_copies(dtype) if sets_t and dtype == "float16" else 0
        return total


def records_of(coded: KeyCodes) -> Array:
    """Codes as `SparQCoded` takes them: ``(B, Hkv D, groups, record)``."""
    ranges = np.stack([coded.lo, coded.step], axis=-1).astype("<f2").view(np.uint8)
    codes = coded.codes.reshape(*coded.lo.shape, -1)
    records = np.concatenate([ranges, codes], axis=-1)
    return records.reshape(len(records), -1, *records.shape[-2:])


class Caches:
    """Sets of caches of one type, equal to each other, of shape (1, Hkv, C, D).

    Attributes:
        keys, values: the sets.
        keys_t: component-major keys, more sets of them; none unless ``component_major``.
        codes: the same in `CODED_BITS` bits, and more sets again; none unless ``coded``.
        summary: what `SparQCodedAttention` takes beside them.
        step: what int8 counts in; 1 for other types.
        kind: of what is attended with.
    """

    def __init__(self, problem: Problem, dtype: str, *, component_major: bool, coded: bool = False) -> None:
        self.problem, self.dtype = problem, np.dtype(DTYPES[dtype])
        self.kind = np.dtype(np.float32 if dtype == "int8" else DTYPES[dtype])
        sets, sets_t = problem.copies(dtype)
        shape = (1, problem.Hkv, problem.C, problem.D)
        self.keys, self.values = ([memory.zeros(shape, self.dtype) for _ in range(sets)] for _ in "kv")
        self.keys_t = [memory.zeros(shape, self.dtype) for _ in range(sets_t if component_major else 0)]
        self.step = 0.2 if dtype == "int8" else 1.0
        rng = np.random.Generator(np.random.SFC64(3))
        for head in range(problem.Hkv):
            for cache in (self.keys, self.values):
                rows = rng.standard_normal((problem.S, problem.D), np.float32)
                cache[0][0, head, : problem.S] = self._stored(rows)
        if self.keys_t:
            for head in range(problem.Hkv):
                chunks = self.keys[0][0, head].reshape(-1, problem.lanes, problem.D)
                self._chunks(0)[head] = chunks.swapaxes(1, 2)
        for copies in (self.keys, self.values, self.keys_t):
            for copy in copies[1:]:
                copy[:] = copies[0]
        sizes = (1, problem.Hkv * problem.D, coded_axes(problem.C)["groups"], CODE_RECORD)
        self.codes = [memory.zeros(sizes, np.uint8) for _ in range(problem.coded_copies(dtype) if coded else 0)]
        self.summary = np.zeros((1, 3 * problem.Hkv, problem.D), np.float32)
        self._code()
        for copy in self.codes[1:]:
            copy[:] = self.codes[0]

    def plant(self) -> tuple[Array, float]:
        """Plant keys in the first set that hold all of the attention.

        Returns the attention output (Hq, D) in float64, and how far one computed in steps of this type may be off.
        """
        p = self.problem
        rows = self.loaded(self.keys[1][0][:, p.planted])
        planted = rows + p.base * np.float32(GAP / p.scale) / (p.base**2).sum(axis=2, keepdims=True)
        self._put(self._stored(planted))
        kind = self.kind
        queries = p.queries.astype(kind).astype(np.float32)
        keys, values = (self.loaded(cache[0][0][:, p.planted]) for cache in (self.keys, self.values))
        exact = _attention(queries, keys, values, p.scale, np.dtype(np.float64))
        plain = _attention(queries, keys, values, p.scale, kind)
        ulp = float(ml_dtypes.finfo(kind).eps) * float(np.abs(exact).max())
        return exact.reshape(p.Hq, p.D), 2 * float(np.abs(plain - exact).max()) + ulp

    def restore(self) -> None:
        """Take the planted keys out again."""
        self._put(self.keys[1][0][:, self.problem.planted])

    def _put(self, rows: Array) -> None:
        self.keys[0][0][:, self.problem.planted] = rows
        if self.keys_t:
            chunk, lane = np.divmod(self.problem.planted, self.problem.lanes)
            self._chunks(0)[:, chunk, :, lane] = rows.swapaxes(0, 1)
        self._code()

    def _code(self) -> None:
        """Code the keys of the first set, a head at a time."""
        for head in range(self.problem.Hkv if self.codes else 0):
            keys = self.loaded(self.keys[0][:, head : head + 1, : self.problem.S])
            coded = code_keys(keys)
            rows = slice(head * self.problem.D, (head + 1) * self.problem.D)
            self.codes[0][:, rows, : coded.lo.shape[-1]] = records_of(coded)
            self.summary[:, 3 * head + 1] = coded.centre[:, 0]

    def _chunks(self, i: int) -> Array:
        p = self.problem
        return self.keys_t[i].reshape(p.Hkv, p.C // p.lanes, p.D, p.lanes)

    def _stored(self, rows: Array) -> Array:
        if self.dtype == np.int8:
            rows = np.clip(np.rint(rows / np.float32(self.step)), -127, 127)
        return rows.astype(self.dtype)

    def loaded(self, rows: Array) -> Array:
        """What rows of the caches stand for, in float32."""
        return rows.astype(np.float32) * np.float32(self.step)


def _attention(queries: Array, keys: Array, values: Array, scale: float, kind: np.dtype[Any]) -> Array:
    """Attention of (heads, G, D) over (heads, N, D), by plain sums from left to right.

    Weights and output have type ``kind``, the rest at least float32.
    """
    work: Any = np.float64 if kind == np.float64 else np.float32

    def product(left: Array, right: Array) -> Array:
        terms = (left[..., None, :] * right[:, None]).astype(work)
        return np.add.accumulate(terms, axis=-1)[..., -1]

    scores = product(queries.astype(work) * work(scale), keys.astype(work))
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights = (weights / weights.sum(axis=2, keepdims=True)).astype(kind).astype(work)
    return product(weights, values.astype(work).swapaxes(1, 2)).astype(kind).astype(np.float64)
