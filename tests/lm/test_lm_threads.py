"""Test one enabled model in many threads: each thread gives its single-threaded output, and any may read the report."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest
from lm_prompts import SAMPLE
from mlx_lm.models.cache import make_prompt_cache
from repository_paths import FIXTURES
from run_threads import METHODS
from saap_artefacts import LAYERS, ONLINE, STEPS
from tier import some
from tiny_models import build, greedy, prompt_of

import mlx_sparse
from mlx_sparse.api.call_report import IN_FLIGHT, Counts, Report
from mlx_sparse.lm.rope import Recorder, ropes

pytestmark = pytest.mark.slow  # many threads

PROMPT = 300
SAAP = f"{ONLINE},probes=3"


@pytest.fixture(scope="module")
def lines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, without_torch: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the lines that `run_threads` prints for eight threads, by method."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = [item.callspec.params["method"] for item in items if "method" in item.callspec.params]
    command = [sys.executable, str(FIXTURES / "run_threads.py"), str(tmp_path_factory.mktemp("threads")), *names]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    sys.stderr.write(run.stderr)  # pytest prints this text if a test fails
    return {line["method"]: line for line in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("method", some(list(METHODS), 5))
def test_eight_threads_equal_single_threads_while_the_report_is_read(method: str, lines: dict[str, dict[str, Any]]):
    assert method in lines, "the process ended before this method"
    line = lines[method]
    assert line["errors"] == []
    assert line["same"] == [True] * 8
    assert line["reads"] > 0
    assert line["report"] == line["expected"], "the report equals that of sequential runs"
    _, figures = line["report"]
    assert figures["sparse_calls"] > 0 or figures["prefill"]["calls"] > 0


def test_reading_the_report_evaluates_nothing(monkeypatch: pytest.MonkeyPatch):
    model = build()
    with mlx_sparse.sparse(model, f"{SAMPLE}+{SAAP}", recall=True) as report:
        cache = make_prompt_cache(model)
        model(mx.array([prompt_of(PROMPT)]), cache=cache)
        for token in range(3):
            model(mx.array([[token + 1]]), cache=cache)  # the result is never evaluated
    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, lambda *_: pytest.fail("evaluated"))
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend([str(report), report.as_dict()]))
    reader.start()
    reader.join()
    text, figures = found
    assert figures["sparse_calls"] == 3 * LAYERS
    assert figures["prefill"]["calls"] == LAYERS
    assert figures["buckets"]["attended"] > 0
    assert "selectivity" in text


def test_unread_figures_do_not_accumulate():
    model = build()
    with mlx_sparse.sparse(model, SAAP) as report:
        greedy(model, prompt_of(PROMPT), 2 * IN_FLIGHT)
        assert len(report._counting) == IN_FLIGHT
    assert report.buckets.attended > 0
    assert len(report._counting) == 0


def test_call_that_raises_counts_nothing(monkeypatch: pytest.MonkeyPatch):
    def failing(*_: Any) -> None:
        raise RuntimeError("no memory")

    model = build()
    with mlx_sparse.sparse(model, SAAP) as report:
        expected = greedy(model, prompt_of(PROMPT), STEPS)[0]
        before = report.as_dict()
        with monkeypatch.context() as patch:
            patch.setattr(type(model.model.norm), "__call__", failing)
            with pytest.raises(RuntimeError, match="no memory"):
                model(mx.array([prompt_of(PROMPT)]), cache=make_prompt_cache(model))
        assert report.as_dict() == before
        assert greedy(model, prompt_of(PROMPT), STEPS)[0] == expected


@pytest.mark.parametrize("attn", [SAAP, f"{SAMPLE}+sparq:rank=4,top_k=16,dense_below=0"])
def test_nested_model_calls_do_not_interfere(attn: str, monkeypatch: pytest.MonkeyPatch):
    outer, inner, prompt = build(), build("qwen3", seed=3), prompt_of(PROMPT)

    def run(nested: bool) -> list[Any]:
        with mlx_sparse.sparse(outer, attn) as report, mlx_sparse.sparse(inner, attn) as other:
            cache = make_prompt_cache(inner)
            within = type(outer.layers[1].mlp)
            call = within.__call__

            def calling(self: Any, x: mx.array) -> mx.array:
                if self is outer.layers[0].mlp:
                    mx.eval(inner(mx.array([[7]] if x.shape[1] == 1 else [prompt]), cache=cache))
                out: mx.array = call(self, x)
                return out

            with monkeypatch.context() as patch:
                if nested:
                    patch.setattr(within, "__call__", calling)
                tokens = greedy(outer, prompt, STEPS)[0]
            return [tokens, report.as_dict(), other.sparse_calls]

    (*alone, none), (*nested, some) = run(False), run(True)
    assert nested == alone
    assert (none, some) == (0, LAYERS * STEPS)


def test_threads_that_add_to_a_report_lose_no_count():
    report = Report(attn="", backend="", model_type="")
    one = Counts(1, Counter(["here"]), 2, 3)

    def add() -> None:
        for _ in range(2000):
            report.add(one)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (report.sparse_calls, report.modeled_bytes, report.dense_bytes) == (16000, 32000, 48000)
    assert report.dense_calls == {"here": 16000}


def test_rope_records_are_per_thread():
    model = build()
    rope, rows = ropes(model)[0], mx.ones((1, 2, 4, 16))
    with Recorder(model) as recorder:
        rotated = rope(rows)
        seen: list[Any] = []
        thread = threading.Thread(
            target=lambda: seen.append([recorder.input_of(rotated), rope(rows), recorder.clear()])
        )
        thread.start()
        thread.join()
        assert seen[0][0] is None
        assert recorder.input_of(seen[0][1]) is None
        assert recorder.input_of(rotated) is rows
