"""Compare docs/models.md with tiny models of mlx-lm's families."""

from __future__ import annotations

import re
from pathlib import Path

import family_models
import mlx.core as mx
import mlx_lm.models
import models_survey as survey
import models_table
import pytest
from mlx_lm.models.cache import make_prompt_cache
from models_table import NOTES

from mlx_sparse.lm import seam
from mlx_sparse.lm.call import active
from mlx_sparse.lm.loading import UNFIT
from mlx_sparse.lm.model import sparse
from mlx_sparse.methods import SparQ

pytestmark = pytest.mark.slow  # tiny models of all families

FACTS, MLX_LM = models_table.read(models_table.FACTS)
KNOWN = {found.family: found for found in FACTS}
AGAIN = "PYTHONPATH=tests/testing python tests/docs/models_table.py writes the table again"
# One family of each kind: full attention, windows, sinks, hybrid, layers without attention, latent, trained selection,
# states only, own attention. The attention module of phixtral is named rope.
SOME = ["llama", "gemma3_text", "gpt_oss", "qwen3_5", "nemotron_h", "deepseek_v3", "minimax_m3_vl", "mamba", "gemma2"]
SOME += ["phixtral"]


def test_table_is_up_to_date() -> None:
    text = models_table.PAGE.read_text(encoding="utf-8")
    assert models_table.page(text, FACTS, MLX_LM) == text, AGAIN
    assert len(models_table.SECTION.findall(text)) == 1


def test_table_has_every_module_with_a_model() -> None:
    folder = Path(mlx_lm.models.__path__[0])
    has_one = re.compile(r"^(class Model\b|from .* import .*\bModel\b)", re.MULTILINE)
    assert survey.modules()
    for name in survey.modules():
        has_model = has_one.search((folder / f"{name}.py").read_text(encoding="utf-8")) is not None
        assert (name in KNOWN) == has_model, f"{name} of mlx-lm {survey.installed()}: {AGAIN}"


@pytest.mark.parametrize("family", SOME)
def test_survey_of_a_family_equals_the_table(family: str) -> None:
    found = survey.facts(family)
    assert found == KNOWN[family], AGAIN


class Groups:
    """Listener that records whether several query heads share a KV head."""

    grouped = False

    def attend(self, queries: mx.array, keys: mx.array, *_: object) -> None:
        self.grouped |= queries.shape[1] > keys.shape[1]


def test_int4_scores_of_all_families_follow_the_shapes_of_queries_and_keys() -> None:
    found, expected = {}, {}
    for family in [known.family for known in FACTS if known.served.get("sparq") and "MLA" not in known.kinds]:
        model, groups = family_models.build(family), Groups()
        with sparse(model, "sparq:dense_below=0,rank=4") as report:
            found[family] = report.attn
        places, token = seam.bind(model), active.set(groups)
        model(mx.array([[1]]), cache=make_prompt_cache(model))
        active.reset(token)
        seam.unbind(places)
        score = "query_key" if groups.grouped or KNOWN[family].qk_norm else "query"
        expected[family] = str(SparQ(rank=4, dense_below=0).for_model(qk_norm=False, grouped=score == "query_key"))
    assert found == expected
    assert {"gpt_bigcode", "nemotron-nas", "dbrx", "lille-130m"} <= set(found)
    assert all("query_key" in found[family] for family in ("gpt_bigcode", "nemotron-nas", "dbrx", "lille-130m"))


def test_only_families_with_latent_vectors_are_labeled_mla() -> None:
    lines = models_table.PAGE.read_text(encoding="utf-8").splitlines()
    (served,) = [line for line in lines if line.startswith("**Every MLA layer can be sparse**")]
    assert {"`deepseek_v3`", "`kimi_linear`", "`mistral4`"} <= set(re.findall(r"`\w+`", served))
    # Caches of whole keys and values, value heads of another size, and heads that are repeated.
    for family in ("deepseek_v2", "minicpm3", "mimo_v2_flash", "plamo"):
        assert "MLA" not in models_table.markdown([KNOWN[family]], MLX_LM)


def test_all_runs_are_correct() -> None:
    run = [found for found in FACTS if found.how == "run"]
    assert len(run) > 80
    assert all(found.exact and found.shows and found.served["sparq"] for found in run)
    assert all(found.layers == found.served["sparq"] + sum(found.dense.values()) for found in FACTS if found.layers)


def test_notes_name_existing_families() -> None:
    assert {*NOTES["checkpoints"], *NOTES["real"], *NOTES["reported"], *UNFIT} <= set(KNOWN)
    lines = models_table.PAGE.read_text(encoding="utf-8").splitlines()
    for family in UNFIT:
        (row,) = [line for line in lines if line.startswith(f"| `{family}` |")]
        assert "**unfit**" in row
    for absent in NOTES["absent"]:
        assert any(absent["models"] in line and MLX_LM in line for line in lines) == (absent["family"] not in KNOWN)


def test_module_without_a_model_is_skipped() -> None:
    assert survey.facts("rope_utils") is None


def test_family_that_cannot_run_has_a_reason() -> None:
    found = survey.facts("prism_hadamard_qwen35")
    assert found == KNOWN["prism_hadamard_qwen35"]
    assert found.how == "not run" and "schema" in found.note
