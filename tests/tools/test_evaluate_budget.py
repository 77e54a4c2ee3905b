"""Test the settings of a method for a byte budget: the largest settings that the transfer formulas allow."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path

import pytest
from saap_artefacts import BUCKETS, write_artefact
from tiny_models import build

from mlx_sparse import ConfigError
from mlx_sparse.core import stats
from mlx_sparse.methods import parse
from mlx_sparse.tools.evaluate.variants import (
    BudgetTooSmall,
    Variant,
    fit_budget,
    read_budget,
    read_methods,
    transfers,
    variants_of,
)

S, D = 2048, 64
SIZES = {"sparq": "top_k", "streaming": "recent_tokens", "h2o": "top_k", "oracle_top_k": "top_k"}


@pytest.mark.parametrize("budget", [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)], ids=str)
@pytest.mark.parametrize(
    "method", [*SIZES, "sparq:top_k=128", "sparq:preset=paper,top_k=129", "sparq:rank=4,local_window=0"]
)
def test_budget_is_used_up_to_whole_keys_and_components(method: str, budget: Fraction) -> None:
    settled = fit_budget(method, budget, S, D)
    assert settled is not None
    (config,) = parse(settled)
    size = "rank" if "top_k=" in method or "preset" in method else SIZES[config.name]
    more = dataclasses.replace(config, **{size: getattr(config, size) + 1})
    assert transfers(config, S, D) <= budget
    all_components = size == "rank" and config.rank == D  # int4 codes may cost less than the budget
    assert transfers(more, S, D) > budget or all_components


def test_transfers_follow_the_formulae() -> None:
    (config,) = parse("sparq:rank=8,top_k=128,key_bits=16")
    assert transfers(config, S, D) == (S * 8 + 2 * 128 * D + 4 * D) / (2 * S * D + 2 * D)
    (config,) = parse("sparq:rank=8,top_k=128")  # 4 bits per key and two 16-bit numbers per group of 64 keys
    assert transfers(config, S, D) == (S * 8 * 9 / 32 + 2 * 128 * D + 4 * D) / (2 * S * D + 2 * D)
    assert transfers(parse("streaming")[0], S, D) == (2 * 128 * D + 2 * D) / (2 * S * D + 2 * D)
    assert transfers(parse("sample")[0], S, D) is None


def test_sparq_splits_its_budget_in_halves() -> None:
    (config,) = parse(fit_budget("sparq:key_bits=16", Fraction(1, 4), S, D) or "")
    assert config.rank == D // 4
    (config,) = parse(fit_budget("sparq", Fraction(1, 4), S, D) or "")
    assert config.rank == int(D / 4 * 32 / 9)
    assert config.top_k == pytest.approx(S // 4 // 2, abs=2)


def test_explicit_settings_stay() -> None:
    assert fit_budget("sparq:rank=16,top_k=64", Fraction(1, 2), S, D) is None
    assert fit_budget("streaming:recent_tokens=100", Fraction(1, 2), S, D) is None
    assert "dense_below=5" in (fit_budget("sparq:dense_below=5", Fraction(1, 2), S, D) or "")
    assert "dense_below=0" in (fit_budget("sparq", Fraction(1, 2), S, D) or "")
    assert fit_budget("sample:alpha_column=0.5", Fraction(1, 2), S, D) is None
    both = fit_budget("sample:alpha_column=0.5+sparq", Fraction(1, 8), S, D) or ""
    assert both == f"sample:alpha_column=0.5+{fit_budget('sparq', Fraction(1, 8), S, D)}"


@pytest.mark.parametrize("mode", ["online", "trained"])
def test_saap_spends_its_budget_on_probes(mode: str, tmp_path: Path) -> None:
    named, buckets = "mode=online,buckets=64", 64
    if mode == "trained":
        buckets = BUCKETS
        named = f"artefact={write_artefact(tmp_path / 'saap', build())}"
    (config,) = parse(fit_budget(f"saap:{named},recent_tokens=127", Fraction(1, 2), S, D) or "")
    expected = 128 + (S - 128) * config.probes / buckets
    assert expected * (1 + 1 / (2 * D)) <= S / 2 < expected + (S - 128) / buckets
    assert transfers(config, S, D) == stats.saap_elements(D, round(expected)) / stats.dense_elements(S, D)


def test_unreachable_budgets_are_left_out_with_a_reason() -> None:
    with pytest.raises(BudgetTooSmall, match=r"that flexgen can meet at 2,048 keys, got 1/4: its minimum is 0.5"):
        fit_budget("flexgen", Fraction(1, 4), S, D)
    variants, left_out = variants_of(
        ["flexgen", "streaming", "sparq:rank=16,top_k=64"], [Fraction(3, 4), Fraction(1, 4)], S, D
    )
    assert [(variant.method, variant.budget) for variant in variants] == [
        ("flexgen", "3/4"),
        ("streaming", "3/4"),
        ("streaming", "1/4"),
        ("sparq:rank=16,top_k=64", None),  # listed once, unchanged
    ]
    (line,) = left_out
    assert "flexgen" in line and line.endswith("Left out.")


def test_no_budget_leaves_methods_unchanged() -> None:
    variants, left_out = variants_of(["sparq", "sample"], [], S, D)
    assert variants == [Variant("sparq", "sparq"), Variant("sample", "sample")] and not left_out
    assert [variant.formula(S, D) for variant in variants] == [transfers(parse("sparq")[0], S, D), None]


def test_method_lists_drop_dense_and_duplicates() -> None:
    texts = ["dense,sparq:rank=16,top_k=64,streaming", "sparq:rank=16,top_k=64"]
    assert read_methods(texts) == ["sparq:rank=16,top_k=64", "streaming"]


@pytest.mark.parametrize("text", ["2", "0", "1", "-1/2", "1/0", "half", "", "1/8/2", "nan", "inf"])
def test_budget_must_be_a_fraction(text: str) -> None:
    with pytest.raises(ConfigError, match="--budget: expected shares such as 1/2,1/8, got"):
        read_budget(text)
    assert read_budget(" 0.125 ") == read_budget("1/8") == Fraction(1, 8)
