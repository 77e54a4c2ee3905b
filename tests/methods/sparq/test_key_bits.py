"""Test int4 scoring keys, (sparq.17) to (sparq.22) of docs/spec/sparq.md, on every backend and in the oracle."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import reference
from adapters import backends_with
from cases import CASES, CODED, Array, Case, assert_same_selection, covering, round_to
from expected import assert_coded_step, coded_parameters

import mlx_sparse
from mlx_sparse import ConfigError, ShapeError, oracle
from mlx_sparse.core import registry
from mlx_sparse.methods.sparq.oracle import approximate_keys, unpack
from mlx_sparse.methods.sparq.scoring_keys import GROUP, KeyCodes

NODES = ("ort",)  # runtimes of exported nodes, which need native kernels
CODING = [name for name in backends_with("code_keys") if name in (*registry.backends_of("code_keys"), *NODES)]
EIGHT_BIT_BACKENDS = ("metal", "triton")  # backends that store scores in 8 bits


class OddKeys(Case):
    """A case with constant, nearly constant, huge and non-finite key components, and NaN in padding."""

    def __str__(self) -> str:
        return f"{super().__str__()}-odd"

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        queries, keys, values = super().inputs(seed, L)
        keys[..., 0] = 3.0
        keys[..., 1] = np.float32(1000) + np.float32(0.5) * (np.arange(self.S) % 2)
        keys[..., 2] *= 1e-6
        if self.dtype != "f16":
            keys[..., 3] *= 1e6
            keys[:, :, 70, 4] = 3e38
            keys[:, :, 71, 4] = -3e38
        keys[:, :, 65, 5], keys[:, :, 140, 6] = np.nan, np.inf
        keys[:, :, -1, 7] = np.nan  # in the tail
        for b, first in enumerate(self.padding or ()):
            keys[b, :, :first] = np.nan
        return queries, round_to(keys, self.dtype), values


ODD = [OddKeys(2, 4, 2, 213, 64, dtype, padding) for dtype in ("f32", "f16", "bf16") for padding in (None, (0, 37))]


def by_backend_and_case(*more: Case) -> Any:
    """Parametrize with all cases, but only some cases for ONNX nodes, whose sessions are slow to create."""
    pairs = [(name, case) for name in CODING for case in (*(CASES[3::4] if name in NODES else CASES), *more)]
    ids = [f"{name}-{case}" for name, case in pairs]
    return pytest.mark.parametrize(("backend", "case"), pairs, ids=ids, indirect=["backend"])


@by_backend_and_case(*ODD)
def test_the_codes_equal_the_oracle_bit_by_bit(backend: Any, case: Case) -> None:
    wanted = oracle.sparq.code_keys(case.inputs()[1], left_padding=case.padding)
    for name, found, array in zip(KeyCodes._fields, backend.code_keys(case), wanted, strict=True):
        np.testing.assert_array_equal(found, array, err_msg=name)


@pytest.mark.parametrize("backend", CODING, indirect=True)
def test_a_padded_row_is_coded_as_it_is_alone(backend: Any) -> None:
    padding = (0, 1, 37, 64, 150, 200)
    case = Case(len(padding), 4, 2, 213, 64, "f16", padding)
    found, keys = backend.code_keys(case), case.inputs()[1]
    for b, first in enumerate(padding):
        alone = oracle.sparq.code_keys(keys[b : b + 1, :, first:])
        for name, array, wanted in zip(KeyCodes._fields, found, alone, strict=True):
            kept = array[b] if name == "center" else array[b][..., : wanted.shape[-1]]
            np.testing.assert_array_equal(kept, wanted[0], err_msg=name)


STEPPING = [*CODING, *(name for name in backends_with("sparq") if name.startswith("cpu-"))]
ARMS = [(name, *arm) for name in STEPPING for arm in covering(CASES[3::4] if name in NODES else CASES, list(CODED))]

ARMS += [(name, Case(2, 4, 2, 50, 64, "f16", (0, 9)), "4-bits") for name in STEPPING]  # no full group


@pytest.mark.parametrize(("backend", "case", "setting"), ARMS, ids=str, indirect=["backend"])
def test_a_backend_selects_by_codes_as_the_oracle(backend: Any, setting: str, case: Case) -> None:
    params = coded_parameters(case, setting)
    assert_coded_step(backend.sparq(case, params), case, params, eight_bit_scores=backend.name in EIGHT_BIT_BACKENDS)


@pytest.mark.parametrize("setting", ["4-bits"])
@pytest.mark.parametrize("case", ODD[:2], ids=str)
@pytest.mark.parametrize("backend", [name for name in STEPPING if name not in NODES], indirect=True)
def test_non_finite_keys_are_selected_first_with_their_groups(backend: Any, case: Case, setting: str) -> None:
    params = {**coded_parameters(case, setting), "rank": case.D, "top_k": 150}
    found = backend.sparq(case, params).choice
    q, k, _ = case.inputs()
    selection = {name: value for name, value in params.items() if name != "reallocate"}
    wanted = reference.sparq_select(q, k, left_padding=case.padding, **selection)
    most = np.where(np.isfinite(wanted.scores), np.abs(wanted.scores), 0).max()
    assert_same_selection(found, wanted.indices, np.where(wanted.scores < np.inf, wanted.scores, 2 * most + 1))
    assert {*range(GROUP, 2 * GROUP), 212} <= set(found[0, 0].tolist())


# --- The oracle -------------------------------------------------------------------------------------------------------


def test_a_coded_key_is_within_half_a_step_of_the_key() -> None:
    keys = Case(2, 4, 2, 200, 64, "f16").inputs()[1]
    coded = oracle.sparq.code_keys(keys)
    near = approximate_keys(keys.astype(np.float64), coded) + coded.center[:, :, None]
    step = np.repeat(coded.step.astype(np.float64), GROUP, axis=-1).swapaxes(-1, -2)
    # lo and step, which are at most 8, are rounded to float16: by half a unit in the last of 11 bits.
    assert (np.abs(near - keys)[:, :, :192] <= step * (0.5 + 2**-11 * 2**4) + 8 * 2**-11).all()
    np.testing.assert_allclose(near[:, :, 192:], keys[:, :, 192:], atol=1e-6)


def test_codes_are_packed_lowest_bits_first() -> None:
    keys = np.zeros((1, 1, GROUP, 8), np.float32)
    keys[0, 0, :, 0] = np.arange(GROUP) % 16
    codes = oracle.sparq.code_keys(keys).codes
    np.testing.assert_array_equal(codes[0, 0, 0, :8], [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    np.testing.assert_array_equal(unpack(codes)[0, 0, 0], np.arange(GROUP) % 16)


def test_exact_codes_select_as_the_keys() -> None:
    """Use keys that are integer multiples of the step, so that the codes are exact."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 16, (1, 2, 256, 32)).astype(np.float64)
    keys[:, :, ::GROUP], keys[:, :, 1::GROUP] = 0, 15
    queries = rng.normal(size=(1, 8, 1, 32)) / 100
    for score in ("query", "query_key"):
        kept = [
            reference.sparq_select(queries, keys, rank=32, top_k=20, component_score=score, key_bits=bits).indices
            for bits in (16, 4)
        ]
        np.testing.assert_array_equal(*kept)


def test_a_shift_of_all_keys_does_not_change_the_selection() -> None:
    q, k, _ = Case(1, 4, 2, 300, 64, "f32").inputs()
    shifted = k + 512 * np.round(np.random.default_rng(1).normal(size=(1, 2, 1, 64)))
    k, shifted = (np.round(keys * 64) / 64 for keys in (k, shifted))  # so that the shift causes no rounding
    for score in ("query", "query_key"):
        choose = {"rank": 16, "top_k": 32, "key_bits": 4, "component_score": score}
        chosen = [reference.sparq_select(q, keys, **choose) for keys in (k, shifted)]
        np.testing.assert_array_equal(chosen[0].indices, chosen[1].indices)


def test_a_non_finite_key_is_selected_with_its_group() -> None:
    q, k, _ = Case(1, 2, 2, 400, 64, "f32").inputs()
    k[0, :, 200] = np.nan
    chosen = reference.sparq_select(q, k, rank=16, top_k=96, local_window=32, key_bits=4).indices
    np.testing.assert_array_equal(chosen[..., :GROUP], np.broadcast_to(np.arange(192, 256), (1, 2, GROUP)))


def test_the_spread_orders_components_as_the_deviation_does() -> None:
    """Compare the orders for normal keys, for which the spread is about 1.2 times the deviation."""
    k = Case(1, 2, 2, 1024, 64, "f32").inputs()[1].astype(np.float64) * np.geomspace(1e-3, 1e3, 64)
    coded = oracle.sparq.code_keys(k)
    found = oracle.key_spread(coded, k)
    np.testing.assert_allclose(found, 1.2 * k.std(axis=2), rtol=0.2)


# --- Arguments of users -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"key_bits": 5}, ConfigError, "key_bits: expected one of 16, 4, got 5."),
        ({"key_bits": True}, ConfigError, "key_bits: expected one of 16, 4, got True."),
        ({"key_bits": 4, "keys_t": "columns"}, ConfigError, "keys_t: expected KeyCodes with key_bits=4, got array."),
        ({"key_bits": 16, "keys_t": "codes"}, ConfigError, "keys_t: expected an array (B, Hkv, D, S) with key_bits=16"),
        (
            {"key_bits": 4, "keys_t": "short"},
            ShapeError,
            "keys_t.codes: expected shape (1, 2, 64, 24), got (1, 2, 64, 16).",
        ),
    ],
)
def test_codes_that_do_not_fit_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    import mlx.core as mx

    q, k, v = (mx.array(array) for array in Case(1, 4, 2, 200, 64, "f32").inputs())
    if given.get("keys_t") == "columns":
        given = {**given, "keys_t": k.swapaxes(-1, -2)}
    elif "keys_t" in given:
        keys = k[:, :, :128] if given["keys_t"] == "short" else k
        given = {**given, "keys_t": mlx_sparse.code_keys(keys, backend="ops")}
    with pytest.raises(error, match=re.escape(message)):
        mlx_sparse.sparq_attention(q, k, v, top_k=32, backend="ops", **given)


def test_a_step_with_codes_counts_their_bytes() -> None:
    import mlx.core as mx

    q, k, v = (mx.array(array) for array in Case(1, 4, 2, 640, 64, "f16").inputs())
    _, stats = mlx_sparse.sparq_attention(q, k, v, rank=32, top_k=64, key_bits=4, return_stats=True)
    assert stats.elements == 640 * 32 * 9 // 32 + 2 * 64 * 64 + 4 * 64  # (sparq.23)
