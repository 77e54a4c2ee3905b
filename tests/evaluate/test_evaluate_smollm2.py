"""The shape of the SparQ paper's Table 2 on a real model, in a minute: the evaluation's smoke form."""

from __future__ import annotations

import json
from pathlib import Path

import commands
import pytest

ARGUMENTS = "--methods dense,sparq,h2o,streaming --tasks repetition --budget 1/8 --context 512 --limit 4 --batch 4"


def test_sparq_copies_at_an_eighth_of_the_transfers_where_eviction_cannot(
    smollm2: Path, tmp_path: Path, blas_environment: dict[str, str], without_torch: dict[str, str]
) -> None:
    out = tmp_path / "results"
    command = ["-m", "mlx_sparse.cli", "eval", "--model", str(smollm2), "--out", str(out), *ARGUMENTS.split()]
    done = commands.run(command, blas_environment | without_torch)
    assert done.returncode == 0, done.stderr
    lines = (out / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["method"]: row for row in map(json.loads, lines)}
    accuracy = {method: row["mean"]["accuracy"] for method, row in rows.items()}
    assert accuracy["dense"] > 0.85  # or the rest proves nothing
    assert accuracy["sparq"] > accuracy["dense"] - 0.15
    assert accuracy["sparq"] > max(accuracy["h2o"], accuracy["streaming"]) + 0.2
    assert rows["sparq"]["mean"]["kl"] < min(rows["h2o"]["mean"]["kl"], rows["streaming"]["mean"]["kl"]) / 2
    for method in ("sparq", "h2o", "streaming"):
        assert (rows[method]["budget"], rows[method]["dense_calls"]) == ("1/8", 0)
        assert rows[method]["formula"] <= 1 / 8
        assert rows[method]["compression"] == pytest.approx(1 / 8, rel=0.15)  # the text grows while it decodes
    assert (out / "report.html").stat().st_size > (out / "quality-repetition.svg").stat().st_size > 1000
