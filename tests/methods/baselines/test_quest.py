"""Compare Quest in array operations with the float64 oracle over all cases."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from adapters import ADAPTERS, Result
from cases import CASES, Array, Case, assert_as_good_as_plain, covering
from expected import Expected, assert_conforms, attended

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.core import registry
from mlx_sparse.methods import Quest, parse
from mlx_sparse.tools.evaluate.variants import fit_budget, transfers

OPS = ADAPTERS["ops"]
SETTINGS = {"pages": {"page_size": 16, "top_k": 64}, "ragged": {"page_size": 5, "top_k": 13}}


def of_keys(scores: Array, case: Case, page_size: int) -> Array:
    """Return for each key the score of its page, ``(B, Hkv, S)``; -inf for keys before the first valid key."""
    each = np.full((case.B, case.Hkv, case.S), -np.inf)
    for row, first in enumerate(case.padding or [0] * case.B):
        each[row, :, first:] = np.repeat(scores[row], page_size, axis=-1)[:, : case.S - first]
    return each


@dataclass(frozen=True)
class Spoiled(Case):
    """A case with ``number`` in a component of some keys of the first KV head, and in all padded rows."""

    rows: tuple[int, int] = (0, 0)
    number: float = np.nan

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        q, k, v = super().inputs(seed, L)
        k[0, 0, slice(*self.rows), 3] = self.number
        for row, first in enumerate(self.padding or ()):
            k[row, :, :first] = v[row, :, :first] = self.number
        return q, k, v


class Negative(Case):
    """A case in which all logits, and therefore all bounds, are negative."""

    def inputs(self, seed: int = 0, L: int = 1) -> tuple[Array, Array, Array]:
        q, k, v = super().inputs(seed, L)
        return np.abs(q), -np.abs(k), v


def wanted(case: Case, setting: str) -> Expected:
    q, k, _ = case.inputs()
    indices, scores = oracle.quest_select(q, k, left_padding=case.padding, **SETTINGS[setting])
    scores = of_keys(scores, case, SETTINGS[setting]["page_size"])
    real = np.abs(scores) < 1e300
    finite = np.where(real, scores, 2 * np.abs(scores[real]).max(initial=1))
    return attended(case, indices, case.D**-0.5, finite)


def run(case: Case, setting: str) -> Result:
    q, k, v = OPS.arrays(case)
    how = {**SETTINGS[setting], "left_padding": OPS.padding(case)}
    out, lse = registry.load("quest", "ops")(q, k, v, scale=case.D**-0.5, **how)
    return OPS.result(registry.load("quest_select", "ops")(q, k, **how), out, lse, case)


@pytest.mark.parametrize(
    ("case", "setting"), covering([case for case in CASES if case.S > 64], list(SETTINGS)), ids=str
)
def test_pages_are_selected_and_attended_as_by_the_oracle(case: Case, setting: str) -> None:
    assert_conforms(run(case, setting), wanted(case, setting), case)


def test_pages_are_ranked_where_every_bound_is_negative() -> None:
    case = Negative(1, 6, 2, 300, 64, "f32")
    assert_conforms(run(case, "ragged"), wanted(case, "ragged"), case)


NUMBERS = [((40, 41), np.nan), ((40, 41), np.inf), ((40, 41), -np.inf), ((20, 90), np.nan), ((0, 0), 1e3)]


@pytest.mark.parametrize(("rows", "number"), NUMBERS)
def test_pages_with_non_finite_keys_come_first_and_padding_does_not_count(rows: tuple[int, int], number: float) -> None:
    case = Spoiled(3, 4, 2, 130, 64, "f32", (0, 7, 130), rows, number)
    expected, found = wanted(case, "pages"), run(case, "pages")
    np.testing.assert_array_equal(found.choice, expected.choice)
    nan = np.isnan(expected.out)
    np.testing.assert_array_equal(np.isnan(found.out), nan)
    assert_as_good_as_plain(*(np.where(nan, 0, out) for out in (found.out, expected.out, expected.plain)), case.dtype)
    dense = reference.dense_attention(*case.inputs(), left_padding=case.padding)
    np.testing.assert_array_equal(np.isnan(expected.out), np.isnan(dense))


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_no_key_scores_more_than_its_page_and_the_current_page_is_attended(case: Case) -> None:
    q, k, _ = case.inputs()
    indices, scores = oracle.quest_select(q, k, page_size=7, top_k=20, left_padding=case.padding)
    valid = oracle.valid_keys(case.B, case.S, case.padding)[:, None]
    exact = np.einsum("bhgd,bhsd->bhgs", q.reshape(case.B, case.Hkv, -1, case.D).astype(float), k).max(axis=2)
    assert (np.where(valid, exact, -np.inf) <= of_keys(scores, case, 7) + 1e-9).all()
    assert (indices == case.S - 1).any(axis=-1).all()


def test_the_public_function_equals_the_oracle_and_is_dense_with_all_pages() -> None:
    case = Case(2, 6, 2, 70, 64, "f32", (0, 30))
    given: dict[str, Any] = {"left_padding": case.padding}
    assert mx.array_equal(*(OPS.public(f"{name}_attention", case, **given) for name in ("quest", "dense")))
    given |= {"top_k": 20, "return_stats": "recall"}
    expected, figures = oracle.quest_attention(*case.inputs(), **given)
    out, stats = OPS.public("quest_attention", case, **given)
    np.testing.assert_allclose(np.array(out), expected, rtol=0, atol=1e-5)
    assert (stats.elements, stats.density) == (figures.elements, figures.density) == (4864, 32 / 70)
    np.testing.assert_allclose(np.array(stats.recall), figures.recall, rtol=1e-4)


def test_settings_and_budgets() -> None:
    assert Quest(top_k=20, page_size=8).attended == 24
    assert str(parse("quest:top_k=64")[0]) == "quest:top_k=64"
    assert transfers(parse(fit_budget("quest", Fraction(1, 4), 8192, 128) or "")[0], 8192, 128) <= 1 / 4
    with pytest.raises(mlx_sparse.ConfigError, match="page_size: expected an integer of at least 1, got 0"):
        parse("quest:page_size=0")


def test_left_padding_does_not_change_the_output() -> None:
    """Test that pages begin at the first valid key, so that other requests of a batch do not move pages."""
    q, k, v = Case(1, 4, 2, 203, 64, "f32").inputs()
    how: dict[str, Any] = {"page_size": 8, "top_k": 32}
    alone = reference.quest_attention(q, k, v, **how)
    found = np.array(mlx_sparse.quest_attention(*map(mx.array, (q, k, v)), **how))
    for padding in (1, 3, 8, 29):
        shifted = [np.concatenate([np.full((1, 2, padding, 64), np.nan, np.float32), rows], axis=2) for rows in (k, v)]
        np.testing.assert_allclose(reference.quest_attention(q, *shifted, **how, left_padding=[padding]), alone)
        padded = mlx_sparse.quest_attention(*map(mx.array, (q, *shifted)), **how, left_padding=mx.array([padding]))
        np.testing.assert_array_equal(np.array(padded), found)
