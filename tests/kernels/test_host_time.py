"""scripts/host_time.py: what building a step takes on the host, and of that MLX's own launches. As a command: what it
puts in place of MLX's kernels stays there."""

from __future__ import annotations

import json
import sys

import pytest
from shell import ROOT, run


def test_its_parts_add_up_for_every_step_and_context() -> None:
    done = run(sys.executable, ROOT / "scripts" / "host_time.py", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["rows"]
    steps = {
        "dense": 0,
        "sparq:component_score=query,key_bits=16": 3,
        "sparq:reallocate=false,component_score=query_key": 3,
    }
    assert [(row["keys"], row["step"], row["launched"]) for row in rows] == [
        (keys, step, launched) for keys in (4096, 16_384) for step, launched in steps.items()
    ]
    for row in rows:
        for figures in (row["median"], row["least"]):
            assert figures["whole"] == pytest.approx(figures["mlx"] + figures["ours"])
            assert figures["mlx"] > 0
            assert row["launched"] > 0 or figures["ours"] == 0
