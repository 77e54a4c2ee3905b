"""Test the C interface of the native kernels with random sizes and contents.

tests/backends/onnx/test_onnx_native_fuzz.py repeats this file with a library that is built with sanitizers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import PRECISION, Array, round_to, ulp
from hypothesis import given
from hypothesis import strategies as st
from native_calls import Call, fuzz, stored, structure
from saap_cases import assert_same_list

from mlx_sparse import oracle
from mlx_sparse.core import native_call
from mlx_sparse.core.blocks.layout import Layout
from mlx_sparse.core.blocks.oracle import attend_blocks
from mlx_sparse.methods.sparq.scoring_keys import GROUP, KeyCodes
from mlx_sparse.oracle import attend, saap, sample

pytestmark = pytest.mark.slow  # fuzzing


LOWEST = {"f32": -3.4028234663852886e38, "f16": -65504.0, "bf16": -3.3895313892515355e38}


class Draw(SimpleNamespace):
    """Random sizes and contents. The unused rows of the buffers and the padded rows contain ``poison``.

    ``bias`` is for the oracle, and ``stored_bias`` has the lowest number of its type in place of -inf.
    """

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.rng = np.random.default_rng(self.seed)
        self.q = round_to(self.rng.normal(size=(self.B, self.Hkv * self.G, self.L, self.D)), self.types[0])
        shape = (self.B, self.Hkv, self.S + self.free, self.D)
        self.k, self.v = (round_to(self.rng.normal(size=shape), self.types[1]) for _ in range(2))
        for array in (self.k, self.v):
            array[:, :, self.S :] = self.poison
            for b, first in enumerate(self.padding or ()):
                array[b, :, :first] = self.poison
        self.bias = self.stored_bias = None
        if self.bias_type:
            bias = round_to(self.rng.normal(size=(self.B, self.Hkv * self.G, 1, self.S)), self.bias_type)
            hidden = self.rng.random(self.S) < 0.2, self.rng.random(bias.shape) < 0.1
            self.bias = np.where(hidden[0] | hidden[1], -np.inf, bias)
            some = hidden[1] & ~hidden[0]
            self.stored_bias = np.where(some, LOWEST[self.bias_type], self.bias), self.bias_type

    @property
    def rows(self) -> tuple[Array, Array, Array]:
        """Queries, keys and values for the oracle."""
        k, v = (np.array(array[:, :, : self.S], np.float64) for array in (self.k, self.v))
        for b, first in enumerate(self.padding or ()):
            k[b, :, :first] = v[b, :, :first] = 0
        return self.q.astype(np.float64), k, v

    def run(self, function: str, *arguments: Any) -> tuple[Array, Array]:
        call = Call(self.q, self.k, self.v, self.S, self.padding, self.types, self.stored_bias)
        return call.run(function, *arguments)

    def close(self, found: tuple[Array, Array], wanted: Array, lse: Array | None) -> None:
        dtype = self.types[0]
        off = ulp(wanted, dtype) + 2e-5
        np.testing.assert_allclose(found[0], wanted, rtol=2.0 ** -PRECISION[dtype], atol=off)
        if lse is not None:
            np.testing.assert_allclose(found[1], lse, rtol=1e-5, atol=1e-4)


@st.composite
def draws(draw: Any, most: int = 1, padded: bool = True) -> Draw:
    L, B = draw(st.integers(1, most)), draw(st.integers(1, 3))
    S = L + draw(st.sampled_from([0, 1, 63, 64, 65, 130, 400, 1100]))
    types = st.sampled_from(sorted(PRECISION))
    return Draw(
        B=B,
        Hkv=draw(st.integers(1, 3)),
        G=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 17])),
        L=L,
        D=draw(st.sampled_from([1, 2, 7, 16, 33, 64, 80, 130])),
        S=S,
        free=draw(st.integers(0, 70)),
        types=(draw(types), draw(types)),
        padding=draw(st.none() | st.lists(st.integers(0, S), min_size=B, max_size=B)) if padded else None,
        bias_type=draw(st.sampled_from(["", *PRECISION])) if most == 1 else "",
        poison=draw(st.sampled_from([float("nan"), float("inf"), 1e4])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@given(draws(most=300), st.sampled_from([0, 1, 5, 70, 2**31 - 1]))
@fuzz
def test_dense_attention_is_exact(case: Draw, window: int) -> None:
    (q, k, v), wanted = case.rows, []
    for i in range(case.L):
        end = case.S - case.L + i + 1
        first = np.maximum(case.padding or [0] * case.B, end - window if window else 0)
        how: dict[str, Any] = {"scale": case.D**-0.5, "left_padding": first}
        rows = q[:, :, i : i + 1], k[:, :, :end], v[:, :, :end]
        wanted.append((attend.dense_attention(*rows, **how), attend.dense_lse(*rows[:2], **how)))
    out, lse = (np.concatenate(each, axis=2) for each in zip(*wanted, strict=True))
    case.close(case.run("dense", window), out, lse)


@given(draws(padded=False), st.integers(1, 700))
@fuzz
def test_lists_of_any_numbers_are_attended(case: Draw, N: int) -> None:
    lists = case.rng.integers(-3, case.S + case.free + 4, (case.B, case.Hkv, N)).astype(np.int32)
    lists[case.rng.random(lists.shape) < 0.1] = case.rng.choice([-(2**31), 2**31 - 1])
    counts = case.rng.integers(-3, N + 4, (case.B, case.Hkv)).astype(np.int32)
    kept = np.where(np.arange(N) < counts[..., None], lists, -1)
    q, k, v = case.rows
    out, lse = attend.attend_indices(q, k, v, np.where(kept < case.S, kept, -1), scale=case.D**-0.5, bias=case.bias)
    case.close(case.run("indices", structure(native_call.Lists, N=N, indices=lists, counts=counts)), out, lse)


@given(draws(), st.integers(1, 90), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 9))
@fuzz
def test_sparq_attends_as_the_oracle(
    case: Draw, top_k: int, coded: bool, weighted: bool, reallocate: bool, spare: int
) -> None:
    q, k, v = case.rows
    rank, window = int(case.rng.integers(1, case.D + 1)), int(case.rng.integers(0, top_k + 1))
    shape, keys = (case.B, case.Hkv, case.D), case.k[:, :, : case.S]
    weight = case.rng.random(shape).astype(np.float32) if weighted else None
    mean = case.rng.normal(size=shape).astype(np.float32) if reallocate else None
    given: dict[str, Any] = {"rank": rank, "top_k": top_k, "local_window": window, "component_weight": weight}
    selection = {**given, "scale": case.D**-0.5, "left_padding": case.padding, "bias": case.bias}
    if coded:
        with np.errstate(all="ignore"):
            made = oracle.sparq.code_keys(keys, left_padding=case.padding)
        rooms = spare * GROUP // 2, spare, spare
        codes, lo, step = (np.pad(each, [(0, 0)] * 3 + [(0, n)]) for each, n in zip(made[:3], rooms, strict=True))
        given |= {"codes": codes, "lo": lo, "step": step, "center": made.center, "groups": lo.shape[-1]}
        selection["keys_t"] = KeyCodes(*made)
    else:
        columns = np.full((*shape, case.S + spare), case.poison, np.float32)
        columns[..., : case.S] = keys.swapaxes(-1, -2)
        given |= {"keys_t": stored(columns, case.types[1]), "columns": case.S + spare}
    recall = np.full((case.B, case.Hkv), np.nan, np.float32)
    given |= {"value_mean": mean, "recall": recall}
    found = case.run("sparq", structure(native_call.SparQ, **given))
    out, lse, *_ = oracle.sparq.sparq_attention(q, k, v, reallocate=reallocate, value_mean=mean, **selection)
    case.close(found, out, lse)
    assert ((recall >= 0) & (recall <= 1 + 1e-5)).all()


@given(draws(most=300, padded=False), st.integers(1, 300), st.integers(1, 12))
@fuzz
def test_blocks_of_any_size_are_attended(case: Draw, size: int, N: int) -> None:
    layout = Layout(case.L, case.S, 1, size)
    shape = case.B, case.Hkv * case.G, layout.row_blocks, N
    lists = case.rng.integers(-2, layout.key_blocks + 3, shape).astype(np.int32)
    lists[case.rng.random(shape) < 0.1] = case.rng.choice([-(2**31), 2**31 - 1])
    out, lse = attend_blocks(*case.rows, lists, block_size=size, scale=case.D**-0.5)
    case.close(case.run("blocks", structure(native_call.Lists, N=N, block_size=size, indices=lists)), out, lse)


@given(draws(most=300, padded=False), st.integers(1, 128), st.integers(1, 9), st.sampled_from([0.01, 0.5, 0.9, 1.0]))
@fuzz
def test_selected_blocks_are_those_of_the_oracle(case: Draw, size: int, chunks: int, alpha: float) -> None:
    layout, (q, k, _) = Layout(case.L, case.S, chunks, size), case.rows
    lists = np.full((case.B, case.Hkv * case.G, layout.row_blocks, layout.key_blocks), -9, np.int32)
    given = structure(native_call.Lists, N=layout.key_blocks, block_size=size, indices=lists)
    case.run("sample", given, alpha, 0.7, chunks)
    mask = oracle.block_mask(lists, layout.key_blocks)
    assert (lists >= -1).all()
    assert (mask.sum(axis=-1) == (lists >= 0).sum(axis=-1)).all()
    settings = {"alpha_column": alpha, "alpha_slash": 0.7, "chunks": chunks, "block_size": size}
    wanted = sample.sample_select(q, k, **settings, scale=case.D**-0.5)
    assert (mask == oracle.block_mask(wanted, layout.key_blocks)).mean() > 0.99  # shares at the threshold


@given(draws(), st.integers(1, 40), st.integers(0, 9), st.integers(0, 20), st.integers(1, 300))
@fuzz
def test_visited_buckets_list_the_keys_of_the_oracle(
    case: Draw, buckets: int, n: int, sinks: int, capacity: int
) -> None:
    B, Hkv, S, padding = case.B, case.Hkv, case.S, case.padding
    covered = case.rng.integers(0, S + 1, B).astype(np.int32)
    window = {"sink_tokens": sinks, "left_padding": padding}
    ids = case.rng.integers(-1, buckets, (B, Hkv, S))
    ids = np.where(np.arange(S) < covered[:, None, None], ids, -1)
    index = [each.astype(np.int32) for each in saap.saap_index(ids[..., : max(covered)], buckets=buckets, **window)]
    visited = np.array([[case.rng.permutation(buckets + 6)[:n] - 3 for _ in range(Hkv)] for _ in range(B)], np.int32)
    wanted = saap.saap_indices(visited, *index, length=S, covered=covered, capacity=max(capacity, S), **window)
    found = np.full((B, Hkv, capacity), -9, np.int32), np.full((B, Hkv), -9, np.int32)
    given = {"B": B, "Hkv": Hkv, "n": visited.shape[2], "buckets": buckets, "listed": index[1].shape[2]}
    given |= {"capacity": capacity, "length": S, "sink_tokens": min(sinks, S), "visited": visited, "covered": covered}
    given |= {"left_padding": None if padding is None else np.array(padding, np.int32)}
    names = {"offsets": index[0], "key_ids": index[1], "indices": found[0], "counts": found[1]}
    native_call.run("buckets", structure(native_call.Buckets, **given, **names))
    if capacity < S:  # a list longer than its capacity is truncated
        wanted = found[0], np.minimum(wanted[1], capacity)
    assert_same_list(*found, wanted)
