"""scripts/roofline.py: what it models, that it says so, and the documentation that holds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import roofline
import roofline_cuda
import roofline_sample
import roofline_steps
from launches import Network, dense_kernel
from roofline_steps import CHIPS, LENGTHS, SHAPES, Chip

from mlx_sparse.methods import SAAP, Sample, SparQ
from mlx_sparse.tools.bench.core import Shape
from mlx_sparse.tools.bench.mlx.saap import ROUTERS

ROOT = Path(__file__).parents[2]
METHODS = [SparQ(), SparQ(component_score="query_key"), SparQ(top_k=256), SparQ(rank=16, top_k=64)]
by_chip = pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)


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


def test_brackets_are_in_order_and_shrink_with_bandwidth() -> None:
    slow, fast = (next(chip for chip in CHIPS if chip.name == name) for name in ("M1", "M2 Ultra"))
    for shape in SHAPES:
        for time in (roofline_steps.dense, lambda *case: roofline_steps.sparq(*case, SparQ())):
            assert time(slow, shape, 65536)[0] < time(slow, shape, 65536)[1]
            assert all(a > b for a, b in zip(time(slow, shape, 65536), time(fast, shape, 65536), strict=True))


@pytest.mark.parametrize("config", METHODS, ids=str)
@by_chip
def test_from_the_advised_context_on_sparq_never_loses(chip: Chip, config: SparQ) -> None:
    for shape in SHAPES:
        first = roofline_steps.advised(chip.letter, shape, config)
        assert first is not None
        for S in [first, *(S for S in LENGTHS if S > first)]:
            assert roofline_steps.sparq(chip, shape, S, config)[1] < roofline_steps.dense(chip, shape, S)[0], (shape, S)


def test_where_nothing_is_saved_no_context_is_advised() -> None:
    assert roofline_steps.advised("g", Shape(32, 2, 64), SparQ(rank=64, key_bits=16)) is None


@pytest.mark.parametrize("config", [SAAP(), SAAP(probes=8), SAAP(probes=128)], ids=str)
@by_chip
def test_from_the_advised_context_on_saap_never_loses(chip: Chip, config: SAAP) -> None:
    for shape in SHAPES:
        for hidden in ROUTERS:
            router = roofline_steps.router_of(shape, hidden)
            first = roofline_steps.advised(chip.letter, shape, config, router)
            assert first is not None
            for S in [first, *(S for S in LENGTHS if S > first), 1 << 20]:
                worst, best = (
                    roofline_steps.saap(chip, shape, S, config, router)[1],
                    roofline_steps.dense(chip, shape, S)[0],
                )
                assert worst < best, (shape, hidden, S)


def test_centroids_that_route_are_a_smaller_network() -> None:
    shape = Shape(32, 8, 128)
    small, large = (Network(1024, hidden) for hidden in (0, 256))
    assert small.weights(128) == 128 * 1024 + 1024
    assert large.weights(128) == 128 * 256 + 256 + 256 * 1024 + 1024
    times = [roofline_steps.saap(CHIPS[0], shape, 65_536, SAAP(), router) for router in (small, large)]
    assert all(a < b for a, b in zip(*times, strict=True))


@by_chip
def test_slower_kernels_need_sparser_lists(chip: Chip) -> None:
    for S in roofline_sample.SHOWN:
        step = roofline_sample.Step(roofline_sample.SHAPE, roofline_sample.STEP, S, Sample())
        own, packed = (
            [roofline_sample.break_even(way, chip, step, e) for e in roofline_sample.EFFICIENCIES]
            for way in (roofline_sample.own, roofline_sample.packed)
        )
        for found in (own, packed):
            assert found == sorted(found, reverse=True)
            assert all(0 < density < 1 for density in found)
        for e, density in zip(roofline_sample.EFFICIENCIES, own, strict=True):
            assert density < e
            assert roofline_sample.own(chip, step, density, e) == pytest.approx(roofline_sample.dense(chip, step))
        # Where both are equally fast the model says which is the better one beyond.
        e = 1 / roofline_sample.packing(chip, step, 0.1)
        assert roofline_sample.own(chip, step, 0.1, 1.01 * e) < roofline_sample.packed(chip, step, 0.1, 1.01 * e)
        assert roofline_sample.own(chip, step, 0.1, 0.99 * e) > roofline_sample.packed(chip, step, 0.1, 0.99 * e)


def test_more_regions_leave_less_for_attention() -> None:
    chip = CHIPS[0]
    found = [
        roofline_sample.break_even(
            roofline_sample.own,
            chip,
            roofline_sample.Step(roofline_sample.SHAPE, 2048, 32768, Sample(chunks=chunks)),
            0.5,
        )
        for chunks in (1, 2, 4)
    ]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("attn", ["sparq", "saap", "sample"])
def test_the_command_says_that_it_is_a_model(attn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main(["--attn", attn]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"    python scripts/roofline.py --attn {attn}\n\nA model, not a measurement")
    for chip in CHIPS:
        assert chip.name in text
    assert roofline.main(["--attn", attn, "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["chip"] for row in rows} == {chip.name for chip in CHIPS}


@pytest.mark.parametrize("attn", ["sparq", "saap", "sample"])
def test_the_documentation_holds_what_bytes_allow_on_an_h200(attn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main(["--of", "cuda", "--attn", attn]) == 0
    table = capsys.readouterr().out.partition("\n\n")[2].strip()
    assert table in (ROOT / "docs" / "results" / "triton.md").read_text()


def test_the_bytes_of_launches_add_up() -> None:
    for case in roofline_cuda.bar_cases():
        for setting in case.settings:
            ours, least = sum(case.parts(setting)), case.formula(setting)
            logits = 2 * (1 if setting.coded and case.G > 1 else 4) * case.rows * case.G * case.S
            assert least < ours < 1.1 * (least + logits)


@pytest.mark.parametrize(
    ("attn", "message"),
    [
        (["--attn", "sparq:rank=65"], "rank: expected at most the head dim D=64, got 65."),
        (["--attn", "h2o"], "--attn: expected sparq, saap or sample with or without parameters, got h2o."),
        (["--of", "cuda", "--attn", "saap:probes=8"], "--attn: expected saap without parameters, got saap:probes=8."),
        (["-o", "pdf"], "-o: expected one of md, json, jsonl, csv, got 'pdf'. --out names a file."),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    attn: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert roofline.main(attn) == 2
    assert capsys.readouterr().err == f"roofline.py: error: {message}\n"
