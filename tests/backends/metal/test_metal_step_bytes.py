"""Compare the bytes that reports print with the bytes that the harness counts, and with the buffers of the C++ core."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlx_sparse.methods import SparQ

sys.path.append(str(Path(__file__).parents[3] / "scripts"))
import traffic


@pytest.mark.parametrize("keys", [4096, 16_384])
@pytest.mark.parametrize("method", ["sparq", "sparq4"])
def test_modeled_bytes_of_metal_are_within_4_percent_of_the_count(
    method: str, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "KEYS", keys)
    row = traffic.count(method)
    assert abs(row["modeled"] / row["mean"] - 1) < 0.04


def test_modeled_bytes_of_cpu_contain_the_scores_of_the_cpp_core() -> None:
    """One pass of native/sparq.cc writes float32 scores of each query head and key, and another pass reads them."""
    config = SparQ(reallocate=False)
    moved = config.step_bytes(1000, 64, itemsize=4, row_bytes=256, G=3, backend="cpu")
    codes, scores, rows, row = 1000 * 32 * 4.5 / 8, 1000 * 3 * (4 + 4), 2 * 128 * 256, 4 * 256
    assert moved == codes + scores + rows + row
