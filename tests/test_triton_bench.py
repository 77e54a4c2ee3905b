"""`mlx-sparse bench --cuda`: what is right for it, what it holds back, and that its report is whole.

On a GPU it runs there; elsewhere in Triton's interpreter, where its times mean nothing and all else is the same.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlx_sparse.cuda_ref.bench import cases, command, contenders, inputs, model, report, run, timing
from mlx_sparse.cuda_ref.bench.cases import Case, Setting
from mlx_sparse.cuda_ref.bench.run import Found, Row
from torch_arrays import DEVICE

from mlx_sparse import ConfigError, oracle, stats
from mlx_sparse.bench.run import main as bench

K = 1024
ROOT = Path(__file__).parents[1]
SETTING = Setting(32, 128)
H200_L2, H200_MEMORY = 60 << 20, int(0.9 * 141e9)
EVERY = cases.plan([4 * K << i for i in range(8)], [1, 8, 64], [(32, 8, 128), (32, 32, 128)], "float16", SETTING)
SMALL = [
    Case(2, 8, 2, 64, 300, "float16", (Setting(16, 32), Setting(8, 40))),
    Case(1, 3, 3, 64, 257, "float16", (Setting(16, 32),)),
    Case(1, 3, 1, 128, 200, "bfloat16", (Setting(128, 40),)),
]
ARGUMENTS = ["--lengths", "200", "--batches", "1", "--shapes", "4x2x64,2x2x64", "--rank", "16", "--top-k", "32"]
by_case = pytest.mark.parametrize("case", SMALL, ids=str)


def arrays(given: inputs.Inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values for the oracle."""
    return tuple(t.double().cpu().numpy() for t in (given.queries, given.keys[0], given.values[0]))


def sparq_settings(setting: Setting) -> dict[str, int]:
    return {"rank": setting.rank, "top_k": setting.top_k, "local_window": setting.window}


# --- what is measured


def test_the_papers_case_comes_first_then_those_with_bars_then_the_rest_by_size() -> None:
    assert EVERY[0].papers
    held = [case for case in EVERY if case.bar]
    assert len(held) == 11
    assert set(EVERY[: len(held)]) == set(held)
    for part in (EVERY[1 : len(held)], EVERY[len(held) :]):
        assert [case.keys for case in part] == sorted(case.keys for case in part)
    assert len(EVERY) == len(set(EVERY)) == 48


@pytest.mark.parametrize("S", [4 * K, 64 * K, 512 * K])
def test_an_eighth_moves_an_eighth(S: int) -> None:
    setting = cases.eighth(S, 128)
    moved = stats.sparq_elements(S, 128, rank=setting.rank, top_k=setting.top_k)
    assert moved / stats.dense_elements(S, 128) == pytest.approx(1 / 8, rel=0.01)


def test_caches_are_enough_that_l2_holds_nothing_and_fit_where_bars_are() -> None:
    for case in EVERY:
        copies = case.copies(H200_L2)
        for setting in case.settings:
            read = case.rows * case.item * (case.S * setting.rank + 2 * setting.top_k * case.D)
            assert copies * read >= 3 * H200_L2
        if case.bar:
            assert case.memory(copies) < H200_MEMORY
    most = next(case for case in EVERY if case.B == 64 and case.S == 512 * K)
    assert most.memory(1) > H200_MEMORY


@by_case
def test_the_memory_of_inputs_is_within_the_estimate(case: Case) -> None:
    made = inputs.Inputs(case, 2, DEVICE)
    taken = sum(t.numel() * t.element_size() for t in (made.keys, made.values, made.keys_t))
    assert taken == 2 * 3 * case.keys < case.memory(2)
    for cache in (made.keys, made.values, made.keys_t):
        assert torch.equal(cache[0], cache[1])
    assert torch.equal(made.keys_t[1], made.keys[0].transpose(-1, -2))


# --- what is right


@by_case
def test_the_reference_is_the_oracle(case: Case) -> None:
    made = inputs.Inputs(case, 1, DEVICE)
    dense = inputs.expected_dense(made)
    exact = oracle.dense_attention(*arrays(made))
    np.testing.assert_allclose(dense.out.cpu().numpy().reshape(exact.shape), exact, rtol=0, atol=1e-12)
    assert 0 < dense.allowed < 0.1
    for setting in case.settings:
        choice = inputs.Choice(made, setting)
        q, k, v = arrays(made)
        chosen = oracle.sparq_select(q, k, **sparq_settings(setting))
        indices = torch.tensor(chosen.indices, device=DEVICE)
        assert choice.wrong(indices, setting.window, 1e-9) is None
        exact = oracle.sparq_attention(q, k, v, **sparq_settings(setting))
        found = choice.expected(indices).out.cpu().numpy().reshape(exact.shape)
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-7)  # the mean of the values is float32


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as it is on the CPU
@by_case
def test_every_contender_is_right_on_every_copy(case: Case) -> None:
    field = contenders.Field(inputs.Inputs(case, 2, DEVICE))
    ran = []
    for name, setting in contenders.names(case):
        try:
            contender = field.contender(name, setting)
            steps = timing.record(contender.step, 2, 4, DEVICE, None)
            steps.run()
        except RuntimeError as error:
            assert "cudnn" in name or "efficient" in name, error  # which need a GPU, and not even there take all
            continue
        assert [contender.wrong(out) for out in steps.outputs] == [None, None], name
        assert steps.sample() > 0
        ran.append(name)
    assert {"flash-gqa", "flex", *contenders.OURS, "plain-sparq"} <= set(ran)


def off_by_one_tile(out: torch.Tensor, _: Case) -> torch.Tensor:
    return out * (15 / 16)


def not_written(out: torch.Tensor, _: Case) -> torch.Tensor:
    out = out.clone()
    out.flatten()[-1] = float("nan")
    return out


@pytest.mark.parametrize("spoil", [off_by_one_tile, not_written])
@pytest.mark.parametrize("name", ["dense", "sparq", "scores"])
def test_a_wrong_result_is_found(name: str, spoil: Callable[[torch.Tensor, Case], torch.Tensor]) -> None:
    case = SMALL[0]
    field = contenders.Field(inputs.Inputs(case, 1, DEVICE))
    contender = field.contender(name, None if name == "dense" else case.settings[0])
    first, *rest = contender.step(0)
    if name == "scores":  # rows are padded to multiples of 16
        first = first[..., : case.S].contiguous()
    assert contender.wrong((first, *rest)) is None
    assert "wrong" in str(contender.wrong((spoil(first, case), *rest)))


def with_another_key(indices: torch.Tensor, case: Case, window: int) -> torch.Tensor:
    indices[0, 0, 0] = next(key for key in range(case.S - window) if key not in indices[0, 0].tolist())
    return indices.sort(dim=2).values


def outside_the_window(indices: torch.Tensor, case: Case, window: int) -> torch.Tensor:
    """All but the first key of the window, and one more key before it."""
    indices[0, 0, -window] = next(key for key in range(case.S - window) if key not in indices[0, 0].tolist())
    return indices.sort(dim=2).values


def with_first(indices: torch.Tensor, key: int) -> torch.Tensor:
    return torch.cat([torch.full_like(indices[..., :1], key), indices[..., 1:]], 2)


SPOILT_CHOICES: dict[str, Callable[[torch.Tensor, Case, int], torch.Tensor]] = {
    "another key": with_another_key,
    "outside the window": outside_the_window,
    "not ascending": lambda indices, case, window: indices.flip(2),
    "one too few": lambda indices, case, window: indices[..., 1:],
    "an empty slot": lambda indices, case, window: with_first(indices, -1),
    "beyond the keys": lambda indices, case, window: with_first(indices, case.S).sort(dim=2).values,
}


@pytest.mark.parametrize("spoil", SPOILT_CHOICES.values(), ids=SPOILT_CHOICES)
def test_a_wrong_choice_is_found(spoil: Callable[[torch.Tensor, Case, int], torch.Tensor]) -> None:
    case = SMALL[0]
    (setting, *_) = case.settings
    contender = contenders.Field(inputs.Inputs(case, 1, DEVICE)).contender("scores+select", setting)
    (indices,) = contender.step(0)
    assert contender.wrong((indices,)) is None
    assert str(contender.wrong((spoil(indices.clone(), case, setting.window),))).startswith("wrong choice: ")


# --- what is held back


def test_no_time_beside_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    build = contenders.Field.contender

    def spoilt(self: contenders.Field, name: str, setting: Setting | None) -> contenders.Contender:
        right = build(self, name, setting)
        if name not in ("sparq", "flash-gqa"):
            return right
        return replace(right, step=lambda i: tuple(out + 0.1 for out in right.step(i)))

    monkeypatch.setattr(contenders.Field, "contender", spoilt)
    monkeypatch.setattr(run, "REPEAT", 1)
    target = tmp_path / "cuda.jsonl"
    assert command.main([*ARGUMENTS, "-o", "jsonl", "--out", str(target)]) == 1
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    rows = [row for row in lines if row["kind"] == "row"]
    for row in rows:
        wrong = row["contender"] in ("sparq", "flash-gqa")
        assert row["failed"] == wrong
        if wrong:
            assert row["note"].startswith("wrong result: error ")
            assert row["median_us"] is row["min_us"] is None
    assert capsys.readouterr().out == target.read_text()
    text = lines[-1]["text"]
    assert "**Failed:**\n\n* torch SDPA flash, enable_gqa, B=1 4/2 heads D=64 S=200: wrong result" in text
    assert "| our sparq_decode, r=16, k=32 |  |" in text


def test_what_raises_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(self: contenders.Field, name: str, setting: Setting | None) -> contenders.Contender:
        if name == "scores":
            raise ConfigError("top_k: expected less.")
        if name == "flash-rows":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        raise RuntimeError(f"no {name} kernel\nand a long story")

    monkeypatch.setattr(contenders.Field, "contender", raises)
    found = run.run([SMALL[0]], 60, lambda row: None)
    rows = {row.contender: row for row in found.rows}
    assert rows["scores"].note == "top_k: expected less."
    assert rows["flash-rows"].note == "CUDA out of memory."
    assert rows["flash-gqa"].note == "no flash-gqa kernel"
    assert {name for name, row in rows.items() if row.failed} == {"dense", "sparq", "scores+select"}
    assert not found.right


def test_cases_that_do_not_fit_are_left_out_with_the_reason() -> None:
    huge = replace(SMALL[0], S=1 << 40)
    pointless = replace(SMALL[0], settings=())
    found = run.run([huge, pointless], 60, lambda row: None)
    assert [row.times for row in found.rows] == [[], []]
    assert re.fullmatch(r"left out: needs \d+ GB of \d+ GB that are free", found.rows[0].note or "")
    assert found.rows[1].note == "left out: SparQ would attend to all keys"
    assert not found.right


def test_short_time_costs_repetitions_first_then_cases() -> None:
    class Steps:
        taken = 0

        def sample(self) -> float:
            Steps.taken += 1
            return 1.0

    row = Row(SMALL[0], "dense")
    run.measure([(row, Steps())], time.monotonic() - 1)
    assert len(row.times) == Steps.taken == run.LEAST >= 5
    run.measure([(row, Steps())], time.monotonic() + 60)
    assert len(row.times) == run.LEAST + run.REPEAT
    found = run.run([SMALL[0]], 1e-9, lambda row: None)
    assert [row.note for row in found.rows] == ["left out: the 1e-09 s were over"]


# --- the report


def test_the_command_prints_tables_and_writes_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "REPEAT", 3)
    target = tmp_path / "cuda.jsonl"
    assert bench(["--cuda", *ARGUMENTS, "-o", "jsonl", "--out", str(target)]) == 0
    printed = capsys.readouterr().out
    assert target.read_text() == printed
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["kind"] for line in lines[:2]] == ["command", "machine"]
    assert lines[0]["command"].startswith("mlx-sparse bench --cuda --lengths 200 ")
    assert (lines[-1]["kind"], lines[-1]["right"]) == ("end", True)
    text = lines[-1]["text"]
    assert list(tmp_path.iterdir()) == [target]
    bandwidth = lines[1]["copy_bytes_per_second"]
    rows = [line for line in lines if line["kind"] == "row"]
    assert len(rows) == 16 + 13
    for row in rows:
        if row["median_us"] is None:
            assert row["note"]
        else:
            assert 0 < row["min_us"] <= row["median_us"]
            assert row["turns"] == 3
            assert row["floor_us"] == pytest.approx(1e6 * row["bytes"] / bandwidth)
    for heading in ("From how many keys on SparQ pays", "SparQ against the fastest dense", "B = 1, 4/2 heads, D = 64"):
        assert f"### {heading}\n" in text
    assert text.count("| our sparq_decode, 1/8 |") == 2


def found(times: dict[int, dict[str, float]], case: Case, **machine: Any) -> Found:
    """Rows of one shape and batch by number of keys, as if they had been measured."""
    rows = []
    for S, known in times.items():
        at = replace(case, S=S)
        for name, setting in contenders.names(at):
            row = Row(at, name, setting, times=[known[name]] if name in known else [])
            row.bytes = contender_bytes(at, name, setting)
            rows.append(row)
    return Found({"copy_bytes_per_second": 4e12, "device": "H200", "architecture": 90} | machine, rows)


def contender_bytes(case: Case, name: str, setting: Setting | None) -> int:
    if setting is None:
        return model.dense_bytes(case)
    parts = [part.bytes for part in model.sparq_parts(case, setting)]
    return {"scores": parts[0], "scores+select": sum(parts[:2])}.get(name, sum(parts))


LLAMA = Case(8, 32, 8, 128, 64 * K, "float16", (SETTING,))


def test_bars_compare_with_the_fastest_dense_of_the_run() -> None:
    scores = model.sparq_parts(LLAMA, SETTING)[0].bytes / 4e12 * 1e6
    times = {"cudnn-rows": 700.0, "flash-gqa": 500.0, "dense": 600.0, "sparq": 100.0, "scores": scores / 0.7}
    (ratio, share) = report.bars(found({64 * K: times}, LLAMA))
    assert ratio.what == "SparQ over the fastest dense, B = 8, 32/8 heads, D = 128"
    assert (ratio.S, ratio.wanted) == (64 * K, 4.5)
    assert (ratio.found, ratio.met) == (5.0, "yes")
    assert share.what == "first launch over the copy bandwidth, B = 8, 32/8 heads, D = 128"
    assert (share.wanted, share.met) == (0.75, "NO")
    assert share.found == pytest.approx(0.7)
    assert all(bar.met == "not measured" for bar in report.bars(found({64 * K: {"dense": 600.0}}, LLAMA)))
    other = replace(LLAMA, settings=(Setting(16, 128),))
    assert not report.bars(found({64 * K: times}, other))


def test_the_papers_row_is_marked_with_its_figure() -> None:
    case = replace(EVERY[0], settings=(SETTING,))
    text = report.text(found({4 * K: {"dense": 1000.0, "sparq": 200.0, "plain-sparq": 500.0}}, case))
    assert "S = 4096, r=32, k=128: **5.00 x**, 2.00 x of torch operations. The paper: 3.02 x on an A100" in text


def test_parts_are_what_each_launch_adds() -> None:
    times = {"dense": 600.0, "sparq": 100.0, "scores": 60.0, "scores+select": 85.0}
    (race,) = report.races(found({64 * K: times}, LLAMA).rows)
    assert [(name, moved, took) for name, moved, took in race.parts] == [
        (part.name, part.bytes, took)
        for part, took in zip(model.sparq_parts(LLAMA, SETTING), (60.0, 25.0, 15.0), strict=True)
    ]
    (race,) = report.races(found({64 * K: {"sparq": 100.0, "scores": 60.0}}, LLAMA).rows)
    assert race.parts == []


@pytest.mark.parametrize(
    ("dense", "wins"),
    [
        ((5.0, 20.0, 40.0), "from 5,461 (between 4k and 8k)"),
        ((15.0, 20.0, 40.0), "from 4k or less"),
        ((15.0, 5.0, 40.0), "from 9,362 (between 8k and 16k)"),
        ((5.0, 8.0, 9.0), "not up to 16k"),
    ],
)
def test_the_crossover_is_where_the_times_cross_for_good(dense: tuple[float, ...], wins: str) -> None:
    times = {S: {"dense": t, "sparq": 10.0} for S, t in zip((4 * K, 8 * K, 16 * K), dense, strict=True)}
    (crossed,) = report.crossovers(found(times, replace(LLAMA, S=4 * K)))
    assert (crossed["what"], crossed["setting"], crossed["wins"]) == ("B = 8, 32/8 heads, D = 128", "r=32, k=128", wins)
    assert crossed["rule"] > 128


def test_what_was_left_out_is_listed_once() -> None:
    made = found({4 * K: {"dense": 5.0, "sparq": 10.0}, 8 * K: {"dense": 5.0, "sparq": 10.0}}, LLAMA)
    for row in made.rows:
        if row.contender == "flex":
            row.note = contenders.NOT_COMPILED
    made.rows.append(Row(replace(LLAMA, S=512 * K), "", note="left out: needs 206 GB of 127 GB that are free"))
    text = report.text(made)
    assert text.count(contenders.NOT_COMPILED) == text.count("needs 206 GB") == 1
    assert "* 1 of 9 turns, for time (" in text


# --- the model, the arguments, the documentation


def test_the_model_adds_up() -> None:
    for case in model.bar_cases():
        (setting,) = case.settings
        ours, least = sum(part.bytes for part in model.sparq_parts(case, setting)), model.sparq_bytes(case, setting)
        logits = 2 * 4 * case.rows * case.G * case.S
        assert least < ours < 1.1 * (least + logits)


def test_the_documentation_holds_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model"]) == 0
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "results" / "triton.md").read_text()


def test_it_runs_without_mlx(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None\n"
        "from mlx_sparse.cuda_ref.bench.command import main; sys.exit(main(['--model']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("| batch |")


def test_what_is_not_installed_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from mlx_sparse.cuda_ref.bench.command import program; sys.argv = ['bench', '--model']; sys.exit(program())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("mlx-sparse bench --cuda: error: torch: expected it to be installed, got none.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "1,many"], "--batches: expected an integer of at least 1, got 'many'."),
        (["--lengths", "4q"], "--lengths: expected numbers such as 1k,2k,3000, got '4q'."),
        (["--lengths", "32"], "--lengths: expected more than the 32 keys that SparQ attends to, got 32."),
        (["--shapes", "4x3"], "--shapes: expected query heads x KV heads x head dim such as 32x8x128, got '4x3'."),
        (["--rank", "65"], "rank: expected at most the head dim D=64, got 65."),
        (["--dtype", "int8"], "--dtype: expected one of float16, bfloat16, got 'int8'."),
        (["--budget-s", "0"], "--budget-s: expected seconds, got 0."),
        (["-o", "x.jsonl"], "-o: expected one of md, json, jsonl, csv, got x.jsonl. --out names a file."),
        (["--out", "no/such/x"], "--out: expected a file in a folder that exists, got no/such/x."),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *ARGUMENTS, *arguments])
    assert command.program() == 2
    assert capsys.readouterr().err == f"mlx-sparse bench --cuda: error: {message}\n"


def test_without_a_gpu_it_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", *ARGUMENTS])
    assert command.program() == 2
    error = capsys.readouterr().err
    assert error.startswith("mlx-sparse bench --cuda: error: --cuda: expected an NVIDIA GPU with torch and triton, got")
    assert error.count("\n") == 1
