"""`mlx-sparse bench --traffic` and `--roofline` for SampleAttention: what they count and model."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_sparse import cli, kept
from mlx_sparse.bench import prefill_roofline as model
from mlx_sparse.bench import prefill_traffic as traffic
from mlx_sparse.bench.dense import Shape
from mlx_sparse.config import Sample
from mlx_sparse.layout import Layout

VIEWS = {"Slice", "Transpose", "Squeeze", "Broadcast", "Reshape", "ExpandDims"}


def bench(*arguments: str) -> int:
    return cli.main(["bench", "--attn", "sample", *arguments])


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, bool], traffic.Row]:
    if sys.platform != "linux":
        pytest.skip("the harness of tests/msl runs on Linux")
    return {(row.name, row.density == 1): row for row in traffic.measure([(128, 384)])}


def test_attending_everything_is_the_work_of_mlx_own_kernel(rows: dict[tuple[str, bool], traffic.Row]) -> None:
    ours, theirs = rows["attend_blocks", True], rows["MLX's dense kernel", True]
    assert ours.multiply_adds == theirs.multiply_adds
    for part in ("Q", "K", "V"):
        assert ours.parts[part] == theirs.parts[part]
    assert ours.total["threadgroup"] <= 1.02 * theirs.total["threadgroup"]


def test_multiply_adds_follow_the_lists_and_the_sample(rows: dict[tuple[str, bool], traffic.Row]) -> None:
    step = model.Step(Shape(traffic.G, 1, traffic.D), 128, 384, Sample())
    # What a kernel multiplies and masks are the tiles that the diagonal cuts.
    assert 1 <= rows["MLX's dense kernel", True].multiply_adds / step.dense_work < 1.1
    assert rows["sample_scores", False].multiply_adds == step.sample_work
    few, all_ = rows["attend_blocks", False], rows["attend_blocks", True]
    assert few.density is not None
    assert few.density < 1
    assert few.multiply_adds < all_.multiply_adds


def test_the_tables_say_what_was_counted(
    rows: dict[tuple[str, bool], traffic.Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traffic, "measure", lambda: list(rows.values()))
    assert bench("--traffic") == 0
    text = capsys.readouterr().out
    assert text.count("\n| 128 | 384 | ") == 3 * len(rows)
    assert bench("--traffic", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    assert [row["multiply_adds"] for row in found] == [row.multiply_adds for row in rows.values()]


def test_the_operations_between_the_kernels_are_counted(tmp_path: Path) -> None:
    layout = Layout(512, 2048, 1, 128)
    column, slash = (mx.random.uniform(shape=(1, 4, 1, layout.key_blocks)) for _ in range(2))
    mx.eval(column, slash)
    width = layout.key_blocks
    lists = kept.select(column, slash, layout, alpha_column=0.9, alpha_slash=0.9, width=width)
    mx.export_to_dot(str(tmp_path / "graph.dot"), lists)
    operations = Counter(re.findall(r'label ?= ?"(\w+)", shape=rectangle', (tmp_path / "graph.dot").read_text()))
    launches = 3 + sum(n for name, n in operations.items() if name not in VIEWS)
    assert 0.8 * model.SELECT_LAUNCHES <= launches <= model.SELECT_LAUNCHES


@pytest.mark.parametrize("chip", model.CHIPS, ids=lambda chip: chip.name)
def test_slower_kernels_need_sparser_lists(chip: model.Chip) -> None:
    for S in model.SHOWN:
        step = model.Step(model.SHAPE, model.STEP, S, Sample())
        own, packed = (
            [model.break_even(way, chip, step, e) for e in model.EFFICIENCIES] for way in (model.own, model.packed)
        )
        for found in (own, packed):
            assert found == sorted(found, reverse=True)
            assert all(0 < density < 1 for density in found)
        for e, density in zip(model.EFFICIENCIES, own, strict=True):
            assert density < e
            assert model.own(chip, step, density, e) == pytest.approx(model.dense(chip, step))
        # Where both are equally fast the model says which is the better one beyond.
        e = 1 / model.packing(chip, step, 0.1)
        assert model.own(chip, step, 0.1, 1.01 * e) < model.packed(chip, step, 0.1, 1.01 * e)
        assert model.own(chip, step, 0.1, 0.99 * e) > model.packed(chip, step, 0.1, 0.99 * e)


def test_more_regions_leave_less_for_attention() -> None:
    chip = model.CHIPS[0]
    found = [
        model.break_even(model.own, chip, model.Step(model.SHAPE, 2048, 32768, Sample(chunks=chunks)), 0.5)
        for chunks in (1, 2, 4)
    ]
    assert found == sorted(found, reverse=True)


def test_the_roofline_says_that_it_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--roofline") == 0
    text = capsys.readouterr().out
    assert "\n\nA model, not a measurement" in text
    for chip in model.CHIPS:
        assert f"| {chip.name} |" in text
