"""Test that mlx-vlm's models decode sparsely as mlx-lm's do, bit for bit, family by family."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
import tier
import vlm_table

ROWS = {row.family: row for row in vlm_table.read()}
EQUAL = [family for family, row in ROWS.items() if row.equal]
HERE = [family for family in EQUAL if family in vlm_table.families()]  # an older mlx-vlm has fewer


@pytest.mark.parametrize("family", tier.some(HERE, 24))
def test_sparse_logits_equal_those_of_mlx_lm(family: str) -> None:
    found = vlm_table.facts(family)
    assert found.equal, found
    if version("mlx-vlm") in vlm_table.FACTS.read_text(encoding="utf-8").splitlines()[0]:
        assert found == ROWS[family]


def test_the_page_has_the_saved_facts() -> None:
    page = vlm_table.PAGE.read_text(encoding="utf-8")
    for family in ROWS:
        assert f"`{family}`" in page
    assert re.search(rf"For {len(EQUAL)} families", page) and len(EQUAL) >= 20
