"""The page of an evaluation: one file that hides nothing, drawn again from its results, and the facts of a run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from report_rows import (
    DECODE,
    DEPTHS,
    FACTS,
    HOSTILE,
    MAP,
    NAN,
    PROMPT,
    ROWS,
    RUN,
    SELECTION,
    SHORT,
    SPEED,
    SPEED_LINES,
    row,
)
from tiny_models import build

import mlx_sparse
from mlx_sparse import cli
from mlx_sparse.extras import install_hint
from mlx_sparse.model_info import weights_hash
from mlx_sparse.tools.evaluate import report
from mlx_sparse.tools.evaluate.journal import as_json, from_json
from mlx_sparse.tools.evaluate.metadata import Facts, TextFacts, run_facts
from mlx_sparse.tools.evaluate.report.read import read_speed
from mlx_sparse.tools.evaluate.results import Row


class Page(HTMLParser):
    """Reads a page as strictly as it was written: every element is closed."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report with everything in it."""
    folder = tmp_path_factory.mktemp("report")
    report.write(folder, ROWS, FACTS, selection=SELECTION, speed=SPEED)
    return folder


def test_the_page_needs_no_other_file(written: Path) -> None:
    found = page(written)
    names = {path.stem for path in written.glob("*.svg")}
    assert names == {"quality-repetition", "quality-needle", "depths-needle", "density", "agreement", "speed"}
    ids = [attrs["id"] for _, attrs in found.elements if "id" in attrs]
    assert len(ids) == len(set(ids)) > 10
    for tag, attrs in found.elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "a", "base")
        assert "src" not in attrs and not any(name.startswith("on") for name in attrs)
        for name, value in attrs.items():
            if "href" in name:
                assert value.startswith("data:image/png;base64,") or value[1:] in ids
            elif "url(" in (value or ""):
                assert value.partition("url(#")[2].rstrip(")") in ids
    content = (written / "report.html").read_text(encoding="utf-8")
    namespaces = content.count('"http://www.w3.org/2000/svg"') + content.count('"http://www.w3.org/1999/xlink"')
    assert content.count("http") == namespaces and "@import" not in content
    assert sum(tag == "svg" for tag, _ in found.elements) == 6


def test_the_tables_say_what_was_read_what_it_cost_and_how_it_ran(written: Path) -> None:
    text = " ".join(page(written).text.split())
    for part in (
        "sparq:rank=16,top_k=77",  # the settings that the budget made
        *("0.136", "0.124"),  # formula and count side by side
        "-0.040 ± 0.003",
        "0.860 ± 0.020",
        "streaming ran densely",
        "fell back to dense: fewer than 2,048 keys (1,000)",
        "h2o 50% sparse",
        "partly sparse: 1,000 of 2,000 calls; dense: a sliding window (1,000)",
        "0.20 to 0.50",  # density by layer
        "mlx-sparse eval --methods sparq",
        "2 attention layers, 4 query heads, 2 KV heads of 16, 32",
        "abab" * 16,
        "0.125 ± 0.010",  # agreement
        "wrong",
    ):
        assert part in text, part


def test_names_are_text_wherever_they_stand(tmp_path: Path) -> None:
    rows = [row("dense"), row(HOSTILE, 0.8, 0.3, attn=f"{HOSTILE}:x", density=MAP, depths=DEPTHS), PROMPT[0]]
    rows += [replace(rows[1], method=f"{HOSTILE}2", **SHORT | {"dense_reasons": {HOSTILE: 3}})]
    facts = replace(FACTS, command=HOSTILE, model=replace(FACTS.model, name=HOSTILE))
    report.write(tmp_path, rows, facts)
    found = page(tmp_path)
    assert "script" not in {tag for tag, _ in found.elements}
    shown = HOSTILE.replace("\x1b", "\N{REPLACEMENT CHARACTER}").replace("\x00", "\N{REPLACEMENT CHARACTER}")
    assert found.text.count(shown) >= 6
    assert f"What sparse attention costs: {shown}" in found.text


def test_many_results_make_a_page_of_bearable_size(tmp_path: Path) -> None:
    rows = [row("dense"), *(row(f"sparq:rank={rank}", 0.8, rank / 100, density=MAP) for rank in range(1, 61))]
    report.write(tmp_path, rows, FACTS)
    found = page(tmp_path)
    assert "40 of 60 methods are drawn" in found.text
    assert "The first 24 of 60 are drawn" in found.text
    assert "sparq:rank=60" in found.text
    assert (tmp_path / "report.html").stat().st_size < 500_000


def as_lines(rows: Sequence[Any]) -> list[str]:
    return [json.dumps(as_json(row) | {"run": RUN}, allow_nan=False) for row in rows]


def test_a_report_drawn_from_its_results_is_the_same_file(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.jsonl").write_text("\n".join(as_lines([*ROWS, *SELECTION])) + "\n")
    (tmp_path / "speed.jsonl").write_text("\n".join(json.dumps(speed) for speed in SPEED_LINES))
    assert cli.main(["report", str(tmp_path), "--speed", str(tmp_path / "speed.jsonl")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    for path in written.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_a_row_comes_back_as_it_was() -> None:
    for kept in (*ROWS, replace(DECODE[1], examples=1, mean_error=NAN, error=NAN, formula=None, selectivity=0.5)):
        assert str(from_json(Row, json.loads(json.dumps(as_json(kept), allow_nan=False)))) == str(kept)


GOOD = as_lines(DECODE)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "got no such file or an empty one"),
        (["\x00"], "something else in line 1"),
        (["[]"], "something else in line 1"),
        (["{}"], "something else in line 1"),
        (["[" * 5000], "something else in line 1"),
        ([GOOD[0], GOOD[1].replace('"run"', '"ran"')], "something else in line 2"),
        ([GOOD[0].replace('"seed": 3', '"seed": "3"')], "something else in line 1"),
        ([GOOD[0], GOOD[1].replace('"compression": 0.5', '"compression": Infinity')], "something else in line 2"),
        ([GOOD[1].replace('"compression": 0.5', '"compression": "0.5"')], "something else in line 1"),
        ([GOOD[1].replace("repetition", "../../x")], "something else in line 1"),
        ([GOOD[1].replace('"depths": []', '"depths": [{"depth": 3}]')], "something else in line 1"),
        ([GOOD[1].replace('"budget": "1/2"', '"budget": 2')], "something else in line 1"),
        ([GOOD[0], GOOD[1].replace('"seed": 3', '"seed": 4')], "expected the results of one run, got several"),
        ([as_lines(SELECTION)[0].replace('"rank": 8', '"rank": "8"')], "something else in line 1"),
    ],
)
def test_results_that_were_not_written_here_get_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], message: str
) -> None:
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    assert cli.main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mlx-sparse: error: {tmp_path}/results.jsonl: expected ") and message in line
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize("changes", [{"S": "1k"}, {"failed": "no"}, {"run": None}, {"run": {"command": "x"}}])
def test_times_that_were_not_written_here_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "speed.jsonl"
    path.write_text(json.dumps(SPEED_LINES[0]))
    assert read_speed(path) == SPEED[:1]
    path.write_text(json.dumps(SPEED_LINES[0] | changes))
    with pytest.raises(mlx_sparse.ArtefactError, match="expected what mlx-sparse bench -o jsonl of this version wrote"):
        read_speed(path)


def test_a_missing_matplotlib_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    report.check()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(mlx_sparse.BackendUnavailable, match="matplotlib: .*" + re.escape(install_hint("eval"))):
        report.check()


def test_facts_say_what_ran_and_nothing_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    text = SimpleNamespace(name="~/book.txt", text="zwölf", sha256="ef" * 32)
    options = {"seed": 1, "prefill_step_size": 512, "batch": 4}
    facts = run_facts("mlx-sparse eval --model ~/m", name="~/m", model=build(), texts=[(text, 7)], **options)
    assert from_json(Facts, json.loads(json.dumps(as_json(facts)))) == facts
    assert facts.texts == [TextFacts("~/book.txt", "ef" * 32, 6, 7)]
    shape = {"type": "llama", "layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 16}
    assert vars(facts.model).items() >= shape.items()
    assert "a-secret" not in str(facts) and str(Path.home()) not in str(facts)


def test_a_model_is_known_by_its_config_and_the_ends_of_every_weight() -> None:
    found = weights_hash(build())
    assert weights_hash(build()) == found

    def changed(change: Any) -> str:
        model = build()
        change(model)
        return weights_hash(model)

    def last_value(model: Any) -> None:
        weight = model.model.layers[1].mlp.up_proj.weight
        weight[-1, -1] += 1

    changes = [
        lambda model: setattr(model.args, "rms_norm_eps", 1e-6),
        last_value,
        lambda model: model.set_dtype(mx.bfloat16),
        lambda model: nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, _: "self_attn.q" in path),
    ]
    assert len({found, *map(changed, changes)}) == 5
