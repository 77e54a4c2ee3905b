"""From where on `SparQCache` is sparse: measured in Triton's interpreter, by simulated devices, or modelled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_rows import states
from mlx_sparse.cuda_ref import hf
from mlx_sparse.cuda_ref.hf import attention, calibrate
from simulated import extra_for, simulated
from torch_arrays import DEVICE
from transformers import AutoConfig

from mlx_sparse import crossing, thresholds
from mlx_sparse.thresholds import MEASURED, MODELLED

ATTN = "sparq:rank=8"
D = 16
MEASURING = "[mlx-sparse] measuring from where on sparq pays here (triton, 2 x 1 heads of 16; up to "


@pytest.fixture(autouse=True)
def folder(calibration_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The calibration folder; nothing was asked before."""
    begin_with(monkeypatch, calibrate.Calibration)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield calibration_folder
    torch.set_num_threads(threads)


def begin_with(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """As a new process with the thresholds of ``engine``."""
    monkeypatch.setattr(calibrate, "CALIBRATION", engine(say=calibrate._say))


def step(S: int, **given: Any) -> hf.SparQCache:
    """One call of an attention layer over ``S`` keys; its cache."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": D}
    config = AutoConfig.for_model("llama", num_hidden_layers=1, **sizes)
    config._attn_implementation = "sparq"
    cache = hf.SparQCache(config, ATTN, **given)
    with torch.no_grad():
        rows = cache.update(*states(1, 1, S, D=D), 0)
        attention.attention(torch.nn.Module(), torch.ones(1, 2, 1, D, device=DEVICE), *rows, None)
    return cache


def only(cache: hf.SparQCache) -> thresholds.Threshold:
    [found] = cache.thresholds.values()
    return found


def test_a_long_context_is_measured_once_and_holds_for_the_next_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fewest = {"LEAST_LAYERS": 1, "MOST_LAYERS": {"gpu": 1}, "SECONDS": {"gpu": 0.1}}
    for name, value in fewest.items():
        monkeypatch.setattr(thresholds, name, value)
    monkeypatch.setattr(crossing, "PAIRS", (2, 2))
    monkeypatch.setattr(calibrate.Calibration, "longest", 1200)
    cache = step(1100, calibrate=True)
    said = capsys.readouterr().err.splitlines()
    found = only(cache)
    assert said[0] == f"{MEASURING}0.1 s, once) ..."
    if found.how == MODELLED:  # others were busy
        assert said[1].startswith("[mlx-sparse] not measured: ")
        return
    assert said[1].startswith(f"[mlx-sparse] sparse from {found.value:,} keys on (measured on this machine); it took ")
    assert len(said) == 2
    assert cache.report.sparse_calls == (found.value <= 1100)
    assert f"sparse from {found.value:,} keys on (measured on this machine)" in str(cache.report)
    [file] = folder.glob("*.json")
    asked = json.loads(file.read_text())["question"]
    assert asked["backend"] == "triton"
    assert asked["dtype"] == "float32"
    assert (asked["device"] == "CPU, Triton's interpreter") == (DEVICE.type == "cpu")
    assert {"torch", "triton", "transformers"} <= asked.keys()
    begin_with(monkeypatch, calibrate.Calibration)
    assert only(step(1100)) == found
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("S", "given"), [(1100, {}), (1000, {"calibrate": True})], ids=["not asked to", "short"])
def test_nothing_is_measured_unasked_or_for_a_short_context(
    S: int, given: dict[str, bool], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert only(step(S, **given)).how == MODELLED
    assert capsys.readouterr().err == ""
    assert not list(folder.glob("*.json"))


@pytest.mark.parametrize("keys", [1200, 3000])
def test_the_device_moves_the_threshold(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_with(monkeypatch, simulated(calibrate.Calibration, extra=extra_for(keys)))
    found = only(step(1100, calibrate=True))
    assert found.how == MEASURED
    assert keys <= found.value <= 1.1 * keys
    below, there = step(int(found.value) - 1), step(int(found.value))
    assert (below.report.sparse_calls, there.report.sparse_calls) == (0, 1)
    assert below.report.dense_calls == {f"over fewer than {found.value:,} keys": 1}


def test_a_noisy_device_is_left_to_the_model_and_asked_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_with(monkeypatch, simulated(calibrate.Calibration, extra=extra_for(2000), noisy=True))
    for _ in range(2):
        assert only(step(1100, calibrate=True)).how == MODELLED
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[1].endswith("The documented model decides instead.")
    assert not list(folder.glob("*.json"))


def test_what_another_version_of_triton_measured_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_with(monkeypatch, simulated(calibrate.Calibration, extra=extra_for(1500)))
    assert only(step(1100, calibrate=True)).how == MEASURED
    [file] = folder.glob("*.json")
    file.write_text(file.read_text().replace('"triton": "', '"triton": "9.'))
    capsys.readouterr()
    begin_with(monkeypatch, calibrate.Calibration)
    for _ in range(2):
        assert only(step(1100)).how == MODELLED
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("[mlx-sparse] a measurement is ignored, and replaced by the next: ")


def test_too_little_memory_leaves_it_to_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(calibrate.Calibration):
        def free_memory(self, layer: thresholds.Layer) -> int:
            return 4 * 1000 * layer.row  # a quarter of it is fewer keys than are worth asking for

    begin_with(monkeypatch, Full)
    assert only(step(1100, calibrate=True)).how == MODELLED
    assert "not measured: " in capsys.readouterr().err
