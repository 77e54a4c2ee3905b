"""Test the command `mlx-sparse train-saap`: files, errors and killed runs."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import commands
import mlx.core as mx
import numpy as np
import pytest
from commands import file_size_limit
from json_tables import read_tables
from tiny_models import build, greedy, write

from mlx_sparse import cli
from mlx_sparse.lm import sparse
from mlx_sparse.methods.saap.artefact import Artefact, load, write_tensors
from mlx_sparse.tools.train.collect import locked
from mlx_sparse.tools.train.rows import Distances
from mlx_sparse.tools.train.run import _texts

DATA = read_tables(__file__)

pytestmark = pytest.mark.slow  # commands

TOKENS = commands.tokens(4000)
EXACT = ["--recent-tokens", "63", "--farther-than", "32"]
SMALL = ["--context", "512", "--windows", "3", "--queries", "96", "--buckets", "8", "--hidden", "32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saap")
    write(folder / "model", num_hidden_layers=3)
    write(folder / "other", seed=1, num_hidden_layers=3)
    (folder / "text.txt").write_text(commands.text(4000))
    (folder / "latin.txt").write_bytes(b"w1 \xe9")
    (folder / "short.txt").write_text(commands.text(700))
    return folder


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    of = ["train-saap", "--model", str(folder / "model"), "--text", str(folder / "text.txt"), "-o", str(out)]
    return [*of, *SMALL, *EXACT, "--steps", "12", *more]


def same(a: Artefact, b: Artefact) -> bool:
    arrays = [
        {(i, name): np.array(x) for i, layer in of.layers.items() for name, x in layer.arrays().items()}
        for of in (a, b)
    ]
    return arrays[0].keys() == arrays[1].keys() and all(
        np.array_equal(array, arrays[1][name]) for name, array in arrays[0].items()
    )


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the artefact and the work folder of one complete run."""
    place = tmp_path_factory.mktemp("trained")
    assert cli.main(arguments(folder, place / "a.safetensors", "--work", str(place / "work"))) == 0
    return place


def test_artefact_has_every_sparse_layer(folder: Path, trained: Path) -> None:
    made = load(trained / "a.safetensors")
    made.check_model(build(num_hidden_layers=3))
    assert (list(made.layers), made.buckets, made.hidden) == ([1, 2], 8, 32)
    assert (made.sink_tokens, made.recent_tokens) == (1, 63)
    assert made.training["training"]["steps"] == 12
    for layer in made.layers.values():
        assert layer.centroids.dtype == mx.float16
        lengths = mx.linalg.norm(layer.centroids.astype(mx.float32), axis=-1)
        np.testing.assert_allclose(np.array(lengths), 1, atol=2e-3)


class Numbers:
    """Tokenizer of numbers, in which every text begins with the token 7."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [7] * add_special_tokens + [*map(int, text.split())]


@pytest.mark.parametrize(
    ("windows", "trained_on", "held_out"), [(1, 1, 1), (3, 2, 1), (8, 2, 1), (100, 2, 1), (1000, 76, 25)]
)
def test_held_out_text_is_not_trained_on(windows: int, trained_on: int, held_out: int, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(1000, 1320 if windows < 1000 else 1000 + 100 * 101))))
    options = {"context": 101, "windows": windows, "text": [str(text)], "held_out": None}
    args = argparse.Namespace(**options, distances=Distances(1, 20, 10), cache_dir=None)
    train, beside = _texts(args, Numbers(), {"max_position_embeddings": 128})
    assert (len(train), len(beside)) == (trained_on, held_out)
    assert all(len(one) == 101 and one[0] == 7 for one in train + beside)
    learnt, tested = ({token for one in texts for token in one[1:]} - {7} for texts in (train, beside))
    assert not learnt & tested
    assert len(learnt) >= 100 * trained_on - 1 and len(tested) == 100 * held_out


def test_report_covers_every_head_and_the_printed_option_works(folder: Path, trained: Path, capsys: Any) -> None:
    out = trained / "used.safetensors"
    assert cli.main(arguments(folder, out, "--work", str(trained / "work"), "--json")) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [(head["layer"], head["head"]) for head in found["heads"]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert found["selectivities"] == [0.05, 0.1, 0.2]
    for head in found["heads"]:
        assert head["recall"].keys() == {"trained", "kmeans"}
        assert head["imbalance"] >= 1
    option = re.search(r"Use it with --attn (\S+)", printed.err)
    assert option is not None
    model = build(num_hidden_layers=3)
    with sparse(model, option[1]) as report:
        greedy(model, TOKENS[:300], 5)
    assert report.sparse_calls == 2 * 5, str(report)
    out.unlink()


def test_collected_texts_are_shared_between_runs(folder: Path, trained: Path) -> None:
    work = trained / "work"
    collected = {path: path.stat().st_mtime_ns for path in work.glob("collected-*/*.f16")}
    out = trained / "b.safetensors"
    recipe = {"steps": 2, "batch": 16, "rate": 1e-5, "start": "random"}
    more = [word for name, value in recipe.items() for word in (f"--{name}", str(value))]
    assert cli.main(arguments(folder, out, "--work", str(work), "--buckets", "16", "--one-text", *more)) == 0
    made = load(out)
    assert (made.buckets, made.layers[1].out_bias.shape[-1]) == (16, 16)
    assert made.training["training"].items() >= {**recipe, "one_text": True}.items()
    assert {path: path.stat().st_mtime_ns for path in work.glob("collected-*/*.f16")} == collected
    assert len(list(work.glob("trained-*"))) == 2


def test_selected_layers_leave_no_work_folder(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "one.safetensors"
    assert cli.main(arguments(folder, out, "--layers", "2", "--steps", "2")) == 0
    assert list(load(out).layers) == [2]
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    table = capsys.readouterr().out
    assert re.search(r"^2 +1 ", table, re.MULTILINE) and max(map(len, table.splitlines())) <= 80
    assert {"kmeans", "trained", "5%", "10%"} <= set(table.split())


def test_foreign_files_in_the_work_folder_stay(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.safetensors"
    mine = tmp_path / "one.safetensors.work" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("precious")
    assert cli.main(arguments(folder, out, "--layers", "2", "--steps", "2")) == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([mine.name, mine.parent.name, out.name])


def test_models_without_pre_rope_tensors_are_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "model", "mamba")
    argv = arguments(folder, tmp_path / "a.safetensors", "--model", str(tmp_path / "model"))
    assert cli.main(argv) == 2
    assert "expected an attention layer that SAAP can serve, got none" in capsys.readouterr().err


@pytest.mark.parametrize("factor", [float("nan"), 1e6])
def test_keys_beyond_float16_are_refused(factor: float, folder: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = {name: array * factor if "1.self_attn.k" in name else array for name, array in mx.load(str(path)).items()}
    mx.save_safetensors(str(path), weights, {"format": "mlx"})
    out = tmp_path / "a.safetensors"
    assert cli.main(arguments(folder, out, "--model", str(tmp_path / "model"))) == 2
    assert "expected queries and keys within float16, got larger or NaN in layer-001" in capsys.readouterr().err
    assert not out.exists()


REFUSED = DATA["refused"]


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_a_one_line_error(
    case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    more, message = REFUSED[case]
    assert cli.main(arguments(folder, tmp_path / "a.safetensors", *more)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mlx-sparse: error: ")]
    assert re.search(message, line), line
    assert not (tmp_path / "a.safetensors").exists()
    assert sorted(folder.rglob("*")) == before


def test_files_of_other_models_are_not_overwritten(folder: Path, trained: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "a.safetensors"
    shutil.copy(trained / "a.safetensors", out)
    before = out.read_bytes()
    assert cli.main(arguments(folder, out, "--model", str(folder / "other"))) == 2
    assert "--out: expected a new file or a file for this model" in capsys.readouterr().err
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("size", "file"), [(20_000, r"layer-001\.pre_rope_keys\.f16"), (100_000, r"layer-001\.safetensors|a\.safetensors")]
)
def test_full_disk_is_an_error_and_resumes(
    size: int, file: str, folder: Path, trained: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "a.safetensors"
    # The networks are larger than the limit, the texts are not.
    argv = arguments(folder, out, *(["--hidden", "640"] if size > 50_000 else []))
    with file_size_limit(size):
        assert cli.main(argv) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mlx-sparse: error: ")]
    assert re.search(f"({file}): expected to read or write it, got: ", line), line
    assert not out.exists()
    assert not [path.name for path in tmp_path.rglob(".*")]
    assert cli.main(argv) == 0
    if size < 50_000:
        assert same(load(out), load(trained / "a.safetensors"))


def test_free_space_is_checked_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    assert cli.main(arguments(folder, tmp_path / "a.safetensors")) == 2
    assert "--work: expected 0.00 GB free" in capsys.readouterr().err


def test_killed_runs_resume_to_the_same_file(
    folder: Path, tmp_path: Path, trained: Path, without_torch: dict[str, str]
) -> None:
    def start(argv: list[str]) -> subprocess.Popen[str]:
        return commands.start(["-m", "mlx_sparse.cli", *argv], os.environ | without_torch)

    whole, out, work = tmp_path / "whole.safetensors", tmp_path / "a.safetensors", tmp_path / "work"
    more = ["--steps", "4000", "--work"]  # the last layer trains until the signal arrives
    process = start(arguments(folder, whole, *more, str(tmp_path / "other")))
    assert process.wait(120) == 0, process.stderr
    argv = arguments(folder, out, *more, str(work))
    ends = {
        "collected-*/layer-002.rope_keys.f16": signal.SIGKILL,
        "trained-*/lock": signal.SIGKILL,
        "trained-*/layer-001.safetensors": signal.SIGINT,
    }
    for pattern, end in ends.items():
        process = start(argv)
        _, err = commands.end(process, end, lambda pattern=pattern: list(work.glob(pattern)))
        assert process.returncode == (-end if end == signal.SIGKILL else 130), err
        assert "Traceback" not in err
        assert ("interrupted; the same command resumes from" in err) == (end == signal.SIGINT)
        assert not out.exists()
    finished = next(work.glob("trained-*/layer-001.safetensors")).stat().st_mtime_ns
    process = start(argv)
    assert process.wait(120) == 0, process.stderr
    assert same(load(out), load(whole))
    assert next(work.glob("trained-*/layer-001.safetensors")).stat().st_mtime_ns == finished


@pytest.mark.parametrize("kind", ["collected", "trained"])
def test_work_folder_is_locked(kind: str, folder: Path, trained: Path, tmp_path: Path, capsys: Any) -> None:
    argv = arguments(folder, tmp_path / "a.safetensors", "--work", str(trained / "work"))
    with ExitStack() as others:
        for path in trained.glob(f"work/{kind}-*"):
            others.enter_context(locked(path))
        assert cli.main(argv) == 2
        assert "--work: expected a folder that no other run uses" in capsys.readouterr().err
    assert cli.main(argv) == 0


def test_damaged_work_folder_is_refused(folder: Path, trained: Path, tmp_path: Path, capsys: Any) -> None:
    work = tmp_path / "work"
    shutil.copytree(trained / "work", work)
    argv = arguments(folder, tmp_path / "a.safetensors", "--work", str(work))
    for damage, message in (
        (lambda path: write_tensors(path, {"mine": mx.zeros(3)}), "expected a layer that this command has trained"),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "not fully covered"),
    ):
        for path in work.glob("trained-*/layer-001.safetensors"):
            damage(path)
        assert cli.main(argv) == 2
        assert message in capsys.readouterr().err
    for path in work.glob("trained-*"):
        shutil.rmtree(path)
    (rows,) = {path for path in work.glob("collected-*/layer-002.rope_keys.f16") if path.stat().st_size > 50_000}
    rows.write_bytes(rows.read_bytes()[:-2])
    assert cli.main(argv) == 2
    assert "expected the collected files" in capsys.readouterr().err
    for path in work.glob("collected-*/windows.jsonl"):
        path.write_text("[" * 100_000 + "\n")
    assert cli.main(argv) == 2
    assert "expected the results of an interrupted run of this command, got another file" in capsys.readouterr().err
