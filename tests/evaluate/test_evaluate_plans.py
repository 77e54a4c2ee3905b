"""What `mlx-sparse eval` makes of its arguments before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import VOCAB, build, write

from mlx_sparse import ConfigError
from mlx_sparse.tools import environment
from mlx_sparse.tools.evaluate import run as evaluate
from mlx_sparse.tools.evaluate.inputs import fingerprint

TEXT = " ".join(f"w{1 + (i * i + i // 7) % (VOCAB - 1)}" for i in range(1200))


def test_results_of_other_versions_are_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    first = fingerprint(model, [1, 2], "option")
    assert fingerprint(model, [1, 2], "option") == first
    monkeypatch.setattr(environment, "versions", lambda: {"mlx": "0"})
    assert fingerprint(model, [1, 2], "option") != first


def evaluation(folder: Path, *options: str) -> evaluate._Evaluation:
    write(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    files = ["--model", str(folder / "model"), "--text", str(folder / "text.txt")]
    args = evaluate._parser().parse_args([*files, "--context", "512,512", *options])
    evaluate._check(args)
    return evaluate._Evaluation(args)


def test_too_small_a_budget_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--budget: expected a share within reach of a method, got none"):
        list(evaluation(tmp_path, "--methods", "flexgen", "--budget", "1/8").rows())
    assert capsys.readouterr().err.count("Left out.") == 1


def test_what_is_named_twice_runs_once_and_every_text_is_cut_before_anything_runs(tmp_path: Path) -> None:
    tasks = ["--tasks", "bits_per_byte,bits_per_byte", "repetition"]
    plans = evaluation(tmp_path, "--methods", "streaming", "sample", *tasks, "--limit", "1")._plans()
    assert [(task, prefill) for _, task, prefill, _, _ in plans] == [
        (task, prefill) for task in ("bits_per_byte", "repetition") for prefill in (False, True)
    ]
    with pytest.raises(ConfigError, match="--limit: expected 2 x 640 tokens of text"):
        evaluation(tmp_path, "--methods", "streaming", *tasks[:1], "repetition,bits_per_byte", "--limit", "2")._plans()
