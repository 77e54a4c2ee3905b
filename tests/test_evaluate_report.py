"""The report of an evaluation: pictures hold what the rows say, and the page is one file that hides nothing."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import mlx.core as mx
import numpy as np
import pytest
from matplotlib.colors import to_hex
from mlx import nn
from tiny_models import build

import mlx_sparse
from mlx_sparse import cli
from mlx_sparse.artefact.identity import weights_hash
from mlx_sparse.evaluate import report
from mlx_sparse.evaluate.facts import read_facts, run_facts
from mlx_sparse.evaluate.report import style
from mlx_sparse.evaluate.report.read import SIDES, read_speed
from mlx_sparse.evaluate.results import Depth, Outcome, Row
from mlx_sparse.evaluate.selection import SelectionRow

NAN = Outcome(*[math.nan] * 6)
ZERO = Outcome(*[0.0] * 6)
DENSE = Outcome(1.14, 0.9, 1.0, 0.0, 40.0, 0.5)
CALLS = 1000
MAP = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
HOSTILE = "<script src='http://x.example/'>alert(1)</script>&\"$\\frac$\x1b\x00"


def row(method: str, accuracy: float = 0.9, share: float = 1.0, **changes: Any) -> Row:
    mean = replace(DENSE, accuracy=accuracy, bits=2.04 - accuracy)
    delta = Outcome(*(a - b for a, b in zip(vars(mean).values(), vars(DENSE).values(), strict=True)))
    fields: dict[str, Any] = {
        "task": "repetition",
        "method": method,
        "attn": method,
        "budget": None,
        "context": 1024,
        "examples": 20,
        "mean": mean,
        "mean_error": Outcome(0.01, 0.02, 0.03, 0.004, 5.0, 0.06),
        "delta": delta,
        "error": ZERO if method == "dense" else Outcome(0.001, 0.003, 0.005, 0.0007, 0.9, 0.011),
        "formula": None if method == "dense" else share * 1.1,
        "compression": share,
        "sparse_calls": 0 if method == "dense" else CALLS,
        "dense_calls": 0,
    }
    return Row(**fields | changes)


SHORT = {"sparse_calls": 0, "dense_calls": CALLS, "dense_reasons": {"fewer than 2,048 keys": CALLS}}
HALF = {"dense_calls": CALLS, "dense_reasons": {"a sliding window": CALLS}}
DECODE = [
    row("dense"),
    row("sparq:rank=16", 0.89, 0.5, budget="1/2"),
    row("sparq:rank=16", 0.86, 0.124, budget="1/8", attn="sparq:rank=16,top_k=77"),
    row("h2o", 0.5, 0.25, **HALF),
    row("streaming", 0.9, 1.0, **SHORT),
]
PROMPT = [
    row("dense", context=4096, prefill=True),
    row("sample", 0.88, context=4096, prefill=True, density=MAP, sampled=0.06, mass=[0.01, 0.8, 0.95]),
]
DEPTHS = [Depth(0.0, 4, 0.25, 0.0), Depth(0.5, 4, 0.5, 0.25), Depth(1.0, 4, 1.0, 1.0)]
NEEDLE = [
    row("sparq", 0.6, 0.3, task="needle", context=context, depths=DEPTHS, **changes)
    for context, changes in ((1024, SHORT), (2048, {}))
]
ROWS = [*DECODE, *PROMPT, *NEEDLE]
SELECTION = [
    SelectionRow(score, rank, 64, 128, 2048, 30, 4, rank / 64, 0.01, rank / 80, 3, rank / 70, 0.02, 0.9, 0.1, 0.003)
    for score, rank in product(("query", "query_key"), (8, 32))
]


def speed_row(S: int, **changes: Any) -> dict[str, Any]:
    times = {"dense_us": S / 10, "sparse_us": S / 20, "plain_read_us": S / 30}
    spread = {f"{side}_{end}": value * by for side, value in times.items() for end, by in (("low", 0.9), ("high", 1.3))}
    sizes = {"shape": "8x2x64", "batch": 1, "S": S, "bytes_formula": 10 * S, "bytes_plain": 40 * S, "ratio": 2.0}
    about = {"method": "sparq", "backend": "ops", "dtype": "float16", "note": None, "failed": False}
    run = {"command": "mlx-sparse bench", "date": "2026-11-21", "machine": {"chip": "a chip"}}
    return about | sizes | times | spread | {"run": run} | changes


WRONG = {"failed": True, "note": "wrong", "ratio": None, **dict.fromkeys(SIDES)}
SPEED = [speed_row(1024), speed_row(2048), speed_row(4096, **WRONG)]
FACTS = {
    "command": "mlx-sparse eval --methods sparq",
    "date": "2026-11-21",
    "seed": 3,
    "prefill_step_size": 2048,
    "batch": 8,
    "versions": {"python": "3.11.7"},
    "machine": {"chip": "a chip", "memory": 1 << 34, "device": None},
    "model": {
        "name": "tiny",
        "type": "llama",
        "hash": "ab" * 32,
        "layers": 2,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": [16, 32],
    },
    "texts": [{"name": "a text", "sha256": "cd" * 32, "bytes": 10, "tokens": 3}],
}


def lines(ax: Any) -> dict[str, Any]:
    """The lines with error bars of an axis, by their label."""
    return {container.get_label(): container for container in ax.containers}


def points(container: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(*container[0].get_data(), strict=True)]


def bars(container: Any) -> list[float]:
    """Lower and upper end of each error bar, one after the other."""
    (segments,) = [collection.get_segments() for collection in container[2]]
    return [float(end[1]) for segment in segments for end in segment]


def texts(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def test_a_point_is_what_a_row_read_and_scored_with_its_error() -> None:
    ax = report.draw_quality(DECODE, "repetition").axes[0]
    drawn = lines(ax)
    assert points(drawn["sparq:rank=16"]) == [(0.124, 0.86), (0.5, 0.89)]
    assert bars(drawn["sparq:rank=16"]) == pytest.approx([0.857, 0.863, 0.887, 0.893])
    (level,) = [line for line in ax.lines if line.get_label() == "dense"]
    assert set(level.get_ydata()) == {0.9}
    band = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    assert (band.y0, band.y1) == pytest.approx((0.88, 0.92))
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1/16", "1/8", "1/4", "1/2", "1"]
    assert ax.get_title() == "1,024 tokens, n = 20"


def test_bits_are_what_bits_per_byte_is_about() -> None:
    rows = [replace(row, task="bits_per_byte") for row in DECODE]
    ax = report.draw_quality(rows, "bits_per_byte").axes[0]
    assert points(lines(ax)["sparq:rank=16"]) == [(0.124, pytest.approx(1.18)), (0.5, pytest.approx(1.15))]
    assert "bits per byte" in ax.get_ylabel()


def test_what_ran_densely_is_named_and_not_drawn() -> None:
    figure = report.draw_quality(DECODE, "repetition")
    assert "streaming" not in lines(figure.axes[0])
    assert not any(1.0 in np.atleast_1d(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker() == "D")
    assert "Not drawn, for it ran densely at 1,024 tokens: streaming" in texts(figure)
    assert report.draw_quality([DECODE[0], DECODE[-1]], "repetition") is None


def test_what_ran_densely_in_part_is_hollow() -> None:
    ax = report.draw_quality(DECODE, "repetition").axes[0]
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in hollow] == [([0.25], [0.5])]


def test_one_example_has_no_error_to_show() -> None:
    rows = [replace(row, examples=1, mean_error=NAN, error=NAN) for row in DECODE]
    figure = report.draw_quality(rows, "repetition")
    assert bars(lines(figure.axes[0])["sparq:rank=16"]) == [0.86, 0.86, 0.89, 0.89]
    assert not figure.axes[0].patches
    assert "n = 1" in texts(figure)


def test_prompts_are_drawn_over_their_density() -> None:
    figure = report.draw_quality([*DECODE, *PROMPT], "repetition")
    steps, prompt = figure.axes
    assert "sample" not in lines(steps)
    assert points(lines(prompt)["sample"]) == [(pytest.approx(0.35), 0.88)]
    assert "block pairs" in prompt.get_xlabel()
    behind = replace(PROMPT[1], task="question", prefill=False)
    assert points(lines(report.draw_quality([behind], "question").axes[0])["sample"]) == [(pytest.approx(0.35), 0.88)]


def test_retained_mass_reaches_down_to_its_first_percentile() -> None:
    rows = [replace(row, task="retained_mass") for row in PROMPT]
    drawn = lines(report.draw_quality(rows, "retained_mass").axes[0])["sample"]
    assert points(drawn) == [(pytest.approx(0.35), 0.95)]
    assert bars(drawn) == [pytest.approx(0.8), 0.95]


def test_the_needle_map_has_depth_down_and_length_across() -> None:
    figure = report.draw_needle(NEEDLE)
    values = np.ma.filled(figure.axes[0].images[0].get_array(), math.nan)
    assert np.isnan(values[:, 0]).all()  # at 1,024 tokens every call was dense
    assert values[:, 1].tolist() == [0.25, 0.5, 1.0]
    assert "ran densely" in texts(figure) and "n = 4" in texts(figure)
    assert report.draw_needle(NEEDLE[:1]) is None is report.draw_needle(DECODE)


def test_the_density_map_shows_every_head() -> None:
    figure = report.draw_density(ROWS)
    assert figure.axes[0].images[0].get_array().tolist() == MAP
    assert report.draw_density(DECODE) is None


def test_agreement_is_drawn_for_both_component_scores() -> None:
    agreement, mass, gap = report.draw_agreement(SELECTION).axes
    for score in ("query", "query_key"):
        label = f"component_score={score}"
        assert points(lines(agreement)[label]) == [(8, 8 / 64), (32, 32 / 64)]
        assert bars(lines(mass)[label]) == pytest.approx(
            [rank / 70 + error for rank in (8, 32) for error in (-0.02, 0.02)]
        )
        assert points(lines(gap)[label]) == [(8, 0.1), (32, 0.1)]
        (worst,) = [line for line in agreement.lines if line.get_label() == f"{score}, worst"]
        assert list(worst.get_ydata()) == [8 / 80, 32 / 80]
    assert [set(line.get_ydata()) for line in mass.lines if line.get_label() == "exact choice"] == [{0.9}]
    assert report.draw_agreement([]) is None


def test_speed_is_drawn_where_the_result_was_right() -> None:
    figure = report.draw_speed(SPEED)
    drawn = lines(figure.axes[0])
    assert points(drawn["sparq on ops"]) == [(1024, 51.2), (2048, 102.4)]
    assert bars(drawn["dense"])[0] == pytest.approx(92.16)
    assert "its result was wrong: sparq on ops, 8x2x64, 4,096 keys" in texts(figure)
    assert report.draw_speed(SPEED[2:]) is None


def test_a_prompt_is_timed_at_once_or_in_pieces() -> None:
    prompts = [speed_row(S, method="sample", step=step) for S, step in ((1024, 1024), (2048, 1024), (2048, 2048))]
    at_once, in_pieces = report.draw_speed(prompts).axes
    for ax in (at_once, in_pieces):
        assert points(lines(ax)["sample on ops"]) == [(1024, 0.0512), (2048, 0.1024)]
        assert ax.get_ylabel() == "milliseconds per layer"
        assert "read" not in lines(ax)
    assert "1,024 tokens at a time" in in_pieces.get_title()


def test_a_method_has_its_colour_whatever_is_drawn_beside_it() -> None:
    alone = lines(report.draw_quality(DECODE[:1] + DECODE[3:4], "repetition").axes[0])["h2o"]
    beside = lines(report.draw_quality(DECODE, "repetition").axes[0])["h2o"]
    assert to_hex(alone[0].get_color()) == to_hex(beside[0].get_color()) == style.colour_of("h2o:top_k=4").lower()
    looks = style.looks(["sparq:rank=8", "sparq:rank=16", "sample+sparq", "h2o"])
    assert len({look["color"] for look in looks.values()}) == 2
    assert len({(look["color"], look["marker"], look["linestyle"]) for look in looks.values()}) == 4


def test_a_picture_changes_only_with_the_figures(tmp_path: Path) -> None:
    def draw(rows: Sequence[Row]) -> bytes:
        report.save(report.draw_quality(rows, "repetition"), tmp_path / "picture.svg")
        return (tmp_path / "picture.svg").read_bytes()

    first = draw(DECODE)
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "svg.hashsalt": None}):
        assert draw(DECODE) == first
    assert draw([*DECODE[:1], replace(DECODE[1], compression=0.4)]) != first
    assert b"matplotlib" not in first and b"2026" not in first and b"<metadata" not in first
    assert [path.name for path in tmp_path.iterdir()] == ["picture.svg"]


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
    run = {"command": "mlx-sparse bench", "date": "2026-11-21", "chip": "a chip"}
    report.write(folder, ROWS, FACTS, selection=SELECTION, speed=[speed | {"run": run} for speed in SPEED])
    return folder


def test_the_page_needs_no_other_file(written: Path) -> None:
    found = page(written)
    names = {path.stem for path in written.glob("*.svg")}
    assert names == {"quality-repetition", "quality-needle", "depths-needle", "density", "agreement", "speed"}
    ids = [attrs["id"] for _, attrs in found.elements if "id" in attrs]
    assert len(ids) == len(set(ids)) > 10
    for tag, attrs in found.elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "a", "base")
        assert "src" not in attrs and not any(name.startswith("on") or "xmlns" in name for name in attrs)
        for name, value in attrs.items():
            if "href" in name:
                assert value.startswith("data:image/png;base64,") or value[1:] in ids
            elif "url(" in (value or ""):
                assert value.partition("url(#")[2].rstrip(")") in ids
    content = (written / "report.html").read_text(encoding="utf-8")
    assert "http" not in content and "url(http" not in content and "@import" not in content
    assert sum(tag == "svg" for tag, _ in found.elements) == 6


def test_the_tables_say_what_was_read_what_it_cost_and_how_it_ran(written: Path) -> None:
    text = page(written).text
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
    facts = FACTS | {"command": HOSTILE, "model": FACTS["model"] | {"name": HOSTILE}}
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


def as_lines(rows: Sequence[Any], run: dict[str, Any]) -> list[str]:
    return [json.dumps(row.as_dict() | {"run": run}, allow_nan=False) for row in rows]


def test_a_report_drawn_from_its_results_is_the_same_file(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.jsonl").write_text("\n".join(as_lines([*ROWS, *SELECTION], FACTS)) + "\n")
    (tmp_path / "speed.jsonl").write_text("\n".join(json.dumps(speed) for speed in SPEED))
    assert cli.main(["report", str(tmp_path), "--speed", str(tmp_path / "speed.jsonl")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    for path in written.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_a_row_comes_back_as_it_was() -> None:
    for kept in (*ROWS, replace(DECODE[1], examples=1, mean_error=NAN, error=NAN, formula=None, selectivity=0.5)):
        assert str(Row.read(json.loads(json.dumps(kept.as_dict(), allow_nan=False)))) == str(kept)


GOOD = as_lines(DECODE, FACTS)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\n",
        b"[]\n",
        b"{}\n",
        b"[" * 5000,
        GOOD[0].replace('"run"', '"ran"').encode(),
        GOOD[0].replace('"seed": 3', '"seed": "3"').encode(),
        GOOD[0].replace('"layers": 2', '"layers": NaN').encode(),
        GOOD[1].replace('"compression": 0.5', '"compression": Infinity').encode(),
        GOOD[1].replace('"compression": 0.5', f'"compression": 1{"0" * 400}').encode(),
        GOOD[1].replace('"compression": 0.5', '"compression": "0.5"').encode(),
        GOOD[1].replace("repetition", "../../x").encode(),
        GOOD[1].replace("repetition", "unheard_of").encode(),
        GOOD[1].replace('"examples": 20', '"examples": 0').encode(),
        GOOD[1].replace('"density": []', '"density": [[2]]').encode(),
        GOOD[1].replace('"depths": []', '"depths": [{"depth": 3}]').encode(),
        GOOD[1].replace('"budget": "1/2"', '"budget": 2').encode(),
        GOOD[1].replace('"method"', '"more": 1, "method"').encode(),
        "\n".join([GOOD[0], GOOD[1].replace('"seed": 3', '"seed": 4')]).encode(),
        as_lines(SELECTION, FACTS)[0].replace('"rank": 8', '"rank": -8').encode(),
        "\n".join(GOOD * 1001).encode(),
    ],
)
def test_results_that_were_not_written_here_get_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "results.jsonl").write_bytes(content)
    assert cli.main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mlx-sparse: error: {tmp_path}/results.jsonl: expected ")
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": "8x2"},
        {"S": 0},
        {"S": "1k"},
        {"dense_us": -1},
        {"sparse_us": 0},
        {"failed": "no"},
        {"failed": True},
        {"run": None},
        {"run": {"command": "x"}},
        {"method": 1},
    ],
)
def test_times_that_were_not_written_here_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "speed.jsonl"
    path.write_text(json.dumps(SPEED[0]))
    assert read_speed(path)[0]["dense_us"] == 102.4
    path.write_text(json.dumps(SPEED[0] | changes))
    with pytest.raises(mlx_sparse.ArtefactError, match="expected what mlx-sparse bench -o jsonl wrote, got"):
        read_speed(path)


def test_a_missing_matplotlib_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    report.check()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        mlx_sparse.BackendUnavailable, match=r"matplotlib: .* pip install 'mlx-sparse-attention\[eval\]'"
    ):
        report.check()


def test_facts_say_what_ran_and_nothing_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    text = SimpleNamespace(name="~/book.txt", text="zwölf", sha256="ef" * 32)
    options = {"seed": 1, "prefill_step_size": 512, "batch": 4}
    facts = run_facts("mlx-sparse eval --model ~/m", name="~/m", model=build(), texts=[(text, 7)], **options)
    assert read_facts(json.loads(json.dumps(facts))) == facts
    assert facts["texts"] == [{"name": "~/book.txt", "sha256": "ef" * 32, "bytes": 6, "tokens": 7}]
    shape = {"type": "llama", "layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 16}
    assert facts["model"].items() >= shape.items()
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
