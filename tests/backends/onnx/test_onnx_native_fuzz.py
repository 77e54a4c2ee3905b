"""Run every native kernel with random sizes, lengths and contents: it returns a valid output or a one-line error.

The conformance tests compare the numbers. `test_nothing_outside_the_buffers_is_accessed` repeats this file with a
library that is built with sanitizers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ninja
import numpy as np
import pytest
import tier
from cases import Array
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_sparse.onnx_export.operators import OPERATORS, coded_axes
from mlx_sparse.onnx_export.runtime import native
from onnx_operators import DTYPES, TYPES, Operator
from require import absent

pytestmark = pytest.mark.slow  # fuzzing, sanitizers

# Format of the native kernels' error messages.
ONE_LINE = re.compile(r"Status Message: \w+: \w+: expected [^\n]+, got [^\n]+\.$")
fuzz = settings(
    max_examples=int(os.environ.get("MLX_SPARSE_FUZZ", "100" if tier.every else "40")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@st.composite
def calls(draw: Any, name: str) -> SimpleNamespace:
    """Draw a call: row b has ``start[b]`` tokens before L new tokens, in buffers of C slots."""

    def number(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def setting(attribute: Any) -> Any:
        most = {"rank": D, "probes": N, "local_window": min(call.settings.get("top_k", 0), 50)}
        if attribute.choices:
            return one(*attribute.choices)
        if attribute.type is float:
            return one(1e-9, 0.1, 0.5, 0.9, 0.999, 1.0) if attribute.high else D**-0.5
        if (high := most.get(attribute.name, attribute.high)) is not None:
            return number(attribute.low, high)
        huge = 2**31 - 1 if attribute.name in ("top_k", "chunks") else 2**63 - 1
        return lanes if attribute.name == "lanes" else max(attribute.low, one(number(0, 40), number(0, C + 5), huge))

    operator = OPERATORS[name]
    prompt = 300 if "block_size" in operator.attribute_names else 20
    B, Hkv, D, lanes = number(1, 3), number(1, 3), one(1, 2, 7, 8, 15, 16, 33, 64, 80), one(1, 3, 8, 16, 40, 64)
    L = 1 if operator.inputs[0].dims[2] == 1 else one(1, number(1, 5), number(1, prompt))
    chunks = -(-L // lanes) + number(0, 300 // lanes)
    C, N, H = chunks * lanes, one(number(1, 40), 127, 128, 129, 1030), one(0, 0, 1, 5, 16, 31, 1025)
    sizes = {"B": B, "Hkv": Hkv, "Hq": Hkv * number(1, 6), "L": L, "D": D, "C": C, "chunks": chunks, "lanes": lanes}
    sizes |= {"HkvD": Hkv * D, "3Hkv": 3 * Hkv, "N": N, "H": H, "features": H or D, **coded_axes(C)}
    call = SimpleNamespace(name=name, sizes=sizes, settings={}, dtype=one(*DTYPES), weights=one("f16", "f32"))
    for attribute in operator.attributes[1:]:
        call.settings[attribute.name] = setting(attribute)
    mistake = one(0, 1)
    call.start = np.array([one(-mistake, number(0, C - L), C - L + mistake) for _ in range(B)])
    padded = "left_padding" in [tensor.name for tensor in operator.inputs]
    call.padding = np.array([one(-mistake, number(0, C + 1)) if padded else 0 for _ in range(B)])
    call.spoiled, call.poison, call.seed = one(False, True), one(np.nan, np.inf), number(0, 2**32 - 1)
    call.inputs = inputs_of(call)
    return call


def inputs_of(call: SimpleNamespace) -> dict[str, Array]:
    """Return random inputs. Slots without a token have ``poison``; a spoiled call has NaN and -inf in other places."""
    rng, sizes, made = np.random.default_rng(call.seed), call.sizes, {}
    types = {**TYPES, "T": DTYPES[call.dtype], "W": DTYPES[call.weights]}
    lengths = {"length": call.start + sizes["L"], "past_length": call.start, "left_padding": call.padding}
    for tensor in OPERATORS[call.name].inputs:
        shape = [sizes.get(axis, axis) for axis in tensor.dims]
        if tensor.name in lengths:
            made[tensor.name] = lengths[tensor.name][: shape[0]]
        elif tensor.name == "past_bucket_ids":
            made[tensor.name] = rng.choice([-(2**15), -1, *range(sizes["N"] + 1), 2**15 - 1], shape)
        elif types[tensor.type] == np.uint8:
            made[tensor.name] = rng.integers(0, 256 if call.spoiled else 60, shape)  # below 60: float16 below 1
        else:
            array = rng.normal(size=shape)
            if tensor.type == "tensor(float)":
                array = np.abs(array)  # as deviations
            if call.spoiled:
                array = np.where(rng.random(shape) < 0.02, rng.choice([np.nan, -np.inf], shape), array)
            made[tensor.name] = array.astype(types[tensor.type])
    slots, end = np.arange(sizes["C"])[:, None], made.get("length", call.start)[:, None, None, None]
    stale = (slots >= end) | (slots < call.padding[:, None, None, None])
    for tensor in OPERATORS[call.name].inputs:
        if tensor.as_keys:
            made[tensor.name][np.broadcast_to(stale, made[tensor.name].shape)] = call.poison
    for name, source in (("keys_t", "keys"), ("past_key_t", "past_key")):
        if name in made:
            by_lane = made[source].reshape(*made[source].shape[:2], -1, sizes["lanes"], sizes["D"])
            made[name] = by_lane.swapaxes(-1, -2).reshape(made[name].shape)
    return made


def fits(call: SimpleNamespace) -> bool:
    """Return True if the operator must accept the lengths and the padding."""
    least = 0 if call.name in ("SparQ", "SparQCoded", "DenseAttention") else call.sizes["L"]
    length = call.inputs.get("length", call.start + call.sizes["L"])
    return bool(least <= length.min() and length.max() <= call.sizes["C"] and call.padding.min() >= 0)


@pytest.mark.parametrize("name", OPERATORS)
@given(st.data())
@fuzz
def test_a_call_is_answered_or_refused(name: str, data: st.DataObject) -> None:
    call = data.draw(calls(name))
    attend = Operator("native", name, call.dtype, weights=call.weights, **call.settings)
    if not fits(call):
        with pytest.raises(Exception, match=ONE_LINE):
            attend(**call.inputs)
        return
    got = attend(**call.inputs)
    if "output" in got:
        assert call.spoiled or np.isfinite(got["output"].astype(np.float32)).all()
    if "indices" in got:
        assert_ascending(got["indices"], call.padding, call.inputs["length"])
    if "blocks" in got:
        assert_ascending(got["blocks"], np.zeros(1), -(-call.inputs["length"] // call.settings["block_size"]))
    for state in OPERATORS[name].states:
        if f"past_{state}" in call.inputs and state in call.inputs:
            assert_appended(got[f"present_{state}"], call, state)


def assert_ascending(lists: Array, first: Array, end: Array) -> None:
    """Assert that each list of row b ascends from ``first[b]`` or above to less than ``end[b]``, then has -1."""
    filled = lists >= 0
    first, end = (np.reshape(bound, (-1, *[1] * (lists.ndim - 1))) for bound in (first, end))
    assert (np.where(filled, (lists >= first) & (lists < end), lists == -1)).all()
    assert (np.diff(np.where(filled, lists, 2**30 + np.arange(lists.shape[-1])), axis=-1) > 0).all()


def assert_appended(present: Array, call: SimpleNamespace, state: str) -> None:
    """Assert bitwise that only the slots of the new tokens changed. NumPy does not compare NaN in bfloat16."""
    expected = call.inputs[f"past_{state}"].copy()
    for b, start in enumerate(call.start):
        expected[b, :, start : start + call.sizes["L"]] = call.inputs[state][b]
    np.testing.assert_array_equal(present.view(np.uint8), expected.view(np.uint8))


def unaligned(array: Array) -> Array:
    """Return a copy of the array at an odd memory address."""
    raw = np.zeros(array.nbytes + 2, np.uint8)
    start = 1 + raw.ctypes.data % 2
    made = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def test_unaligned_inputs_are_refused() -> None:
    attend = Operator("native", "CachedAttention", "f32", scale=1.0, window=0)
    new, past = (np.ones((1, 1, n, 8), np.float32) for n in (1, 4))
    given = {"query": new, "key": new, "value": new, "past_key": past, "past_value": past}
    given |= {"past_length": np.array([2]), "left_padding": np.array([1])}
    np.testing.assert_array_equal(attend(**given)["output"], new)
    for name, array in given.items():
        message = f"{name}: expected data at a multiple of {array.itemsize} bytes, got other data"
        with pytest.raises(Exception, match=message):
            attend(**given | {name: unaligned(array)})


def preloads(compiler: str) -> str | None:
    """Return libraries to preload for sanitizers, or None if the compiler has no sanitizers."""
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        told = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        found.append(told.stdout.strip())
    return " ".join(found) if all(Path(path).is_absolute() for path in found) else None


@pytest.mark.skipif(sys.platform != "linux", reason="sanitizers are preloaded")
def test_nothing_outside_the_buffers_is_accessed(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    preload = preloads(compiler) if compiler else None
    if preload is None:
        absent("sanitizers", "g++ with libasan")
    cmake, made_by = [sys.executable, "-m", "cmake"], ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja.BIN_DIR}/ninja"]
    source = Path(__file__).parents[3] / "onnx_export" / "ort_ops"
    options = ["-DSPARSE_VERSION=sanitized", "-DSPARSE_SANITIZE=ON", f"-DCMAKE_CXX_COMPILER={compiler}"]
    for arguments in (["-S", source, "-B", tmp_path, *made_by, *options], ["--build", tmp_path, "--parallel", "2"]):
        done = subprocess.run([*cmake, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    code = f"""
import sys
from pathlib import Path
import pytest
from mlx_sparse.onnx_export.runtime import native
native._found, native._mismatch = lambda: Path({str(tmp_path / native.LIBRARY)!r}), lambda path: None
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", {__file__!r}, "-k", "not outside_the_buffers"]))
"""
    env = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "MLX_SPARSE_FUZZ": "12"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert f"{len(OPERATORS) + 1} passed" in done.stdout
