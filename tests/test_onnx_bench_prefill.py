"""`mlx-sparse bench --onnx --attn sample`: every contender computes the same, and the report is whole."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from mlx_sparse.onnx_export import native
from mlx_sparse.onnx_export.bench import prefill
from mlx_sparse.onnx_export.bench.prefill import DENSITIES, Buffers, Problem, Row
from require import absent

from mlx_sparse import cli, oracle

PROBLEM = Problem(4, 2, 32, 700, block_size=32, chunks=2)
SMALL = ["bench", "--onnx", "--attn", "sample:block_size=32", "--lengths", "600", "--shapes", "4x2x32", "--repeat", "2"]
MISSING = {
    **dict.fromkeys(("native-dense", "native-sample"), native.unavailable()),
    "torch": None if importlib.util.find_spec("torch") else "torch is not installed",
}


@pytest.mark.parametrize("density", [0.55, 0.75])
def test_the_alpha_is_that_of_the_density(density: float) -> None:
    alpha = PROBLEM.alpha_of(density)
    assert abs(PROBLEM.density(alpha) - density) < 0.1
    q, k, _ = PROBLEM.arrays
    chosen = oracle.sample_select(q, k, alpha_column=alpha, alpha_slash=alpha, chunks=2, block_size=32).blocks
    assert (oracle.block_mask(chosen, 22) == PROBLEM.blocks(alpha)).all()


@pytest.mark.parametrize("alpha", [None, 0.4])
def test_the_expected_rows_are_the_oracles(alpha: float | None) -> None:
    rows, expected = PROBLEM.expected(alpha)
    q, k, v = PROBLEM.arrays
    both = {"alpha_column": alpha or 1.0, "alpha_slash": alpha or 1.0}
    whole = oracle.sample_attention(q, k, v, **both, chunks=2, block_size=32)
    np.testing.assert_allclose(expected, whole[0][:, rows], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [*prefill.DENSE, *prefill.SPARSE])
def test_every_contender_computes_what_the_oracle_does(name: str) -> None:
    alpha = 0.4 if name in prefill.SPARSE else None
    row = Row(name, "float32", PROBLEM.S, (4, 2, 32), 1, alpha=alpha)
    if MISSING.get(name):
        absent("torch" if name == "torch" else "ort", str(MISSING[name]))
    contender = prefill._build(row, PROBLEM, Buffers(PROBLEM, "float32"))
    contender.run()
    assert prefill._wrong(contender, PROBLEM, row) is None
    row.alpha = None if alpha else 0.4
    assert str(prefill._wrong(contender, PROBLEM, row)).startswith("wrong result: error ")


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "prefill.md"
    assert cli.main([*SMALL, "--threads", "1,2", "--out", str(target)]) == 0
    text = capsys.readouterr().out
    assert target.read_text() == text
    assert "### 1 thread\n" in text
    assert "| | type | 4/2/32, 600 |" in text
    assert "wrong result" not in text
    assert cli.main([*SMALL, "--threads", "1", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 6 + 3 * len(DENSITIES)
    for row in rows:
        missing = MISSING.get(row["contender"])
        assert bool(row["note"]) == bool(missing)
        assert row["samples"] == (0 if missing else 2)
        assert 0 < row["density"] <= 1


def test_what_would_hold_too_much_is_left_out() -> None:
    row = Row("attention", "float32", 8192, (32, 8, 128), 1)
    assert prefill._unavailable(row, Problem(32, 8, 128, 8192, 128, 1)) == "holds 8.6 GB of logits"


def test_wrong_arguments_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--attn", "sample:alpha_column=0.5"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mlx-sparse: error: --attn: expected block_size and chunks alone with --onnx, got sample:")
    assert error.count("\n") == 1
