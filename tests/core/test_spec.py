"""Test that the numbers in docs/spec match the code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlx_sparse import oracle
from mlx_sparse.core.blocks.layout import Layout
from mlx_sparse.tools.train import run
from mlx_sparse.tools.train.network import Training

SPEC = Path(__file__).parents[2] / "docs" / "spec"
SAAP, SAMPLE = ((SPEC / name).read_text(encoding="utf-8") for name in ("saap.md", "sample.md"))


def test_the_training_defaults_of_saap_are_the_documented_ones() -> None:
    given = run._parser().parse_args(["-o", "x.safetensors"])
    training = Training(hidden=0)
    for name in ("steps", "batch", "rate", "start", "one_text"):
        assert getattr(given, name) == getattr(training, name)
    for row in (
        f"| texts | `--windows`, `--context` | {given.windows} of the model's context, "
        f"at most {run.LONGEST:,} tokens |",
        "| hidden units | `--hidden` | 2 D |",
        f"| steps of Adam | `--steps` | {training.steps} |",
        f"| queries per step | `--batch` | {training.batch} per KV head |",
        f"| learning rate | `--rate` | {training.rate:.0e}, falling to 0 by half a cosine |".replace("e-0", "e-"),
    ):
        assert row in SAAP
    assert training.rate_at(training.steps) == 0


@pytest.mark.parametrize(("distance", "far"), [(5, False), (6, True), (7, True)])
def test_a_key_is_far_from_the_first_distance_that_the_window_leaves_out(distance: int, far: bool) -> None:
    """Test one key that has almost all attention and its own bucket, with a window of six keys."""
    assert "Key j is in far(i) if its distance |i - j| is at least n_r" in SAAP
    S, recent = 20, 6
    keys, queries = np.zeros((S, 8)), np.zeros((S, 8))
    keys[S - 1 - distance], queries[S - 1] = 2.0, 2.0
    ids = np.where(np.arange(S) == S - 1 - distance, 0, 1)
    target = oracle.saap_target(
        queries, keys, ids, buckets=2, sink_tokens=1, recent_tokens=recent, farthest_top=0, scale=1.0
    )
    (row,) = np.flatnonzero(target.rows == S - 1)
    assert (target.mass[row, 0] > 0.99) == far
    in_window = S - 1 - distance >= S - recent
    assert in_window != far


def test_regions_are_cut_at_the_borders_of_row_blocks() -> None:
    assert "Regions are cut at the borders of row blocks" in SAMPLE
    ragged = Layout(L=150, S=230, chunks=2, block_size=32)
    assert [(region.first, region.stop) for region in ragged.regions] == [(2, 5), (5, 8)]
    assert [region.sample for region in ragged.regions] == [(48, 80), (118, 150)]  # and not 75, half of the rows
    even = Layout(L=256, S=256, chunks=2, block_size=32)
    assert [region.sample[1] for region in even.regions] == [128, 256]
