"""`mlx-sparse bench --traffic` and `--roofline` for SparQ: what they count and model, and what they refuse."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest
from msl import Metal

from mlx_sparse import cli
from mlx_sparse.bench import launches, roofline, traffic
from mlx_sparse.bench.dense import Shape, dense_kernel
from mlx_sparse.cache import SparseKVCache
from mlx_sparse.checks import ConfigError
from mlx_sparse.config import SparQ

CONFIGS = [SparQ(), SparQ(component_score="query_key"), SparQ(top_k=256), SparQ(rank=16, top_k=64)]


def bench(*arguments: str) -> int:
    return cli.main(["bench", *arguments])


# traffic


@pytest.fixture(scope="module")
def tables() -> list[traffic.Table]:
    if sys.platform != "linux":
        pytest.skip("the harness of tests/msl runs on Linux")
    return traffic.measure([(4096, 4), (2048, 1)], kv_heads=1)


def test_traffic_compares_with_the_kernels_mlx_would_run(tables: list[traffic.Table]) -> None:
    assert [(table.S, table.G, table.name, table.launches) for table in tables] == [
        (4096, 4, "sparq", 3),
        (4096, 4, "MLX's sdpa_vector_2pass_1 of 64 blocks (base and Pro, Max)", 2),
        (4096, 4, "MLX's sdpa_vector_2pass_1 of 128 blocks (Ultra)", 2),
        (2048, 1, "sparq", 3),
        (2048, 1, "MLX's sdpa_vector (base and Pro)", 1),
        (2048, 1, "MLX's sdpa_vector_2pass_1 of 64 blocks (Max)", 2),
        (2048, 1, "MLX's sdpa_vector_2pass_1 of 128 blocks (Ultra)", 2),
    ]


def test_traffic_counts_each_part_exactly(tables: list[traffic.Table]) -> None:
    for table in tables:
        cache, chosen = table.S * 128 * 2, 128 * 128 * 2
        parts = {"keys_t": cache // 4, "K rows": chosen, "V rows": chosen}
        if table.name != "sparq":
            parts = {"K rows": cache, "V rows": cache}
        for part, size in parts.items():
            assert table.parts[part]["dispatch"] == size
            assert table.parts[part]["threadgroup"] == size
        rows = table.as_dicts()
        assert rows[-1]["part"] == "sum"
        assert rows[-1]["dispatch"] == sum(row["dispatch"] for row in rows[:-1])


def test_traffic_says_how_far_it_is_from_the_formula(tables: list[traffic.Table]) -> None:
    text = traffic.text(tables)
    ratios = re.findall(r"sparq at dispatch level: (\S+) x the formula, and (\S+) x its score buffer", text)
    assert len(ratios) == 2
    for formula, buffer in ratios:
        assert 1 < float(formula) < 1.1
        assert float(buffer) < 3


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("linux", "expected a source checkout with tests/msl, got an installed package"),
        ("darwin", "expected Linux, where the harness of tests/msl runs, got darwin"),
    ],
)
def test_traffic_needs_a_checkout_on_linux(
    platform: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(traffic, "__file__", str(tmp_path / "mlx_sparse" / "bench" / "traffic.py"))
    with pytest.raises(ConfigError, match=message):
        traffic.harness()


# roofline


@pytest.mark.parametrize(
    ("letter", "shape", "S", "name", "blocks"),
    [
        ("g", Shape(32, 8, 128), 4095, "sdpa_vector", 1),
        ("g", Shape(32, 8, 128), 4096, "sdpa_vector_2pass_1", 64),
        ("g", Shape(9, 3, 64), 4096, "sdpa_vector_2pass_1", 32),
        ("g", Shape(32, 32, 128), 65536, "sdpa_vector", 1),
        ("g", Shape(16, 2, 128), 8192, "sdpa_vector_2pass_1_gqa", 64),
        ("s", Shape(8, 1, 256), 8193, "sdpa_vector_2pass_1", 256),
        ("s", Shape(16, 2, 128), 65537, "sdpa_vector_2pass_1_gqa", 1024),
        ("d", Shape(32, 32, 128), 1024, "sdpa_vector_2pass_1", 128),
        ("d", Shape(32, 32, 128), 8193, "sdpa_vector_2pass_1", 256),
        ("d", Shape(8, 1, 256), 16384, "sdpa_vector_2pass_1", 512),
    ],
)
def test_the_dense_kernel_is_the_one_mlx_takes(letter: str, shape: Shape, S: int, name: str, blocks: int) -> None:
    kernel = dense_kernel(letter, shape, S)
    assert (kernel.name, kernel.blocks) == (name, blocks)


def test_the_formulae_for_dense_attention_are_what_the_harness_counts(tables: list[traffic.Table]) -> None:
    for table in tables:
        if table.name == "sparq":
            continue
        letter = next(letter for letter, chip in traffic.CHIPS.items() if re.search(rf"\(.*{chip}.*\)", table.name))
        shape = Shape(table.G, 1, 128)
        by_formula = launches.dense_launches(dense_kernel(letter, shape, table.S), shape, table.S)
        assert len(by_formula) == table.launches
        assert sum(launch.once for launch in by_formula) == pytest.approx(table.total["dispatch"], rel=0.02)
        assert sum(launch.each for launch in by_formula) == pytest.approx(table.total["threadgroup"], rel=0.05)


@pytest.mark.parametrize("config", [*CONFIGS[:2], SparQ(top_k=700)], ids=str)
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


VIEWS = {"Slice", "Transpose", "Squeeze", "Broadcast", "Reshape", "ExpandDims"}


@pytest.mark.parametrize(("weighted", "reallocate"), launches.SIDE_LAUNCHES)
def test_the_launches_beside_the_kernels_are_those_of_the_cache(
    weighted: bool, reallocate: bool, tmp_path: Path
) -> None:
    config = SparQ(reallocate=reallocate, component_score="query_key" if weighted else "query")
    cache = SparseKVCache()
    cache.update_and_fetch(*(mx.ones((1, 2, 200, 64), mx.float16) for _ in "kv"))
    for _ in range(2):  # the second is a decode step like any other
        row = mx.ones((1, 2, 1, 64), mx.float16)
        cache.update_and_fetch(row, row)
        mx.eval(cache.keys, cache.values)
        read = cache._sparq_parameters(config, 4, cache.length)
        side = cache._side
        assert side is not None
        kept = [side.keys_t, read["value_mean"], read["component_weight"]]
        arrays = [array for array in kept if array is not None]
        mx.export_to_dot(str(tmp_path / "graph.dot"), *arrays)
        mx.eval(arrays)
    operations = Counter(re.findall(r'label ?= ?"(\w+)", shape=rectangle', (tmp_path / "graph.dot").read_text()))
    assert sum(n for name, n in operations.items() if name not in VIEWS) == launches.SIDE_LAUNCHES[weighted, reallocate]


def test_brackets_are_in_order_and_shrink_with_bandwidth() -> None:
    slow, fast = (next(chip for chip in roofline.CHIPS if chip.name == name) for name in ("M1", "M2 Ultra"))
    for shape in roofline.SHAPES:
        for time in (roofline.dense, lambda *case: roofline.sparq(*case, SparQ())):
            assert time(slow, shape, 65536)[0] < time(slow, shape, 65536)[1]
            assert all(a > b for a, b in zip(time(slow, shape, 65536), time(fast, shape, 65536), strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("chip", roofline.CHIPS, ids=lambda chip: chip.name)
def test_from_the_advised_context_on_the_model_never_loses(chip: roofline.Chip, config: SparQ) -> None:
    for shape in roofline.SHAPES:
        first = roofline.advised(chip.letter, shape, config)
        assert first is not None
        for S in [first, *(S for S in roofline.LENGTHS if S > first)]:
            assert roofline.sparq(chip, shape, S, config)[1] < roofline.dense(chip, shape, S)[0], (shape, S)


def test_where_nothing_is_saved_no_context_is_advised() -> None:
    assert roofline.advised("g", Shape(32, 2, 64), SparQ(rank=64)) is None


def test_the_roofline_says_that_it_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--roofline") == 0
    text = capsys.readouterr().out
    assert "\n\nA model, not a measurement" in text
    for chip in roofline.CHIPS:
        assert chip.name in text


@pytest.mark.parametrize(
    ("attn", "message"),
    [
        ("sparq:rank=65", "rank: expected at most the head dim D=64, got 65."),
        ("streaming", "--attn: expected sparq, saap or sample with or without parameters, got streaming."),
    ],
)
def test_the_roofline_is_of_methods_with_kernels(attn: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--roofline", "--attn", attn) == 2
    assert capsys.readouterr().err == f"mlx-sparse: error: {message}\n"
