"""mlx-sparse bench generate: prompts of exact lengths, what rows say, and once the real commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from mlx_sparse.checks import ArtefactError, ConfigError
from mlx_sparse.tools.bench import generate
from mlx_sparse.tools.bench.command import main
from mlx_sparse.tools.bench.generate import Prompt, Run, Way
from mlx_sparse.tools.demo.outcome import Outcome

SPARQ = "sparq:rank=4,top_k=4,dense_below=0"
LAYERS, LENGTH, TOKENS, TURNS = 2, 50, 8, 1  # a start takes seconds
REPORT: dict[str, Any] = {
    "attn": "sparq:rank=16,top_k=128",
    "layers": 30,
    "served_layers": 30,
    "sparse_calls": 300,
    "dense_calls": {"of several queries at once (prompt)": 60},
    "sparse_bytes": 100_000_000,
    "dense_bytes": 400_000_000,
    "prefill": None,
}


def words(text: str) -> list[int]:
    """A tokenizer with one token at the start of every text."""
    return [0, *(hash(word) for word in text.split())]


def run(prompt: float, generation: float, text: str = "a b c d", report: Any = None) -> Run:
    return Run(Outcome(text, 100, prompt, 4, generation, report), busy=1 / prompt)


def row_of(method: str, dense: list[Run], runs: list[Run]) -> dict[str, Any]:
    return generate.row(Way(method, attn=True), Prompt(100), dense, runs, words).as_dict()


@pytest.mark.parametrize("S", [2, 3, 17])
def test_a_prompt_is_the_start_of_the_text_with_exactly_so_many_tokens(S: int):
    text = " ".join(f"word{i}" for i in range(40))
    prompt = generate.prompt_of(text, S, words)
    assert text.startswith(prompt) and len(words(prompt)) == S


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(ConfigError, match=r"--lengths: expected prompts .*, got 10 of 4 tokens. Give a longer --text"):
        generate.prompt_of("one two three", 10, words)


def test_ratios_are_of_the_same_turn():
    dense = [run(100, 10), run(50, 4), run(80, 8)]
    sparse = [run(110, 20, report=REPORT), run(100, 6, report=REPORT), run(80, 12, report=REPORT)]
    row = row_of("sparq:rank=16", dense, sparse)
    assert (row["prompt"], row["prompt_low"], row["prompt_high"]) == (100, 90, 105)
    assert (row["prompt_ratio"], row["generation_ratio"]) == pytest.approx((1.1, 1.5))  # not 100 / 80 and 12 / 8
    assert (row["generation_ratio_low"], row["generation_ratio_high"]) == pytest.approx((1.5, 1.75))
    assert row["busy_seconds"] == 1 / 100
    assert (row["bytes_per_token"], row["dense_bytes_per_token"]) == (10_000_000, 40_000_000)
    assert (row["attn"], row["sparse_calls"], row["note"]) == ("sparq:rank=16,top_k=128", 300, None)
    base = row_of("dense", dense, dense)
    assert (base["prompt_ratio"], base["generation_ratio"], base["as_dense"], base["note"]) == (1, 1, True, None)


@pytest.mark.parametrize(
    ("text", "same", "as_dense"), [("a b c d", 4, True), ("a b x d", 2, False), ("a b", 2, False), ("", 0, False)]
)
def test_tokens_are_compared_with_those_of_dense_attention(text: str, same: int, as_dense: bool):
    row = generate.row(Way("sparq", attn=True), Prompt(100), [run(1, 1)], [run(1, 1, text, REPORT)], words)
    assert (row.details["same_tokens"], row.details["as_dense"]) == (same, as_dense)
    assert ("all" if as_dense else f"the first {same} of 4") in generate.table([row])


@pytest.mark.parametrize(
    ("method", "changes", "note"),
    [
        ("sparq", {"sparse_calls": 0}, "no call of sparq was sparse: 60 of several queries at once (prompt)"),
        ("sample+sparq", {"prefill": {"calls": 0}}, "no call of sample was sparse: 60 of several"),
        ("sample+sparq", {"prefill": {"calls": 0}, "sparse_calls": 0}, "no call of sample and sparq was sparse"),
        ("sample+sparq", {"prefill": {"calls": 30}}, None),
    ],
)
def test_a_method_without_a_sparse_call_is_noted(method: str, changes: dict[str, Any], note: str | None):
    row = generate.row(Way(method, attn=True), Prompt(100), [run(1, 1)], [run(1, 1, report=REPORT | changes)], words)
    assert (row.note or "").startswith(note or "") and bool(row.note) == bool(note)
    assert f"* `{method}` at 100: " in generate.table([row]) or not note


def test_a_run_without_a_report_is_refused():
    with pytest.raises(ArtefactError, match="expected a report of sparq, got none"):
        generate.row(Way("sparq", attn=True), Prompt(100), [run(1, 1)], [run(1, 1)], words)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--attn", "sparkle"], "sparkle"),
        (["--repeat", "0"], "--repeat: expected"),
        (["--max-tokens", "0"], "--max-tokens: expected"),
        (["--lengths", "many"], "--lengths: expected"),
        (["-o", "pdf"], "-o: expected one of"),
        (["--threads", "2"], "--threads: expected none with --engine mlx, got 2."),
        (["--engine", "onnx", "--text", "x"], "--text: expected none with --engine onnx, got x."),
        (["--text", "no/such/file"], "--text: expected readable UTF-8 text files or one of python"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(argv: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        main(["generate", *argv])


def test_the_real_commands_are_run_and_compared(tmp_path: Path, without_torch: Any, capsys: pytest.CaptureFixture[str]):
    model = tiny_models.write(tmp_path / "llama")
    text = tmp_path / "text"
    text.write_text(tiny_models.words(tiny_models.prompt_of(2 * LENGTH)))
    options = ["--model", str(model), "--text", str(text), "--lengths", str(LENGTH), "--max-tokens", str(TOKENS)]
    assert main(["generate", *options, "--attn", SPARQ, "--repeat", str(TURNS), "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    dense, sparse = document["rows"]
    assert (dense["method"], sparse["method"]) == ("dense", SPARQ)
    assert dense["turns"] == sparse["turns"] == TURNS
    assert dense["S"] == sparse["S"] == LENGTH
    assert dense["tokens"] == sparse["tokens"] == TOKENS
    assert dense["as_dense"] and not sparse["as_dense"]
    assert sparse["sparse_calls"] == LAYERS * (TOKENS + 1)
    assert 0 < sparse["bytes_per_token"] < sparse["dense_bytes_per_token"]
    assert (
        min(
            row[name]
            for row in (dense, sparse)
            for name in ("prompt", "generation", "generation_ratio", "busy_seconds")
        )
        > 0
    )
    assert "processors" in document["load average"] and document["machine"]["mlx"]
