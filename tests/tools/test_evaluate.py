"""Test the runner of `mlx-sparse eval`: measurements of examples and resumed runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import commands
import mlx.core as mx
import numpy as np
import pytest
from commands import Progress
from mlx_lm.models.cache import make_prompt_cache
from text_tokenizers import WordTokenizer
from tiny_models import build

import mlx_sparse
from mlx_sparse.tools.evaluate import runner
from mlx_sparse.tools.evaluate.journal import Journal
from mlx_sparse.tools.evaluate.results import Outcome, Row, Trial
from mlx_sparse.tools.evaluate.runner import Prefix, Prompt, Run, Steps
from mlx_sparse.tools.evaluate.table import tables
from mlx_sparse.tools.evaluate.tasks import Example, Passage
from mlx_sparse.tools.evaluate.tasks.text import BITS_TOKENS
from mlx_sparse.tools.evaluate.variants import DENSE, Variant, quantized_variants

CONTEXT = 400
TOKENS = commands.tokens(4 * (CONTEXT + BITS_TOKENS))


def variants(*methods: str) -> list[Variant]:
    return [Variant(method, method) for method in methods]


def no_journal() -> Journal[Trial]:
    return Journal(None, "", "", Trial)


def run_variants(
    subjects: list[Any], chosen: list[Variant], prefill: bool = False, D: int = 16, **given: Any
) -> list[Row]:
    done = Run("needle", 100, prefill, subjects, chosen, D)
    for subject in subjects:
        done.add(subject, given.get("progress", Progress()), given.get("journal", no_journal()))
    return done.rows()


def run(subjects: list[Any], *methods: str, **given: Any) -> list[Row]:
    return run_variants(subjects, variants(*methods), **given)


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    methods = ["sparq:rank=4,top_k=500,dense_below=9000", "sparq:rank=4,top_k=8"]
    examples = [Example(TOKENS[:100], TOKENS[100:120]), Example(TOKENS[7:107], TOKENS[107:127])]
    progress, subject = Progress(), Steps(build(), WordTokenizer(), examples, 512)
    result = run([subject], *methods, progress=progress)
    assert progress.count == 2 * (1 + len(methods))
    return dict(zip(["dense", *methods], result, strict=True))


def cells(row: Row) -> dict[str, str]:
    """Return the cells of a row in its table by column."""
    (table,) = tables([row])
    return dict(zip(table.header, table.rows[0], strict=True))


def test_selecting_every_key_matches_dense(rows: dict[str, Row]) -> None:
    row = rows["sparq:rank=4,top_k=500,dense_below=9000"]
    assert row.mean.agreement == 1
    assert abs(row.delta.bits) < 1e-5
    assert abs(row.mean.kl) < 1e-5
    assert (row.sparse_calls, row.compression) == (0, 1)
    assert row.served == "fell back"
    assert row.dense_reasons == {"over fewer than 9,000 keys": 2 * 2 * 20}
    assert cells(row)["calls"] == "ran densely: 80 over fewer than 9,000 keys"


def test_batched_examples_match_single_examples(rows: dict[str, Row]) -> None:
    methods, model = list(rows)[1:], build()
    examples = [Example(TOKENS[:100], TOKENS[100:120]), Example(TOKENS[7:107], TOKENS[107:113])]
    together = Steps(model, WordTokenizer(), examples, 512)  # a row with a shorter target runs on
    for variant in (DENSE, *variants(*methods)):
        alone = [Steps(model, WordTokenizer(), [example], 512).trials(variant)[0] for example in examples]
        for one, of_two in zip(alone, together.trials(variant), strict=True):
            assert of_two.outcome.accuracy == one.outcome.accuracy
            assert of_two.outcome.bits == pytest.approx(one.outcome.bits, rel=1e-4)
            assert of_two.outcome.kl == pytest.approx(one.outcome.kl, rel=1e-3, abs=1e-6)


def test_only_scored_tokens_count() -> None:
    model, tokens = build(), TOKENS[:120]
    whole = Steps(model, WordTokenizer(), [Example(tokens[:100], tokens[100:])], 512)
    part = Steps(model, WordTokenizer(), [Example(tokens[:100], tokens[100:], scored=[3, 7])], 512)
    scores = runner.position_scores(whole.reference, whole.reference, whole.targets)[0]
    (found,) = part.trials(DENSE)
    assert found.outcome.bits == pytest.approx(scores[[3, 7], 0].sum() / math.log(2) / 4, rel=1e-6)
    assert found.outcome.accuracy == scores[[3, 7], 1].mean()


@pytest.mark.parametrize(
    ("right", "matched", "exact"), [([1, 1, 0, 1], 4, 0), ([0, 1, 1, 1], 0, 0), ([1, 1, 1, 1], 8, 1)]
)
def test_matched_characters_end_at_the_first_wrong_token(right: list[int], matched: int, exact: int) -> None:
    figures = np.array([[0.5, good, 1, 0] for good in right], float)
    found = runner.step_outcome(figures, Example([1], [2, 3, 4, 5]), WordTokenizer())
    assert (found.matched, found.exact, found.accuracy) == (matched, exact, sum(right) / 4)


def test_few_keys_are_sparse_and_change_the_output(rows: dict[str, Row]) -> None:
    row = rows["sparq:rank=4,top_k=8"]
    assert row.method == "sparq:rank=4,top_k=8"
    assert row.attn == "sparq:rank=4,top_k=8,reallocate=false,component_score=query_key"
    assert (row.examples, row.served) == (2, "sparse")
    assert row.sparse_calls == 2 * 2 * 20
    assert row.dense_calls == 0
    assert row.mean.kl > 1e-3
    assert row.compression < 0.5
    # 113 = 100 * 4 * 9 / 32, rounded up: int4 codes with lo and step
    assert row.formula == pytest.approx((113 + 2 * 8 * 16 + 4 * 16) / (2 * 100 * 16 + 2 * 16))
    # Counted at the mean length: codes, float32 scores of G = 2 heads, and float32 rows.
    S, item = 110, 4
    counted = S * (4 * 9 / 16 + 8 * 2) + (2 * 8 * 16 + 4 * 16) * item
    assert row.compression == pytest.approx(counted / ((2 * S * 16 + 2 * 16) * item), rel=0.02)


@pytest.mark.parametrize("observed", [None, "h2o"])
def test_shared_prefill_gives_the_same_scores(observed: str | None) -> None:
    """Test that tasks whose prompts begin with the same tokens run their common prefill once."""
    model = build()
    batches = [
        [Example(TOKENS[i : i + 90] + TOKENS[end : end + 10], TOKENS[40:50]) for i in (0, 7)] for end in (300, 400)
    ]
    prefix, method = Prefix(model, batches, observed), Variant("h2o:top_k=32", "h2o:top_k=32")
    assert 90 <= prefix.length < 99
    for batch in batches:
        alone, shared = (
            Steps(model, WordTokenizer(), batch, 512, prefix=given, observed=observed) for given in (None, prefix)
        )
        assert (shared.cache[0].offset, prefix.cache[0].offset) == (99, prefix.length)
        for variant in (DENSE, method):
            for one, other in zip(alone.trials(variant), shared.trials(variant), strict=True):
                assert vars(other.outcome) == pytest.approx(vars(one.outcome), rel=1e-4, abs=1e-5)
    assert Prefix(model, batches[:1]).length == 0


def test_quantized_caches_lose_quality_with_fewer_bits() -> None:
    sparq = variants("sparq:top_k=8,rank=64,key_bits=16")
    subject = Steps(build(head_dim=64), WordTokenizer(), [Example(TOKENS[:100], TOKENS[100:120])], 512)
    all_variants = [*sparq, *quantized_variants(sparq, [8, 2])]
    result = run_variants([subject], all_variants, D=64)
    found = {row.method: row for row in result}
    names = ["dense", "sparq:top_k=8,rank=64,key_bits=16"]
    assert list(found) == [*names, *(f"{name} --kv-bits {bits}" for bits in (8, 2) for name in names)]
    assert 0 < found["dense --kv-bits 8"].mean.kl < 0.05 < found["dense --kv-bits 2"].mean.kl
    few = found["sparq:top_k=8,rank=64,key_bits=16 --kv-bits 8"]
    assert (few.sparse_calls, few.served) == (2 * 20, "sparse")
    assert few.mean.kl == pytest.approx(found["sparq:top_k=8,rank=64,key_bits=16"].mean.kl, rel=0.3)


EXACT = "sink_tokens=1,recent_tokens=15,dense_layers=0,dense_below=0,merge_every=1"


def test_saap_reports_selectivity() -> None:
    methods = [f"saap:mode=online,buckets=8,probes={probes},{EXACT}" for probes in (2, 8)]
    subject = Steps(build(), WordTokenizer(), [Example(TOKENS[:100], TOKENS[100:120])], 512)
    dense, few, every = run([subject], *methods)
    assert dense.selectivity is None
    assert few.sparse_calls == every.sparse_calls == 2 * 20
    assert few.selectivity is not None and 0 < few.selectivity < 0.8
    assert few.mean.kl > 1e-4
    assert every.selectivity == 1
    assert abs(every.mean.kl) < 1e-5 and every.mean.agreement == 1
    assert [cells(row)["selectivity"] for row in (few, every)] == [f"{few.selectivity:.3f}", "1.000"]


def test_late_index_equals_an_index_from_the_start() -> None:
    """Test an index that is built after prefill, because dense prefill runs once for all methods."""
    model, method = build(), f"saap:mode=online,buckets=8,probes=2,{EXACT}"
    prompt, target = TOKENS[:100], TOKENS[100:120]
    (found,) = Steps(model, WordTokenizer(), [Example(prompt, target)], 512).trials(Variant(method, method))
    rows = []
    with mlx_sparse.lm.sparse(model, method) as report:
        cache = runner.prefill(model, mx.array([prompt[:-1]]), make_prompt_cache(model), 512)
        for token in [prompt[-1], *target[:-1]]:
            rows.append(model(mx.array([[token]]), cache=cache)[0])
    dense = Steps(model, WordTokenizer(), [Example(prompt, target)], 512).reference[0]
    expected = runner.prompt_outcome(mx.concatenate(rows), dense, target, 2 * len(target))
    assert found.sparse_calls == 2 * 20 and found.dense_calls == 0  # the prefill ran without the method
    assert found.outcome.kl == pytest.approx(expected.kl, rel=1e-3)
    assert found.selectivity == pytest.approx(report.buckets.selectivity)


def test_results_depend_on_artefact_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tried = tmp_path / "saap.safetensors", []
    method = f"saap:artefact={path}"

    class Subject:
        depths, digests = (None,), ("0",)

        def trials(self, variant: Variant) -> list[Trial]:
            tried.append(variant.attn)
            return [Trial(Outcome(1.5, 0.5, 1.0, 0.0), variant.attn)]

    monkeypatch.setattr(
        Variant, "formula", lambda variant, S, D: None
    )  # it would load the artefact, which does not exist
    for content in (b"one", b"one", b"two"):
        path.write_bytes(content)
        run([Subject()], method, journal=Journal(tmp_path / "results", "eval", "key", Trial))
    assert tried == ["dense", method, method]


def test_bits_per_byte_is_the_target_likelihood() -> None:
    model, prompt, target = build(), TOKENS[:30], TOKENS[30:40]
    logits = model(mx.array([[*prompt, *target]]))[0].astype(mx.float32)
    logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    bits = -sum(logp[29 + i, token].item() for i, token in enumerate(target)) / 0.6931471805599453
    row = run([Steps(model, WordTokenizer(), [Example(prompt, target)], 512)])[0]
    assert row.mean.bits == pytest.approx(bits / (2 * len(target)), rel=1e-4)
    best = logp.argmax(axis=-1).tolist()
    assert row.mean.accuracy == pytest.approx(
        sum(best[29 + i] == token for i, token in enumerate(target)) / len(target)
    )


def test_kl_is_from_dense_to_sparse() -> None:
    dense, sparse = mx.array([[0.9, 0.1]]), mx.array([[0.5, 0.5]])
    found = runner.prompt_outcome(mx.log(sparse), mx.log(dense), [0], 1)
    assert found.kl == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), rel=1e-5)


PASSAGE = Passage(TOKENS[:300], list(range(150, 299, 2)))
DENSE_SAMPLE = "sample:alpha_column=1,block_size=32,dense_below=0"
SPARSE_SAMPLE = "sample:alpha_column=0.3,alpha_slash=0.3,block_size=32,dense_below=0"
WINDOW = "streaming_prefill:window=0.1,block_size=32"


@pytest.fixture(scope="module")
def prompts() -> dict[str, Row]:
    methods = [DENSE_SAMPLE, SPARSE_SAMPLE, WINDOW]
    subject = Prompt(build(), WordTokenizer(), PASSAGE, 100, recall=True)
    return dict(zip(["dense", *methods], run([subject], *methods, prefill=True), strict=True))


def test_prefill_scores_match_one_causal_call(prompts: dict[str, Row]) -> None:
    logits = build()(mx.array([PASSAGE.tokens]))[0].astype(mx.float32)
    logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    nats = -sum(logp[position, PASSAGE.tokens[position + 1]].item() for position in PASSAGE.scored)
    assert prompts["dense"].mean.bits == pytest.approx(nats / math.log(2) / (2 * len(PASSAGE.scored)), rel=1e-4)
    best = logits.argmax(axis=-1).tolist()
    right = [best[position] == PASSAGE.tokens[position + 1] for position in PASSAGE.scored]
    assert prompts["dense"].mean.accuracy == pytest.approx(sum(right) / len(right))


def test_full_prefill_matches_dense(prompts: dict[str, Row]) -> None:
    row = prompts[DENSE_SAMPLE]
    assert row.mean.agreement == 1
    assert abs(row.mean.kl) < 1e-6
    assert all(layer == 1 for layer in row.density)


@pytest.mark.parametrize("method", [SPARSE_SAMPLE, WINDOW])
def test_sparse_prefill_reports_density_and_recall(prompts: dict[str, Row], method: str) -> None:
    row = prompts[method]
    assert row.mean.kl > 1e-3
    assert row.sparse_calls == 2 * 3
    assert len(row.density) == 2 and all(0 < layer < 1 for layer in row.density)
    least, low, mean = row.recall
    assert 0 < least <= low + 1e-3 <= mean + 2e-3 < 1
    assert (row.sampled > 0) == (method == SPARSE_SAMPLE)


def test_combined_methods_are_sparse_in_both_stages() -> None:
    model, both, decode = build(), f"{SPARSE_SAMPLE}+sparq:rank=4,top_k=8", "sparq:rank=4,top_k=8"
    subject = Steps(model, WordTokenizer(), [Example(TOKENS[:200], TOKENS[200:208])], 128)
    row, alone = run([subject], both, decode)[1:]
    assert row.density and not alone.density
    assert row.compression == alone.compression < 1
    with mlx_sparse.sparse(model, both):
        cache = make_prompt_cache(model)
        for piece in (TOKENS[:128], TOKENS[128:199]):
            model(mx.array([piece]), cache=cache)
        logits = model(mx.array([[TOKENS[199]]]), cache=cache)[0, 0].astype(mx.float32)
    nats = (mx.logsumexp(logits) - logits[TOKENS[200]]).item()
    short = Steps(model, WordTokenizer(), [Example(TOKENS[:200], TOKENS[200:201])], 128)
    assert short.trials(Variant(both, both))[0].outcome.bits == pytest.approx(nats / math.log(2) / 2, rel=1e-4)


def test_results_depend_on_the_tokens(tmp_path: Path) -> None:
    """Test that a changed task or batch does not reuse earlier results, which are stored by tokens."""
    model, path, counts = build(), tmp_path / "results", []
    for prompt, scored in ((TOKENS[:50], None), (TOKENS[:50], None), (TOKENS[:50], [1]), (TOKENS[1:51], [1])):
        journal = Journal(path, "eval", "key", Trial)
        run(
            [Steps(model, WordTokenizer(), [Example(prompt, TOKENS[60:63], scored)], 512)],
            "streaming:recent_tokens=8",
            journal=journal,
        )
        counts.append(len(journal.results))
    assert counts == [2, 2, 4, 6]


def test_non_finite_logits_are_an_error() -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(mlx_sparse.ConfigError, match="--model: expected finite logits, got infinity or NaN"):
            runner.prompt_outcome(mx.array([[value, 0.0]]), mx.zeros((1, 2)), [0], 1)


def test_impossible_tokens_add_no_divergence() -> None:
    logits = mx.array([[1.0, 2.0, -math.inf]])
    assert runner.prompt_outcome(logits, logits, [0], 1).kl == 0


def test_unserved_layers_do_not_count_as_dense() -> None:
    (_, row) = run([Steps(build(), WordTokenizer(), [Example(TOKENS[:200], TOKENS[200:203])], 128)], SPARSE_SAMPLE)
    assert (row.served, row.sparse_calls, row.dense_calls) == ("sparse", 2 * 2, 0)
    assert "bytes counted" not in cells(row), "all decode steps are dense"
    assert cells(row)["density"] == f"{np.mean(row.density):.3f}"
    sliding = Steps(build("gemma3_text"), WordTokenizer(), [Example(TOKENS[:50], TOKENS[50:53])], 512)
    (_, row) = run([sliding], "sparq:rank=4,top_k=8")
    assert (row.served, row.dense_calls, row.dense_reasons) == ("sparse", 0, {})
