"""Test the command `mlx-sparse eval`: errors, output and files."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import commands
import pytest
from tiny_models import build, write

import mlx_sparse
from mlx_sparse.tools import environment
from mlx_sparse.tools.evaluate import run
from mlx_sparse.tools.evaluate.inputs import fingerprint

pytestmark = pytest.mark.slow  # commands

# Every word of this text is one token.
TEXT = commands.text(1800)
SPARSE_SAMPLE = "sample:alpha_column=0.3,alpha_slash=0.3,block_size=32,dense_below=0"


def test_command_prints_one_json_line_per_row(tmp_path: Path, without_torch: dict[str, str]) -> None:
    write(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ["-m", "mlx_sparse.cli", "eval", "--model", str(tmp_path / "model"), "--context", "1024"]

    def evaluate(*more: str) -> Any:
        return commands.run([*command, *more], os.environ | without_torch)

    options = ["--methods", f"dense,sparq:rank=4,top_k=16,{SPARSE_SAMPLE}", "--limit", "1", "--text", str(text)]
    options += ["--out", str(tmp_path / "results"), "--prefill-step-size", "300"]
    done = evaluate(*options, "--tasks", "bits_per_byte,copying", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["task"] for line in lines] == ["bits_per_byte"] * 4 + ["copying"] * 4
    assert [line["prefill"] for line in lines] == [False, False, True, True] * 2
    assert all(line["sparse_calls"] > 0 for line in lines[1::2])
    kept = [json.loads(line) for line in (tmp_path / "results" / "results.jsonl").read_text().splitlines()]
    facts = [line.pop("run") for line in kept]
    assert kept == lines
    assert all(of_row == facts[0] for of_row in facts)
    assert (facts[0]["seed"], facts[0]["model"]["head_dim"], facts[0]["versions"]["mlx"]) == (0, 16, version("mlx"))
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"results.jsonl", "trials.jsonl"}
    again = evaluate(*options)
    assert again.stdout.count(" the baseline\n") == 4 and max(map(len, again.stdout.splitlines())) <= 80
    assert " ".join(again.stdout.split()).endswith("less two standard errors.")
    assert again.stdout.count("copying: tokens inside a sparse prompt") == 1
    short = evaluate("--methods", "sparq:rank=4", "--tasks", "bits_per_byte", "--limit", "4", "--text", str(text))
    assert short.returncode == 2
    assert short.stderr.strip().splitlines()[-1].startswith("mlx-sparse: error: --limit: expected 4 x 1,152 tokens")


def test_results_of_other_versions_are_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    first = fingerprint(model, [1, 2], "option")
    assert fingerprint(model, [1, 2], "option") == first
    monkeypatch.setattr(environment, "versions", lambda: {"mlx": "0"})
    assert fingerprint(model, [1, 2], "option") != first


def evaluation(folder: Path, *options: str) -> run._Evaluation:
    write(folder / "model")
    (folder / "text.txt").write_text(commands.text(1200))
    files = ["--model", str(folder / "model"), "--text", str(folder / "text.txt")]
    args = run._parser().parse_args([*files, "--context", "512,512", *options])
    run._check(args)
    return run._Evaluation(args)


def test_too_small_budget_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(mlx_sparse.ConfigError, match="--budget: expected a share that a method can meet, got none"):
        list(evaluation(tmp_path, "--methods", "flexgen", "--budget", "1/8").rows())
    assert capsys.readouterr().err.count("Left out.") == 1


def test_duplicates_run_once_and_texts_are_checked_first(tmp_path: Path) -> None:
    tasks = ["--tasks", "bits_per_byte,bits_per_byte", "copying"]
    groups = evaluation(tmp_path, "--methods", "streaming", "sample", *tasks, "--limit", "1").plans()
    assert [[(plan.task, plan.prefill) for plan in group] for group in groups] == [
        [("bits_per_byte", False), ("copying", False)],  # their prompts have the same first tokens
        [("bits_per_byte", True)],
        [("copying", True)],
    ]
    with pytest.raises(mlx_sparse.ConfigError, match="--limit: expected 2 x 640 tokens of text"):
        evaluation(tmp_path, "--methods", "streaming", *tasks[:1], "copying,bits_per_byte", "--limit", "2").plans()
