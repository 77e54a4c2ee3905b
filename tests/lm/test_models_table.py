"""docs/models.md says what tiny models of mlx-lm's families do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import mlx_lm.models
import models_table
import pytest

from mlx_sparse import cli
from mlx_sparse.lm.unfit_models import UNFIT
from mlx_sparse.tools.models import notes, survey, table

FACTS, MLX_LM = models_table.read(models_table.FACTS)
KNOWN = {found.family: found for found in FACTS}
AGAIN = "python scripts/models_table.py writes it anew"
# One of each kind: full, windows, sinks, a hybrid, layers without attention, latent, trained, states alone, its own.
# And one whose attention is called a rope.
SOME = ["llama", "gemma3_text", "gpt_oss", "qwen3_5", "nemotron_h", "deepseek_v3", "minimax_m3_vl", "mamba", "gemma2"]
SOME += ["phixtral"]

# A process that answers for what it is given, until a family ends it.
DIES = """
import json, os, sys
for name in sys.argv[1:]:
    if name == "phi3" and sys.argv[1] != "--probe":
        os.abort()
    if name != "--probe":
        print(json.dumps(None if name == "base" else {"family": name, "served": {"sparq": 1}}), flush=True)
"""


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
    assert found is not None
    assert found.as_dict() == KNOWN[family].as_dict(), AGAIN


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


def test_a_family_that_ends_the_process_is_only_asked_for_its_layers() -> None:
    told: list[str] = []
    found = survey.survey(["llama", "base", "phi3", "qwen3"], told.append, [sys.executable, "-c", DIES])
    assert [(one.family, one.how, one.note) for one in found] == [
        ("llama", "run", ""),
        ("phi3", "probed", "a run of it crashes"),
        ("qwen3", "run", ""),
    ]
    assert told == ["llama", "base", "phi3", "qwen3"]


def test_the_command_prints_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--models", "gemma4", "deepseek_v3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["mlx-lm"] == survey.installed()
    assert printed["families"] == [KNOWN[name].as_dict() for name in ("gemma4", "deepseek_v3")], AGAIN


def test_the_table_for_a_terminal_has_a_line_for_each() -> None:
    _, *lines = table.text([KNOWN["gemma4"], KNOWN["deepseek_v3"]], MLX_LM).splitlines()
    assert re.fullmatch(r"gemma4 +2 of 10 +2 full, 8 sliding window; dense: 8 with a sliding .*; unfit: .*", lines[0])
    assert re.fullmatch(r"deepseek_v3 +0 of 4 +MLA; dense: 4 with .* \(MLA\)", lines[1])
    assert lines[-1].startswith(f"mlx-lm {MLX_LM}: 2 families. ")


def test_an_unknown_family_gets_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--models", "qwen3_mo"]) == 2
    assert "--models: expected families of mlx-lm, got 'qwen3_mo'. Did you mean qwen3_moe?" in capsys.readouterr().err
