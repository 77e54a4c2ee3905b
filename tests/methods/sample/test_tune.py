"""Test `mlx-sparse tune`: measurements, selected settings, the file and interrupted runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
from pathlib import Path

import commands
import mlx.core as mx
import pytest
from commands import Progress
from text_tokenizers import CharacterTokenizer, WordTokenizer
from tiny_models import build, write

import mlx_sparse
from mlx_sparse.checks import ArtefactError, ConfigError
from mlx_sparse.core.base import Prefill
from mlx_sparse.methods import Gather, Sample, SampleRange, load_toml, parse
from mlx_sparse.tools.evaluate.journal import FORMAT, Journal
from mlx_sparse.tools.evaluate.runner import passage_logits
from mlx_sparse.tools.formats import write_toml
from mlx_sparse.tools.tune import Search, grids, group_by_range
from mlx_sparse.tools.tune.results import FIRST_LINE, RETRIEVAL, Measured, Trial, Tuned, recommendation, select, toml

pytestmark = pytest.mark.slow  # commands

TOKENS = commands.tokens(2500)
LENGTH = 1024


def found(accuracy: float, density: float, *, sampled: float = 0.1, alpha: float | None = 0.9) -> Measured:
    config = Sample(alpha_column=alpha, alpha_slash=0.9, block_size=64) if alpha else None
    return Measured(config, {"needle": accuracy, "copying": accuracy}, density, sampled, 1.0)


DENSE = found(0.9, 1.0, sampled=0.0, alpha=None)


@pytest.mark.parametrize(
    ("measured", "accurate", "fast"),
    [
        # "accurate" is the least work without loss. "fast" is the least work with 90 % of the accuracy (not 0.80).
        ([(0.91, 0.7), (0.9, 0.5), (0.82, 0.3), (0.80, 0.1)], 1, 2),
        # Every setting loses accuracy. The smallest loss wins, and the cheaper of two settings with equal loss.
        ([(0.88, 0.7), (0.88, 0.6), (0.85, 0.5)], 1, 2),
        # No setting has 90 % of the accuracy, so "accurate" and "fast" are the same setting.
        ([(0.5, 0.3), (0.7, 0.8)], 1, 1),
        # The cheapest setting has no loss, so it is "accurate" and "fast".
        ([(0.95, 0.2), (0.9, 0.4)], 0, 0),
    ],
)
def test_selection_is_the_least_work_with_enough_accuracy(
    measured: list[tuple[float, float]], accurate: int, fast: int
) -> None:
    rows = [found(accuracy, density, alpha=0.8 + i / 100) for i, (accuracy, density) in enumerate(measured)]
    assert select(DENSE, rows) == (rows[accurate], rows[fast])


def test_sampling_counts_as_work() -> None:
    dear, cheap = found(0.9, 0.50, sampled=0.3), found(0.9, 0.55, sampled=0.1)
    assert select(DENSE, [dear, cheap])[0] is cheap
    low, high = found(0.9, 0.5, alpha=0.8), found(0.9, 0.5, alpha=0.95)
    assert select(DENSE, [low, high])[0] is low


def test_lengths_map_to_the_ranges_of_the_paper() -> None:
    lengths = [8192, 16384, 32768, 49152, 98304, 131072]
    assert group_by_range(lengths, 131072) == [
        (16384, (8192,)),
        (49152, (16384, 32768)),
        (81920, (49152,)),
        (114688, (98304,)),
        (131073, (131072,)),
    ]


def search(min_accuracy: float = 0.0) -> Search:
    alphas = {"alpha_column": [1.0, 0.5], "alpha_slash": [0.6], "chunks": [2], "share": [0.5, 0.25]}
    settings = grids(argparse.Namespace(methods=["sample", "gather"], block_size=32, **alphas))
    options = {"examples": 1, "step": 512, "min_accuracy": min_accuracy}
    return Search(build(), WordTokenizer(), TOKENS, settings, **options)


def test_needle_passage_states_each_needle_once() -> None:
    letters = CharacterTokenizer()
    (passage,) = RETRIEVAL["needle"](letters.encode("text. " * 400), letters, context=2000, limit=1, seed=1)
    text, answers = letters.decode(passage.tokens), letters.decode(passage.targets)
    assert len(passage.tokens) == 2000 and passage.scored == sorted(passage.scored)
    assert len(answers) == 20 and answers.isdigit()
    for number in (answers[i : i + 5] for i in range(0, 20, 5)):
        assert text.count(number) == 2
        city = text[:1000].split(f" is {number}")[0].split()[-1]
        assert f"What is the door code of {city}? The door code of {city} is {number}" in text[1000:]
    assert passage.scored[-1] == 1998  # the last question ends the passage


@pytest.fixture(scope="module")
def tuned() -> list[Tuned]:
    return search().tune(16384, (LENGTH,), Progress())


def test_accuracy_is_the_share_of_predicted_tokens(tuned: list[Tuned]) -> None:
    model = build()
    for task, make in RETRIEVAL.items():
        (passage,) = make(TOKENS, WordTokenizer(), context=LENGTH, limit=1, seed=0)
        best = model(mx.array([passage.tokens]))[0].argmax(axis=-1).tolist()
        right = [best[position] == passage.tokens[position + 1] for position in passage.scored]
        assert tuned[0].dense.tasks[task] == sum(right) / len(right)


def test_density_falls_with_alpha(tuned: list[Tuned]) -> None:
    sparse, everything = tuned[0].measured
    config = Sample(alpha_column=0.5, alpha_slash=0.6, chunks=2, block_size=32, dense_below=0)
    assert (sparse.config, everything.config) == (config, dataclasses.replace(config, alpha_column=1.0))
    assert (everything.tasks, everything.density, everything.sampled) == (tuned[0].dense.tasks, 1.0, 0.0)
    model = build()
    with mlx_sparse.sparse(model, config) as report:
        for make in RETRIEVAL.values():
            for passage in make(TOKENS, WordTokenizer(), context=LENGTH, limit=1, seed=0):
                passage_logits(model, passage, 512)
    heads = [head for heads in report.prefill.density.values() for head in heads]
    assert sparse.density == pytest.approx(sum(heads) / len(heads))
    assert 0.3 < sparse.density < 1
    assert sparse.sampled == pytest.approx(2 * 32 / 512)


def test_density_falls_with_the_share(tuned: list[Tuned]) -> None:
    few, many = tuned[1].measured
    assert (few.config, many.config) == (Gather(share=0.25, dense_below=0), Gather(share=0.5, dense_below=0))
    assert 0 < few.density < many.density < 1


def test_the_recommendation_is_the_faster_method_with_the_least_work_or_dense_attention() -> None:
    def result(config: Prefill, accuracy: float, density: float, seconds: float = 0.9) -> Tuned:
        row = Measured(config, {"needle": accuracy, "copying": accuracy}, density, 0.1, seconds)
        return Tuned(16384, (8192,), DENSE, [row], row, row)

    sample, gather = result(Sample(), 0.9, 0.6), result(Gather(), 0.9, 0.5)
    for results, prefer, start in (
        ([sample, gather], "accuracy", "Use --attn gather with this file: it keeps 100% of the accuracy"),
        ([sample, result(Gather(), 0.85, 0.5)], "accuracy", "Use --attn sample with this file: "),
        ([sample, result(Gather(), 0.85, 0.5)], "speed", "Use --attn gather with this file: it keeps 90% of the"),
        ([result(Sample(), 0.85, 0.5)], "accuracy", "Keep prefill dense: "),
        ([sample, result(Gather(), 0.9, 0.5, seconds=1.1)], "accuracy", "Use --attn sample with this file: "),
        ([result(Gather(), 0.9, 1.0)], "accuracy", "Keep prefill dense: no method is faster and keeps 100% of the"),
    ):
        assert recommendation(results, prefer).startswith(start)


def test_the_file_has_the_largest_share_that_a_range_needs(tmp_path: Path) -> None:
    rows = [Measured(Gather(share=share), {"needle": 0.9}, share, 0.1, 1.0) for share in (0.5, 0.75)]
    out = tmp_path / "tuned.toml"
    write_toml(out, toml([Tuned(16384, (8192,), DENSE, [row], row, row) for row in rows], "speed", "a model"))
    assert load_toml(out) == {"gather": Gather(share=0.75)}


def test_tasks_beyond_the_model_are_refused() -> None:
    progress = Progress()
    with pytest.raises(
        ConfigError, match=r"--lengths: expected lengths at which .*, got an accuracy of 0\.\d\d at 1,024"
    ):
        search(min_accuracy=0.9).tune(16384, (LENGTH,), progress)
    assert progress.count == len(RETRIEVAL)


@pytest.mark.parametrize(("prefer", "alpha"), [("accuracy", 0.95), ("speed", 0.8)])
def test_file_loads_as_the_preferred_settings(tmp_path: Path, prefer: str, alpha: float) -> None:
    careful, fast = found(0.9, 0.6, alpha=0.95), found(0.85, 0.3, alpha=0.8)
    ranges = [Tuned(up_to, (up_to // 2,), DENSE, [careful, fast], careful, fast) for up_to in (16384, 49152)]
    out = tmp_path / "tuned.toml"
    write_toml(out, toml(ranges, prefer, "a model\n[sparq]"))
    settings = tuple(SampleRange(up_to, alpha, 0.9, 1) for up_to in (16384, 49152))
    assert load_toml(out) == {"sample": Sample(block_size=64, ranges=settings)}
    assert "accuracy 0.900, density 1.000" in out.read_text()
    assert list(tmp_path.iterdir()) == [out]


def test_invalid_output_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    out.write_text(FIRST_LINE)
    with pytest.raises(ConfigError):
        write_toml(out, "[sample]\nalpha_column = 7\n")
    assert out.read_text() == FIRST_LINE
    assert list(tmp_path.iterdir()) == [out]


HEADER = {"mlx_sparse": "tune", "format": FORMAT, "key": "k"}
RESULT = {"right": 3, "scored": 5, "density": 0.5, "sampled": 0.1, "seconds": 2.0}
DAMAGED = [
    b"\xff\xfe\n",
    b"[" * 100_000 + b"\n",
    b'{"name": "a"}\n',
    b'{"name": "a", "result": 3}\n',
    json.dumps({"name": "a", "result": RESULT | {"sampled": "0.1"}}).encode() + b"\n",
    json.dumps({"name": "a", "result": {**RESULT, "seconds": float("inf")}}).encode() + b"\n",
    b'{"name": "a", "result": ' + b"9" * 10_000 + b"}\n",
    json.dumps({"name": "a", "result": {**RESULT, "seconds": 10**400}}).encode() + b"\n",
    json.dumps({"name": "a", "result": {**RESULT, "right": 10**400}}).encode() + b"\n",
    json.dumps({"name": ["a"], "result": RESULT}).encode() + b"\n",
]


@pytest.mark.parametrize("line", DAMAGED)
def test_damaged_state_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(json.dumps(HEADER).encode() + b"\n" + line)
    with pytest.raises(ArtefactError, match="got something else in line 2") as error:
        Journal(path, "tune", "k", Trial)
    assert "\n" not in str(error.value)
    assert path.read_bytes().endswith(line)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "another file"),
        (b"[sample]\n", "another file"),
        (b"[]\n", "another file"),
        (json.dumps(HEADER | {"mlx_sparse": "eval"}).encode() + b"\n", "another file"),
        (json.dumps(HEADER | {"key": "other"}).encode() + b"\n", "results of other inputs"),
        (json.dumps(HEADER | {"format": FORMAT + 1}).encode() + b"\n", "results of other inputs"),
    ],
)
def test_foreign_state_is_refused_and_stays(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match=reason):
        Journal(path, "tune", "k", Trial)
    assert path.read_bytes() == content


def test_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "state"
    trial = Trial(**RESULT)
    Journal(path, "tune", "k", Trial).add("a", trial)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[1][:-4])
    again = Journal(path, "tune", "k", Trial)
    assert (again.results, path.read_bytes()) == ({"a": trial}, whole)
    again.add("b", trial)
    assert Journal(path, "tune", "k", Trial).results == {"a": trial, "b": trial}


class Command:
    """Command line of `mlx-sparse tune` for a tiny model, run in processes."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        write(folder / "model")
        text = folder / "text.txt"
        text.write_text(commands.text(2500))
        self.out, self.state = folder / "tuned.toml", folder / "tuned.toml.state.jsonl"
        self.environment = environment
        self.arguments = ["-m", "mlx_sparse.cli", "tune", "--model", str(folder / "model")]
        self.arguments += ["--text", str(text), "--lengths", "1k", "--examples", "1", "--alpha-column", "0.5", "0.8"]
        self.arguments += ["--alpha-slash", "0.6", "--chunks", "1", "2", "--block-size", "32", "--share", "0.5"]
        self.arguments += ["--out", str(self.out)]
        self.arguments += ["--prefill-step-size", "512", "--min-accuracy", "0", "--json"]

    def start(self, *more: str) -> subprocess.Popen[str]:
        return commands.start([*self.arguments, *more], self.environment)

    def results(self) -> list[str]:
        return self.state.read_text().splitlines()[1:] if self.state.exists() else []


def test_interrupted_search_resumes(tmp_path: Path, without_torch: dict[str, str]) -> None:
    command = Command(tmp_path, os.environ | without_torch)
    process = command.start()
    out, err = commands.end(process, signal.SIGINT, lambda: len(command.results()) >= 3)
    assert (process.returncode, out) == (130, ""), err
    assert err.splitlines()[-1].startswith("mlx-sparse tune: interrupted; the same command resumes from")
    assert "Traceback" not in err
    assert not command.out.exists()
    before = command.results()
    runs = len(RETRIEVAL) * (1 + 4 + 1)
    assert 3 <= len(before) < runs

    with command.state.open("a") as file:
        file.write('{"name": "needles/10')  # as if the process was killed during a write
    out, err = command.start().communicate(timeout=120)
    after = command.results()
    assert after[: len(before)] == before
    assert len({json.loads(line)["name"] for line in after}) == len(after) == runs
    found, gathered = json.loads(out)["ranges"]
    assert (gathered["method"], len(gathered["measured"])) == ("gather", 1)
    assert (found["up_to"], found["lengths"], len(found["measured"])) == (16384, [1024], 4)
    settings = load_toml(command.out)["sample"]
    assert isinstance(settings, Sample)
    (chosen,) = parse(found["accuracy_first"]["method"])
    assert isinstance(chosen, Sample)
    assert settings.ranges == (SampleRange(16384, chosen.alpha_column, chosen.alpha_slash, chosen.chunks),)

    # The other preference reuses all results. Another seed starts another search.
    out, err = command.start("--prefer", "speed").communicate(timeout=60)
    assert "speed first." in command.out.read_text().splitlines()[0]
    assert command.results() == after
    written = command.out.read_text()
    _, err = command.start("--seed", "1").communicate(timeout=60)
    assert err.splitlines()[-1].startswith(
        f"mlx-sparse: error: {command.state}: expected the results of an interrupted"
    )
    assert command.out.read_text() == written
