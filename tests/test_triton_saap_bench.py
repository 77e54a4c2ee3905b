"""`mlx-sparse bench --cuda --saap`: what is right for it, what it holds back, and that its report is whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlx_sparse.cuda_ref.bench import command, contenders, run, saap, saap_cases, saap_report, timing
from mlx_sparse.cuda_ref.bench.run import Found, Row
from mlx_sparse.cuda_ref.bench.saap_cases import Case, Setting, equal
from torch_arrays import DEVICE, to_numpy

from mlx_sparse import oracle

K = 1024
ROOT = Path(__file__).parents[1]
H200_L2, H200_MEMORY = 60 << 20, int(0.9 * 141e9)
EVERY = saap_cases.plan([64 * K, *saap_cases.BARS], [1], [(32, 8, 128)], "float16")
SETTINGS = equal(0.1, 32, 64), Setting(24, 8, 0.3, "a column", 64)
SMALL = Case(2, 4, 2, 64, 500, "float16", SETTINGS)
by_setting = pytest.mark.parametrize("setting", SETTINGS, ids=str)


@pytest.fixture(autouse=True)
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few exact keys, so that short caches have others."""
    for module in (saap, saap_cases):
        monkeypatch.setattr(module, "SINK_TOKENS", 2)
        monkeypatch.setattr(module, "RECENT_TOKENS", 38)


def routed(setting: Setting, case: Case = SMALL) -> saap.Routed:
    return saap.Routed(saap.Inputs(case, 2, DEVICE), setting)


# --- what is measured


def test_every_bar_is_a_case_with_the_papers_network_at_5_percent() -> None:
    assert {case.S: case.bar for case in EVERY if case.bar} == saap_cases.BARS
    for case in EVERY:
        held, small, skewed = case.settings
        assert (held.hidden, held.buckets) == (1024, 1024)
        assert held.share == pytest.approx(0.05, rel=0.01)
        assert (small.hidden, small.share) == (256, held.share)
        assert (skewed.probes, skewed.share) == (32, saap_cases.TABLE_5[case.S][1])


def test_caches_networks_and_indices_are_enough_that_l2_holds_nothing_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (saap, saap_cases):
        monkeypatch.undo()
        assert module.RECENT_TOKENS == 2047
    for case in EVERY:
        copies = case.copies(H200_L2)
        assert copies * case.least >= 3 * H200_L2
        assert case.memory(copies) < H200_MEMORY


@by_setting
def test_visited_buckets_hold_the_share_that_is_asked_for(setting: Setting) -> None:
    found = routed(setting)
    visited = oracle_route(found)
    ids = to_numpy(found._bucket_ids)
    measured = oracle.saap.selectivity(ids, visited, saap_cases.SINK_TOKENS, saap_cases.RECENT_TOKENS)
    assert measured == pytest.approx(setting.share, rel=0.01)
    shares = setting.head_shares(SMALL.Hkv)
    assert (min(shares) < max(shares)) == bool(setting.column)
    covered = slice(saap_cases.SINK_TOKENS, SMALL.S - saap_cases.RECENT_TOKENS)
    for h, share in enumerate(shares):
        sizes = np.bincount(ids[0, h, covered], minlength=setting.buckets)[visited[0, h]] / SMALL.outside
        np.testing.assert_allclose(sizes, setting.bucket_shares(share), atol=1.01 / SMALL.outside)


def oracle_route(found: saap.Routed) -> np.ndarray:
    network = {name: to_numpy(array) for name, array in found.networks[0]._asdict().items()}
    return oracle.saap_route(to_numpy(found.inputs.before), probes=found.setting.probes, **network)


def test_every_copy_has_arrays_of_its_own() -> None:
    found = routed(SETTINGS[0])
    for first, second in zip(found.networks[0], found.networks[1], strict=True):
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()
    first, second = found.indices
    assert torch.equal(first.key_ids, second.key_ids)
    assert first.key_ids.data_ptr() != second.key_ids.data_ptr()


# --- what is right


@by_setting
def test_the_reference_is_the_oracle(setting: Setting) -> None:
    found = routed(setting)
    visited = oracle_route(found)
    assert found.wrong_route((torch.tensor(visited, device=DEVICE),)) is None
    window = {"sink_tokens": saap_cases.SINK_TOKENS, "recent_tokens": saap_cases.RECENT_TOKENS}
    ids = to_numpy(found._bucket_ids)
    given = found.inputs.queries, found.inputs.keys[0], found.inputs.values[0]
    exact = oracle.saap_attention(*map(to_numpy, given), bucket_ids=ids, visited=visited, **window)
    expected = saap.expected_over(found.inputs, found.attended(torch.tensor(visited, device=DEVICE)))
    np.testing.assert_allclose(expected.out.cpu().numpy().reshape(exact.shape), exact, rtol=0, atol=1e-12)


def test_every_contender_is_right_on_every_copy() -> None:
    field = saap.field(SMALL, 2, DEVICE)
    ran = []
    for name, setting in saap.names(SMALL):
        if name.startswith(("cudnn", "efficient", "flex")):  # the first two need a GPU; the third is slow without
            continue
        contender = field.contender(name, setting)
        steps = timing.record(contender.step, 2, 4, DEVICE, None)
        steps.run()
        assert [contender.wrong(out) for out in steps.outputs] == [None, None], name
        ran.append(name)
    assert {"flash-gqa", "dense", "saap", "network", "network+list"} <= set(ran)


def another_bucket(out: Any) -> Any:
    visited = out[0].clone()
    others = [bucket for bucket in range(64) if bucket not in visited[0, 0].tolist()]
    visited[0, 0, 0] = others[0]
    return (visited.sort(dim=2).values,)


def a_key_twice(out: Any) -> Any:
    indices = out[0].clone()
    indices[0, 0, 1] = indices[0, 0, 0]
    return indices, out[1]


def one_key_less(out: Any) -> Any:
    counts = out[1].clone()
    counts[0, 0] -= 1
    return out[0], counts


def a_little_off(out: Any) -> Any:
    return (out[0] * (15 / 16), *out[1:])


SPOILT: list[tuple[str, Callable[[Any], Any], str]] = [
    ("network", another_bucket, "wrong buckets: one left out scores"),
    ("network", lambda out: (out[0].flip(2),), "wrong buckets: expected"),
    ("network+list", a_key_twice, "wrong list: "),
    ("network+list", one_key_less, "wrong list: "),
    ("saap", a_little_off, "wrong result: "),
    ("dense", a_little_off, "wrong result: "),
]


@pytest.mark.parametrize(("name", "spoil", "message"), SPOILT)
def test_what_is_wrong_is_found(name: str, spoil: Callable[[Any], Any], message: str) -> None:
    contender = saap.field(SMALL, 1, DEVICE).contender(name, None if name == "dense" else SETTINGS[0])
    out = contender.step(0)
    assert contender.wrong(out) is None
    assert str(contender.wrong(spoil(out))).startswith(message)


def test_a_share_of_the_keys_that_is_not_the_one_asked_for_is_found() -> None:
    found = routed(SETTINGS[0])
    found.setting = replace(found.setting, share=0.2)
    assert str(found.wrong_list(found.list(0))).startswith("wrong share of the keys: ")


# --- the report


def measured(times: dict[str, float], S: int = 128 * K) -> Found:
    """Rows as if they had been measured."""
    case = next(case for case in EVERY if case.S == S)
    rows = [Row(case, name, setting) for name, setting in saap.names(case)]
    for row in rows:
        row.times = [times[row.contender]] if row.contender in times else []
    return Found({"copy_bytes_per_second": 4e12, "device": "H200", "architecture": 90}, rows)


def test_bars_compare_with_the_fastest_dense_of_the_run_and_the_paper_stands_beside() -> None:
    found = measured({"flash-gqa": 140.0, "cudnn-rows": 120.0, "dense": 130.0, "saap": 40.0})
    (bar,) = saap_report.bars(found)
    assert (bar.S, bar.wanted, bar.found, bar.met) == (128 * K, 3.5, 3.0, "NO")
    text = saap_report.text(found)
    assert "| 128k | 3.5 | 3.00 | NO |" in text
    assert "The paper: 50 to 18 µs, 2.78 x, at 171k" in text
    assert {bar.met for bar in saap_report.bars(measured({"dense": 100.0}))} == {"not measured"}
    other = [replace_case(row) for row in found.rows]
    assert not saap_report.bars(Found(found.machine, other))


def replace_case(row: Row) -> Row:
    return Row(replace(row.case, Hkv=4), row.contender, row.setting)


def test_parts_are_what_each_launch_adds() -> None:
    found = measured({"dense": 100.0, "network": 9.0, "network+list": 11.5, "saap": 30.0})
    line = next(line for line in saap_report.text(found).splitlines() if "| H=1024, 5.0%, equal" in line)
    assert [cell.split(" (")[0].strip() for cell in line.split("|")[-4:-1]] == ["9.0", "2.5", "18.5"]


def test_a_step_that_fails_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel\nand a long story")

    monkeypatch.setattr(saap.Routed, "step", broken)
    monkeypatch.setattr(run, "REPEAT", 1)
    found = run.run([replace(SMALL, settings=SETTINGS[:1])], 600, lambda row: None, saap)
    assert [row.contender for row in found.rows if row.failed] == ["saap"]
    assert not found.right
    assert "**Failed:**\n\n* our SAAP step (H=32, 9.4%, equal buckets), B=2 4/2 heads" in saap_report.text(found)


def test_the_command_writes_lines_and_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "REPEAT", 1)
    monkeypatch.setattr(command, "SAAP_LEAST", 100)
    monkeypatch.setattr(saap_cases, "BUCKETS", 64)
    monkeypatch.setattr(saap_cases, "HIDDEN", 64)
    monkeypatch.setattr(saap_cases, "plan", lambda *given: [replace(SMALL, B=1, settings=SETTINGS)])
    target = tmp_path / "saap.md"
    arguments = ["--saap", "--lengths", "500", "--shapes", "4x2x64"]
    assert command.main([*arguments, "--out", str(target)]) == 0
    assert target.read_text() == capsys.readouterr().out
    assert target.read_text().startswith("    mlx-sparse bench --cuda --saap ")
    assert command.main([*arguments, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["copy_bytes_per_second"] > 0
    rows = [row for row in found["rows"] if row["kind"] == "row"]
    assert [row["hidden"] for row in rows if row["contender"] == "saap"] == [32, 24]
    assert all(row["note"] or row["turns"] == 1 for row in rows)


# --- the model, the arguments, the documentation


def test_the_bars_leave_time_for_launches() -> None:
    """A bar that bytes alone do not allow could not be met."""
    for case in EVERY:
        moved = sum(part.bytes for part in saap_cases.parts(case, case.settings[0]))
        assert contenders.dense_bytes(case) / moved > 1.5 * (case.bar or 1)


def test_the_documentation_holds_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    assert command.main(["--saap", "--model"]) == 0
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "results" / "triton.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "2k"], "--lengths: expected at least 4096 keys, twice what SAAP always attends, got 2048."),
        (["--batches", "0"], "--batches: expected an integer of at least 1, got 0."),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--saap", *arguments])
    assert command.program() == 2
    assert capsys.readouterr().err == f"mlx-sparse bench --cuda: error: {message}\n"
