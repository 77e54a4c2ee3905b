"""Test several processes that run one model on MLX's ring on this machine."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import benchmark
from rank_processes import run_ranks, started_ranks
from run_ranks import CUTS, METHODS
from saap_artefacts import write_artefact
from servers import Server, free_port, reports_in
from tiny_models import build, write

from mlx_sparse.checks import ArtefactError, ConfigError
from mlx_sparse.lm.ranks import Ranks, connection_error, difference, facts_of
from mlx_sparse.methods.saap.artefact import load
from mlx_sparse.model_parts import Part, part_of

RUN = Path(__file__).parents[1] / "testing" / "run_ranks.py"
SPARSE = ["--attn", "sparq:rank=4,top_k=4,dense_below=0"]
BENCHMARK = ["mlx_lm.benchmark", "-p", "60", "-g", "6", "--model", "model"]
STEPS, LAYERS = 7, 2  # mlx-lm computes one token ahead
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_torch")]  # several processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write(folder / "model")
    write(folder / "other", rope_theta=500.0)
    write_artefact(folder / "other", build(seed=5))
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, mx.array]]]:
    """Return the files of `run_ranks.py` from one process, from rank 0 and from rank 1."""
    out = tmp_path_factory.mktemp("parts")
    artefacts = [str(write_artefact(out / family, build(family, num_hidden_layers=3))) for family, _ in CUTS[:2]]
    argv = [sys.executable, str(RUN)]
    subprocess.run([*argv, str(out / "alone"), *artefacts], check=True)
    for done in run_ranks(lambda rank: [*argv, str(out / f"rank{rank}"), *artefacts], out):
        assert done.code == 0, done.err
    return [
        (json.loads((out / name).read_text()), dict(mx.load(str(out / f"{name}.npz")).items()))  # type: ignore[union-attr]
        for name in ("alone", "rank0", "rank1")
    ]


Found = list[tuple[dict[str, Any], dict[str, mx.array]]]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("family", "how"), CUTS, ids=[" ".join(cut) for cut in CUTS])
def test_parts_equal_one_process(family: str, how: str, name: str, found: Found):
    case = f"{family} {how} {name}"
    (alone, logits), *ranks = found
    expected = np.array(logits[case])
    for of_rank, of_rank_logits in ranks:
        assert of_rank[case]["tokens"] == alone[case]["tokens"]
        assert np.abs(np.array(of_rank_logits[case]) - expected).max() < 1e-4 * np.abs(expected).max()
    whole, *parts = [of_rank[case]["counted"] for of_rank in (alone, *(of_rank for of_rank, _ in ranks))]
    if whole is None:
        return

    def summed(name: str) -> Any:
        return sum(part[name] for part in parts)

    copies = 2 if how == "tensor" else 1  # calls per layer, each with a part of the heads
    assert summed("layers") == copies * whole["layers"]
    assert summed("served_layers") == copies * whole["served_layers"]
    assert summed("sparse_calls") == copies * whole["sparse_calls"] > 0
    calls = sum((Counter(part["dense_calls"]) for part in parts), Counter())
    assert calls == {reason: copies * count for reason, count in whole["dense_calls"].items()}
    assert (summed("dense_bytes"), summed("sparse_bytes")) == (whole["dense_bytes"], whole["sparse_bytes"])
    if whole["buckets"] is not None:
        attended, keys = (sum(part["buckets"][name] for part in parts) for name in ("attended", "keys"))
        assert (attended, keys) == (whole["buckets"]["attended"], whole["buckets"]["keys"])
    if whole["prefill"] is not None:
        by_rank = [[layer["heads"] for layer in part["prefill"]["layers"]] for part in parts]
        heads = [layer["heads"] for layer in whole["prefill"]["layers"]]
        joined = [a + b for a, b in zip(*by_rank, strict=True)] if how == "tensor" else by_rank[1] + by_rank[0]
        assert joined == heads
    shared = ["1 of 2 KV heads on this rank"] * 2
    if how == "pipeline":  # the last rank has the first layers of the model
        shared = ["layers 1 to 2 of the model on this rank", "layers 0 to 0 of the model on this rank"]
    assert [part["opening"].rpartition("), ")[2] for part in parts] == shared


def test_artefact_with_indivisible_heads_is_refused(tmp_path: Path):
    model = build()
    artefact = load(write_artefact(tmp_path / "one", build(num_attention_heads=3, num_key_value_heads=3)))
    model.model.layers[0].self_attn.q_proj = shard_of(model.model.layers[0].self_attn.q_proj)
    assert part_of(model) == Part(0, None, 1, 2)
    with pytest.raises(ArtefactError, match=r"^artefact: expected the 3 KV heads of 16 of layer 0 to be split into 2"):
        artefact.part_for(model)


def test_an_artefact_of_another_model_is_refused_on_all_ranks(folder: Path):
    attn = "saap:artefact=other.saap.safetensors,probes=2"
    for done in run_ranks(lambda rank: [*BENCHMARK, "-n", "1", "--attn", attn], folder):
        assert done.code == 2
        (line,) = done.err.splitlines()
        assert line.startswith("mlx_lm.benchmark: error: artefact: expected one trained on this model, got one for a ")


def shard_of(linear: Any) -> Any:
    """Return the linear layer as the second of two shards."""

    class AllToShardedLinear(type(linear)):  # type: ignore[misc]
        class group:
            rank = staticmethod(lambda: 1)
            size = staticmethod(lambda: 2)

    linear.__class__ = AllToShardedLinear
    return linear


def test_an_option_on_one_rank_is_refused_on_all(folder: Path):
    for done in run_ranks(lambda rank: [*BENCHMARK, "-n", "1", *(SPARSE if rank == 0 else [])], folder):
        assert done.code == 2
        assert done.err == (
            f"mlx_lm.benchmark: error: --attn: expected the same value on all ranks, got {SPARSE[1]} on rank 0 and "
            "none on rank 1.\n"
        )


def test_a_mistake_on_one_rank_is_refused_on_all(folder: Path):
    argv = [*BENCHMARK, "-n", "1", *SPARSE]
    first, second = run_ranks(lambda rank: [*argv, *(["--nonsense"] if rank else [])], folder)
    assert (first.code, second.code) == (2, 2)
    refused = "arguments: expected valid arguments on all ranks, got an error on rank 1."
    assert first.err == f"mlx_lm.benchmark: error: {refused}\n"
    assert second.err.endswith("mlx_lm.benchmark: error: unrecognized arguments: --nonsense\n")


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"model": "m", "attn": "sparq", "port": 1, "prompt": "w1", "pipeline": False, **changes}
    )


def test_differing_options_are_named_unless_local(folder: Path, tmp_path: Path):
    def message(*changes: dict[str, Any]) -> str | None:
        return difference([facts_of(options(**change), []) for change in changes], [False] * len(changes))

    same = "expected the same value on all ranks, got"
    assert message({}, {}, {"port": 2}) is None
    assert message({}, {"attn": "h2o"}, {}) == f"--attn: {same} sparq on ranks 0 and 2 and h2o on rank 1."
    assert message({"pipeline": True}, {}) == f"--pipeline: {same} yes on rank 0 and no on rank 1."
    assert message({}, {"attn": None, "pipeline": True}) == f"--attn: {same} sparq on rank 0 and none on rank 1."
    texts = message({"prompt": "w1 " * 99}, {"prompt": "w2 " * 99})
    assert re.fullmatch(
        rf"--prompt: {same} (a text of 297 characters \(\w{{8}}\)) on rank 0 and \1?.* on rank 1\.", texts
    )
    # The same model in another folder.
    write(tmp_path / "elsewhere")
    assert message({"model": str(folder / "model")}, {"model": str(tmp_path / "elsewhere")}) is None
    assert message({"model": str(folder / "model")}, {"model": str(folder / "other")}).startswith(f"--model: {same} ")
    versions = facts_of(options(), [])
    other = versions | {"mlx": ("0.1", "0.1")}
    assert difference([versions, other], [False, False]).startswith(f"mlx: {same} ")


def test_one_rank_without_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("MLX_RANK", raising=False)
    monkeypatch.setattr(mx.distributed, "init", None)
    assert Ranks.start() == Ranks(0, 1)
    (tmp_path / "hosts").write_text("\n")  # the hosts of `mlx.launch -n 1`
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
    assert Ranks.start() == Ranks(0, 1)
    assert Ranks().gather({"a": [1]}) == [{"a": [1]}]


def test_unreachable_rank_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def init() -> None:
        raise RuntimeError("[ring] Couldn't connect (error: 111)")

    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.setattr(mx.distributed, "init", init)
    monkeypatch.setattr(sys, "argv", ["mlx_lm.benchmark", "--model", "model", *SPARSE])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert capsys.readouterr().err == (
        "mlx_lm.benchmark: error: ranks: expected all ranks to start this command, got: [ring] Couldn't connect "
        "(error: 111).\n"
    )


def test_rank_with_another_program_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mx.distributed, "all_gather", lambda own, stream: mx.concatenate([own, own + 1]))
    with pytest.raises(
        ConfigError, match=r"^mlx-sparse-attention: expected this package on all ranks, got none on rank 1\."
    ):
        Ranks(0, 2).gather("here")


def test_lost_ranks_are_told_apart_from_other_runtime_errors():
    assert connection_error(RuntimeError("[matmul] Last dimension of first input")) is None
    assert connection_error(RuntimeError("[ring] gone\nmore")) == (
        "ranks: expected all ranks to run this command to the end, got: [ring] gone."
    )


@pytest.mark.parametrize("killed", [0, 1])
def test_lost_rank_is_a_one_line_error(killed: int, folder: Path):
    with started_ranks(lambda rank: [*BENCHMARK, "-n", "1000000", *SPARSE], folder) as processes:
        assert processes[0].stdout
        while not processes[0].stdout.readline().startswith("Trial 2"):
            assert processes[0].poll() is None, processes[0].communicate()
        processes[killed].kill()
        _, err = processes[1 - killed].communicate(timeout=60)
    assert processes[1 - killed].returncode == 2, err
    (line,) = [line for line in err.splitlines() if "error: " in line]
    assert line.startswith("mlx_lm.benchmark: error: ranks: expected all ranks to run this command to the end, got: ")
    assert "Traceback" not in err
    assert ("sparse calls: " in err) == (killed == 1), "only rank 0 prints the report"


def test_server_on_two_ranks_reports_rank_0(folder: Path):
    server = Server.__new__(Server)
    server.port = free_port()
    argv = ["mlx_lm.server", "--model", "model", "--port", str(server.port), *SPARSE, "--attn-report", "json"]
    with started_ranks(lambda rank: argv, folder, stdout=False) as processes:
        server.process = processes[0]
        server.wait_until_up()
        assert server.ask("w1 w2 w3 w4 w5 w6 w7 w8")
        (report,) = reports_in(server.interrupt())
        assert report["served_layers"] == LAYERS
        assert report["sparse_calls"] >= LAYERS * STEPS
