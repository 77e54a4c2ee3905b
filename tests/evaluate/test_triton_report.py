"""The reports of `mlx-sparse bench --engine cuda`: bars, crossovers, and what each launch adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from mlx_sparse.cuda_ref.bench import cases, dense, prompts, report, saap, sparq
from mlx_sparse.cuda_ref.bench.cases import Density, Prompt, SparQCase, SparQSetting

from mlx_sparse.tools.bench.core import MICRO, Row, Shape

K = 1024
SETTING = SparQSetting(32, 128)
MACHINE = {"copy_bytes_per_second": 4e12, "device": "H200", "architecture": 90}
LLAMA = SparQCase("float16", Shape(32, 8, 128), 8, 64 * K, (SETTING,))


def rows_of(case: Any, times: dict[str, float], names: Any) -> list[Row]:
    """Rows of one case, as if they had been measured: microseconds by contender."""
    rows = []
    for setting in (None, *case.settings):
        for name in dense.NAMES if setting is None else names:
            rows.append(Row(case, name, setting, {"bytes": case.dense_bytes, "floor_us": 1.0}))
            if isinstance(case, SparQCase) and setting:
                rows[-1].details["bytes"] = sum(case.parts(setting)[: {"scores": 1, "scores+select": 2}.get(name, 3)])
            if name in times:
                rows[-1].take([MICRO * times[name]])
    return rows


def text_of(method: str, machine: Any, rows: list[Row], repeat: int) -> str:
    return report.REPORTS[method].text(machine, rows, repeat)


def found(times: dict[int, dict[str, float]], case: SparQCase) -> list[Row]:
    return [row for S, known in times.items() for row in rows_of(replace(case, S=S), known, sparq.NAMES)]


def test_bars_compare_with_the_fastest_dense_of_the_run() -> None:
    scores = LLAMA.parts(SETTING)[0] / 4e12 * 1e6
    times = {"cudnn-rows": 700.0, "flash-gqa": 500.0, "dense": 600.0, "sparq": 100.0, "scores": scores / 0.7}
    (ratio, share) = report.sparq_bars(MACHINE, found({64 * K: times}, LLAMA))
    assert ratio.what == "SparQ over the fastest dense, B = 8, 32/8 heads, D = 128"
    assert (ratio.S, ratio.wanted) == (64 * K, 4.5)
    assert (ratio.found, ratio.met) == (pytest.approx(5.0), "yes")
    assert share.what == "first launch over the copy bandwidth, B = 8, 32/8 heads, D = 128"
    assert (share.wanted, share.met) == (0.75, "NO")
    assert share.found == pytest.approx(0.7)
    missing = report.sparq_bars(MACHINE, found({64 * K: {"dense": 600.0}}, LLAMA))
    assert all(bar.met == "not measured" for bar in missing)
    assert not report.sparq_bars(MACHINE, found({64 * K: times}, replace(LLAMA, settings=(SparQSetting(16, 128),))))


def test_the_papers_row_is_marked_with_its_figure() -> None:
    shape, B, S = cases.PAPER
    case = SparQCase("float16", shape, B, S, (SETTING,))
    text = text_of("sparq", MACHINE, found({S: {"dense": 1000.0, "sparq": 200.0, "plain-sparq": 500.0}}, case), 1)
    assert "S = 4096, r=32, k=128: **5.00 x**, 2.00 x of torch operations. The paper: 3.02 x on an A100" in text


def test_parts_are_what_each_launch_adds() -> None:
    names, moved = ("scores", "scores+select", "sparq"), (1, 2, 3)
    times = {"dense": 600.0, "sparq": 100.0, "scores": 60.0, "scores+select": 85.0}
    (race,) = report.races(found({64 * K: times}, LLAMA))
    added = race.added(names, moved)
    assert [part for part, _ in added] == [1, 2, 3]
    assert [time for _, time in added] == pytest.approx([60.0, 25.0, 15.0])
    (race,) = report.races(found({64 * K: {"sparq": 100.0, "scores": 60.0}}, LLAMA))
    assert race.added(names, moved) == []


@pytest.mark.parametrize(
    ("times", "wins"),
    [
        ((5.0, 20.0, 40.0), "from 5,461 (between 4k and 8k)"),
        ((15.0, 20.0, 40.0), "from 4k or less"),
        ((15.0, 5.0, 40.0), "from 9,362 (between 8k and 16k)"),
        ((5.0, 8.0, 9.0), "not up to 16k"),
    ],
)
def test_the_crossover_is_where_the_times_cross_for_good(times: tuple[float, ...], wins: str) -> None:
    measured = {S: {"dense": t, "sparq": 10.0} for S, t in zip((4 * K, 8 * K, 16 * K), times, strict=True)}
    (crossed,) = report.crossovers(MACHINE, found(measured, LLAMA))
    assert (crossed["what"], crossed["setting"], crossed["wins"]) == ("B = 8, 32/8 heads, D = 128", "r=32, k=128", wins)
    assert crossed["rule"] > 128


def test_what_was_left_out_is_listed_once() -> None:
    made = found({4 * K: {"dense": 5.0, "sparq": 10.0}, 8 * K: {"dense": 5.0, "sparq": 10.0}}, LLAMA)
    for row in made:
        if row.name == "flex":
            row.note = dense.NOT_COMPILED
    made.append(Row(replace(LLAMA, S=512 * K), "", note="left out: needs 206 GB of the 127 GB there are"))
    text = text_of("sparq", MACHINE, made, 9)
    assert text.count(dense.NOT_COMPILED) == text.count("needs 206 GB") == 1
    assert "* 1 of 9 turns, for time (" in text


def saap_rows(times: dict[str, float], S: int = 128 * K, shape: Shape = cases.LLAMA) -> list[Row]:
    (case,) = cases.saap_cases([S], [1], [shape], "float16")
    return rows_of(case, times, saap.NAMES)


def test_bars_of_saap_have_the_paper_beside_them() -> None:
    rows = saap_rows({"flash-gqa": 140.0, "cudnn-rows": 120.0, "dense": 130.0, "saap": 40.0})
    (bar,) = report.saap_bars(MACHINE, rows)
    assert (bar.S, bar.wanted, bar.found, bar.met) == (128 * K, 3.5, pytest.approx(3.0), "NO")
    text = text_of("saap", MACHINE, rows, 1)
    assert "| 128k | 3.5 | 3.00 | NO |" in text
    assert "The paper: 50 to 18 µs, 2.78 x, at 171k" in text
    assert {bar.met for bar in report.saap_bars(MACHINE, saap_rows({"dense": 100.0}))} == {"not measured"}
    assert not report.saap_bars(MACHINE, saap_rows({"dense": 100.0}, shape=Shape(32, 4, 128)))


def test_parts_of_saap_are_what_each_launch_adds() -> None:
    rows = saap_rows({"dense": 100.0, "network": 9.0, "network+list": 11.5, "saap": 30.0})
    line = next(line for line in text_of("saap", MACHINE, rows, 1).splitlines() if "| H=1024, 5.0%, equal" in line)
    assert [cell.split(" (")[0].strip() for cell in line.split("|")[-4:-1]] == ["9.0", "2.5", "18.5"]


def prompt_rows(times: dict[str, float], S: int = 128 * K) -> list[Row]:
    case, whole = Prompt("float16", cases.LLAMA, 1, S), ("sampling", *prompts.DENSE)
    rows = [Row(case, name, None if name in whole else Density(0.1, 0.11)) for name in times]
    for row in rows:
        row.take([MICRO * times[row.name]])
    return rows


def test_bars_of_prompts_compare_with_the_fastest_dense_and_with_our_own_kernel() -> None:
    times = {"flash": 900.0, "cudnn": 600.0, "dense": 800.0, "sampling": 5.0, "attend": 110.0, "included": 120.0}
    ratio, share = report.prompt_bars(MACHINE, prompt_rows(times))
    assert (ratio.S, ratio.wanted, ratio.found, ratio.met) == (128 * K, 6.0, pytest.approx(5.0), "NO")
    assert share.found == pytest.approx(0.11 * 800 / 110)
    assert share.met == "yes"
    assert {bar.met for bar in report.prompt_bars(MACHINE, prompt_rows({"flash": 900.0, "included": 1.0}))} == {
        "yes",
        "not measured",
    }
    assert report.prompt_bars(MACHINE, prompt_rows(times, 8 * K)) == []
    assert "| 32/8, 128 | 128k | 11.0% | 0.600 (cudnn) | 0.800 | 0.005 | 0.110 | 0.120 | 5.00 |" in report.REPORTS[
        "sample"
    ].text(MACHINE, prompt_rows(times), 1)
