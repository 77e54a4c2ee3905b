"""Test wrong options of the evaluation commands: one-line errors before a model or a text is loaded."""

from __future__ import annotations

import re

import pytest
from json_tables import read_tables
from repository_paths import ROOT

from mlx_sparse import cli

REFUSED = [(command, *row) for command, rows in read_tables(__file__).items() for row in rows]


@pytest.mark.parametrize(("command", "argv", "message"), REFUSED)
def test_bad_input_is_a_one_line_error(
    command: str, argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main([*command.split(), *argv]) == 2
    out, line = capfd.readouterr()
    assert (out, line.count("\n")) == ("", 1)
    assert line.startswith("mlx-sparse: error: ") and re.search(message, line), line
