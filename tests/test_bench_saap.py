"""`mlx-sparse bench --traffic` and `--roofline` for SAAP: what they count and model."""

from __future__ import annotations

import json
import sys

import pytest

from mlx_sparse import cli
from mlx_sparse.bench import launches, roofline
from mlx_sparse.bench import saap_roofline as model
from mlx_sparse.bench import saap_traffic as traffic
from mlx_sparse.bench.dense import Shape
from mlx_sparse.bench.traffic import LEVELS, harness
from mlx_sparse.config import SAAP

LENGTH = 16_384


@pytest.fixture(scope="module")
def rows() -> dict[str, traffic.Row]:
    if sys.platform != "linux":
        pytest.skip("the harness of tests/msl runs on Linux")
    return {row.name: row for row in traffic.measure(SAAP(), LENGTH, kv_heads=1)}


def test_each_weight_and_each_attended_row_is_read_once(rows: dict[str, traffic.Row]) -> None:
    network = 2 * (128 * 1024 + 1024 + 1024 * 1024 + 1024)
    for name in traffic.FILLINGS:
        row = rows[name]
        for level in LEVELS:
            assert row.parts["network"][level] == network
            assert row.parts["K rows"][level] == row.parts["V rows"][level] == row.attended * 128 * 2


def test_lists_hold_the_keys_of_the_filling(rows: dict[str, traffic.Row]) -> None:
    far = LENGTH - 2048
    assert rows["balanced"].attended == pytest.approx(2048 + 0.05 * far, abs=2)
    assert rows["half visited"].attended == pytest.approx(2048 + 0.55 * far, abs=2)
    assert rows["half unvisited"].attended == rows["balanced"].attended
    assert rows["half unvisited"].slots > rows["half unvisited"].attended + 0.5 * far


def test_nobody_works_off_more_tiles_than_a_fair_share(rows: dict[str, traffic.Row]) -> None:
    for name in traffic.FILLINGS:
        row = rows[name]
        assert row.chain == -(-row.attended // (row.groups * 128))
    assert rows["half visited"].alone >= 0.5 * (LENGTH - 2048) / 128


def test_five_percent_of_131072_keys_cost_little_more_than_the_formula() -> None:
    """For one KV head; the others do the same."""
    if sys.platform != "linux":
        pytest.skip("the harness of tests/msl runs on Linux")
    row = traffic.step(harness(), SAAP(), "balanced", traffic.S, 1)
    assert row.total["dispatch"] <= row.total["threadgroup"] <= 1.15 * row.formula
    assert 9 * row.formula < 2 * row.S * 128 * 2 < 11 * row.formula


def test_the_tables_say_what_was_counted(
    rows: dict[str, traffic.Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traffic, "measure", lambda config: list(rows.values()))
    assert cli.main(["bench", "--attn", "saap", "--traffic"]) == 0
    text = capsys.readouterr().out
    assert f"S = {LENGTH:,} keys: 1 KV heads" in text
    for name, row in rows.items():
        assert text.count(f"\n| {name} | ") == len(LEVELS) + 1
        assert f"| {row.total['dispatch'] / row.formula:.3f} |" in text
    assert cli.main(["bench", "--attn", "saap", "--traffic", "-o", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in printed] == list(rows)
    assert printed[1]["bytes"]["network"]["dispatch"] == rows["balanced"].parts["network"]["dispatch"]


def test_more_probes_than_buckets_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--attn", "saap:probes=1024", "--traffic"]) == 2
    error = capsys.readouterr().err
    assert error == "mlx-sparse: error: probes: expected an integer of at least 1 and at most 1023, got 1024.\n"


# roofline


@pytest.mark.parametrize(("filling", "share"), [("balanced", 0.05), ("half visited", 0.55)])
def test_the_formulae_are_what_the_harness_counts(rows: dict[str, traffic.Row], filling: str, share: float) -> None:
    shape, router = Shape(traffic.G, 1, traffic.D), launches.Router(traffic.BUCKETS, traffic.HIDDEN)
    step = launches.saap_launches(shape, LENGTH, SAAP(), router, share)
    kernels = [launch for launch in step if launch.name != "fold"]
    assert [launch.name for launch in kernels] == ["saap_route", "saap_indices", "attend_indices", "merge"]
    assert sum(launch.once for launch in kernels) == pytest.approx(rows[filling].total["dispatch"], rel=0.02)
    assert sum(launch.each for launch in kernels) == pytest.approx(rows[filling].total["threadgroup"], rel=0.02)


@pytest.mark.parametrize("config", [SAAP(), SAAP(probes=8), SAAP(probes=128)], ids=str)
@pytest.mark.parametrize("chip", roofline.CHIPS, ids=lambda chip: chip.name)
def test_from_the_advised_context_on_the_model_never_loses(chip: roofline.Chip, config: SAAP) -> None:
    for shape in roofline.SHAPES:
        for hidden in model.ROUTERS:
            router = model.router_of(shape, hidden)
            first = model.advised(chip.letter, shape, config, router)
            assert first is not None
            for S in [first, *(S for S in roofline.LENGTHS if S > first), 1 << 20]:
                worst, best = model.saap(chip, shape, S, config, router)[1], roofline.dense(chip, shape, S)[0]
                assert worst < best, (shape, hidden, S)


def test_centroids_that_route_are_a_smaller_network() -> None:
    shape = Shape(32, 8, 128)
    small, large = (launches.Router(1024, hidden) for hidden in (0, 256))
    assert small.weights(128) == 128 * 1024 + 1024
    assert large.weights(128) == 128 * 256 + 256 + 256 * 1024 + 1024
    times = [model.saap(roofline.CHIPS[0], shape, 65_536, SAAP(), router) for router in (small, large)]
    assert all(a < b for a, b in zip(*times, strict=True))


def test_the_roofline_says_what_it_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--attn", "saap", "--roofline"]) == 0
    text = capsys.readouterr().out
    assert "\n\nA model, not a measurement" in text
    assert text.count("| M2 Ultra | ") == 2 * len(model.SHOWN)
    assert cli.main(["bench", "--attn", "saap", "--roofline", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == len(roofline.CHIPS) * len(roofline.SHAPES) * len(model.ROUTERS)
