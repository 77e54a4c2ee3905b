"""docs/models.md says what tiny models of mlx-lm's families do."""

from __future__ import annotations

import re
from pathlib import Path

import mlx_lm.models
import models_notes as notes
import models_survey as survey
import models_table
import pytest

from mlx_sparse.lm.loading import UNFIT

pytestmark = pytest.mark.slow  # tiny models of all families

FACTS, MLX_LM = models_table.read(models_table.FACTS)
KNOWN = {found.family: found for found in FACTS}
AGAIN = "PYTHONPATH=tests/fixtures python tests/lm/models_table.py writes it anew"
# One of each kind: full, windows, sinks, a hybrid, layers without attention, latent, trained, states alone, its own.
# And one whose attention is called a rope.
SOME = ["llama", "gemma3_text", "gpt_oss", "qwen3_5", "nemotron_h", "deepseek_v3", "minimax_m3_vl", "mamba", "gemma2"]
SOME += ["phixtral"]


def test_the_table_is_the_generated_one() -> None:
    text = models_table.PAGE.read_text(encoding="utf-8")
    assert models_table.page(text, FACTS, MLX_LM) == text, AGAIN
    assert len(models_table.SECTION.findall(text)) == 1


def test_every_module_with_a_model_is_in_it() -> None:
    folder = Path(mlx_lm.models.__path__[0])
    has_one = re.compile(r"^(class Model\b|from .* import .*\bModel\b)", re.MULTILINE)
    assert survey.modules()
    for name in survey.modules():
        has_model = has_one.search((folder / f"{name}.py").read_text(encoding="utf-8")) is not None
        assert (name in KNOWN) == has_model, f"{name} of mlx-lm {survey.installed()}: {AGAIN}"


@pytest.mark.parametrize("family", SOME)
def test_a_family_does_what_it_says(family: str) -> None:
    found = survey.facts(family)
    assert found == KNOWN[family], AGAIN


def test_nothing_that_ran_was_wrong() -> None:
    run = [found for found in FACTS if found.how == "run"]
    assert len(run) > 80
    assert all(found.exact and found.shows and found.served["sparq"] for found in run)
    assert all(found.layers == found.served["sparq"] + sum(found.dense.values()) for found in FACTS if found.layers)


def test_the_notes_are_of_families_that_there_are() -> None:
    assert {*notes.CHECKPOINTS, *notes.REAL, *notes.REPORTED, *UNFIT} <= set(KNOWN)
    lines = models_table.PAGE.read_text(encoding="utf-8").splitlines()
    for family in UNFIT:
        (row,) = [line for line in lines if line.startswith(f"| `{family}` |")]
        assert "**unfit**" in row
    for absent in notes.ABSENT:
        assert any(absent.models in line and MLX_LM in line for line in lines) == (absent.family not in KNOWN)


def test_a_module_without_a_model_is_no_family() -> None:
    assert survey.facts("rope_utils") is None


def test_a_family_of_which_nothing_can_be_run_is_read() -> None:
    found = survey.facts("prism_hadamard_qwen35")
    assert found is not None
    # Its attention is qwen3_next's, two files away.
    assert (found.how, list(found.kinds)) == ("read", ["calls mlx-lm's attention"])
    assert "schema" in found.note
