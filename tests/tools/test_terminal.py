"""Test what commands print in a terminal and in a log: tables, text, progress, and the verdict."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from typing import Any

import pytest
from report_rows import DENSE, row
from rich.console import Console

from mlx_sparse.core import registry
from mlx_sparse.core.decide import NEVER
from mlx_sparse.tools import progress
from mlx_sparse.tools.evaluate.table import Table
from mlx_sparse.tools.progress import Bar
from mlx_sparse.tools.terminal import WIDTH, fill, table
from mlx_sparse.tools.verdict import COPY, verdict, verdicts

LONG = "sparq:rank=16,top_k=256,component_score=query_key,dense_below=0"


def test_wide_tables_continue_below_and_repeat_the_first_columns() -> None:
    header = ["method", "context", "settings", *(f"number {i}" for i in range(9))]
    rows = [[name, "2,048", LONG, *(f"{i}.125" for i in range(9))] for name in ("sparq", "h2o")]
    text = table(header, rows, keys=2)
    assert max(map(len, text.splitlines())) <= WIDTH
    parts = text.split("\n\n")
    assert len(parts) > 1 and all(part.count("2,048") == 2 for part in parts)
    assert "".join(word for word in text.split() if "=" in word and "0" in word).count("dense_below=0") == 2
    assert all(text.count(f"{i}.125") == 2 for i in range(9))
    assert table(["a", "b"], []).split() == ["a", "b", "─" * 4]
    path = "/tmp/" + "x" * 200
    assert "".join(table(["path"], [[path]]).splitlines()[2:]) == path
    assert max(map(len, str(Table("copying", header, rows)).splitlines())) <= WIDTH


def test_text_is_filled_but_words_stay_whole() -> None:
    assert max(map(len, fill("word " * 99, "w" * 70 + " next").splitlines())) <= WIDTH
    assert "x" * 99 in fill("word " * 9 + "x" * 99)


@pytest.mark.parametrize("terminal", [False, True])
def test_silent_work_still_shows_that_time_passes(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=WIDTH)
    with Bar("first", 9, "runs", console) as bar:
        bar.update(2)
        before = len(file.getvalue())
        deadline = time.monotonic() + 20
        while file.getvalue().count("first") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(file.getvalue()) > before  # no unit was finished meanwhile
        bar.stage("second")
    assert "2 of 9 runs" in file.getvalue() or terminal
    assert "second" in file.getvalue()


@pytest.mark.parametrize(
    ("facts", "first", "command"),
    [
        ({}, "Use it: {use}", ""),
        ({"crossover": 900}, "Use it from 900 tokens on: {use}", ""),
        (
            {"crossover": 900, "shorter": "this prompt has 5"},
            "Not worth it on this machine below 900 tokens; this prompt has 5.",
            "For longer prompts: {use}",
        ),
        ({"crossover": NEVER}, "Not worth it on this machine: no length was found at which it is faster.", "{stay}"),
        ({"useless": "dense is faster"}, "Not worth it on this machine: dense is faster.", "{stay}"),
        ({"unsafe": "KL 1", "useless": "x"}, "Not safe for this model, see the numbers: KL 1.", "{stay}"),
    ],
)
def test_verdict_is_one_of_three_with_a_command(facts: dict[str, Any], first: str, command: str) -> None:
    dense = "mlx_lm.generate --model 'a b'"
    native = "" if registry.unavailable("cpu") else " --attn dense --attn-backend cpu"
    found = {"use": f"{dense} --attn sparq:rank=4", "stay": f"Stay with dense attention: {dense}{native}"}
    lines = verdict("a b", "sparq:rank=4", **facts)
    assert lines == [text.format(**found) for text in (first, command) if text]


def test_eval_judges_methods_as_advise_does() -> None:
    good, bad = (row(f"sparq:rank={rank}", task=COPY, mean=replace(DENSE, kl=kl)) for rank, kl in ((4, 0.01), (2, 1.0)))
    lines = verdicts([row("dense", task=COPY), good, bad])
    assert lines[0] == f"copying at {good.context:,} tokens: {good.method} passes, {bad.method} fails."
    assert verdicts([row("dense", task=COPY)]) == []
