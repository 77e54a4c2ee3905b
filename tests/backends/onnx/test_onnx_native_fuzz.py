"""Test the native kernels with random sizes, lengths and contents: correct output or a one-line error.

`test_nothing_outside_the_buffers_is_accessed` repeats the files in `SANITIZED` with a library that is built with
sanitizers.
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
import reference
from cases import PRECISION, Array, Case, assert_same_selection, ulp
from hypothesis import given
from hypothesis import strategies as st
from onnx_operators import DTYPES, ONE_LINE, Operator, coded_caches, fuzz, unaligned, windowed_attention
from require import absent

from mlx_sparse import native, oracle
from mlx_sparse.core.blocks.layout import Layout
from mlx_sparse.methods.sparq.scoring_keys import GROUP

pytestmark = pytest.mark.slow  # fuzzing, sanitizers
SANITIZED = [
    "onnx/test_onnx_native_fuzz.py",
    "onnx/test_onnx_saap_fuzz.py",
    "cpu/test_cpu_fuzz.py",
    "cpu/test_cpu_calls.py",
]


class Draw(SimpleNamespace):
    """Random sizes and contents: caches of C slots with ``start`` tokens, and L new tokens."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        rng = np.random.default_rng(self.seed)
        kind = DTYPES[self.dtype]
        self.q = rng.normal(size=(self.B, self.Hkv * self.G, self.L, self.D)).astype(kind)
        shape = (self.B, self.Hkv, self.C, self.D)
        self.k, self.v = (rng.normal(size=shape).astype(kind) for _ in range(2))
        for b, (start, first) in enumerate(zip(self.start, self.padding, strict=True)):
            for array in (self.k, self.v):
                array[b, :, max(0, start + self.L) :] = self.poison
                array[b, :, : max(0, first)] = self.poison
        self.poisoned = np.zeros((self.B, self.Hkv), bool)
        if self.poisoned_key and self.fits():
            b, h = self.seed % self.B, self.seed % self.Hkv
            j = max(0, min(self.padding[b], self.length[b] - 1)) if self.seed % 2 else self.length[b] - 1
            if j >= self.padding[b]:
                self.k[b, h, j, self.seed % self.D] = np.nan if self.seed % 3 else -np.inf
                self.poisoned[b, h] = True

    @property
    def length(self) -> Array:
        return np.array(self.start) + self.L

    @property
    def scale(self) -> float:
        return self.D**-0.5

    def fits(self) -> bool:
        return all(0 <= start <= self.C - self.L for start in self.start) and all(first >= 0 for first in self.padding)

    def row(self, b: int) -> tuple[Array, Array, Array, Array]:
        """Return query, keys, values and padding of row b up to its last token, with zeros in invalid slots."""
        end = self.length[b]
        first = min(self.padding[b], end)
        q, k, v = (array[b : b + 1].astype(np.float64) for array in (self.q, self.k, self.v))
        k, v = k[:, :, :end], np.where(np.arange(end)[:, None] >= first, v[:, :, :end], 0)
        k = np.where((np.arange(end)[:, None] >= first) & ~self.poisoned[b][:, None, None], k, 0)
        return q, k, v, np.array([first])

    def close(self, got: Array, expected: Array, b: int) -> None:
        """Assert that heads with finite valid keys are equal within one rounding to the type of the case."""
        sound = np.repeat(~self.poisoned[b], self.G)
        wanted, out = expected[0][sound], got[b][sound].astype(np.float64)
        np.testing.assert_allclose(out, wanted, rtol=2.0 ** -PRECISION[self.dtype], atol=ulp(wanted, self.dtype) + 2e-5)

    def appended(self) -> dict[str, Array]:
        """Return the new tokens, and caches without them."""
        at = [slice(start, start + self.L) for start in self.start]
        new = {n: np.stack([a[b, :, at[b]] for b in range(self.B)]) for n, a in (("key", self.k), ("value", self.v))}
        past = {"past_key": self.k.copy(), "past_value": self.v.copy()}
        for array in past.values():
            for b in range(self.B):
                array[b, :, at[b]] = self.poison
        return {**new, **past, "past_length": np.array(self.start)}


@st.composite
def draws(draw: Any, most: int = 5, mistakes: bool = False) -> Draw:
    B, tokens = draw(st.integers(1, 3)), draw(st.integers(1, most))
    lanes = draw(st.sampled_from([1, 3, 8, 16, 40, 64]))
    C = lanes * draw(st.integers(-(-tokens // lanes), max(-(-tokens // lanes), 300 // lanes)))
    D = draw(st.sampled_from([1, 2, 7, 8, 15, 16, 33, 64, 80]))
    room = (-1, C - tokens + 1) if mistakes else (0, C - tokens)
    top_k = draw(st.one_of(st.integers(1, 40), st.integers(1, C + 5), st.just(2**31 - 1)))
    return Draw(
        B=B,
        Hkv=draw(st.integers(1, 3)),
        G=draw(st.integers(1, 6)),
        L=tokens,
        D=D,
        C=C,
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        start=draw(st.lists(st.integers(*room), min_size=B, max_size=B)),
        padding=draw(st.lists(st.integers(-1 if mistakes else 0, C + 1), min_size=B, max_size=B)),
        window=draw(st.sampled_from([0, 1, 5, 70, 10**12])),
        lanes=lanes,
        rank=draw(st.integers(1, D)),
        top_k=top_k,
        local_window=draw(st.integers(0, min(top_k, 50))),
        component_score=draw(st.integers(0, 1)),
        poison=draw(st.sampled_from([float("nan"), float("inf"), 1e4])),
        poisoned_key=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def assert_same_bits(got: Array, expected: Array) -> None:
    """Assert bitwise equality, because NumPy does not compare NaN in bfloat16."""
    same = (np.ascontiguousarray(array).view(np.uint8) for array in (got, expected))
    np.testing.assert_array_equal(*same)


def exact(case: Draw, b: int) -> Array:
    """Compute causal attention of row b in its window, in float64."""
    q, k, v, first = case.row(b)
    return windowed_attention(q, k, v, first, case.window or 10**12, case.scale)


def chunked(case: Draw) -> Array:
    return case.k.reshape(case.B, case.Hkv, -1, case.lanes, case.D).swapaxes(-1, -2)


def sparq_settings(case: Draw) -> dict[str, Any]:
    names = ("rank", "top_k", "local_window", "component_score", "scale")
    return {**{name: getattr(case, name) for name in names}, "reallocate": 0}


def oracle_settings(case: Draw) -> dict[str, Any]:
    words = {"component_score": ("query", "query_key")}
    named = {name: words[name][value] if name in words else value for name, value in sparq_settings(case).items()}
    named.pop("reallocate")
    return named


def deviations(case: Draw) -> Array:
    """Return the standard deviation of the valid keys, 0 if there are none."""
    made = np.zeros((case.B, case.Hkv, case.D))
    for b in range(case.B):
        valid = case.row(b)[1][0, :, case.padding[b] :]
        if valid.shape[1]:
            made[b] = valid.std(axis=1)
    return made


@given(draws())
@fuzz
def test_dense_attention_is_exact(case: Draw) -> None:
    attend = Operator("native", "DenseAttention", case.dtype, scale=case.scale, window=case.window)
    given = {"left_padding": case.padding, "length": case.length}
    got = attend(query=case.q, keys=case.k, values=case.v, **given)["output"]
    for b in range(case.B):
        q, k, v, first = case.row(b)
        case.close(got, windowed_attention(q, k, v, first, case.window or 10**12, case.scale), b)


@given(draws(most=1))
@fuzz
def test_sparq_selects_and_attends_as_the_oracle(case: Draw) -> None:
    attend = Operator("native", "SparQ", case.dtype, **sparq_settings(case))
    buffers = {"keys": case.k, "keys_t": chunked(case), "values": case.v, "deviation": deviations(case)}
    zeros = np.zeros((case.B, case.Hkv, case.D))
    got = attend(query=case.q, left_padding=case.padding, length=case.length, value_mean=zeros, **buffers)
    longest = -(-max(case.length) // case.lanes) * case.lanes
    assert got["indices"].shape == (case.B, case.Hkv, min(case.top_k, longest))
    for b in range(case.B):
        q, k, v, first = case.row(b)
        count = min(case.top_k, int(case.length[b] - first[0]))
        indices = got["indices"][b]
        filled = indices[:, :count]
        assert (indices[:, count:] == -1).all()
        assert (np.diff(filled) > 0).all()
        assert ((filled >= first[0]) & (filled < case.length[b])).all()
        sound = ~case.poisoned[b]
        choice = reference.sparq_select(q, k, left_padding=first, **oracle_settings(case))
        if sound.any() and count and case.top_k < case.length[b] - first[0]:
            chosen = np.where(choice.indices >= 0, choice.indices, -1)[0][sound][:, :count]
            assert_same_selection(filled[None, sound], chosen[None], choice.scores[:, sound])
        expected, _ = oracle.attend.attend_indices(q, k, v, indices[None], scale=case.scale)
        case.close(got["output"], expected, b)


@given(draws())
@fuzz
def test_tokens_are_appended_and_attended(case: Draw) -> None:
    attend = Operator("native", "CachedAttention", case.dtype, scale=case.scale, window=case.window)
    appended = case.appended()
    got = attend(query=case.q, left_padding=case.padding, **appended)
    for b in range(case.B):
        case.close(got["output"], exact(case, b), b)
    assert_same_bits(got["present_key"], case.k)
    assert_same_bits(got["present_value"], case.v)
    only = Operator("native", "Append", case.dtype)(**appended)
    assert_same_bits(only["present_key"], case.k)


@given(draws())
@fuzz
def test_cached_sparq_equals_sparq_over_its_caches(case: Draw) -> None:
    settings = {**sparq_settings(case), "lanes": case.lanes, "dense_below": 0}
    sums = np.zeros((case.B, case.Hkv, 3, case.D))
    for b in range(case.B):
        keys, values = (array[b, :, case.padding[b] : case.start[b]].astype(np.float64) for array in (case.k, case.v))
        spread = keys.var(axis=1) * keys.shape[1] if keys.size else 0 * sums[b, :, 0]
        sums[b] = np.stack([values.sum(axis=1), keys.sum(axis=1), spread], axis=1)
    appended = case.appended()
    flat = np.array(chunked(case)).reshape(case.k.shape)
    past_key_t = appended["past_key"].reshape(case.B, case.Hkv, -1, case.lanes, case.D).swapaxes(-1, -2)
    attend = Operator("native", "SparQAttention", case.dtype, **settings)
    past = {**appended, "past_key_t": past_key_t.reshape(case.k.shape), "past_sums": sums}
    got = attend(query=case.q, left_padding=case.padding, **past)
    assert_same_bits(got["present_key_t"], flat)
    assert_same_bits(got["present_key"], case.k)
    given = {"query": case.q, "keys": case.k, "values": case.v, "left_padding": case.padding, "length": case.length}
    if case.L > 1:
        expected = Operator("native", "DenseAttention", case.dtype, scale=case.scale, window=0)(**given)["output"]
    elif case.component_score:
        return  # the two deviations round differently, so scores that are almost equal may be ordered differently
    else:
        zeros = np.zeros((case.B, case.Hkv, case.D))
        sparq = Operator("native", "SparQ", case.dtype, **sparq_settings(case))
        expected = sparq(**given, keys_t=chunked(case), value_mean=zeros, deviation=zeros)["output"]
    sound = np.repeat(~case.poisoned, case.G, axis=1)
    np.testing.assert_array_equal(got["output"][sound], expected[sound])


def coded_states(case: Draw, ends: Array) -> dict[str, Array]:
    """Return codes and summary after ``ends`` tokens of each row."""
    rows = []
    for b, end in enumerate(ends):
        row = slice(b, b + 1)
        one = Case(
            1, case.Hkv * case.G, case.Hkv, int(end), case.D, case.dtype, padding=(min(case.padding[b], int(end)),)
        )
        rows.append(coded_caches(one, case.k[row], case.v[row], int(end), case.C))
    return {name: np.concatenate([row[name] for row in rows]) for name in ("past_key_codes", "past_summary")}


@given(draws())
@fuzz
def test_int4_scoring_keys_equal_the_oracle(case: Draw) -> None:
    settings = sparq_settings(case)
    attend = Operator("native", "SparQCodedAttention", case.dtype, **settings, dense_below=0)
    with np.errstate(all="ignore"):
        past, wanted = (coded_states(case, ends) for ends in (np.array(case.start), case.length))
    got = attend(query=case.q, left_padding=case.padding, **case.appended(), **past)
    assert_same_bits(got["present_key"], case.k)
    np.testing.assert_array_equal(got["present_summary"][:, 1::3], wanted["past_summary"][:, 1::3])
    sound = ~case.poisoned
    if case.component_score:
        spreads = (states[:, 2::3][sound] for states in (got["present_summary"], wanted["past_summary"]))
        np.testing.assert_allclose(*spreads, rtol=1e-4, atol=1e-6)
    for b, end in enumerate(case.length):
        full = max(0, end - case.padding[b]) // GROUP
        assert_same_bits(*(codes[b, :, :full] for codes in (got["present_key_codes"], wanted["past_key_codes"])))
    if case.L > 1:
        return
    states = {"key_codes": got["present_key_codes"], "summary": got["present_summary"], "length": case.length}
    choose = Operator("native", "SparQCoded", case.dtype, **settings)
    chosen = choose(query=case.q, keys=case.k, values=case.v, left_padding=case.padding, **states)
    heads = np.repeat(sound, case.G, axis=1)
    np.testing.assert_array_equal(chosen["output"][heads], got["output"][heads])
    for b in range(case.B):
        q, k, v, first = case.row(b)
        count = min(case.top_k, int(case.length[b] - first[0]))
        filled = chosen["indices"][b][:, :count]
        assert (chosen["indices"][b][:, count:] == -1).all()
        assert (np.diff(filled) > 0).all()
        if sound[b].any() and count and case.top_k < case.length[b] - first[0]:
            choice = reference.sparq_select(q, k, left_padding=first, key_bits=4, **oracle_settings(case))
            assert_same_selection(
                filled[None, sound[b]], choice.indices[:, sound[b], :count], choice.scores[:, sound[b]]
            )
        expected, _ = oracle.attend.attend_indices(q, k, v, chosen["indices"][b : b + 1], scale=case.scale)
        case.close(chosen["output"], expected, b)


@given(draws(mistakes=True))
@fuzz
def test_only_invalid_lengths_are_refused(case: Draw) -> None:
    attend = Operator("native", "SparQAttention", case.dtype, lanes=case.lanes, dense_below=0, **sparq_settings(case))
    caches = {name: np.zeros(case.k.shape) for name in ("past_key", "past_key_t", "past_value")}
    new = np.ones((case.B, case.Hkv, case.L, case.D))
    sums = np.zeros((case.B, case.Hkv, 3, case.D))
    given = {"query": case.q, "key": new, "value": new, "past_sums": sums, **caches}
    given |= {"past_length": case.start, "left_padding": case.padding}
    if case.fits():
        assert np.isfinite(attend(**given)["output"].astype(np.float32)).all()
    else:
        with pytest.raises(Exception, match=ONE_LINE):
            attend(**given)


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


class Prompt(SimpleNamespace):
    """Random sizes and contents of a prefill chunk; ``free`` slots of the buffers are NaN."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        rng = np.random.default_rng(self.seed)
        kind = DTYPES[self.dtype]
        self.q = (2 * rng.normal(size=(self.B, self.Hkv * self.G, self.L, self.D))).astype(kind)
        shape = (self.B, self.Hkv, self.S + self.free, self.D)
        self.k, self.v = (rng.normal(size=shape).astype(kind) for _ in range(2))
        for array in (self.k, self.v):
            array[:, :, self.S :] = np.nan

    @property
    def settings(self) -> dict[str, Any]:
        alphas = {"alpha_column": self.alphas[0], "alpha_slash": self.alphas[1]}
        return {**alphas, "chunks": self.chunks, "block_size": self.block_size, "scale": self.D**-0.5}


@st.composite
def prompts(draw: Any) -> Prompt:
    L = draw(st.integers(1, 300))
    alpha = st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0])
    return Prompt(
        B=draw(st.integers(1, 2)),
        Hkv=draw(st.integers(1, 2)),
        G=draw(st.integers(1, 4)),
        L=L,
        S=L + draw(st.sampled_from([0, 1, 31, 64, 200])),
        free=draw(st.integers(0, 9)),
        D=draw(st.sampled_from([1, 7, 16, 33, 64])),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        block_size=draw(st.sampled_from([32, 64, 128])),
        chunks=draw(st.sampled_from([1, 2, 5, 2**31 - 1])),
        alphas=(draw(alpha), draw(alpha)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@given(prompts())
@fuzz
def test_prefill_attends_to_the_returned_blocks(case: Prompt) -> None:
    attend = Operator("native", "Sample", case.dtype, **case.settings)
    got = attend(query=case.q, keys=case.k, values=case.v, length=np.array([case.S]))
    q, k, v = (array.astype(np.float64) for array in (case.q, case.k[:, :, : case.S], case.v[:, :, : case.S]))
    blocks, layout = got["blocks"], Layout(case.L, case.S, case.chunks, case.block_size)
    rows = np.arange(layout.first_block, layout.key_blocks)
    assert blocks.shape[:3] == (case.B, case.Hkv * case.G, layout.row_blocks)
    mask = oracle.block_mask(blocks, layout.key_blocks)
    assert mask[..., 0].all()
    assert mask[:, :, np.arange(len(rows)), rows].all()
    assert (mask.sum(axis=-1) == (blocks >= 0).sum(axis=-1)).all()
    assert not mask[:, :, np.arange(layout.key_blocks) > rows[:, None]].any()
    expected, _ = oracle.attend_blocks(q, k, v, blocks, block_size=case.block_size)
    off = ulp(expected, case.dtype) + 2e-5
    np.testing.assert_allclose(got["output"].astype(np.float64), expected, rtol=2.0 ** -PRECISION[case.dtype], atol=off)


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
    source = Path(__file__).parents[3] / "mlx_sparse" / "native"
    options = ["-DSPARSE_VERSION=sanitized", "-DSPARSE_SANITIZE=ON", f"-DCMAKE_CXX_COMPILER={compiler}"]
    for arguments in (["-S", source, "-B", tmp_path, *made_by, *options], ["--build", tmp_path, "--parallel", "2"]):
        done = subprocess.run([*cmake, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    code = f"""
import sys
from pathlib import Path
import pytest
from mlx_sparse import native
native.path, native._mismatch = lambda: Path({str(tmp_path / native.LIBRARY)!r}), lambda path: None
files = {[str(Path(__file__).parents[1] / file) for file in SANITIZED]}
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *files, "-k", "not outside_the_buffers"]))
"""
    env = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "MLX_SPARSE_FUZZ": "12"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert re.search(r"^\d{3} passed, \d+ deselected", done.stdout, re.MULTILINE)  # and none skipped
