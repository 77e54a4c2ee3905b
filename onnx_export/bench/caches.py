"""Caches that the contenders of the benchmark read: enough copies that none stays in a processor's cache."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mlx_sparse.common.key_codes import KeyCodes
from mlx_sparse.oracle import code_keys
from mlx_sparse.tools.bench.core import Case

from .. import build
from ..defaults import lanes_for
from ..operators import coded_axes, packed_row
from ..runtime import memory

Array = npt.NDArray[Any]

IN_PLAY = 600_000_000  # bytes that a contender goes through before it sees the same ones again
CODED_BITS = 4
GAP = 60.0  # logits by which planted keys stand out, so that they hold all of the attention by a few components too
PACKED = {"kv8": 8, "kv4": 4}  # bits of rows with scales in float16
DTYPES = {
    **{"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8},
    **dict.fromkeys(PACKED, np.uint8),
}


def _in_play(dtype: str) -> int:
    """Fewer of packed rows, so that all have room: between two steps others go through theirs."""
    return IN_PLAY // 4 if dtype in PACKED else IN_PLAY


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

    def packing(self, dtype: str) -> dict[str, int]:
        """How the rows of such caches are packed, as attributes of an operator; none if they are not."""
        if dtype not in PACKED:
            return {}
        group_size = math.gcd(self.D, 64)
        return {"kv_bits": PACKED[dtype], "kv_group_size": group_size, "kv_type": build.TYPES["float16"]}

    def width(self, dtype: str) -> int:
        """Elements of a row."""
        packing = self.packing(dtype)
        return packed_row(self.D, **packing) if packing else self.D

    def bytes(self, dtype: str) -> int:
        """Of one cache of keys or values."""
        return int(self.Hkv * self.C * self.width(dtype) * np.dtype(DTYPES[dtype]).itemsize)

    def copies(self, dtype: str) -> tuple[int, int]:
        """How many sets of keys and values there are, and how many of component-major keys.

        Of the latter a step reads a part of ``rank / D``, by which there are the more of them.
        """
        both, read = 2 * self.bytes(dtype), self.bytes(dtype) * self.rank // self.D
        return max(2, -(-_in_play(dtype) // both)), max(2, -(-IN_PLAY // max(1, read)))

    @property
    def coded_bytes(self) -> int:
        """Of one set of codes."""
        axes = coded_axes(self.C, CODED_BITS)
        return self.Hkv * self.D * axes["groups"] * axes["record"]

    def coded_copies(self, dtype: str) -> int:
        """How many of them there are; a step reads a part of ``rank / D``."""
        return max(2, -(-_in_play(dtype) * self.D // (self.coded_bytes * self.rank)))

    def memory(self, dtypes: Iterable[str]) -> int:
        """Bytes of the caches of these types together."""
        total = 0
        for dtype in dtypes:
            sets, sets_t = self.copies(dtype)
            total += self.bytes(dtype) * (2 * sets + (sets_t if dtype in ("float32", "float16") else 0))
            total += self.coded_bytes * self.coded_copies(dtype) if sets_t and dtype in ("float16", "kv4") else 0
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
        self.kind = np.dtype({"int8": np.float32, **dict.fromkeys(PACKED, np.float16)}.get(dtype, DTYPES[dtype]))
        self.packing = problem.packing(dtype)
        sets, sets_t = problem.copies(dtype)
        shape = (1, problem.Hkv, problem.C, problem.width(dtype))
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
        axes = coded_axes(problem.C, CODED_BITS)
        sizes = (1, problem.Hkv * problem.D, axes["groups"], axes["record"])
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
            coded = code_keys(keys, key_bits=CODED_BITS)
            rows = slice(head * self.problem.D, (head + 1) * self.problem.D)
            self.codes[0][:, rows, : coded.lo.shape[-1]] = records_of(coded)
            self.summary[:, 3 * head + 1] = coded.centre[:, 0]

    def _chunks(self, i: int) -> Array:
        p = self.problem
        return self.keys_t[i].reshape(p.Hkv, p.C // p.lanes, p.D, p.lanes)

    def _stored(self, rows: Array) -> Array:
        if self.packing:
            return self._packed(rows)
        if self.dtype == np.int8:
            rows = np.clip(np.rint(rows / np.float32(self.step)), -127, 127)
        return rows.astype(self.dtype)

    def _packed(self, rows: Array) -> Array:
        bits, group_size = self.packing["kv_bits"], self.packing["kv_group_size"]
        groups = rows.reshape(*rows.shape[:-1], -1, group_size)
        low, high = groups.min(axis=-1), groups.max(axis=-1)
        ranges = np.stack([(high - low) / ((1 << bits) - 1), low], axis=-1).astype(np.float16)
        scale, bias = (ranges[..., i : i + 1].astype(np.float32) for i in range(2))
        codes = np.clip(np.rint((groups - bias) / scale), 0, (1 << bits) - 1).astype(np.uint8).reshape(rows.shape)
        packed = codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4
        return np.concatenate([packed, ranges.view(np.uint8).reshape(*rows.shape[:-1], -1)], axis=-1)

    def loaded(self, rows: Array) -> Array:
        """What rows of the caches stand for, in float32."""
        if not self.packing:
            return rows.astype(np.float32) * np.float32(self.step)
        bits, D = self.packing["kv_bits"], self.problem.D
        codes, ranges = np.split(rows, [D * bits // 8], axis=-1)
        if bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1)
        groups = codes.reshape(*rows.shape[:-1], -1, self.packing["kv_group_size"])
        pairs = np.ascontiguousarray(ranges).view(np.float16).astype(np.float32).reshape(*groups.shape[:-1], 2)
        exact: Array = pairs[..., :1] * groups + pairs[..., 1:]
        return exact.astype(np.float16).astype(np.float32).reshape(*rows.shape[:-1], D)


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
