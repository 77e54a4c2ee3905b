"""``export-onnx --dense-below``: measured on this machine, or given."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny_models
from exported import exported
from mlx_sparse.onnx_export.exporter import calibrate, command, export
from mlx_sparse.onnx_export.exporter.methods.quest import QuestDecoding
from mlx_sparse.onnx_export.exporter.methods.sparq import SparQDecoding
from mlx_sparse.onnx_export.runtime import native
from mlx_sparse.onnx_export.runtime.runner import Runner
from require import absent
from simulated import extra_for, simulated

from mlx_sparse import measured, thresholds
from mlx_sparse.methods import SparQ, Step
from mlx_sparse.methods.quest import Quest
from mlx_sparse.thresholds import KEPT, LEAST_LAYERS, Layer

SPARQ = "sparq:rank=4,top_k=4,local_window=1,key_bits=16"
RULE = 5  # keys: what a file of it gets where nobody says otherwise
MEASURING = "[mlx-sparse] measuring from where on sparq pays here (ort, 4 x 2 heads of 16; up to "


@pytest.fixture(autouse=True)
def folder(calibration_folder: Path) -> Path:
    """The calibration folder."""
    if reason := native.unavailable():
        absent("ort", reason)
    return calibration_folder


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Path, str, str]]:
    """Export a tiny llama; where to, and what the command printed on both outputs."""
    source = tiny_models.write(tmp_path / "source")
    count = 0

    def call(*options: str, method: str = SPARQ) -> tuple[Path, str, str]:
        nonlocal count
        count += 1
        out = tmp_path / f"out{count}"
        given = ["--model", str(source), "-o", str(out), "--method", method, "--max-length", "256", *options]
        try:
            assert command.main(given) == 0
        except SystemExit as stop:
            assert stop.code == 2
        said = capsys.readouterr()
        return out, said.out, said.err

    return call


def dense_below(out: Path) -> int:
    """The attribute of all layers of a file."""
    nodes = onnx.load(out / "model.onnx", load_external_data=False).graph.node
    [value] = {a.i for node in nodes for a in node.attribute if a.name == "dense_below"}
    return int(value)


def logits(out: Path, count: int) -> list[np.ndarray]:
    """Of the steps over ``count`` keys and over one more."""
    runner = Runner(out)
    tokens = tiny_models.prompt_of(count + 1, 3)
    runner.step([tokens[: count - 1]])
    return [runner.step([[token]]).copy() for token in tokens[count - 1 :]]


def test_this_machine_is_measured_once(run: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "SECONDS", {"cpu": 0.5})
    monkeypatch.setattr(calibrate, "SAMPLE", 0.002)
    out, said, told = run("--dense-below", "auto")
    keys = dense_below(out)
    assert MEASURING + "0.5 s, once) ..." in told
    assert f",dense_below={keys}, 256 tokens" in said
    if "not measured" in told:  # others were busy
        assert keys == RULE
        assert f"Decode steps are sparse from {keys} keys on (modelled)." in said
        return
    assert f"[mlx-sparse] sparse from {keys} keys on (measured on this machine); it took" in told
    assert f"Decode steps are sparse from {keys} keys on (measured on this machine)." in said
    [file] = folder.glob("*.json")
    found = json.loads(file.read_text())
    assert found["question"]["backend"] == "ort"
    assert keys == (found["answer"]["keys"] or found["answer"]["up_to"] + 1)  # nothing may have won in so short a time
    again, said, told = run("--dense-below", "auto")
    assert "[mlx-sparse]" not in told
    assert dense_below(again) == keys
    assert "(measured on this machine)" in said


def test_steps_are_dense_below_what_was_found_and_sparse_from_there_on(
    run: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    folder.touch()  # nothing can be kept there
    for name, keys in (("fast", 40), ("slow", 90)):
        monkeypatch.setattr(export, "Calibration", simulated(calibrate.Calibration, extra=extra_for(keys)))
        out, _, told = run("--dense-below", "auto")
        found[name] = dense_below(out)
        assert keys <= found[name] <= 1.1 * keys
        assert "the measurement cannot be kept: " in told
        short, long = logits(out, found[name] - 1)
        dense, sparse = (logits(exported(method), found[name] - 1) for method in ("dense", f"{SPARQ},dense_below=0"))
        assert np.abs(dense[0] - sparse[0]).max() > 1e-2
        np.testing.assert_allclose(short, dense[0], rtol=0, atol=1e-4)
        assert np.abs(long - dense[1]).max() > 1e-2
    assert found["fast"] < found["slow"]


def test_where_sparse_steps_never_win_they_begin_beyond_what_was_timed(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "Calibration", simulated(calibrate.Calibration, extra=1.0))
    out, said, _ = run("--dense-below", "auto")
    assert dense_below(out) == 257
    assert "It decodes densely: sparse steps begin at 257 keys and it holds 256 tokens." in said


def test_a_quarter_of_the_free_memory_holds_what_is_timed(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def free_memory(self: Any, layer: Layer) -> int:
        copies = LEAST_LAYERS * KEPT  # of the keys and values of a layer
        return 4 * copies * layer.row * 100

    device = simulated(calibrate.Calibration, extra=1.0, free_memory=free_memory)
    monkeypatch.setattr(export, "Calibration", device)
    assert dense_below(run("--dense-below", "auto")[0]) == 101  # no longer context was timed


def test_a_noisy_machine_gets_the_rule_and_is_told(
    run: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = simulated(calibrate.Calibration, extra=extra_for(20), noisy=True)
    monkeypatch.setattr(export, "Calibration", device)
    out, said, told = run("--dense-below", "auto")
    assert re.search(r"not measured: times at .* keys vary from .*\. The documented model decides instead\.", told)
    assert f"Decode steps are sparse from {RULE} keys on (modelled)." in said
    assert dense_below(out) == RULE
    assert not folder.exists()


def test_what_another_version_measured_is_not_used(
    run: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys_of(keys: int) -> tuple[int, str]:
        monkeypatch.setattr(export, "Calibration", simulated(calibrate.Calibration, extra=extra_for(keys)))
        out, _, told = run("--dense-below", "auto")
        return dense_below(out), told

    with monkeypatch.context() as older:
        older.setattr(measured, "_version", lambda package: "0.0.1")
        first, _ = keys_of(30)
    second, told = keys_of(80)
    assert MEASURING in told
    assert first < second
    assert len(list(folder.iterdir())) == 2
    # Nor is a file under our name in which another version stands.
    for file in folder.iterdir():
        file.write_text(file.read_text().replace('"onnxruntime": "', '"onnxruntime": "9.'))
    third, told = keys_of(150)
    assert "a measurement is ignored, and replaced by the next: " in told
    assert third > second
    assert keys_of(30) == (third, "")  # now it is kept


def test_a_number_is_that_of_the_method(run: Callable[..., Any]) -> None:
    out, said, told = run("--dense-below", "33")
    other, same, _ = run(method=f"{SPARQ},dense_below=33")
    assert dense_below(out) == dense_below(other) == 33
    assert said.partition(": ")[2] == same.partition(": ")[2]
    assert "Decode steps" not in said
    assert "[mlx-sparse]" not in told


def test_a_missing_library_is_one_line(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", "libmissing.so")
    out, _, told = run("--dense-below", "auto")
    assert re.fullmatch(r"export-onnx: error: native: expected libmissing.so, got none that can be used: .*\n", told)
    assert not out.exists()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "decode",
    [
        SparQDecoding(SparQ(rank=8, reallocate=False, component_score="query_key", dense_below=0)),
        QuestDecoding(Quest(top_k=128, dense_below=0)),
    ],
    ids=["sparq", "quest"],
)
def test_both_branches_of_the_kernels_are_timed(decode: Any, dtype: str) -> None:
    made = calibrate.Calibration(decode, lanes=256, max_length=1024)
    layer = Layer("ort", Step(2, 3, 32, 2), dtype)
    times = made.pairs(decode.method, layer, 700, 0.0)
    assert len(times) >= 2
    assert np.isfinite(times).all()
    assert np.min(times) > 0
    sides = [calibrate._Step(decode, 256, layer, 700, 2, below) for below in (700, 701)]
    for side in sides:
        side.seconds()
    sparse, dense = (side.output.astype(np.float32) for side in sides)
    assert np.isfinite(dense).all()
    assert np.isfinite(sparse).all()
    assert np.abs(sparse - dense).max() > 1e-3
