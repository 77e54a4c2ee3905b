"""Test the C interface of the native kernels: ill-formed calls return a message, and threads and forks may call."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cases import Array
from native_calls import Call, structure
from repository_paths import ROOT

from mlx_sparse.core import native_call
from mlx_sparse.core.native_call import Buffer

B, HQ, HKV, S, D, L, TOP_K = 2, 4, 2, 200, 16, 70, 20


def arrays(seed: int = 0, queries: int = 1) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(B, HQ, queries, D)), *(rng.normal(size=(B, HKV, S + 5, D)) for _ in range(2))


def numbers(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(1).integers(0, 9, shape).astype(dtype)


def sparq(scoring: dict[str, Any]) -> Any:
    sizes = {"rank": 5, "top_k": TOP_K, "local_window": 3}
    optional = {"component_weight": numbers(B, HKV, D), "value_mean": numbers(B, HKV, D)}
    return structure(native_call.SparQ, **sizes, **scoring, **optional, recall=numbers(B, HKV))


COLUMNS = {"columns": S, "keys_t": numbers(B, HKV, D, S)}
CODES = {"groups": 3, "codes": numbers(B, HKV, D, 96, dtype=np.uint8), "center": numbers(B, HKV, D)}
CODES |= {name: numbers(B, HKV, D, 3, dtype=np.float16) for name in ("lo", "step")}
LISTS, COUNTS = numbers(B, HKV, 9, dtype=np.int32), numbers(B, HKV, dtype=np.int32)
BLOCKS, SELECTED = numbers(B, HQ, 3, 4, dtype=np.int32), numbers(B, HQ, 3, 7, dtype=np.int32)
BUCKETS = {"B": B, "Hkv": HKV, "n": 3, "buckets": 8, "listed": 40, "capacity": 60, "length": S, "sink_tokens": 2}
BUCKETS |= {"visited": numbers(B, HKV, 3, dtype=np.int32), "offsets": numbers(B, HKV, 9, dtype=np.int32)}
BUCKETS |= {"key_ids": numbers(B, HKV, 40, dtype=np.int32), "indices": numbers(B, HKV, 60, dtype=np.int32)}
BUCKETS |= {name: numbers(B, dtype=np.int32) for name in ("covered", "left_padding")} | {"counts": COUNTS}
# Correct arguments after the attention, and the number of queries. `buckets` has no attention.
CALLS: dict[str, tuple[str, int, Callable[[], list[Any]]]] = {
    "dense": ("dense", L, lambda: [9]),
    "columns": ("sparq", 1, lambda: [sparq(COLUMNS)]),
    "codes": ("sparq", 1, lambda: [sparq(CODES)]),
    "indices": ("indices", 1, lambda: [structure(native_call.Lists, N=9, indices=LISTS, counts=COUNTS)]),
    "blocks": ("blocks", L, lambda: [structure(native_call.Lists, N=4, block_size=32, indices=BLOCKS)]),
    "sample": ("sample", L, lambda: [structure(native_call.Lists, N=7, block_size=32, indices=SELECTED), 0.5, 0.5, 2]),
    "buckets": ("buckets", 0, lambda: [structure(native_call.Buckets, **BUCKETS)]),
}
# Sizes that no field accepts, except the fields of `ACCEPTED`, and fields that a function ignores.
STRANGE = (-1, 0, 2**31, 2**62, -(2**63))
ACCEPTED = {"top_k": (2**31, 2**62), "local_window": (0,), "sink_tokens": (0,)}
IGNORED = {("columns", "groups"), ("codes", "columns"), ("indices", "block_size"), ("sample", "out"), ("sample", "lse")}
IGNORED |= {(name, "bias_type") for name in ("dense", "blocks", "sample")}  # without a bias
OPTIONAL = ("left_padding", "bias", "component_weight", "value_mean", "counts")


def arguments(name: str) -> list[Any]:
    _, queries, make = CALLS[name]
    bias = (numbers(B, HQ, 1, S), "f16") if queries == 1 else None
    attention = [Call(*arrays(queries=queries), length=S, padding=(0, 9), bias=bias).given] if queries else []
    return [*attention, *make()]


def mistakes(name: str, field: str, value: Any) -> list[Any]:
    """Return wrong values in place of the correct ``value`` of a field."""
    if not isinstance(value, Buffer):
        return [3, -1] if field.endswith("type") else [n for n in STRANGE if n not in ACCEPTED.get(field, ())]
    wrong = [Buffer(value.data, value.bytes + 1), Buffer(value.data, value.bytes - 4)]
    wrong += [] if field in OPTIONAL else [Buffer(None, value.bytes)]
    return wrong + ([] if field in ("codes", "lo", "step") else [Buffer(value.data + 1, value.bytes)])


def fields(name: str) -> Iterator[tuple[int, str]]:
    for n, each in enumerate(arguments(name)):
        for field, *_ in getattr(each, "_fields_", ()):
            value = getattr(each, field)
            if field != "scale" and (name, field) not in IGNORED and not (isinstance(value, Buffer) and not value.data):
                yield n, field


@pytest.mark.parametrize(("name", "n", "field"), [(name, *place) for name in CALLS for place in fields(name)])
def test_an_ill_formed_structure_returns_a_message(name: str, n: int, field: str) -> None:
    correct = arguments(name)
    native_call.run(CALLS[name][0], *correct)
    value = getattr(correct[n], field)
    for wrong in mistakes(name, field, Buffer(value.data, value.bytes) if isinstance(value, Buffer) else value):
        setattr(correct[n], field, wrong)
        refused(CALLS[name][0], *correct)


def refused(function: str, *given: Any) -> None:
    with pytest.raises(RuntimeError) as raised:
        native_call.run(function, *given)
    assert re.fullmatch(rf"native {function}: \w+: expected [^\n]+\.", str(raised.value))


def test_ill_formed_numbers_return_a_message() -> None:
    for window in (-1, 2**31, -(2**63)):
        refused("dense", arguments("dense")[0], window)
    for chunks in (0, -1, -(2**63)):
        refused("sample", *arguments("sample")[:-1], chunks)
    for name in CALLS:
        given = arguments(name)
        for n, each in enumerate(given):
            if isinstance(each, ctypes.Structure):
                refused(CALLS[name][0], *given[:n], None, *given[n + 1 :])


def results(seed: int) -> list[Array]:
    """Return the results of several functions that divide their work among the threads."""
    q, k, v = arrays(seed, queries=L)
    found = [*Call(q, k, v).run("dense", 0), *Call(q[:, :, -1:], k, v).run("dense", 0)]
    columns = np.ascontiguousarray(k[:, :, :S].swapaxes(2, 3), np.float32)
    recall = numbers(B, HKV)
    step = structure(native_call.SparQ, rank=4, top_k=30, columns=S, keys_t=columns, recall=recall)
    found += [*Call(q[:, :, -1:], k, v, S).run("sparq", step), recall]
    blocks = np.zeros((B, HQ, 3, 7), np.int32)
    lists = structure(native_call.Lists, N=7, block_size=32, indices=blocks)
    Call(q, k, v).run("sample", lists, 0.5, 0.5, 2)
    return [*found, blocks, *Call(q, k, v).run("blocks", lists)]


def assert_same(found: list[Array], wanted: list[Array]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_calls_of_several_threads_give_the_results_of_one() -> None:
    seeds = list(range(8))
    wanted = [results(seed) for seed in seeds]
    with ThreadPoolExecutor(8) as pool:
        for found, each in zip(pool.map(results, seeds * 12), wanted * 12, strict=True):
            assert_same(found, each)


SCRIPT = """
import os, sys
import native_calls
before = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0
from test_cpu_calls import assert_same, results  # calls every function
wanted = results(0)
print(len(os.listdir("/proc/self/task")) - before if sys.platform == "linux" else 0, flush=True)
for _ in range(3):
    if (child := os.fork()) == 0:
        assert_same(results(0), wanted)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert_same(results(0), wanted)
"""


@pytest.mark.parametrize("threads", ["1", "1000", "-3", "two", None])
def test_forked_processes_may_call_and_threads_are_limited(threads: str | None) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests/testing", ROOT / "tests/backends/cpu")))}
    env.pop("OMP_NUM_THREADS", None)
    env |= {} if threads is None else {"OMP_NUM_THREADS": threads}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    if sys.platform == "linux":
        assert int(done.stdout) == (0 if threads == "1" else len(os.sched_getaffinity(0)) - 1)
