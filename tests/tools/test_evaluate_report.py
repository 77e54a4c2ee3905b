"""Test the report of an evaluation: pictures, tables, a report from stored results, and hostile files."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from json_tables import read_tables
from mlx import nn
from report_rows import DECODE, DEPTHS, FACTS, HOSTILE, NAN, PROMPT, ROWS, RUN, SHORT, row
from tiny_models import build

import mlx_sparse
from mlx_sparse import cli
from mlx_sparse.extras import install_hint
from mlx_sparse.model_info import weights_hash
from mlx_sparse.tools.evaluate import picture, report
from mlx_sparse.tools.evaluate.journal import as_json, from_json
from mlx_sparse.tools.evaluate.results import Facts, Row, TextFacts, run_facts

DATA = read_tables(__file__)


class Page(HTMLParser):
    """HTML parser that requires every element to be closed."""

    VOID = ("meta", "img")

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed((folder / report.PAGE).read_text(encoding="utf-8"))
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


def drawn(ax: Any) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each method in a plot."""
    return {
        line.get_label(): [(float(x), float(y)) for x, y in zip(*line[0].get_data(), strict=True)]
        for line in ax.containers
    }


def test_points_show_transfer_score_error_and_dense_share() -> None:
    (ax,) = picture.draw(DECODE).axes
    assert drawn(ax)["sparq:rank=16"] == [(0.124, 0.86), (0.5, 0.89)]
    (segments,) = [collection.get_segments() for collection in ax.containers[0][2]]
    ends = [float(end[1]) for segment in segments for end in segment]
    assert ends == pytest.approx([0.857, 0.863, 0.887, 0.893])
    (level,) = [line for line in ax.lines if line.get_label() == "dense attention"]
    assert set(level.get_ydata()) == {0.9}
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1/16", "1/8", "1/4", "1/2", "1"]
    assert ax.get_title() == "1,024 tokens, n = 20"
    assert "streaming" not in drawn(ax)  # a dense row
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in hollow] == [([0.25], [0.5])]
    assert picture.draw([DECODE[0], DECODE[-1]]) is None


def test_prefill_is_drawn_over_density() -> None:
    steps, prompt = picture.draw([*DECODE, *PROMPT]).axes
    assert "sample" not in drawn(steps)
    assert drawn(prompt) == {"sample": [(pytest.approx(0.35), 0.88)]}
    (ax,) = picture.draw([replace(one, task="attention_recall") for one in PROMPT]).axes
    assert drawn(ax) == {"sample": [(pytest.approx(0.35), 0.95)]}
    (ax,) = picture.draw([replace(one, task="bits_per_byte") for one in DECODE[:2]]).axes
    assert drawn(ax) == {"sparq:rank=16": [(0.5, pytest.approx(1.15))]}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a report with all sections."""
    folder = tmp_path_factory.mktemp("report")
    report.write(folder, ROWS, FACTS)
    return folder


def test_page_is_self_contained_and_complete(written: Path) -> None:
    page = Page(written)
    assert [path.name for path in written.iterdir()] == [report.PAGE]
    pictures = [attrs["src"] or "" for tag, attrs in page.elements if tag == "img"]
    assert len(pictures) == 2 and all(src.startswith("data:image/svg+xml;base64,") for src in pictures)
    assert not {"script", "link", "iframe", "object", "a", "base"} & {tag for tag, _ in page.elements}
    assert "http" not in (written / report.PAGE).read_text(encoding="utf-8")
    text = " ".join(page.text.split())
    for part in (
        "sparq:rank=16,top_k=77",  # the settings derived from the budget
        *("0.136", "0.124"),  # formula and count
        "-0.040 ± 0.003",
        "ran densely: 1,000 fewer than 2,048 keys",
        "50% sparse; dense: 1,000 a sliding window",
        "0.20 to 0.50",  # density by layer
        "0% 0.25, 50% 0.50, 100% 1.00",  # accuracy by depth
        "mlx-sparse eval --methods sparq",
        "2 attention layers, 4 query heads, 2 KV heads of [16, 32]",
        "abab" * 16,
    ):
        assert part in text, part


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    rows = [row("dense"), row(HOSTILE, 0.8, 0.3, attn=f"{HOSTILE}:x", density=[0.2], depths=DEPTHS), PROMPT[0]]
    rows += [replace(rows[1], method=f"{HOSTILE}2", **SHORT | {"dense_reasons": {HOSTILE: 3}})]
    report.write(tmp_path, rows, replace(FACTS, command=HOSTILE, model=replace(FACTS.model, name=HOSTILE)))
    page = Page(tmp_path)
    assert "script" not in {tag for tag, _ in page.elements}
    shown = HOSTILE.replace("\x1b", "\N{REPLACEMENT CHARACTER}").replace("\x00", "\N{REPLACEMENT CHARACTER}")
    assert page.text.count(shown) >= 6


def as_lines(rows: Any, **changes: Any) -> list[str]:
    return [json.dumps(as_json(row) | {"run": RUN | changes}, allow_nan=False) for row in rows]


def test_report_from_results_is_identical(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.jsonl").write_text("\n".join(as_lines(ROWS)) + "\n")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert (written / report.PAGE).read_bytes() == (tmp_path / report.PAGE).read_bytes()


def test_rows_survive_json() -> None:
    for kept in (*ROWS, replace(DECODE[1], examples=1, mean_error=NAN, error=NAN, formula=None, selectivity=0.5)):
        assert str(from_json(Row, json.loads(json.dumps(as_json(kept), allow_nan=False)))) == str(kept)


GOOD = as_lines(DECODE)
HUGE, DEEP = "9" * 400, "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "got no file or an empty file"),
        (["\x00"], "something else in line 1"),
        (["[]"], "something else in line 1"),
        (["{}"], "something else in line 1"),
        (["[" * 5000], "something else in line 1"),
        (["[" * 100_000], "something else in line 1"),
        ([GOOD[0], GOOD[1].replace('"run"', '"ran"')], "something else in line 2"),
        ([GOOD[0], GOOD[1].replace('"seed": 3', '"seed": 4')], "expected the results of one run, got several"),
        *(
            ([GOOD[1].replace(old, new.replace("HUGE", HUGE))], "something else in line 1")
            for old, new in DATA["damage"]
        ),
        (as_lines(DECODE, machine={"memory": HUGE, "chip": 10**400}), "something else in line 1"),
        (as_lines(DECODE, machine={"memory": {"a": 1}}), "something else in line 1"),
        (as_lines(DECODE, machine="a chip"), "something else in line 1"),
        (as_lines(DECODE, versions={"python": json.loads(DEEP)}), "something else in line 1"),
        (as_lines(DECODE, texts="none"), "something else in line 1"),
        (as_lines(DECODE, model="tiny"), "something else in line 1"),
        (as_lines(DECODE, model=RUN["model"] | {"kv_heads": json.loads(DEEP)}), "something else in line 1"),
    ],
)
def test_damaged_results_are_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], message: str
) -> None:
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    assert cli.main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mlx-sparse: error: {tmp_path}/results.jsonl: expected ") and message in line
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_missing_matplotlib_is_reported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    report.check()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(mlx_sparse.BackendUnavailable, match="matplotlib: .*" + re.escape(install_hint("eval"))):
        report.check()


def test_facts_hold_no_private_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    text = SimpleNamespace(name="~/book.txt", text="zwölf", sha256="ef" * 32)
    options = {"seed": 1, "prefill_step_size": 512, "batch": 4}
    facts = run_facts("mlx-sparse eval --model ~/m", "~/m", build(), [(text, 7)], **options)
    assert from_json(Facts, json.loads(json.dumps(as_json(facts)))) == facts
    assert facts.texts == [TextFacts("~/book.txt", "ef" * 32, 6, 7)]
    shape = {"type": "llama", "layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 16}
    assert vars(facts.model).items() >= shape.items()
    assert "a-secret" not in str(facts) and str(Path.home()) not in str(facts)


def test_weights_hash_covers_config_and_weights() -> None:
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
