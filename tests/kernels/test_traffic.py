"""scripts/traffic.py: bytes that the Metal kernels move, counted; and the formulae that stand for them."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import launches
import mlx.core as mx
import msl
import pytest
import roofline_sample
import traffic
import traffic_packed
import traffic_saap
import traffic_sample
import traffic_sparq
from counting import LEVELS, Row
from launches import dense_kernel
from msl import Metal

from mlx_sparse.cache.kv_cache import SparseKVCache
from mlx_sparse.common import block_select
from mlx_sparse.common.block_layout import Layout
from mlx_sparse.methods import SAAP, Sample, SparQ
from mlx_sparse.tools.bench.core import Shape

METHODS = [
    *(SparQ(), SparQ(component_score="query_key"), SparQ(top_k=700), SparQ(key_bits=16)),
    *(SparQ(component_score="query_key", key_bits=bits) for bits in (8, 16)),
]
LENGTH = 16_384  # keys of SAAP's steps
VIEWS = {"Slice", "Transpose", "Squeeze", "Broadcast", "Reshape", "ExpandDims"}
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the harness of tests/msl runs on Linux")


def operations(arrays: Any, folder: Path) -> int:
    """Operations that make the arrays, views apart."""
    mx.export_to_dot(str(folder / "graph.dot"), *arrays)
    found = Counter(re.findall(r'label ?= ?"(\w+)", shape=rectangle', (folder / "graph.dot").read_text()))
    return sum(n for name, n in found.items() if name not in VIEWS)


# what the command prints


def test_it_needs_linux(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert traffic.main([]) == 2
    message = "traffic.py: error: traffic.py: expected Linux, where the harness of tests/msl runs, got darwin.\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("attn", "message"),
    [
        ("sparq:rank=16", "--attn: expected sparq without parameters, got sparq:rank=16."),
        ("streaming", "--attn: expected sparq, saap or sample with or without parameters, got streaming."),
        ("saap:probes=1024", "probes: expected an integer of at least 1 and at most 1023, got 1024."),
    ],
)
@on_linux
def test_wrong_methods_are_refused_in_one_line(attn: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert traffic.main(["--attn", attn]) == 2
    assert capsys.readouterr().err == f"traffic.py: error: {message}\n"


# sparq


@pytest.fixture(scope="module")
def tables() -> list[Row]:
    if sys.platform != "linux":
        pytest.skip("the harness of tests/msl runs on Linux")
    return traffic_sparq.measure(msl, SparQ(), [(4096, 4), (2048, 1)], kv_heads=1)


def test_traffic_compares_with_the_kernels_mlx_would_run(tables: list[Row]) -> None:
    assert [(table.facts["S"], table.facts["G"], table.name, table.facts["launches"]) for table in tables] == [
        (4096, 4, "sparq:key_bits=16", 3),
        (4096, 4, "sparq", 3),
        (4096, 4, "MLX's sdpa_vector_2pass_1 of 64 blocks (base and Pro, Max)", 2),
        (4096, 4, "MLX's sdpa_vector_2pass_1 of 128 blocks (Ultra)", 2),
        (2048, 1, "sparq:key_bits=16", 3),
        (2048, 1, "sparq", 3),
        (2048, 1, "MLX's sdpa_vector (base and Pro)", 1),
        (2048, 1, "MLX's sdpa_vector_2pass_1 of 64 blocks (Max)", 2),
        (2048, 1, "MLX's sdpa_vector_2pass_1 of 128 blocks (Ultra)", 2),
    ]


def test_traffic_counts_each_part_exactly(tables: list[Row]) -> None:
    for table in tables:
        cache, chosen = table.facts["S"] * 128 * 2, 128 * 128 * 2
        parts = {"keys_t": cache // 4, "K rows": chosen, "V rows": chosen}
        if not table.name.startswith("sparq"):
            parts = {"K rows": cache, "V rows": cache}
        if table.name == "sparq":
            # A component's codes are whole lines; its lo and step, 2 bytes for each group, may begin one.
            codes, lines = 32 * table.facts["S"] // 2, 32 * 2 * -(-table.facts["S"] // 64 * 2 // 128) * 128
            del parts["keys_t"]
            assert codes < table.parts["keys_t"]["dispatch"] <= codes + lines
        for part, size in parts.items():
            assert table.parts[part]["dispatch"] == size
            assert table.parts[part]["threadgroup"] == size


def test_traffic_says_how_far_it_is_from_the_formula(tables: list[Row]) -> None:
    text = traffic_sparq.text(tables, SparQ())
    ratios = re.findall(r"sparq:key_bits=16 at dispatch level: (\S+) x the formula, and (\S+) x its score buffer", text)
    assert len(ratios) == 2
    for formula, buffer in ratios:
        assert 1 < float(formula) < 1.1
        assert float(buffer) < 3


@on_linux
def test_traffic_counts_packed_rows_beside_mlxs_quantised_attention() -> None:
    rows = traffic_packed.measure(msl, SparQ(), [(4, "rows"), (4, "copy")], length=4096, kv_heads=1)
    by_rows, by_copy = (row.parts for row in rows)
    assert by_rows["keys scored"]["dispatch"] == 4096 * 72
    assert by_copy["keys scored"]["dispatch"] < by_rows["keys scored"]["dispatch"] / 3
    for parts in (by_rows, by_copy):
        assert 128 * 72 <= parts["K rows"]["dispatch"] <= 128 * 3 * 128  # a line for codes, scales and biases each
        assert parts["score buffer"]["dispatch"] <= 2.01 * 4096 * 4  # 8 bits, written and read
    assert rows[0].facts["mlx"] == 2 * 4096 * 72 + 4 * 4096 * 4 * 2
    assert "at rank 32" in traffic_packed.text(rows, SparQ())


def test_the_formulae_for_dense_attention_are_what_the_harness_counts(tables: list[Row]) -> None:
    for table in tables:
        if table.name.startswith("sparq"):
            continue
        letter = next(
            letter for letter, chip in traffic_sparq.CHIPS.items() if re.search(rf"\(.*{chip}.*\)", table.name)
        )
        shape = Shape(table.facts["G"], 1, 128)
        by_formula = launches.dense_launches(dense_kernel(letter, shape, table.facts["S"]), shape, table.facts["S"])
        assert len(by_formula) == table.facts["launches"]
        assert sum(launch.once for launch in by_formula) == pytest.approx(table.total["dispatch"], rel=0.02)
        assert sum(launch.each for launch in by_formula) == pytest.approx(table.total["threadgroup"], rel=0.05)


@pytest.mark.parametrize("config", METHODS, ids=str)
@pytest.mark.parametrize(
    ("shape", "S"),
    [(Shape(8, 2, 128), 4096), (Shape(2, 2, 128), 16384), (Shape(9, 3, 64), 5056), (Shape(8, 1, 256), 9024)],
    ids=str,
)
def test_the_formulae_for_sparq_are_what_the_harness_counts(config: SparQ, shape: Shape, S: int, metal: Metal) -> None:
    if not metal.emulated:
        pytest.skip("a GPU does not count")
    cache = SparseKVCache()
    cache.keys, cache.values = (mx.random.normal((1, shape.Hkv, S, shape.D)).astype(mx.float16) for _ in "kv")
    cache.offset = S
    queries = mx.random.normal((1, shape.Hq, 1, shape.D)).astype(mx.float16)
    cache.attend(queries, config, scale=shape.D**-0.5, backend="metal")
    by_formula = [
        launch for launch in launches.sparq_launches(shape, S, config) if launch.name not in ("append", "sums")
    ]
    assert len(by_formula) == len(metal.launches)
    for launch, report in zip(by_formula, metal.launches, strict=True):
        assert report.kernel.startswith(launch.name)
        groups = [size // per for size, per in zip(report.grid, report.threadgroup, strict=True)]
        assert launch.groups == groups[0] * groups[1] * groups[2]
    for name, level in (("once", "dispatch"), ("each", "threadgroup")):
        counted = sum(
            getattr(buffer, level)
            for report in metal.launches
            for buffer in (*report.reads.values(), *report.writes.values())
        )
        # The lines of scattered scores that alpha is summed from are counted apart, though some are the same.
        slack = 0.1 if shape.G == 1 else 0.03
        assert sum(getattr(launch, name) for launch in by_formula) == pytest.approx(counted, rel=slack)


@pytest.mark.parametrize(("weighted", "reallocate"), launches.SIDE_LAUNCHES)
def test_the_launches_beside_the_kernels_are_those_of_the_cache(
    weighted: bool, reallocate: bool, tmp_path: Path
) -> None:
    config = SparQ(reallocate=reallocate, component_score="query_key" if weighted else "query", key_bits=16)
    cache = SparseKVCache()
    cache.update_and_fetch(*(mx.ones((1, 2, 200, 64), mx.float16) for _ in "kv"))
    for _ in range(2):  # the second is a decode step like any other
        row = mx.ones((1, 2, 1, 64), mx.float16)
        cache.update_and_fetch(row, row)
        mx.eval(cache.keys, cache.values)
        read = cache.state_of("sparq").read(cache, config, 4, whole=True)
        side = cache.beside["sparq"]
        assert side is not None
        block_select = [side.columns.keys_t, read["value_mean"], read["component_weight"]]
        arrays = [array for array in block_select if array is not None]
        launched = operations(arrays, tmp_path)
        mx.eval(arrays)
    assert launched == launches.SIDE_LAUNCHES[weighted, reallocate]


# saap


@pytest.fixture(scope="module")
def steps() -> dict[str, Row]:
    if sys.platform != "linux":
        pytest.skip("the harness of tests/msl runs on Linux")
    return {row.name: row for row in traffic_saap.measure(msl, SAAP(), LENGTH, kv_heads=1)}


def test_each_weight_and_each_attended_row_is_read_once(steps: dict[str, Row]) -> None:
    network = 2 * (128 * 1024 + 1024 + 1024 * 1024 + 1024)
    for name in traffic_saap.FILLINGS:
        row = steps[name]
        for level in LEVELS:
            assert row.parts["network"][level] == network
            assert row.parts["K rows"][level] == row.parts["V rows"][level] == row.facts["attended"] * 128 * 2


def test_lists_hold_the_keys_of_the_filling(steps: dict[str, Row]) -> None:
    far = LENGTH - 2048
    assert steps["balanced"].facts["attended"] == pytest.approx(2048 + 0.05 * far, abs=2)
    assert steps["half visited"].facts["attended"] == pytest.approx(2048 + 0.55 * far, abs=2)
    assert steps["half unvisited"].facts["attended"] == steps["balanced"].facts["attended"]
    assert steps["half unvisited"].facts["slots"] > steps["half unvisited"].facts["attended"] + 0.5 * far


def test_nobody_works_off_more_tiles_than_a_fair_share(steps: dict[str, Row]) -> None:
    for name in traffic_saap.FILLINGS:
        row = steps[name]
        assert row.facts["chain"] == -(-row.facts["attended"] // (row.facts["groups"] * 128))
    assert steps["half visited"].facts["alone"] >= 0.5 * (LENGTH - 2048) / 128


@on_linux
def test_five_percent_of_131072_keys_cost_little_more_than_the_formula() -> None:
    """For one KV head; the others do the same."""
    row = traffic_saap.step(msl, SAAP(), "balanced", traffic_saap.S, 1)
    assert row.total["dispatch"] <= row.total["threadgroup"] <= 1.15 * (row.formula or 0)
    assert 9 * (row.formula or 0) < 2 * row.facts["S"] * 128 * 2 < 11 * (row.formula or 0)


@on_linux
def test_the_tables_of_steps_say_what_was_counted(
    steps: dict[str, Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traffic_saap, "measure", lambda msl, config: list(steps.values()))
    assert traffic.main(["--attn", "saap"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("    python scripts/traffic.py --attn saap\n\n")
    assert f"S = {LENGTH:,} keys: 1 KV heads" in text
    for name, row in steps.items():
        assert text.count(f"\n| {name} | ") == len(LEVELS) + 1
        assert f"| {row.total['dispatch'] / (row.formula or 1):.3f} |" in text
    assert traffic.main(["--attn", "saap", "-o", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)["rows"]
    assert [row["kernels"] for row in printed] == list(steps)
    assert printed[1]["bytes"]["network"]["dispatch"] == steps["balanced"].parts["network"]["dispatch"]


@pytest.mark.parametrize(("filling", "share"), [("balanced", 0.05), ("half visited", 0.55)])
def test_the_formulae_for_saap_are_what_the_harness_counts(steps: dict[str, Row], filling: str, share: float) -> None:
    shape, router = Shape(traffic_saap.G, 1, traffic_saap.D), traffic_saap.NETWORK
    launched = launches.saap_launches(shape, LENGTH, SAAP(), router, share)
    kernels = [launch for launch in launched if launch.name != "fold"]
    assert [launch.name for launch in kernels] == ["saap_route", "saap_indices", "attend_indices", "merge"]
    assert sum(launch.once for launch in kernels) == pytest.approx(steps[filling].total["dispatch"], rel=0.02)
    assert sum(launch.each for launch in kernels) == pytest.approx(steps[filling].total["threadgroup"], rel=0.02)


# sample

Prompts = dict[tuple[str, bool], Row]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    if sys.platform != "linux":
        pytest.skip("the harness of tests/msl runs on Linux")
    return {(row.name, row.facts["density"] == 1): row for row in traffic_sample.measure(msl, Sample(), [(128, 384)])}


def test_attending_everything_is_the_work_of_mlx_own_kernel(prompts: Prompts) -> None:
    ours, theirs = prompts["attend_blocks", True], prompts["MLX's dense kernel", True]
    assert ours.facts["multiply_adds"] == theirs.facts["multiply_adds"]
    for part in ("Q", "K", "V"):
        assert ours.parts[part] == theirs.parts[part]
    assert ours.total["threadgroup"] <= 1.02 * theirs.total["threadgroup"]


def test_multiply_adds_follow_the_lists_and_the_sample(prompts: Prompts) -> None:
    step = roofline_sample.Step(Shape(traffic_sample.G, 1, traffic_sample.D), 128, 384, Sample())
    # What a kernel multiplies and masks are the tiles that the diagonal cuts.
    assert 1 <= prompts["MLX's dense kernel", True].facts["multiply_adds"] / step.dense_work < 1.1
    assert prompts["sample_scores", False].facts["multiply_adds"] == step.sample_work
    few, all_ = prompts["attend_blocks", False], prompts["attend_blocks", True]
    assert few.facts["density"] is not None
    assert few.facts["density"] < 1
    assert few.facts["multiply_adds"] < all_.facts["multiply_adds"]


@on_linux
def test_the_tables_of_prompts_say_what_was_counted(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traffic_sample, "measure", lambda msl, config: list(prompts.values()))
    assert traffic.main(["--attn", "sample"]) == 0
    assert capsys.readouterr().out.count("\n| 128 | 384 | ") == 3 * len(prompts)
    assert traffic.main(["--attn", "sample", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    assert [row["multiply_adds"] for row in found] == [row.facts["multiply_adds"] for row in prompts.values()]


def test_the_operations_between_the_kernels_are_counted(tmp_path: Path) -> None:
    layout = Layout(512, 2048, 1, 128)
    column, slash = (mx.random.uniform(shape=(1, 4, 1, layout.key_blocks)) for _ in range(2))
    mx.eval(column, slash)
    lists = block_select.select(column, slash, layout, alpha_column=0.9, alpha_slash=0.9, width=layout.key_blocks)
    launched = 3 + operations([lists], tmp_path)
    assert 0.8 * roofline_sample.SELECT_LAUNCHES <= launched <= roofline_sample.SELECT_LAUNCHES
