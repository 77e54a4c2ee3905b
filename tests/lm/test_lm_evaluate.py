"""Test mlx_lm.evaluate with --attn: scores, sparse calls and messages of requests of public suites."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from forked import without_blas
from mlx import nn
from mlx_lm import evaluate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load
from tiny_models import prompt_of, words, write

from mlx_sparse import cli
from mlx_sparse.api.call_report import JSON_KEY
from mlx_sparse.extras import install_hint
from mlx_sparse.lm import disable, sparse
from mlx_sparse.lm.command import run

pytestmark = pytest.mark.slow  # commands

SPARQ = "sparq:rank=4,top_k=4,dense_below=0"
SAMPLE = "sample:block_size=32,alpha_column=0.3,alpha_slash=0.3,dense_below=0"
LAYERS, CONTEXT, LONG, TEXT, TOKENS = 2, 40, 300, 30, 6
CONTINUATIONS = (1, 2, 5)
PROMPTS = "in prefill"
DOCUMENTS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def loaded(model: Path) -> Iterator[Any]:
    """Load the model for direct calls."""
    found = load(str(model))[0]
    yield found
    disable(found)


def run_requests(model: Path, attn: str | None, kind: str, *requests: Any, batch_size: int = 8) -> Any:
    """Return the answers of mlx-lm's model for lm-eval to requests in a command with ``--attn``."""

    def main() -> Any:
        parser = argparse.ArgumentParser()
        parser.add_argument("--batch-size", type=int)
        options = ["--attn", attn] if attn else []
        args = parser.parse_args(["--batch-size", str(batch_size), *options, "--attn-report", "json"])
        answering = evaluate.MLXLM(str(model), batch_size=args.batch_size, use_chat_template=False)
        return getattr(answering, kind)([SimpleNamespace(args=request) for request in requests])

    return run(main, "mlx_lm.evaluate")


def likelihood(model: Any, context: list[int], tokens: list[int]) -> float:
    """Return the log-likelihood of ``tokens``: prefill of all context tokens except the last, then decode steps."""
    cache = make_prompt_cache(model)
    if context[:-1]:
        model(mx.array([context[:-1]]), cache=cache)
    total = 0.0
    for last, token in zip([context[-1], *tokens[:-1]], tokens, strict=True):
        total += nn.log_softmax(model(mx.array([[last]]), cache=cache)[0, -1])[token].item()
    return total


def choices(length: int = CONTEXT) -> tuple[list[int], list[list[int]]]:
    return prompt_of(length, 3), [prompt_of(count, 7 + count) for count in CONTINUATIONS]


def likelihoods(model: Path, attn: str | None, length: int = CONTEXT) -> list[float]:
    context, tails = choices(length)
    answers = run_requests(model, attn, "loglikelihood", *((words(context), f" {words(tail)}") for tail in tails))
    return [score for score, _ in answers]


def report(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON report, and our lines before it."""
    *lines, last = without_blas(capsys.readouterr().err).splitlines()
    return json.loads(last), [line for line in lines if line.startswith("[mlx-sparse]")]


def test_continuations_are_decoded_after_a_dense_context(model: Path, loaded: Any, capsys: Any):
    found = likelihoods(model, SPARQ)
    context, tails = choices()
    with sparse(loaded, SPARQ):
        np.testing.assert_allclose(found, [likelihood(loaded, context, tail) for tail in tails], rtol=1e-5)
    figures, lines = report(capsys)
    assert not np.allclose(found, likelihoods(model, None), rtol=1e-3)
    # One step for the last context token, then one for every token except the last.
    steps = LAYERS * (1 + sum(count - 1 for count in CONTINUATIONS))
    assert figures["requests"] == {
        "loglikelihood": {"sparse_prompt": 0, "sparse_decode": steps, "dense": {PROMPTS: LAYERS}}
    }
    assert (figures[JSON_KEY][0]["sparse_calls"], lines) == (steps, [])


def test_likelihoods_without_sparse_calls_are_reported_as_dense(model: Path, capsys: Any):
    found = likelihoods(model, "sparq:rank=4,top_k=64")
    figures, (warning,) = report(capsys)
    assert figures["requests"]["loglikelihood"]["sparse_decode"] == 0
    assert "no sparse call with sparq in loglikelihood requests: the results are for dense attention" in warning
    assert "over fewer than 65 keys" in warning
    np.testing.assert_allclose(found, likelihoods(model, None), rtol=1e-5)


def test_contexts_are_sparse_prompts_and_continuations_are_decoded(model: Path, loaded: Any, capsys: Any):
    dense = likelihoods(model, None, LONG)
    capsys.readouterr()
    alone = likelihoods(model, SAMPLE, LONG)
    figures, lines = report(capsys)
    assert figures["requests"]["loglikelihood"]["sparse_prompt"] == LAYERS
    assert lines == ["[mlx-sparse] using --batch-size 1: sample needs prompts without padding."]
    both = likelihoods(model, f"{SAMPLE}+{SPARQ}", LONG)
    context, tails = choices(LONG)
    with sparse(loaded, f"{SAMPLE}+{SPARQ}"):
        np.testing.assert_allclose(both, [likelihood(loaded, context, tail) for tail in tails], rtol=1e-5)
    assert not np.allclose(alone, both, rtol=1e-3)
    assert not np.allclose(alone, dense, rtol=1e-3)


def test_warning_names_a_prefill_method_without_sparse_calls(model: Path, capsys: Any):
    likelihoods(model, f"{SAMPLE}+{SPARQ}")
    figures, (_, warning) = report(capsys)
    assert figures["requests"]["loglikelihood"]["sparse_decode"] > 0
    assert "no sparse call with sample in loglikelihood requests: prefill was dense" in warning


def test_whole_texts_are_decoded_token_by_token(model: Path, loaded: Any, capsys: Any):
    texts = [prompt_of(count, count) for count in (TEXT, TEXT - 9)]  # shorter rows of a batch are padded at the end
    found = run_requests(model, SPARQ, "loglikelihood_rolling", *((words(text),) for text in texts))
    with sparse(loaded, SPARQ):
        np.testing.assert_allclose(found, [likelihood(loaded, text[:1], text[1:]) for text in texts], rtol=1e-5)
    calls = report(capsys)[0]["requests"]["loglikelihood_rolling"]
    assert calls["sparse_decode"] == LAYERS * (TEXT - 1 - 4)
    assert calls["dense"] == {"over fewer than 5 keys": LAYERS * 4}


def test_whole_texts_use_the_prefill_method(model: Path, loaded: Any, capsys: Any):
    texts = [prompt_of(count, count) for count in (LONG, LONG - 40)]
    found = run_requests(model, f"{SAMPLE}+{SPARQ}", "loglikelihood_rolling", *((words(text),) for text in texts))
    figures, lines = report(capsys)
    with sparse(loaded, SAMPLE):
        for text, score in zip(texts, found, strict=True):
            logits = loaded(mx.array([text[:-1]]), cache=make_prompt_cache(loaded))[0]
            picked = mx.take_along_axis(nn.log_softmax(logits), mx.array(text[1:])[:, None], axis=-1)
            np.testing.assert_allclose(score, picked.sum().item(), rtol=1e-5)
    assert figures["requests"]["loglikelihood_rolling"]["sparse_prompt"] == LAYERS * len(texts)
    assert "no sparse call with sparq in loglikelihood_rolling requests: decoding was dense" in lines[-1]


@pytest.mark.parametrize("attn", [SPARQ, f"{SAMPLE}+{SPARQ}"])
def test_generated_text_equals_generate_step(model: Path, loaded: Any, attn: str):
    prompts = [prompt_of(count, count) for count in (LONG, LONG - 7)]
    options = {"until": ["nothing"], "max_gen_toks": TOKENS}
    found = run_requests(model, attn, "generate_until", *((words(prompt), options) for prompt in prompts))
    with sparse(loaded, attn):
        generated = [list(generate_step(mx.array(prompt), loaded, max_tokens=TOKENS)) for prompt in prompts]
    assert found == [words([token for token, _ in tokens]) for tokens in generated]


def test_without_a_method_scores_equal_mlx_lms(model: Path, capsys: Any):
    context, tails = choices()
    requests = [SimpleNamespace(args=(words(context), f" {words(tail)}")) for tail in tails]
    plain = evaluate.MLXLM(str(model), use_chat_template=False).loglikelihood(requests)
    assert likelihoods(model, None) == [score for score, _ in plain]
    assert "mlx-sparse" not in capsys.readouterr().err


def test_an_mlx_lm_with_other_interfaces_is_refused(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(evaluate.MLXLM, "_score_fn")
    with pytest.raises(SystemExit):
        run(lambda: None, "mlx_lm.evaluate")
    assert "expected evaluate.MLXLM._score_fn with a parameter step_size, got none" in capsys.readouterr().err


def test_missing_lm_eval_error_names_the_extra(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate")
    assert cli.main(["evaluate", "--model", "any", "--tasks", "any"]) == 2
    assert install_hint("lm-eval") in capsys.readouterr().err


DATA = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "documents.jsonl"}},
    "test_split": "test",
    "doc_to_text": "{{text}}",
}
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "text": {
        "output_type": "generate_until",
        "doc_to_target": "{{continued}}",
        "generation_kwargs": {"until": ["nothing"], "max_gen_toks": TOKENS},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def test_the_real_command_scores_local_tasks(
    model: Path, loaded: Any, tmp_path: Path, without_torch: Any, monkeypatch: pytest.MonkeyPatch
):
    documents = []
    for seed in range(DOCUMENTS):
        text, tails = prompt_of(CONTEXT, seed), [prompt_of(count, 50 + seed + count) for count in CONTINUATIONS]
        with sparse(loaded, SPARQ):  # only decoding with SparQ gives these answers
            best = int(np.argmax([likelihood(loaded, text, tail) for tail in tails]))
            continued = [token for token, _ in generate_step(mx.array(text), loaded, max_tokens=TOKENS)]
        choice = {"choices": [words(tail) for tail in tails], "answer": best}
        documents.append({"text": words(text), "continued": words(continued), **choice})
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **DATA, **task}))  # JSON is YAML
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = [str(Path(sys.executable).with_name("mlx_lm.evaluate")), "--model", str(model), "--output-dir", "out"]
    options = ["--tasks", "choice.yaml", "text.yaml", "--no-apply-chat-template", "--attn", SPARQ]
    done = subprocess.run(
        [*command, *options, "--attn-report", "json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").iterdir()
    results = json.loads(file.read_text())
    assert (results["choice"]["acc,none"], results["text"]["exact_match,none"]) == (1, 1)
    assert all(result["attn"].startswith("sparq:rank=4,top_k=4") for result in results.values())
    scored = DOCUMENTS * LAYERS * (1 + sum(count - 1 for count in CONTINUATIONS))
    assert results["choice"]["attn_calls"]["sparse_decode"] == scored
    assert results["choice"]["attn_calls"]["dense"] == {PROMPTS: DOCUMENTS * LAYERS}
    # All documents are one batch, which is computed one token ahead.
    assert results["text"]["attn_calls"]["sparse_decode"] == LAYERS * (TOKENS + 1)
    figures = json.loads(done.stderr.splitlines()[-1])
    assert figures["requests"].keys() == {"loglikelihood", "generate_until"}
    assert figures[JSON_KEY][0]["sparse_calls"] == scored + LAYERS * (TOKENS + 1)
    assert "warning" not in done.stderr


def test_a_mistake_is_one_line_of_the_command(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["mlx_lm.evaluate", "--model", "any", "--tasks", "any", "--attn", "sparkle"])
    with pytest.raises(SystemExit):
        evaluate.main()  # wrapped by the start-up hook
    assert capsys.readouterr().err.startswith("mlx_lm.evaluate: error: attn: expected one of ")
