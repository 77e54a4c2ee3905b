"""Selection on Metal for more query rows than a thread has sums of: those of a call with several queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters import ADAPTERS
from cases import QUEST, Array, Case, assert_same_choice, every_parameter
from expected import METHODS, assert_conforms
from metal_facts import check, moved
from mlx_arrays import to_mlx
from msl import Metal, Report
from quantised_cases import PackedCase, PackedMlx
from saap_cases import SaapCase, assert_same_buckets
from spoiled import Spoiled

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.common.packed_rows import PackedRows
from mlx_sparse.kernels import quest, saap, select, sparq
from mlx_sparse.methods import registry
from mlx_sparse.methods.registry import METAL_GROUP, METAL_ROWS
from mlx_sparse.ops.key_codes import code_keys

METAL, PACKED = ADAPTERS["metal"], PackedMlx("metal")
counted = pytest.mark.skipif(mx.metal.is_available(), reason="only the harness counts bytes")


def assert_chosen(case: Case, backend: Any = METAL, **settings: Any) -> None:
    """The keys of one decode step over whole cache buffers are the oracle's."""
    params = {**every_parameter(case, "paper"), "key_bits": 16, "reallocate": False, **settings}
    params["local_window"] = params["top_k"] // 4
    exact, weight = params.pop("reallocate"), None
    q, k, _ = backend.arrays(case)
    padding, bits = backend.padding(case), params["key_bits"]
    coded = None if bits == 16 else code_keys(k, padding, key_bits=bits)
    how = {name: value for name, value in params.items() if name != "component_score"}
    if params["component_score"] == "query_key":
        more = {} if coded is None else {"key_bits": bits}
        spread = (k,) if coded is None else (coded, k)
        weight = backend.load("deviation" if coded is None else "key_spread")(*spread, padding, **more)
    keys_t = backend.columns(k) if coded is None else backend.cached_codes(coded, bits)
    how |= {"component_weight": weight, "left_padding": padding, "exact": exact, "length": case.S}
    chosen = np.array(sparq.sparq_select(q, backend.cached(k), keys_t=keys_t, **how))
    q, k, _ = case.inputs()
    wanted = oracle.sparq_select(q, k, left_padding=case.padding, **params)
    assert_same_choice(chosen, wanted.indices, wanted.scores)


class Poisoned(Case):
    """A case with NaN in the rows before the first valid one."""

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        q, k, v = super().inputs(seed, L)
        for row, first in enumerate(self.padding or ()):
            k[row, :, :first] = v[row, :, :first] = np.nan
        return q, k, v


# sparq


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("rows", [17, 24, 32, 64, 128])
def test_one_choice_for_many_rows_is_that_of_the_oracle(metal: Metal, rows: int, bits: int) -> None:
    score = "query" if rows in (24, 64) else "query_key"
    case = Case(1, 2 * rows, 2, 1100 if rows < 64 else 300, 64, "f16")
    assert_chosen(case, key_bits=bits, component_score=score)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("score", ["query", "query_key"])
def test_logits_of_many_rows_are_summed_without_a_softmax(metal: Metal, score: str, bits: int) -> None:
    case = Poisoned(2, 2 * 20, 2, 200, 64, "f32", padding=(0, 69))
    assert_chosen(case, key_bits=bits, group_reduce="logits", component_score=score)
    if metal.emulated:
        assert len(metal.launches) == 3


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("padding", [None, (0, 37), (1024, 1030), (1100, 2600)], ids=str)
def test_padded_rows_are_left_out_of_many_rows_choice(metal: Metal, padding: tuple[int, int] | None, bits: int) -> None:
    """Up to a padding of whole tiles, of which nothing is left."""
    case = Poisoned(2, 20, 1, 1163 if padding is None or padding[1] < 1163 else 2601, 32, "f32", padding=padding)
    assert_chosen(case, key_bits=bits, top_k=20)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("S", [1, 3, 40, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 1088, 2049])
def test_every_length_is_right_for_many_rows(metal: Metal, S: int, bits: int) -> None:
    assert_chosen(Case(1, 18, 1, S, 16, "bf16"), key_bits=bits, rank=5, top_k=min(S, 16))


@pytest.mark.parametrize(
    ("D", "rank", "bits"), [(8, 1, 16), (20, 16, 4), (80, 17, 16), (96, 96, 4), (128, 33, 16), (256, 250, 4)]
)
def test_any_head_dim_and_rank_is_right_for_many_rows(metal: Metal, D: int, rank: int, bits: int) -> None:
    assert_chosen(Case(1, 25, 1, 150, D, "f16"), rank=rank, key_bits=bits)


@pytest.mark.parametrize("spoil", ["nan", "inf", "inf-minus-inf", "minus-inf", "query", "query-inf", "all-keys"])
@pytest.mark.parametrize("reduce", ["softmax", "logits"])
def test_what_is_no_number_ranks_as_the_oracle_ranks_it(metal: Metal, spoil: str, reduce: str) -> None:
    case = Spoiled(1, 2 * 20, 2, 130, 64, "f32", spoil=spoil)
    assert_chosen(case, group_reduce=reduce)


@pytest.mark.parametrize("settings", [{}, {"key_bits": 4}, {"group_reduce": "logits"}], ids=str)
def test_many_rows_are_reallocated_by_their_own_logits(metal: Metal, settings: dict[str, Any]) -> None:
    case = Case(2, 2 * 20, 2, 200, 64, "f32", padding=(0, 37))
    params = {**every_parameter(case, "paper"), "reallocate": True, **settings}
    assert_conforms(METAL.sparq(case, params), METHODS["sparq"](case, params), case)


def test_a_step_of_many_rows_is_the_oracles(metal: Metal) -> None:
    case = Case(1, 2 * 24, 2, 300, 64, "f16", padding=(5,))
    params = {**every_parameter(case, "paper"), "reallocate": False, "key_bits": 4}
    assert_conforms(METAL.sparq(case, params), METHODS["sparq"](case, params), case)


@pytest.mark.parametrize("settings", [{"rank": 64}, {"key_bits": 4}, {"rank": 64, "reallocate": True}], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (3, 64)])
def test_many_rows_choose_from_packed_keys(metal: Metal, bits: int, group: int, settings: dict[str, Any]) -> None:
    case = PackedCase(2, 2 * 20, 2, 200, 64, "f16", padding=(0, 37), bits=bits, group_size=group)
    assert_chosen(case, PACKED, **settings)


def test_the_best_of_tiles_of_a_long_context_are_those_of_many_rows(metal: Metal) -> None:
    assert_chosen(Case(1, 17, 1, 8300, 32, "f16"), key_bits=4, top_k=100)


# quest and saap


def assert_pages(case: Case, page_size: int, top_k: int) -> None:
    result = METAL.quest(case, {"page_size": page_size, "top_k": top_k})
    q, k, _ = case.inputs()
    indices, scores = oracle.quest_select(q, k, left_padding=case.padding, page_size=page_size, top_k=top_k)
    finite = np.where(np.isfinite(scores), scores, 2 * np.abs(scores[np.isfinite(scores)]).max(initial=1))
    assert_same_choice(result.choice, indices, np.repeat(finite, page_size, axis=-1)[..., : case.S])


@pytest.mark.parametrize("setting", QUEST)
@pytest.mark.parametrize(
    ("rows", "D", "dtype"), [(17, 64, "f16"), (24, 80, "f32"), (64, 256, "f32"), (128, 128, "bf16"), (32, 20, "f32")]
)
def test_pages_of_many_rows_are_those_of_the_oracle(metal: Metal, rows: int, D: int, dtype: str, setting: str) -> None:
    assert_pages(Case(2, 2 * rows, 2, 500, D, dtype, padding=(0, 137)), **QUEST[setting])


@dataclass(frozen=True)
class Lone(Case):
    """A case in which all query rows of a KV head but one are zero."""

    row: int = 0

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        q, k, v = super().inputs(seed, L)
        rows = np.arange(self.Hq) % (self.Hq // self.Hkv)
        return q * (rows == self.row)[:, None, None], k, v


@pytest.mark.parametrize("row", [16, 0, 7, 8])
def test_a_row_decides_wherever_it_is(metal: Metal, row: int) -> None:
    case = Lone(1, 34, 2, 400, 64, "f32", row=row)
    assert_pages(case, 5, 40)
    assert_chosen(case, key_bits=4)


class Negative(Case):
    """A case in which every logit is negative, and so every bound."""

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        q, k, v = super().inputs(seed, L)
        return np.abs(q), -np.abs(k), v


def test_rows_that_there_are_not_bound_no_page(metal: Metal) -> None:
    assert_pages(Negative(1, 17, 1, 400, 64, "f32"), 8, 40)


@pytest.mark.parametrize("spoil", ["nan", "inf", "minus-inf", "query", "query-inf"])
def test_pages_with_what_is_no_number_are_ranked_as_the_oracle_ranks_them(metal: Metal, spoil: str) -> None:
    assert_pages(Spoiled(1, 2 * 20, 2, 130, 64, "f32", spoil=spoil), 5, 20)


@pytest.mark.parametrize("hidden", [None, 48, 130])
@pytest.mark.parametrize(("rows", "weights"), [(17, "f16"), (24, "f32"), (64, "bf16"), (128, "f16")])
def test_many_rows_visit_the_buckets_of_the_oracle(metal: Metal, rows: int, weights: str, hidden: int | None) -> None:
    buckets = 300 if rows < 64 else 40
    case = SaapCase(Case(2, 2 * rows, 2, 1, 64, "f16"), "random", buckets, 8, hidden, weights=weights)
    assert_same_buckets(METAL.route(case), case)


# Which groups


@pytest.mark.parametrize("function", ["sparq", "quest", "saap", "saap_route", "attend_indices"])
def test_metal_takes_up_to_128_rows_and_says_so(metal: Metal, function: str) -> None:
    assert registry.resolve("auto", function, D=64, G=METAL_ROWS) == "metal"
    assert registry.resolve("auto", function, D=64, G=METAL_ROWS + 1) == "ops"
    with pytest.raises(mlx_sparse.BackendUnavailable, match="up to 128 query rows per KV head, not 129"):
        registry.resolve("metal", function, D=64, G=METAL_ROWS + 1)


# Bytes

HKV, D, RANK = 1, 128, 32


def decode(metal: Metal, S: int, rows: int, key_bits: int = 16, **how: Any) -> list[Report]:
    """The launches that choose the keys of one float16 step."""
    q, k, _ = (to_mlx(array, "f16") for array in Case(1, HKV * rows, HKV, S, D, "f16").inputs())
    packed = PackedRows.of(k, bits=4) if how.pop("packed", False) else None
    keys_t: Any = None if packed and key_bits == 16 else mx.contiguous(k.swapaxes(-1, -2))
    if key_bits < 16:
        keys_t = code_keys(k, None, key_bits=key_bits)
        mx.eval(*keys_t)
    metal.clear()
    given = {"rank": RANK, "top_k": 128, "local_window": 32, "group_reduce": "softmax", "component_weight": None}
    given |= {"scale": 0.1, "left_padding": None, "key_bits": key_bits, "keys_t": keys_t, **how}
    sparq.sparq_select(q, packed or k, **given)
    return list(metal.launches)


@counted
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("L", [2, 4, 8, 16])
def test_a_pass_reads_each_key_once_for_all_rows(metal: Metal, L: int, bits: int) -> None:
    S, rows = 2048 + 40, 4 * L
    launches = decode(metal, S, rows, bits)
    scored = [
        report for report in launches if report.kernel.startswith(("sparq_many", "sparq_code_scores", "sparq_scores"))
    ]
    passes = 1 if rows <= METAL_GROUP else 2
    assert len(scored) == passes
    keys = HKV * RANK * (S * 2 if bits == 16 else S // 64 * (8 * bits + 4))
    names = ("keys_t", "codes", "lo", "step")
    lines = 2 * 128 * HKV * RANK * (bits < 16)  # lo and step of a component begin a line each
    assert keys <= moved(scored, "dispatch", *names) <= passes * (1.03 * keys + lines)
    assert moved(scored, "threadgroup", *names) <= passes * (1.1 * keys + lines * -(-S // 1024))
    if rows > METAL_GROUP:
        # A number per key, written and read, whatever the rows.
        assert moved(launches, "dispatch", "made", direction="write") <= HKV * (S * 4 + 4 * rows * 8) + 512
        assert moved(launches, "dispatch", "scores", direction="read") <= HKV * S * 4 + 512


@counted
def test_kernels_of_many_rows_do_what_their_comments_say(metal: Metal) -> None:
    S, G, rows = 2048 + 40, 20, 24
    form = {"ROW_BITS": 4, "ROW_GROUP": 64}
    sizes = {"S": S, "G": G, "H": HKV, "Hkv": HKV, "Hq": HKV * G, "ROWS": rows, "MAKES": 2}
    decode(metal, S, G)
    check(metal, "sparq_components", WEIGHTED=0, **sizes)
    check(metal, "sparq_many_scores", tiles=3, **sizes)
    decode(metal, 4096, G, 4)
    check(metal, "sparq_many_code_scores", tiles=5, BITS=4, **{**sizes, "S": 4096})
    decode(metal, 4096 + 40, G, 4, packed=True)
    check(metal, "sparq_many_code_scores_packed", tiles=5, BITS=4, **{**sizes, "S": 4096 + 40}, **form)
    decode(metal, S, G, packed=True, rank=D)
    check(metal, "sparq_many_row_scores", tiles=3, **{**sizes, "rank": D}, **form)
    decode(metal, S, G, group_reduce="logits", component_weight=mx.ones((1, HKV, D)))
    check(metal, "sparq_components", WEIGHTED=1, **sizes)
    check(metal, "sparq_many_scores", tiles=3, **{**sizes, "MAKES": 4})
    decode(metal, S, G, exact=True)
    check(metal, "sparq_many_scores", tiles=3, **{**sizes, "MAKES": 8})
    tiles, threads, slots = select.tiles_of(S, 128)
    check(metal, "sparq_candidates", tiles=tiles, threads=threads, slots=slots, score_tiles=3, SOFTMAX=1, **sizes)


@counted
@pytest.mark.parametrize("L", [8, 16])
def test_quest_and_saap_read_bounds_and_weights_once_for_all_rows(metal: Metal, L: int) -> None:
    G, S, P = 4 * L, 4000, 250
    q, k, _ = (to_mlx(array, "f16") for array in Case(1, HKV * G, HKV, S, D, "f16").inputs())
    bounds = (registry.load("page_bounds", "metal"))(k, None, page_size=16)
    named = dict(zip(("page_min", "page_max"), bounds, strict=True))
    quest.quest_select(q, k, page_size=16, top_k=64, left_padding=None, **named)
    check(metal, "quest_many_scores", G=G, P=P, Hkv=HKV, Hq=HKV * G, Q=2, ceil=lambda n: int(-(-n // 1)))
    launches = [metal.last("quest_many_scores")]
    for level in ("lane", "threadgroup", "dispatch"):
        assert moved(launches, level, "page_min", "page_max") == HKV * 2 * (P - 1) * D * 2
    case = SaapCase(Case(1, HKV * G, HKV, 1, D, "f16"), "random", 1024, 8, 512, weights="f16")
    metal.clear()
    METAL.route(case)
    hidden, out = (report for report in metal.launches if report.kernel == "saap_many_layer")
    for report, below, units in ((hidden, D, 512), (out, 512, 1024)):
        for level in ("lane", "threadgroup", "dispatch"):
            assert moved([report], level, "weight") == HKV * below * units * 2
    check(metal, "saap_many_layer", Hkv=HKV, I=512, C=1024, W=2, G=G, ROWS=G, tiles=8, RELU=0)
    check(metal, "sparq_candidates", Hkv=HKV, S=1024, G=G, tiles=1, threads=256, slots=8, score_tiles=8, SOFTMAX=1)
    assert saap.UNITS * 8 == 1024
