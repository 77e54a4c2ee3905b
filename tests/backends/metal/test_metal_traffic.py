"""Test that scripts/traffic.py counts the bytes of a SparQ step and the work of a gathered prefill."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
import traffic

from mlx_sparse import gather_attention

pytestmark = pytest.mark.slow  # counts bytes


def test_sparq_reads_the_selected_components_and_rows_once(capsys: pytest.CaptureFixture[str]) -> None:
    traffic.main(["sparq"])
    row = json.loads(capsys.readouterr().out)
    heads, rank, top_k = traffic.KV_HEADS, 32, 128
    assert row["bytes"]["keys_t"] == heads * rank * traffic.KEYS * traffic.ITEM
    assert row["bytes"]["keys"] == row["bytes"]["values"] == heads * top_k * traffic.D * traffic.ITEM
    assert row["formula"] < row["mean"] < row["dense"]


def test_the_work_of_gathered_prefill_is_its_density_and_half_of_its_sampled_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    S, chunk = 256, 64
    monkeypatch.setattr(traffic, "GATHER", traffic.Gather(dense_below=0, chunk=chunk, samples=8, exact_tail=0))
    row = traffic.count_gather(S)
    heads = (mx.random.normal((1, heads, S, 16)) for heads in (4, 1, 1))
    _, stats = gather_attention(*heads, chunk=chunk, samples=8, exact_tail=0, neighbors=16, return_stats=True)
    sampled = 8 * (0 + chunk + 2 * chunk + 3 * chunk) / (S * (S + 1) / 2)
    assert row["work"] == pytest.approx(float(stats.density) + sampled / 2)
    assert row["launches"] > 20 and row["mean"] > row["dense"]


def test_an_unknown_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        traffic.main(["dense"])
    assert "invalid choice: 'dense'" in capsys.readouterr().err


def test_the_unfused_step_over_latents_moves_the_latents_twice_and_the_scores_seven_times() -> None:
    G, S, item = 20, 4096, traffic.ITEM
    found = traffic.latent_costs(G, S)
    assert found["unfused"] * traffic.MB == pytest.approx(item * S * (2 * traffic.LATENT + 7 * G), rel=0.02)
    assert found["dense_gflop"] * 1e9 == 2 * G * S * (64 + 512 + 512)
    assert found["gflop"] * 1e9 == 2 * G * (S * (64 + 32) + 32 * 512 + 2 * 512 * traffic.LOW_RANK.at(S).top_k)
