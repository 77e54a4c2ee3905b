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
from mlx_sparse.core.native_call import Buffer, buffer

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
# For each function of c_api.h, its correct arguments after the attention, by name. `buckets` takes one structure.
CALLS: dict[str, tuple[str, int, Callable[[], dict[str, Any]]]] = {
    "dense": ("dense", L, lambda: {"window": 9}),
    "columns": ("sparq", 1, lambda: {"parameters": sparq(COLUMNS)}),
    "codes": ("sparq", 1, lambda: {"parameters": sparq(CODES)}),
    "indices": ("indices", 1, lambda: {"indices": buffer(LISTS), "counts": buffer(COUNTS), "N": 9}),
    "blocks": ("blocks", L, lambda: {"lists": buffer(BLOCKS), "N": 4, "block_size": 32}),
    "sample": (
        "sample",
        L,
        lambda: {"column": 0.5, "slash": 0.5, "chunks": 2, "block_size": 32, "lists": buffer(SELECTED)},
    ),
    "buckets": ("buckets", 0, lambda: {"given": structure(native_call.Buckets, **BUCKETS)}),
}
STRANGE = (-1, 0, 2**31, 2**62, -(2**63))
OPTIONAL = ("left_padding", "component_weight", "value_mean", "counts")
# Fields that accept some of the strange sizes.
ANY = {("columns", "groups"), ("codes", "columns"), ("sample", "column"), ("sample", "slash")}
SOME = {"top_k": (2**31, 2**62), "local_window": (0,), "sink_tokens": (0,), "chunks": (2**31, 2**62), "window": (0,)}


def run(name: str, change: Callable[[dict[str, Any]], None] = lambda given: None) -> None:
    """Call a function of `CALLS` after ``change`` has edited its arguments."""
    function, queries, make = CALLS[name]
    given = make()
    if queries:
        call = Call(*arrays(queries=queries), length=S, padding=(0, 9))
        given = {"attention": call.given, **given}
    change(given)
    native_call.run(
        function,
        *(
            ctypes.byref(each) if hasattr(each, "_fields_") and type(each) is not Buffer else each
            for each in given.values()
        ),
    )


def fields(name: str) -> Iterator[tuple[str, str, Any]]:
    """Return the places of the sizes and buffers of a call: argument, field ("" for the argument itself), value."""
    found: dict[str, Any] = {}
    run(name, found.update)
    for argument, value in found.items():
        if isinstance(value, ctypes.Structure) and not isinstance(value, Buffer):
            yield from ((argument, field, getattr(value, field)) for field, *_ in value._fields_ if field != "scale")
        else:
            yield argument, "", value


def mistakes() -> Iterator[Any]:
    for name in CALLS:
        for argument, field, value in fields(name):
            place = field or argument
            if isinstance(value, Buffer):
                if not value.data or (name == "sample" and place in ("out", "lse")):
                    continue
                wrong = [Buffer(value.data, value.bytes + 1), Buffer(value.data, value.bytes - 4)]
                wrong += [] if place in OPTIONAL else [Buffer(None, value.bytes)]
                wrong += [] if place in ("codes", "lo", "step") else [Buffer(value.data + 1, value.bytes)]
            else:
                wrong = [size for size in STRANGE if size not in SOME.get(place, ()) and (name, place) not in ANY]
                wrong = [3, -1] if place.endswith("type") else wrong
            for n, each in enumerate(wrong):
                yield pytest.param(
                    name, argument, field, each, id=f"{name}-{place}-{n if isinstance(each, Buffer) else each}"
                )


@pytest.mark.parametrize(("name", "argument", "field", "wrong"), list(mistakes()))
def test_an_ill_formed_call_returns_a_message(name: str, argument: str, field: str, wrong: Any) -> None:
    def change(given: dict[str, Any]) -> None:
        if field:
            setattr(given[argument], field, wrong)
        else:
            given[argument] = wrong

    with pytest.raises(RuntimeError) as raised:
        run(name, change)
    assert re.fullmatch(rf"native {CALLS[name][0]}: \w+: expected [^\n]+\.", str(raised.value))
    run(name)  # the message of the last call is gone


@pytest.mark.parametrize("name", ["dense", "columns", "buckets"])
def test_a_null_pointer_returns_a_message(name: str) -> None:
    pointers = {"dense": [None, 0], "columns": [None, None], "buckets": [None]}[name]
    with pytest.raises(RuntimeError, match="arguments: expected no null pointer"):
        native_call.run(CALLS[name][0], *pointers)


def results(seed: int) -> list[Array]:
    """Return the results of several functions that divide their work among the threads."""
    q, k, v = arrays(seed, queries=L)
    found = [*Call(q, k, v).run("dense", 0), *Call(q[:, :, -1:], k, v).run("dense", 0)]
    parameters = structure(
        native_call.SparQ,
        **{**COLUMNS, "rank": 4, "top_k": 30, "keys_t": np.ascontiguousarray(k[:, :, :S].swapaxes(2, 3), np.float32)},
        recall=(recall := numbers(B, HKV)),
    )
    found += [*Call(q[:, :, -1:], k, v, S).run("sparq", ctypes.byref(parameters)), recall]
    lists = np.zeros((B, HQ, 3, 7), np.int32)
    Call(q, k, v).run("sample", 0.5, 0.5, 2, 32, lists)
    return [*found, lists, *Call(q, k, v).run("blocks", lists, 7, 32)]


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
