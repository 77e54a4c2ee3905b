"""Test the lines that a server prints per request, and the fallback for a changed mlx-lm."""

from __future__ import annotations

from collections import Counter

import pytest
from mlx_lm import server

from mlx_sparse.api.call_report import Counts, Report
from mlx_sparse.lm import serving
from mlx_sparse.lm.session import Session
from mlx_sparse.lm.statistics import PrefillStatistics


class Context:
    prompt, prompt_cache_count = [1] * 2000, -1


def test_request_counts_the_calls_during_its_lifetime() -> None:
    now, lines = Counts(3, Counter(prompt=2), prefill=1), list[str]()
    requests = serving.Requests(lambda: now, lines.append)
    first = requests.begin()
    now = Counts(5, Counter(prompt=4, short=1), prefill=2)
    second, third = requests.begin(), requests.begin()
    requests.end(third)  # rejected by mlx-lm
    tokens = requests.answer(second, Context(), iter("abc"))
    now = Counts(1005, Counter(prompt=4, short=3), prefill=2)
    assert "".join(tokens) == "abc"
    requests.answer(first, Context(), iter("ab")).close()  # the client disconnects before the first token
    requests.answer(requests.begin(), Context(), iter("")).close()
    prompt = "prompt of 2,000 tokens"
    assert lines == [
        f"{prompt}, 3 generated; calls of up to 3 concurrent requests: 1,000 sparse, 0 sparse in prefill, "
        "2 dense (2 short)",
        f"{prompt}, 0 generated; calls of up to 3 concurrent requests: 1,002 sparse, 1 sparse in prefill, "
        "5 dense (3 short, 2 prompt)",
        f"{prompt}, 0 generated; calls: 0 sparse, 0 sparse in prefill, 0 dense",
    ]


def test_a_session_adds_the_calls_of_all_its_models() -> None:
    session = Session("mlx_lm.server")
    assert session.calls() == Counts()
    for name in "ab":
        report = Report(attn="sparq", backend="ops", model_type="llama")
        report.add(Counts(2, Counter(prompt=1), prefill=PrefillStatistics(calls=4)))
        session.reports[name, ()] = report
    assert session.calls() == Counts(4, Counter(prompt=2))
    session.prefill = object()  # type: ignore[assignment]
    assert session.calls().prefill == 8


INTERFACES = [(server.ResponseGenerator, "generate"), (server, "GenerationContext")]


@pytest.mark.parametrize(("owner", "name"), INTERFACES, ids=[name for _, name in INTERFACES])
def test_changed_mlx_lm_prints_one_line_and_nothing_is_replaced(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(owner, name)
    before = dict(vars(server.ResponseGenerator))
    with serving.request_logging(Session("mlx_lm.server")):
        assert dict(vars(server.ResponseGenerator)) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert line.endswith("has changed. The report is printed at the end.")


def test_changed_signature_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving.changed_interface() is None
    monkeypatch.setattr(server.ResponseGenerator, "generate", lambda self, request: None)
    assert serving.changed_interface() == "ResponseGenerator.generate"


def test_everything_is_restored(capsys: pytest.CaptureFixture[str]) -> None:
    before = server.ResponseGenerator.generate
    with pytest.raises(KeyError), serving.request_logging(Session("mlx_lm.server")):
        assert server.ResponseGenerator.generate != before
        raise KeyError
    assert server.ResponseGenerator.generate == before
    assert not capsys.readouterr().err
