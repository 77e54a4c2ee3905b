"""Test the search for the crossover length of sparse attention, and the files with its results."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from json_tables import read_tables

from mlx_sparse import calibrate
from mlx_sparse.calibrate import read_measurement, read_points, timing, write_measurement
from mlx_sparse.calibrate.timing import MIN_SPEEDUP, PRECISION, Pairs, Point, crossover, find
from mlx_sparse.checks import ArtefactError

DATA = read_tables(__file__)

pytestmark = pytest.mark.usefixtures("calibration_folder")

# Seconds of a device per launch, per key of a dense step and per key of a sparse step.
Device = tuple[float, float, float]
SLOW: Device = (1e-3, 1e-6, 0.3e-6)
FAST: Device = (4e-5, 1e-6, 0.3e-6)
LIMITS: dict[str, Any] = {"shortest": 256, "longest": 65_536, "first": 4096, "seconds": 1e9}
NOISE = [(1.0, 0.5), (1.0, 2.0), (1.0, 1.0), (1.0, 0.7), (1.0, 1.6)]


def simulated(device: Device, lengths: list[int] | None = None) -> Callable[[int], Pairs]:
    """Simulate a device: a sparse step costs an additional launch, and less time per key."""
    launch, dense, sparse = device

    def measure(S: int) -> Pairs:
        if lengths is not None:
            lengths.append(S)
        return [(dense * S * jitter, (launch + sparse * S) * jitter) for jitter in (1.0, 1.02, 0.99, 1.01, 1.0)]

    return measure


def true_crossover(device: Device) -> float:
    """Return the context length at which the speedup is `MIN_SPEEDUP`."""
    launch, dense, sparse = device
    return MIN_SPEEDUP * launch / (dense - MIN_SPEEDUP * sparse)


@pytest.mark.parametrize("device", [SLOW, FAST, (1e-2, 1e-6, 0.3e-6)], ids=["slow", "fast", "slowest"])
@pytest.mark.parametrize("first", [256, 4096, 65_536])
def test_crossover_is_found_within_ten_percent_from_any_start(device: Device, first: int) -> None:
    lengths: list[int] = []
    points = find(simulated(device, lengths), **LIMITS | {"first": first})
    possible, won = crossover(points)
    wanted = max(true_crossover(device), 256)
    assert won == possible
    assert wanted <= (won or 0) <= PRECISION * wanted + 1
    assert all(one.S < other.S for one, other in pairwise(points))
    assert len(set(lengths)) < 12
    # A length wins after two timings, with arrays at other places, and loses after one.
    assert all(lengths.count(point.S) == 1 + (point.low >= MIN_SPEEDUP) for point in points)


def test_more_pairs_of_a_length_narrow_the_interval_of_its_median() -> None:
    noise = [0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 1.25, 1.3, 1.4, 1.5, 1.55, 1.6, 1.7, 1.8, 2.0]
    few, many = (Point.of(512, [(ratio, 1.0) for ratio in ratios]) for ratios in (noise[::3], 4 * noise))
    assert (few.low, few.ratio, few.high) == (0.5, 1.25, 1.7)
    assert (many.low, many.ratio, many.high) == (1.2, 1.3, 1.5)


def test_undecided_length_is_timed_until_its_pairs_decide() -> None:
    """Time a method that wins by 1.1 at all lengths, with pairs of which a third show the opposite."""
    lengths: list[int] = []

    def noisy(S: int) -> Pairs:
        lengths.append(S)
        return [(ratio, 1.0) for ratio in (0.9, 1.1, 1.1, 1.1, 1.3)]

    assert crossover(find(noisy, **LIMITS | {"first": 256})) == (256, 256)
    assert lengths == [256] * 3


@pytest.mark.parametrize(
    ("device", "keys", "longest"),
    [((0.0, 1e-6, 0.3e-6), 256, 4096), ((1.0, 1e-6, 0.3e-6), None, 65_536), ((0.0, 1e-6, 1e-6), None, 65_536)],
    ids=["always faster", "not within reach", "never faster"],
)
def test_methods_that_always_or_never_win(device: Device, keys: int | None, longest: int) -> None:
    points = find(simulated(device), **LIMITS)
    assert (crossover(points), points[-1].S) == ((keys, keys), longest)


def test_search_stops_before_exceeding_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def slow(S: int, device: Device = (1.0, 1e-6, 0.3e-6)) -> Pairs:
        nonlocal now
        now += S / 1000
        return simulated(device)(S)

    monkeypatch.setattr(timing.time, "monotonic", lambda: now)
    find(slow, **LIMITS | {"seconds": 20})
    assert now == 4096 / 1000 + 8192 / 1000
    assert crossover(find(partial(slow, device=SLOW), **LIMITS | {"seconds": 0})) == (4096, 4096)


def test_upper_end_of_a_noisy_crossover_is_a_measured_win() -> None:
    """Test ratios with noise of a factor of two, which are clear below 1/2 and above 2 times the crossover."""
    scatter = (0.5, 0.6, 1.0, 1.7, 2.0)
    points = find(lambda S: [(S * factor, 4096.0) for factor in scatter], **LIMITS)
    possible, won = crossover(points)
    assert possible is not None
    assert won is not None
    assert possible <= 4096 * MIN_SPEEDUP <= won
    assert won > calibrate.BUSY * possible
    assert points[-1].S >= won


def test_noise_at_all_lengths_gives_no_crossover() -> None:
    points = find(lambda S: NOISE, **LIMITS)
    assert crossover(points) == (4096, None)
    assert points[-1].S == 65_536


def test_one_disturbed_measurement_is_repeated() -> None:
    bad, good = iter([NOISE]), simulated(SLOW)
    disturbed, quiet = find(lambda S: next(bad, None) or good(S), **LIMITS), find(good, **LIMITS)
    assert [point.S for point in disturbed] == [point.S for point in quiet]
    assert crossover(disturbed) == crossover(quiet)


POINTS = [[1024, 0.4, 0.5, 0.6], [2048, 1.4, 1.5, 1.6]]
KEY: calibrate.MeasurementKey = {"device": "a chip", "heads": 3, "method": "sparq", "mlx": "0.32"}


def test_measurement_is_read_back_from_its_file(calibration_folder: Path) -> None:
    write_measurement(KEY, {"points": POINTS})
    assert read_points(read_measurement(KEY) or {}) == [Point(*point) for point in POINTS]
    assert len(list(calibration_folder.iterdir())) == 1
    assert '"device": "a chip"' in calibrate.path_of(KEY).read_text()


def test_file_under_the_name_of_another_measurement_is_refused() -> None:
    other = {**KEY, "device": "another"}
    write_measurement(other, {"points": POINTS})
    assert read_measurement(KEY) is None
    calibrate.path_of(other).rename(calibrate.path_of(KEY))
    with pytest.raises(ArtefactError, match="expected a measurement of this machine and version, got something else"):
        read_measurement(KEY)


DAMAGED = {
    "empty": b"",
    "cut": b'{"key": {"back',
    "binary": bytes(range(256)),
    "a number": b"7",
    "deep": b"[" * 60_000,
    "deep and closed": b"[" * 30_000 + b"]" * 30_000,
    "huge": b" " * 70_000 + b"{}",
    "many digits": b'{"key": ' + b"9" * 5000 + b"}",
    "another key": b'{"key": {}, "result": {}}',
    "no result": json.dumps({"key": KEY, "result": 7}).encode(),
    "infinite": b'{"format": 1e999}',
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_refused_in_one_line_and_can_be_replaced(data: bytes) -> None:
    path = calibrate.path_of(KEY)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    with pytest.raises(ArtefactError) as error:
        read_measurement(KEY)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    write_measurement(KEY, {"points": POINTS})
    assert read_measurement(KEY) is not None


@pytest.mark.parametrize("points", DATA["wrong points"], ids=str)
def test_points_of_another_form_are_refused(points: Any) -> None:
    with pytest.raises(ValueError, match="expected lengths with three ratios each"):
        read_points({"points": points})


def test_a_folder_that_cannot_be_written_is_an_os_error(calibration_folder: Path) -> None:
    calibration_folder.write_text("a file where the folder should be")
    with pytest.raises(FileExistsError):
        write_measurement(KEY, {"points": POINTS})
    with pytest.raises(ArtefactError):
        read_measurement(KEY)


def _write_many(folder: Path, number: int) -> None:
    calibrate.folder = lambda: folder  # in this separate process
    for _ in range(20):
        write_measurement(KEY, {"number": number})


def test_concurrent_processes_leave_one_complete_file(calibration_folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(calibration_folder, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    found = set()
    while any(writer.is_alive() for writer in writers):
        if (answer := read_measurement(KEY)) is not None:
            found.add(answer["number"])
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert found and found <= {0, 1}
    assert [path.suffix for path in calibration_folder.iterdir()] == [".json"]
