"""Test thresholds that are measured on this machine with real decode steps on tiny layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from forked import Finished, Forks
from msl import Metal
from short_methods import having
from tiny_models import build, greedy, prompt_of, write

import mlx_sparse
from mlx_sparse import calibrate, cli
from mlx_sparse.calibrate import (
    GIVEN,
    MEASURED,
    MODELED,
    Calibration,
    Threshold,
    measurement_key,
    path_of,
    read_measurement,
    read_points,
    timing,
    write_measurement,
)
from mlx_sparse.calibrate.timing import MIN_SPEEDUP, Layer
from mlx_sparse.checks import ConfigError
from mlx_sparse.core.base import Method, Step
from mlx_sparse.lm.model import plan_of
from mlx_sparse.methods import SAAP, Sample, SparQ, parse, read_toml

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("calibration_folder")]  # timings

OPS = Layer("ops", Step(2, 2, 32, 4), mx.float32)
PROMPT = Layer("ops", Step(2, 2, 32, 4), mx.float32, 256)
LONG = 1 << 20
(TUNED,) = parse("sample:ranges=99999:0.95:0.95:1")


def save_measurement(config: Method, layer: Layer, keys: int | None, up_to: int = 65_536) -> None:
    """Save a measurement as if it was made on this machine."""
    points = [[up_to, *[0.5] * 3]] if keys is None else [[keys, *[2.0] * 3]]
    write_measurement(measurement_key(config, layer), {"points": points})


def test_without_measurement_the_threshold_is_modeled() -> None:
    assert Calibration().threshold(SparQ(), OPS, LONG) == Threshold(2048, MODELED)


@pytest.mark.parametrize(
    ("attn", "keys"),
    [("sparq:dense_below=300", 300), *((f"{name}:top_k=64", 65) for name in having("top_k", "dense_below"))],
)
def test_given_thresholds_are_neither_measured_nor_looked_up(attn: str, keys: int) -> None:
    (config,) = parse(attn)
    save_measurement(config, OPS, 5000)
    assert Calibration(measures=True, seconds=0.01).threshold(config, OPS, LONG) == Threshold(keys, GIVEN)


def test_saap_is_modeled() -> None:
    config = SAAP(mode="online")
    assert Calibration(measures=True, seconds=0.01).threshold(config, OPS, LONG).how == MODELED


@pytest.mark.parametrize(
    ("keys", "up_to", "expected"),
    [(700, 4096, 700), (9000, 65_536, 9000), (50, 4096, 129), (None, 1024, 2048), (None, 4096, 4097)],
    ids=[
        "earlier",
        "later",
        "not before it can",
        "modeled beyond the measured lengths",
        "no win within the measured lengths",
    ],
)
def test_measurement_replaces_the_modeled_threshold(keys: int | None, up_to: int, expected: int) -> None:
    save_measurement(SparQ(), OPS, keys, up_to)
    assert Calibration().threshold(SparQ(), OPS) == Threshold(expected, MEASURED)


def test_settings_without_effect_on_time_share_a_measurement() -> None:
    save_measurement(SparQ(), OPS, 700)
    assert Calibration().threshold(SparQ().for_model(qk_norm=False), OPS).value == 700
    write_measurement(measurement_key(TUNED, PROMPT), {"share": 0.5, "best": 0.6})
    assert Calibration().threshold(parse("sample:ranges=9:0.8:0.7:1")[0], PROMPT).value == 0.5


@pytest.mark.parametrize(
    "other",
    [
        Layer("ops", Step(4, 2, 32, 4), mx.float32),
        Layer("ops", Step(2, 2, 64, 4), mx.float32),
        Layer("ops", Step(2, 2, 32, 4), mx.bfloat16),
        Layer("metal", Step(2, 2, 32, 4, "g"), mx.float32),
    ],
    ids=["heads", "head dim", "type", "backend"],
)
def test_measurement_of_one_layer_does_not_apply_to_another(other: Layer) -> None:
    save_measurement(SparQ(), OPS, 700)
    assert Calibration().threshold(SparQ(), other).how == MODELED
    assert Calibration().threshold(SparQ(rank=16), OPS).how == MODELED
    assert Calibration().threshold(SparQ(component_score="query"), OPS).how == MODELED


@pytest.mark.parametrize("config", [SparQ(), *parse("sample:block_size=32,ranges=9999:0.3:0.3:1")], ids=str)
def test_first_long_context_is_measured_once_and_saved(config: Method) -> None:
    messages: list[str] = []
    layer = PROMPT if isinstance(config, Sample) else OPS
    calibration = Calibration(measures=True, seconds=0.2, progress=messages.append)
    enough = calibration.shortest_measured(config)
    assert calibration.threshold(config, layer, enough - 1).how == MODELED
    assert not messages
    found = calibration.threshold(config, layer, enough)
    assert len(messages) == 2
    assert found.how == MEASURED
    assert re.search(r"sparse .*\(measured on this machine.*\); it took \d+\.\d s\.", messages[1])
    assert Calibration().threshold(config, layer) == found
    calibration.threshold(config, layer, LONG)
    assert len(messages) == 2


def test_measuring_keeps_the_random_state() -> None:
    mx.random.seed(3)
    expected = mx.random.normal((4,))
    mx.random.seed(3)
    Calibration(measures=True, seconds=0.05).threshold(SparQ(), OPS, LONG)
    assert mx.array_equal(mx.random.normal((4,)), expected)


def test_timed_rows_are_all_different() -> None:
    rows = np.array(timing._rows(OPS, 1, 3 * timing.TILE))[0, 0]
    assert rows.shape == (3 * timing.TILE, 32)
    assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize(("config", "layer"), [(SparQ(), OPS), (TUNED, PROMPT)], ids=["steps", "prompts"])
def test_too_little_free_memory_keeps_the_modeled_threshold(
    config: Method, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "free_memory", lambda: 1 << 20)
    messages: list[str] = []
    assert Calibration(measures=True, progress=messages.append).threshold(config, layer, LONG).how == MODELED
    assert "MB of free memory are too few" in messages[1]


def test_damaged_file_is_reported_once_and_replaced() -> None:
    save_measurement(SparQ(), OPS, 700)
    path = path_of(measurement_key(SparQ(), OPS))
    path.write_text("{")
    messages: list[str] = []
    calibration = Calibration(progress=messages.append)
    assert [calibration.threshold(SparQ(), OPS).how for _ in range(3)] == [MODELED] * 3
    assert len(messages) == 1
    assert str(path) in messages[0]
    save_measurement(SparQ(), OPS, 800)
    assert Calibration().threshold(SparQ(), OPS).value == 800


def test_measurement_of_another_process_is_used() -> None:
    assert Calibration().threshold(SparQ(), OPS).how == MODELED
    save_measurement(SparQ(), OPS, 700)
    assert Calibration(measures=True, seconds=0.2).threshold(SparQ(), OPS, LONG) == Threshold(700, MEASURED)


BUSY_POINTS = [[2000, 0.7, 0.9, 1.1], [4000, 0.8, 1.2, 1.5], [8000, 1.1, 1.5, 1.9]]


def test_measurement_of_a_busy_machine_is_repeated_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    write_measurement(measurement_key(SparQ(), OPS), {"points": BUSY_POINTS})
    found = Calibration().threshold(SparQ(), OPS, LONG)
    assert found == Threshold(8000, MEASURED, 2000, busy=True)
    assert calibrate.describe(SparQ(), found) == (
        "sparse at 8,000 keys and longer (measured on this machine, spread 2,000 to 8,000 keys; "
        "the machine was busy, so the next run measures again)"
    )
    calibration = Calibration(measures=True, seconds=0.2)
    assert calibration.needs_measurement(SparQ(), OPS)
    monkeypatch.setattr(timing, "time_steps", lambda *_, **__: [(2.0, 1.0)] * 5)
    assert calibration.threshold(SparQ(), OPS, LONG) == Threshold(1024, MEASURED)
    assert not calibration.needs_measurement(SparQ(), OPS)
    assert Calibration().threshold(SparQ(), OPS) == Threshold(1024, MEASURED)


def test_busy_machine_uses_the_lower_end_for_prompts() -> None:
    write_measurement(measurement_key(TUNED, PROMPT), {"share": 0.3, "best": 0.8})
    found = Calibration().threshold(TUNED, PROMPT)
    assert found == Threshold(0.3, MEASURED, 0.8, busy=True)
    assert "at most 30% of the blocks are selected (measured on this machine, spread 30% to 80%; " in (
        calibrate.describe(TUNED, found)
    )


@pytest.mark.parametrize(
    ("config", "layer", "result"),
    [
        (SparQ(), OPS, {"points": []}),
        (SparQ(), OPS, {"points": [[10**400, 1, 1, 1]]}),
        (TUNED, PROMPT, {"share": 7, "best": 7}),
        (TUNED, PROMPT, {"share": 10**400, "best": 1}),
        (TUNED, PROMPT, {"share": True, "best": 1}),
        (TUNED, PROMPT, {}),
    ],
    ids=str,
)
def test_hostile_result_is_reported_in_one_line_and_ignored(config: Method, layer: Layer, result: Any) -> None:
    write_measurement(measurement_key(config, layer), result)
    messages: list[str] = []
    calibration = Calibration(progress=messages.append)
    assert calibration.threshold(config, layer).how == MODELED
    assert [message.startswith("a measurement is ignored, and replaced by the next: ") for message in messages] == [
        True
    ]


def test_unwritable_folder_limits_a_measurement_to_this_run(
    calibration_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration_folder.write_text("not a folder")
    messages: list[str] = []
    calibration = Calibration(measures=True, seconds=0.2, progress=messages.append)
    monkeypatch.setattr(timing, "time_steps", lambda *_, **__: [(2.0, 1.0)] * 5)
    assert calibration.threshold(SparQ(), OPS, LONG) == Threshold(1024, MEASURED)
    assert "It is used for this run only." in messages[-1]
    assert Calibration().threshold(SparQ(), OPS).how == MODELED


def test_interrupted_measurement_writes_no_file(calibration_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "time_steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Calibration(measures=True).threshold(SparQ(), OPS, LONG)
    assert not calibration_folder.exists()


def test_decode_steps_are_sparse_at_the_measured_threshold_and_longer() -> None:
    model = build("llama")
    save_measurement(*_served(model, "sparq:rank=4"), 310)
    with mlx_sparse.sparse(model, "sparq:rank=4") as report:
        greedy(model, prompt_of(300), 20)
    assert report.crossovers() == ["sparse at 310 keys and longer (measured on this machine)"]
    assert "\n  sparse at 310 keys and longer (measured on this machine)\n" in str(report)
    assert report.as_dict()["crossovers"] == report.crossovers()
    assert report.sparse_calls > 0
    assert report.dense_calls["over fewer than 310 keys"] > 0


def _served(model: Any, attn: str) -> tuple[Method, Layer]:
    """Return the resolved method and the layer of a model whose layers are all equal."""
    with mlx_sparse.sparse(model, attn):
        plan = plan_of(model)
        assert plan is not None
        (served,) = plan.layers
    return served


@pytest.mark.parametrize(("share", "calls"), [(0.0, 0), (1.0, 2)])
def test_prefill_is_dense_above_the_measured_density(share: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_sparse.methods.sample.config.SAMPLE_TUNED_BELOW", 256)
    model, attn = build("llama"), "sample:block_size=32,ranges=9999:0.3:0.3:1"
    write_measurement(measurement_key(*_served(model, attn)), {"share": share, "best": share})
    with mlx_sparse.sparse(model, attn) as report:
        greedy(model, prompt_of(600), 1)
    assert report.prefill.calls == calls
    crossovers = "prefill never sparse" if share == 0 else "prefill sparse at 256 keys and longer"
    assert report.crossovers() == [f"{crossovers} (measured on this machine)"]


def test_metal_kernels_are_measured_and_saved_by_the_same_code(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the code that runs on a Mac, from measurement to file. Times in the harness are meaningless."""
    monkeypatch.setattr(calibrate, "LONGEST", 1024)
    monkeypatch.setattr(timing, "PAIRS", (2, 2))
    layer, messages = Layer("metal", Step(1, 1, 32, 4, "g"), mx.float32), list[str]()
    calibration = Calibration(measures=True, seconds=0.01, progress=messages.append)
    found = calibration.threshold(SparQ(), layer, 2444)
    assert len(messages) == 2
    (point,) = read_points(read_measurement(measurement_key(SparQ(), layer)) or {})
    assert point.S == 1024
    assert found.value == (1024 if point.low >= MIN_SPEEDUP else SparQ().shortest_context(layer.step))


def test_prefill_on_metal_kernels_is_timed_by_the_same_code(metal: Metal) -> None:
    layer = Layer("metal", Step(1, 1, 32, 4, "g"), mx.float32, 64)
    result = timing.time_prefill(Sample(block_size=32, dense_below=512), layer, 0.01)
    assert 0 <= result["share"] <= result["best"] <= 1
    assert result["S"] == 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a tiny model and a cache folder for the commands."""
    path = tmp_path_factory.mktemp("calibrate")
    write(path / "llama")
    return path


@pytest.fixture(scope="module")
def run(folder: Path, without_torch: dict[str, str]) -> Iterator[Callable[..., Finished]]:
    """Return a function that runs a command in that folder."""
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder)}
    with Forks() as forks:
        yield lambda *command: forks.run(list(command), folder, "", **environment)


def test_command_measures_every_shape_and_attn_uses_the_result(run: Callable[..., Finished]) -> None:
    done = run("mlx-sparse", "calibrate", "--model", "llama", "--attn", "sparq:rank=4", "--seconds", "0.3")
    assert done.code == 0, done.err
    assert re.search(
        r"2 layers, cpu, \d+ x \d+ heads of \d+: sparq:rank=4\S* sparse at [\d,]+ keys and longer", done.out
    )
    assert "the context length at which sparq is faster" in done.err
    options = ["--model", "llama", "--prompt", "w1 w2", "--max-tokens", "2", "--attn", "sparq:rank=4"]
    generated = run("mlx_lm.generate", *options)
    assert "measured on this machine" in generated.err.splitlines()[0], generated.err
    assert "no call will be sparse" in generated.err


def test_command_succeeds_if_nothing_has_to_be_measured(folder: Path) -> None:
    assert cli.main(["calibrate", "--model", str(folder / "llama"), "--attn", "sparq:rank=8,dense_below=9"]) == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--model", "nowhere"], "--model: expected a model that mlx-lm can load, got nowhere"),
        (["--model", "llama", "--seconds", "0"], "--seconds: expected a number above 0 and at most 3600, got 0."),
        (["--model", "llama", "--seconds", "nan"], "--seconds: expected a number above 0 and at most 3600, got nan."),
        (["--model", "llama", "--attn", "sparc"], "attn: expected one of"),
        (["--model", "llama", "--prefill-step-size", "0"], "--prefill-step-size: expected"),
    ],
)
def test_errors_of_the_command_are_one_line(
    folder: Path, options: list[str], error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["calibrate", *options]) == 2
    messages = capsys.readouterr().err
    assert messages.startswith(f"mlx-sparse: error: {error}")
    assert messages.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("calibrate = 1\n[sparq]", "expected calibrate to be true or false, got 1"),
        ("calibration = true", "one table per method"),
    ],
)
def test_toml_file_with_a_wrong_calibrate_setting_is_refused(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_toml(tmp_path / "bad.toml")


# With the default top_k the threshold is measured. 1,200 tokens are enough for a measurement.
@pytest.mark.parametrize(
    ("options", "toml", "measures"),
    [([], "", True), (["--no-calibrate"], "", False), ([], "calibrate = false", False)],
    ids=["by default", "--no-calibrate", "calibrate = false"],
)
def test_attn_measures_at_the_first_long_context_by_default(
    run: Callable[..., Finished], tmp_path: Path, options: list[str], toml: str, measures: bool
) -> None:
    (tmp_path / "attn.toml").write_text(f"{toml}\n[sparq]\nrank = 2\n")
    prompt = " ".join(["w1 w2 w3 w4"] * 300)
    done = run(
        *("mlx_lm.generate", "--model", "llama", "--prompt", prompt, "--max-tokens", "2"),
        *("--attn-config", str(tmp_path / "attn.toml"), *options),
    )
    assert done.code == 0, done.err
    assert ("the context length at which sparq is faster" in done.err) == measures
