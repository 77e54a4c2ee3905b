"""Test `mlx-sparse bench generate`: fields of rows, and one run with a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from mlx_sparse import calibrate
from mlx_sparse.checks import ConfigError
from mlx_sparse.tools.bench import generate
from mlx_sparse.tools.bench.command import main
from mlx_sparse.tools.bench.generate import Context, Generation

SPARQ = "sparq:rank=4,top_k=4,dense_below=0"
REPORT: dict[str, Any] = {
    "attn": "sparq:rank=16,top_k=128",
    "sparse_calls": 300,
    "dense_calls": {"in prefill": 60},
    "prefill": None,
}


class Fake(Generation):
    """Generation with given speeds."""

    def __init__(self, method: str, speeds: list[float], wrong: str | None = None) -> None:
        super().__init__(Context(100), method, "x")
        self.given, self.wrong = speeds, wrong

    def check(self) -> str | None:
        return self.wrong

    def run(self, turn: int) -> float:
        self.measured["generation"].append(self.given[turn])
        return 1.0


def test_ratios_compare_the_same_turn() -> None:
    made: list[Generation] = [Fake("dense", [10, 4, 8]), Fake("sparq", [20, 6, 12]), Fake("saap", [], wrong="wrong")]
    dense, sparse, wrong = (row.as_dict() for row in generate.measure(made, 3))
    assert (dense["generation"], dense["generation_ratio"]) == (8, 1)
    assert (sparse["generation"], sparse["generation_ratio"]) == (12, 1.5)  # not 12 / 8, the ratio of the medians
    assert (sparse["generation_ratio_low"], sparse["generation_ratio_high"]) == (1.5, 1.75)
    assert (wrong["failed"], wrong["note"], wrong["turns"], "generation" in wrong) == (True, "wrong", 0, False)


@pytest.mark.parametrize(
    ("method", "changes", "note"),
    [
        ("sparq", {}, None),
        ("sparq", {"sparse_calls": 0}, "no call of sparq was sparse: 60 in prefill"),
        ("sample+sparq", {"prefill": {"calls": 0}}, "no call of sample was sparse: 60 in prefill"),
        ("sample+sparq", {"prefill": {"calls": 30}}, None),
    ],
)
def test_methods_without_sparse_calls_are_noted(method: str, changes: dict[str, Any], note: str | None) -> None:
    found = generate.never_sparse(method, REPORT | changes)
    assert (found or "").startswith(note or "") and bool(found) == bool(note)
    assert generate.never_sparse("dense", None) is None


def test_real_answers_are_compared(tmp_path: Path, without_torch: Any, capsys: Any) -> None:
    model, text = tiny_models.write(tmp_path / "llama"), tmp_path / "text"
    text.write_text(tiny_models.words(tiny_models.prompt_of(100)))
    options = ["--model", str(model), "--text", str(text), "--lengths", "50", "--max-tokens", "8", "--repeat", "1"]
    assert main(["generate", *options, "--attn", SPARQ, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    dense, sparse = document["rows"]
    assert [(row["method"], row["S"], row["tokens"], row["turns"]) for row in (dense, sparse)] == [
        ("dense", 50, 8, 1),
        (SPARQ, 50, 8, 1),
    ]
    assert dense["as_dense"] and not sparse["as_dense"]
    assert sparse["report"]["sparse_calls"] == 2 * 9  # 2 layers, 8 tokens and the last prompt token
    with pytest.raises(ConfigError, match=r"--lengths: expected prompts .*, got 500 of 100 tokens. Give a longer --te"):
        main(["generate", *options, "--lengths", "500"])
    assert dense["report"] is None and 0 < sparse["report"]["sparse_bytes"] < sparse["report"]["dense_bytes"]
    assert all(row[name] > 0 for row in (dense, sparse) for name in ("prompt", "generation", "generation_ratio"))
    assert all(row["time_to_first_token"] > 49 / row["prompt"] for row in (dense, sparse))  # prefill and one step
    assert document["model"] == "llama"
    assert "processors" in document["load average"] and document["machine"]["mlx"]


def test_crossover_lengths_are_measured_before_the_turns(
    calibration_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(calibrate.SECONDS, "cpu", 0.1)
    model: Any = tiny_models.build()
    for method, files in (("dense", 0), ("sparq:rank=4", 1)):
        answer = generate.Answer(tiny_models.prompt_of(50), method, model, None, 1)  # type: ignore[arg-type]
        assert generate.prepare_and_check(answer)
        assert len(list(calibration_folder.glob("*.json"))) == files
