"""The search for the context from which sparse attention is faster, and the files that keep what it found."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mlx_sparse import measured
from mlx_sparse.checks import ArtefactError
from mlx_sparse.crossing import WITHIN, WORTH, Crossing, Noisy, Pairs, Point, find

pytestmark = pytest.mark.usefixtures("calibration_folder")

# Seconds of a device: of a launch, and of a key densely and sparsely.
Device = tuple[float, float, float]
SLOW: Device = (1e-3, 1e-6, 0.3e-6)
FAST: Device = (4e-5, 1e-6, 0.3e-6)
LIMITS: dict[str, Any] = {"shortest": 256, "longest": 65_536, "first": 4096}


def engine(device: Device, asked: list[int] | None = None) -> Callable[[int], Pairs]:
    """An engine whose sparse steps cost launches more, and less for each key."""
    launch, dense, sparse = device

    def measure(S: int) -> Pairs:
        if asked is not None:
            asked.append(S)
        return [(dense * S * jitter, (launch + sparse * S) * jitter) for jitter in (1.0, 1.02, 0.99, 1.01, 1.0)]

    return measure


def true_crossing(device: Device) -> float:
    """Keys from which dense over sparse is `WORTH`."""
    launch, dense, sparse = device
    return WORTH * launch / (dense - WORTH * sparse)


@pytest.mark.parametrize("device", [SLOW, FAST, (1e-2, 1e-6, 0.3e-6)], ids=["slow", "fast", "slowest"])
@pytest.mark.parametrize("first", [256, 4096, 65_536])
def test_the_crossing_is_found_within_a_tenth_wherever_the_search_begins(device: Device, first: int) -> None:
    found = find(engine(device), **LIMITS | {"first": first}, seconds=1e9)
    keys = found.keys or 0
    wanted = max(true_crossing(device), 256)
    assert wanted <= keys <= WITHIN * wanted + 1
    assert [point.S for point in found.points] == sorted({point.S for point in found.points})


def test_a_slower_device_crosses_later() -> None:
    slow, fast = (find(engine(device), **LIMITS, seconds=1e9).keys or 0 for device in (SLOW, FAST))
    assert slow > 5 * fast


@pytest.mark.parametrize(
    ("device", "keys", "up_to"),
    [((0.0, 1e-6, 0.3e-6), 256, 4096), ((1.0, 1e-6, 0.3e-6), None, 65_536), ((0.0, 1e-6, 1e-6), None, 65_536)],
    ids=["always faster", "not within reach", "never faster"],
)
def test_what_does_not_cross_is_said(device: Device, keys: int | None, up_to: int) -> None:
    found = find(engine(device), **LIMITS, seconds=1e9)
    assert (found.keys, found.up_to) == (keys, up_to)


def test_no_length_is_begun_after_the_time_and_the_answer_is_one_that_won() -> None:
    asked: list[int] = []
    clock = count(0, 1.0)
    found = find(engine(SLOW, asked), **LIMITS, seconds=2.5, clock=lambda: float(next(clock)))
    assert len(asked) == 2
    assert found.keys == 2048
    assert find(engine(SLOW), **LIMITS, seconds=0).keys == 4096


def test_a_length_that_would_take_too_long_is_not_begun() -> None:
    now = 0.0

    def slow(S: int) -> Pairs:
        nonlocal now
        now += S / 1000
        return engine((1.0, 1e-6, 0.3e-6))(S)

    find(slow, **LIMITS, seconds=20, clock=lambda: now)
    assert now == 4096 / 1000 + 8192 / 1000


def test_lengths_are_asked_once_each() -> None:
    asked: list[int] = []
    find(engine(SLOW, asked), **LIMITS, seconds=1e9)
    assert len(asked) == len(set(asked)) < 10


def test_a_machine_that_is_too_noisy_gives_no_answer() -> None:
    with pytest.raises(Noisy, match=r"times at 4,096 keys vary from 0\.\d\d to \d\.\d\d times"):
        find(lambda S: [(1.0, 0.5), (1.0, 2.0), (1.0, 1.0), (1.0, 0.7), (1.0, 1.6)], **LIMITS, seconds=1e9)


def test_noise_that_does_not_blur_the_answer_is_no_hindrance() -> None:
    pairs = [(4.0, 1.0), (9.0, 1.0), (6.0, 1.0), (5.0, 1.0), (12.0, 1.0)]
    assert find(lambda S: pairs, **LIMITS, seconds=1e9).keys == 256


def test_one_disturbed_measurement_is_taken_again() -> None:
    bad = iter([[(1.0, 0.5), (1.0, 2.0), (1.0, 1.0), (1.0, 0.7), (1.0, 1.6)]])
    good = engine(SLOW)
    found = find(lambda S: next(bad, None) or good(S), **LIMITS, seconds=1e9)
    assert found == find(good, **LIMITS, seconds=1e9)


CROSSING = Crossing(2048, 4096, (Point(1024, 1.0, 2.0, 0.4, 0.5, 0.6), Point(2048, 3.0, 2.0, 1.4, 1.5, 1.6)))
ASKED = measured.question("ops", "a chip", ("mlx",), heads=3, D=64, method="sparq")


@pytest.mark.parametrize("crossing", [CROSSING, replace(CROSSING, keys=None), Crossing(1, 1)], ids=str)
def test_a_crossing_survives_its_file(crossing: Crossing, calibration_folder: Path) -> None:
    measured.write(ASKED, crossing.as_dict())
    assert Crossing.of(measured.read(ASKED) or {}) == crossing
    assert len(list(calibration_folder.iterdir())) == 1


@pytest.mark.parametrize("change", ["backend", "device", "system", "mlx", "mlx-sparse-attention", "heads", "method"])
def test_what_was_measured_elsewhere_or_of_another_version_is_not_used(change: str) -> None:
    measured.write(ASKED, CROSSING.as_dict())
    other = "another" if isinstance(ASKED[change], str) else 4
    assert measured.read({**ASKED, change: other}) is None
    assert measured.read(ASKED) is not None


def test_a_file_under_the_name_of_another_question_is_refused() -> None:
    other = {**ASKED, "device": "another"}
    measured.write(other, CROSSING.as_dict())
    measured.path_of(other).rename(measured.path_of(ASKED))
    with pytest.raises(ArtefactError, match="expected a measurement of this version, got something else"):
        measured.read(ASKED)


DAMAGED = {
    "empty": b"",
    "cut": b'{"format": 1, "question": {"back',
    "binary": bytes(range(256)),
    "a number": b"7",
    "deep": b"[" * 60_000,
    "huge": b" " * 70_000 + b"{}",
    "another format": b'{"format": 2, "question": {}, "answer": {}}',
    "infinite": b'{"format": 1e999}',
}


def test_one_process_measures_at_a_time() -> None:
    with measured.alone() as first:
        assert first
        with measured.alone() as second:
            assert not second
    with measured.alone() as again:
        assert again


def test_where_no_lock_can_be_written_nobody_waits(calibration_folder: Path) -> None:
    calibration_folder.write_text("not a folder")
    with measured.alone() as free:
        assert free


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_refused_in_one_line_and_can_be_replaced(data: bytes) -> None:
    path = measured.path_of(ASKED)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    with pytest.raises(ArtefactError) as error:
        measured.read(ASKED)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    measured.write(ASKED, CROSSING.as_dict())
    assert measured.read(ASKED) is not None


ANSWERS: dict[str, Any] = {
    "nothing": {},
    "no keys": {"keys": 0, "up_to": 9, "points": []},
    "negative": {"keys": -5, "up_to": 9, "points": []},
    "beyond reason": {"keys": 1 << 40, "up_to": 9, "points": []},
    "a text": {"keys": "9", "up_to": 9, "points": []},
    "a bool": {"keys": True, "up_to": 9, "points": []},
    "a bool to look up to": {"keys": None, "up_to": True, "points": []},
    "no points": {"keys": 9, "up_to": 9, "points": None},
    "a point of another form": {"keys": 9, "up_to": 9, "points": [{"S": 1}]},
    "a time that is no number": {"keys": 9, "up_to": 9, "points": [CROSSING.as_dict()["points"][0] | {"dense": "1"}]},
    "a time that is infinite": {
        "keys": 9,
        "up_to": 9,
        "points": [CROSSING.as_dict()["points"][0] | {"dense": float("inf")}],
    },
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_that_is_none_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keys and up_to|points|a point"):
        Crossing.of(answer)


def test_a_folder_that_cannot_be_written_is_an_os_error_and_leaves_nothing(calibration_folder: Path) -> None:
    calibration_folder.write_text("a file where the folder should be")
    with pytest.raises(FileExistsError):
        measured.write(ASKED, CROSSING.as_dict())
    with pytest.raises(ArtefactError):
        measured.read(ASKED)


def test_what_is_interrupted_leaves_the_file_as_it_was(calibration_folder: Path) -> None:
    measured.write(ASKED, CROSSING.as_dict())
    before = measured.path_of(ASKED).read_bytes()

    class Interrupts(dict[str, Any]):
        def items(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured.write(ASKED, Interrupts(keys=1))
    assert [path.read_bytes() for path in calibration_folder.iterdir()] == [before]


def _write_many(folder: Path, number: int) -> None:
    measured.folder = lambda: folder  # in a process of its own
    for _ in range(20):
        measured.write(ASKED, Crossing(number + 1, 9).as_dict())


def test_processes_that_calibrate_at_once_leave_one_whole_file(calibration_folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(calibration_folder, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    found: set[int | None] = set()
    while any(writer.is_alive() for writer in writers):
        if (answer := measured.read(ASKED)) is not None:
            found.add(Crossing.of(answer).keys)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert found <= {1, 2}
    assert found
    assert [path.suffix for path in calibration_folder.iterdir()] == [".json"]


def test_files_are_json_that_a_person_can_read() -> None:
    measured.write(ASKED, CROSSING.as_dict())
    text = measured.path_of(ASKED).read_text()
    assert json.loads(text)["answer"]["keys"] == 2048
    assert '"device": "a chip"' in text
