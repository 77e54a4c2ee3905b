"""`mlx-sparse bench --cuda --prefill`: what is right for it, what it holds back, and that its report is whole."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mlx_sparse.cuda_ref import blocks
from mlx_sparse.cuda_ref.bench import command, prefill, prefill_report
from mlx_sparse.cuda_ref.bench.prefill import Case, Row
from torch_arrays import DEVICE

from mlx_sparse import oracle

ROOT = Path(__file__).parents[1]
SMALL = Case(2, 1, 64, 400, "float16")
K = 1024
LLAMA = Case(32, 8, 128, 128 * K, "float16")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> prefill.Inputs:
    """Small blocks, so that there is something to leave out."""
    monkeypatch.setattr(prefill, "BLOCK_SIZE", 32)
    return prefill.Inputs(SMALL, DEVICE)


def test_the_reference_is_the_oracle_over_the_drawn_blocks(drawn: prefill.Inputs) -> None:
    kept, counts = drawn.drawn(0.4)
    layout = SMALL.layout
    lists = prefill.sample.merge(kept, layout, 0, layout.row_blocks, layout.key_blocks, torch.empty_like(counts))
    assert torch.equal(counts, (lists >= 0).sum(dim=3, dtype=torch.int32))
    assert 0.3 < float(counts.sum() / SMALL.Hq / layout.causal_pairs) < 0.6
    q, k, v = (array.double().cpu().numpy() for array in drawn.qkv)
    out, _ = oracle.attend_blocks(q, k, v, lists.cpu().numpy(), block_size=32)
    found = drawn.expected(kept).out.cpu().numpy().reshape(4, SMALL.Hq, 64)
    np.testing.assert_allclose(found, out[0][:, drawn.checked].swapaxes(0, 1), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as it is on the CPU
def test_every_contender_is_right_and_a_wrong_result_is_found(drawn: prefill.Inputs) -> None:
    ran = []
    for row, step, wrong in prefill.contenders(drawn, [0.1]):
        if row.contender == "cudnn":  # it needs a GPU
            continue
        out = step(0)
        assert wrong(out) is None, row.contender
        spoilt = (torch.zeros_like(out[0]), *out[1:])
        assert str(wrong(spoilt)).startswith("wrong "), row.contender
        ran.append(row.contender)
    assert ran == ["flash", "dense", "sampling", "attend", "included", "flex"]


def measured(times: dict[str, float], case: Case = LLAMA) -> list[Row]:
    """Rows as if they had been measured, at 10 %."""
    dense = ("sampling", *prefill_report.DENSE)
    return [Row(case, name, *(() if name in dense else (0.1, 0.11)), times=[time]) for name, time in times.items()]


def test_bars_compare_with_the_fastest_dense_and_with_our_own_kernel() -> None:
    rows = measured({"flash": 900.0, "cudnn": 600.0, "dense": 800.0, "sampling": 5.0, "attend": 110.0, "included": 120})
    ratio, share = prefill_report.bars(rows)
    assert (ratio.S, ratio.wanted, ratio.found, ratio.met) == (128 * K, 6.0, 5.0, "NO")
    assert share.found == pytest.approx(0.11 * 800 / 110)
    assert share.met == "yes"
    assert {bar.met for bar in prefill_report.bars(measured({"flash": 900.0, "attend": 1.0})[:1])} <= {"not measured"}
    assert prefill_report.bars([replace(row, case=replace(LLAMA, S=8 * K)) for row in rows]) == []


def test_what_fails_or_does_not_fit_is_a_row_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel\nand a long story")

    monkeypatch.setattr(blocks.Prefill, "attend", broken)
    monkeypatch.setattr(prefill, "TURNS", 1)
    huge = replace(SMALL, S=1 << 30)
    facts, rows = prefill.run([SMALL, huge], [0.5], 600, lambda row: None)
    failed = {row.contender: row.note for row in rows if row.failed}
    assert failed == dict.fromkeys(("dense", "attend", "included"), "no kernel")
    assert str(rows[-1].note).startswith("left out: needs ")
    text = prefill_report.text(facts, rows)
    assert "**Failed:**\n\n* our attend_blocks, all blocks, 2/1 heads D=64 S=400: no kernel" in text
    assert "left out: needs " in text


def test_what_fails_before_a_step_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no lists")

    monkeypatch.setattr(prefill.sample, "merge", broken)
    monkeypatch.setattr(prefill, "TURNS", 1)
    facts, rows = prefill.run([SMALL], [0.1], 600, lambda row: None)
    assert [(row.contender, row.note) for row in rows if row.failed] == [("", "no lists")]
    assert [row.contender for row in rows if row.times] == ["flash", "dense", "sampling"]
    assert "* all, 2/1 heads D=64 S=400: no lists" in prefill_report.text(facts, rows)


def test_the_results_of_contenders_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    record = prefill.record
    monkeypatch.setattr(prefill, "record", lambda *given: made.append(record(*given)) or made[-1])
    monkeypatch.setattr(prefill, "TURNS", 0)
    prefill.run([replace(SMALL, S=140)], [], 600, lambda row: None)
    assert len(made) == 4
    assert not any(steps.outputs for steps in made if steps)


def test_settings_of_decode_steps_say_nothing_of_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--prefill", "--model", "--lengths", "100", "--shapes", "2x1x16"]) == 0
    assert capsys.readouterr().out


def test_the_command_writes_lines_and_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(prefill, "TURNS", 1)
    target = tmp_path / "prompts.jsonl"
    arguments = ["--prefill", "--lengths", "300", "--shapes", "1x1x64", "--densities", "0.5", "-o", "jsonl"]
    assert command.main([*arguments, "--out", str(target)]) == 0
    assert target.read_text() == capsys.readouterr().out
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["kind"] for line in lines[:2]] == ["command", "machine"]
    assert (lines[-1]["kind"], lines[-1]["right"]) == ("end", True)
    rows = [line for line in lines if line["kind"] == "row"]
    assert [row["contender"] for row in rows] == ["flash", "cudnn", "dense", "sampling", "attend", "included"]
    assert all(row["note"] or row["turns"] == 1 for row in rows)


def test_the_documentation_holds_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--prefill", "--model"]) == 0
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "results" / "triton.md").read_text()


@pytest.mark.parametrize("densities", ["0", "1.5", "many", "0.1,,"])
def test_densities_that_are_none_are_refused_in_one_line(
    densities: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--prefill", "--densities", densities])
    assert command.program() == 2
    error = capsys.readouterr().err
    assert error.startswith("mlx-sparse bench --cuda: error: --densities: expected ")
    assert error.count("\n") == 1
