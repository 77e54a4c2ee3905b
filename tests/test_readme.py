"""The README says what the program does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_sparse.methods import METHODS, SparQ
from mlx_sparse.tools import matrix

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_matrix_is_the_generated_one() -> None:
    found = re.search(r"<!-- matrix -->\n(.*?)\n<!-- /matrix -->", README, re.DOTALL)
    assert found
    assert found[1] == matrix.markdown()


def test_every_method_is_described() -> None:
    table = README[README.index("## Methods") : README.index("## What runs where")]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(METHODS) - {"dense"}


def test_the_defaults_of_sparq_are_the_stated_ones() -> None:
    assert f"`rank` ({SparQ().rank})" in README
    assert f"`top_k` ({SparQ().top_k})" in README
    assert "`dense_below` (`16 * top_k`; none" in README
    assert SparQ(top_k=200).shortest_context() == 3200
    assert SparQ(top_k=127).shortest_context() == 128


@pytest.mark.parametrize("spec", sorted(set(re.findall(r"`((?:sparq|streaming)(?::[\w=,]+)?)`", README))))
def test_every_method_specification_parses(spec: str) -> None:
    from mlx_sparse.methods import parse

    assert type(parse(spec)[0]) is METHODS[spec.partition(":")[0]]


def test_every_file_it_links_exists() -> None:
    root = Path(__file__).parents[1]
    for link in re.findall(r"\]\(((?!http|#)[^)]+)\)", README):
        assert (root / link).is_file(), link
