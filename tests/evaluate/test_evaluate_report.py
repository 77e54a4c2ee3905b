"""Pictures of an evaluation hold what its rows say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from report_rows import (
    DECODE,
    MAP,
    NAN,
    NEEDLE,
    PROMPT,
    ROWS,
    SELECTION,
    SPEED,
    speed_row,
)

from mlx_sparse.tools.evaluate import report
from mlx_sparse.tools.evaluate.report import style
from mlx_sparse.tools.evaluate.results import Row


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


def test_layers_of_the_density_map_may_have_different_numbers_of_heads() -> None:
    drawn = report.draw_density([replace(PROMPT[0], density=[[0.1], [0.2, 0.3]])]).axes[0].images[0].get_array()
    assert drawn.filled(-1).tolist() == [[0.1, -1], [0.2, 0.3]]


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
    assert to_hex(alone[0].get_color()) == to_hex(beside[0].get_color()) == style.look_of("h2o:top_k=4")[0].lower()
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
    assert b"matplotlib" not in first and b"2026" not in first
    assert [path.name for path in tmp_path.iterdir()] == ["picture.svg"]
