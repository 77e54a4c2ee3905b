"""Several processes that run one model on MLX's ring, on this machine: parts of models, and ranks that end."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from rank_processes import pair, run_pair
from run_ranks import CUTS, METHODS
from saap_artefacts import write_artefact
from test_lm_commands import JSON
from test_lm_server import Server, free_port
from tiny_models import build, write

from mlx_sparse.api.call_report import JSON_KEY
from mlx_sparse.artefact import load
from mlx_sparse.checks import ArtefactError
from mlx_sparse.lm.rank_reports import numbers_of, report_of, total
from mlx_sparse.lm.ranks import Ranks, address_of_first, difference, facts_of
from mlx_sparse.model_parts import Part, part_of

RUN = Path(__file__).parents[1] / "fixtures" / "run_ranks.py"
WAIT = Path(__file__).parents[1] / "fixtures" / "wait_rank.py"
FAIL = Path(__file__).parents[1] / "fixtures" / "fail_rank.py"
SPARSE = ["--attn", "sparq:rank=4,top_k=4,dense_below=0"]
BENCHMARK = ["mlx_lm.benchmark", "-p", "60", "-g", "6", "--model", "model"]
STEPS, LAYERS = 7, 2  # mlx-lm works one token ahead
pytestmark = pytest.mark.usefixtures("without_torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write(folder / "model")
    write(folder / "other", rope_theta=500.0)
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, mx.array]]]:
    """What `run_ranks.py` wrote: alone, as rank 0 and as rank 1."""
    out = tmp_path_factory.mktemp("parts")
    artefacts = [str(write_artefact(out / family, build(family, num_hidden_layers=3))) for family, _ in CUTS[:2]]
    argv = [sys.executable, str(RUN)]
    subprocess.run([*argv, str(out / "alone"), *artefacts], check=True)
    for done in run_pair(lambda rank: [*argv, str(out / f"rank{rank}"), *artefacts], out):
        assert done.code == 0, done.err
    return [
        (json.loads((out / name).read_text()), dict(mx.load(str(out / f"{name}.npz")).items()))  # type: ignore[union-attr]
        for name in ("alone", "rank0", "rank1")
    ]


Found = list[tuple[dict[str, Any], dict[str, mx.array]]]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("family", "how"), CUTS, ids=[" ".join(cut) for cut in CUTS])
def test_parts_give_what_one_process_gives(family: str, how: str, name: str, found: Found):
    case = f"{family} {how} {name}"
    (alone, logits), *ranks = found
    expected = np.array(logits[case])
    for of_rank, of_rank_logits in ranks:
        assert of_rank[case]["tokens"] == alone[case]["tokens"]
        assert np.abs(np.array(of_rank_logits[case]) - expected).max() < 1e-4 * np.abs(expected).max()
    if alone[case]["counted"] is None:
        return
    whole, summed = report_of(alone[case]["counted"]), total({n: ranks[n][0][case]["counted"] for n in (0, 1)})
    copies = 2 if how == "tensor" else 1  # of a layer's call, each with a part of the heads
    assert (summed.layers, summed.served_layers) == (whole.layers, whole.served_layers)
    assert summed.dense_layers == whole.dense_layers
    assert summed.sparse_calls == copies * whole.sparse_calls > 0
    assert summed.dense_calls == {reason: copies * count for reason, count in whole.dense_calls.items()}
    assert (summed.dense_bytes, summed.sparse_bytes) == (whole.dense_bytes, whole.sparse_bytes)
    assert summed.counted == whole.counted
    if whole.prefill is not None:
        assert summed.prefill.calls == copies * whole.prefill.calls
        assert summed.prefill.density == whole.prefill.density
    assert [rank["first_layer"] for rank in summed.ranks] == ([0, 0] if how == "tensor" else [1, 0])
    shared = "with 1 of 2 KV heads on each of 2 ranks" if how == "tensor" else "2 and 1 of them on 2 ranks"
    assert summed.opening()[0].endswith(f", {shared}")
    per_step = re.compile(r"\((.*) instead of (.*) per step\)")
    assert per_step.findall(str(summed)) == per_step.findall(str(whole))


def test_an_artefact_that_cannot_be_cut_as_the_model_is_is_refused(tmp_path: Path):
    model = build()
    artefact = load(write_artefact(tmp_path / "one", build(num_attention_heads=3, num_key_value_heads=3)))
    model.model.layers[0].self_attn.q_proj = shard_of(model.model.layers[0].self_attn.q_proj)
    assert part_of(model) == Part(0, None, 1, 2)
    with pytest.raises(ArtefactError, match=r"^artefact: expected 3 KV heads of 16 for layer 0 to be cut into 2 parts"):
        artefact.part_for(model)


def shard_of(linear: Any) -> Any:
    """A linear layer that says that it has the second of two parts."""

    class AllToShardedLinear(type(linear)):  # type: ignore[misc]
        class group:
            rank = staticmethod(lambda: 1)
            size = staticmethod(lambda: 2)

    linear.__class__ = AllToShardedLinear
    return linear


def test_an_option_on_one_rank_is_refused_on_all(folder: Path):
    for done in run_pair(lambda rank: [*BENCHMARK, "-n", "1", *(SPARSE if rank == 0 else [])], folder):
        assert done.code == 2
        assert done.err == (
            f"mlx_lm.benchmark: error: --attn: expected the same on all ranks, got {SPARSE[1]} on rank 0 and none on "
            "rank 1.\n"
        )


def test_a_mistake_on_one_rank_is_refused_on_all(folder: Path):
    argv = [sys.executable, str(FAIL), "--model", "model", *SPARSE]
    first, second = run_pair(lambda rank: [*argv, *(["--nonsense"] if rank else [])], folder)
    assert (first.code, second.code) == (2, 2)
    assert (
        first.err == "fail_rank.py: error: arguments: expected the same on all ranks, got some that rank 1 refused.\n"
    )
    assert second.err.endswith("fail_rank.py: error: unrecognized arguments: --nonsense\n")


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"model": "m", "attn": "sparq", "port": 1, "prompt": "w1", "pipeline": False, **changes}
    )


def test_what_has_to_be_the_same_is_named_and_what_is_local_may_differ(folder: Path, tmp_path: Path):
    def told(*changes: dict[str, Any]) -> str | None:
        return difference([facts_of(options(**change), []) for change in changes], [False] * len(changes))

    same = "expected the same on all ranks, got"
    assert told({}, {}, {"port": 2}) is None
    assert told({}, {"attn": "quest"}, {}) == f"--attn: {same} sparq on ranks 0 and 2 and quest on rank 1."
    assert told({"pipeline": True}, {}) == f"--pipeline: {same} yes on rank 0 and no on rank 1."
    assert told({}, {"attn": None, "pipeline": True}) == f"--attn: {same} sparq on rank 0 and none on rank 1."
    texts = told({"prompt": "w1 " * 99}, {"prompt": "w2 " * 99})
    assert re.fullmatch(
        rf"--prompt: {same} (a text of 297 characters \(\w{{8}}\)) on rank 0 and \1?.* on rank 1\.", texts
    )
    # The same model in another place.
    write(tmp_path / "elsewhere")
    assert told({"model": str(folder / "model")}, {"model": str(tmp_path / "elsewhere")}) is None
    assert told({"model": str(folder / "model")}, {"model": str(folder / "other")}).startswith(f"--model: {same} ")
    versions = facts_of(options(), [])
    other = versions | {"mlx": ("0.1", "0.1")}
    assert difference([versions, other], [False, False]).startswith(f"mlx: {same} ")


def test_without_a_launcher_there_is_one_rank_and_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("MLX_RANK", raising=False)
    monkeypatch.setattr(mx.distributed, "init", None)
    assert Ranks.here() == Ranks(0, 1)
    (tmp_path / "hosts").write_text("\n")  # of `mlx.launch -n 1`
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
    assert Ranks.here() == Ranks(0, 1)
    assert Ranks().gather({"a": [1]}) == [{"a": [1]}]


def test_rank_0_is_reached_where_mlx_reaches_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("MLX_HOSTFILE", "MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    assert address_of_first() is None
    monkeypatch.setenv("MLX_JACCL_COORDINATOR", "10.0.0.1:32323")
    assert address_of_first() == "10.0.0.1"
    (tmp_path / "hosts.json").write_text('[["[fe80::1]:5000", "10.0.0.3:5001"], ["10.0.0.4:5000"]]')
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
    assert address_of_first() == "fe80::1"


Started = list["subprocess.Popen[str]"]


@pytest.fixture
def started(folder: Path) -> Iterator[Callable[[], Started]]:
    """Two ranks of an endless benchmark, in the middle of it."""
    processes: Started = []

    def start() -> Started:
        processes.extend(pair(lambda rank: [*BENCHMARK, "-n", "1000000", *SPARSE], folder))
        assert processes[0].stdout
        while not processes[0].stdout.readline().startswith("Trial 2"):
            assert processes[0].poll() is None, processes[0].communicate()
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def errors_in(err: str) -> list[str]:
    return [line for line in err.splitlines() if "error:" in line]


@pytest.mark.parametrize(("lost", "how"), [(1, "killed"), (0, "killed"), (1, "stopped")])
def test_who_is_left_names_the_lost_rank_and_ends(lost: int, how: str, started: Callable[[], Started]):
    processes = started()
    processes[lost].send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    began = time.monotonic()
    _, err = processes[1 - lost].communicate(timeout=60)
    assert time.monotonic() - began < 30  # 10 on a machine that does nothing else
    assert processes[1 - lost].returncode == 1, err
    why = "its process ended" if how == "killed" else "it does not answer"
    assert errors_in(err) == [f"mlx_lm.benchmark: error: rank {lost} ({os.uname().nodename}) was lost: {why}."]
    assert "Traceback" not in err
    assert ("sparse calls: " in err) == (lost == 1), "the report is rank 0's"


def test_ranks_that_are_ended_by_sigterm_report_and_raise_no_alarm(started: Callable[[], Started]):
    processes = started()
    for process in processes:
        process.terminate()
    errs = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2
    assert [errors_in(err) for err in errs] == [[], []]
    # MLX says of itself what became of its connections.
    first_lines, second_lines = ([line for line in err.splitlines() if "[ring]" not in line] for err in errs)
    assert second_lines == []
    opening, first, *rest = first_lines
    assert first.endswith("2 of 2 layers (llama, model), with 1 of 2 KV heads on each of 2 ranks")
    assert opening.startswith(first)
    (calls,) = [line for line in rest if line.startswith("  sparse calls: ")]
    # Of both: rank 1 has told of two trials at least, or said it when it ended.
    assert int(calls.split()[2].replace(",", "")) >= 2 * LAYERS * STEPS
    assert "on all ranks, " in calls


def test_a_rank_that_waits_inside_mlx_for_another_is_ended_by_sigterm(folder: Path):
    processes = pair(lambda rank: [sys.executable, str(WAIT), "--model", "model", *SPARSE], folder)
    try:
        for process in processes:
            assert process.stdout and process.stdout.readline() == "begun\n"
        processes[0].terminate()
        _, err = processes[0].communicate(timeout=30)
        assert processes[0].returncode == 128 + signal.SIGTERM
        assert errors_in(err) == []
        assert processes[1].poll() is None, "it has heard that rank 0 has ended, and goes on"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_an_exception_on_one_rank_ends_the_other_in_one_line(folder: Path):
    first, second = run_pair(lambda rank: [sys.executable, str(FAIL), "--model", "model", *SPARSE], folder)
    assert (first.code, second.code) == (1, 1)
    assert second.err.splitlines()[-1] == "MemoryError: no room"
    name = os.uname().nodename
    assert errors_in(first.err) == [f"fail_rank.py: error: rank 1 ({name}) failed: MemoryError: no room."]
    assert "Traceback" not in first.err


def test_the_servers_report_is_that_of_all_ranks(folder: Path):
    server = Server.__new__(Server)
    server.port = free_port()
    argv = ["mlx_lm.server", "--model", "model", "--port", str(server.port), *SPARSE, *JSON]
    processes = pair(lambda rank: argv, folder, stdout=False)
    server.process = processes[0]
    try:
        server.wait_until_up()
        server.ask("w1 w2 w3 w4 w5 w6 w7 w8")
        until = time.monotonic() + 30
        while len(ranks := server.sparse()[0]["ranks"]) < 2 or ranks[0]["sparse_calls"] != ranks[1]["sparse_calls"]:
            assert time.monotonic() < until  # ranks tell once a second
            time.sleep(0.1)
        for process in processes:
            process.terminate()
        first, second = (process.communicate(timeout=60)[1] for process in processes)
        (line,) = [line for line in first.splitlines() if line.startswith(f'{{"{JSON_KEY}": ')]
        (report,) = json.loads(line)[JSON_KEY]
        assert report["ranks"] == ranks
        assert report["sparse_calls"] == sum(rank["sparse_calls"] for rank in ranks) > 0
        assert [(rank["kv_heads"], rank["of_kv_heads"]) for rank in ranks] == [(1, 2)] * 2
        assert errors_in(first) + errors_in(second) == []
        assert JSON_KEY not in second
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_report_survives_the_way_to_another_rank(found: Found):
    for case in found[0][0].values():
        if case["counted"] is not None:
            assert json.loads(json.dumps(numbers_of(report_of(case["counted"])))) == case["counted"]
