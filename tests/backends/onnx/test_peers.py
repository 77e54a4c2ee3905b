"""Test the graphs, states, rows and refusals of scripts/peers.py. llama.cpp is not needed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import onnx
import peers
import pytest
from evidence import FIELDS
from exported import FLOAT32, copied
from mlx_sparse.onnx_export import bench
from mlx_sparse.onnx_export.runtime.runner import Runner


def test_group_query_attention_gives_the_logits_of_the_exported_file(tmp_path: Path) -> None:
    dense = Runner(copied("dense", tmp_path))
    made = dense.path.with_name("peer.onnx")
    onnx.save(peers.with_group_query(onnx.load(dense.path, load_external_data=False), heads=4), made)
    peer = Runner(made)
    for token in (3, 1, 4, 1, 5):
        ours = dense.step([[token]])
        np.testing.assert_allclose(peer.step([[token]]), ours, rtol=0, atol=FLOAT32 * float(np.abs(ours).max()))


@pytest.mark.parametrize("transposed", [0, 1])
def test_state_of_llama_has_the_size_of_all_keys_and_values(transposed: int) -> None:
    row, layers, S = 6, 2, 5
    one = struct.pack("<4I3i2IiQ", 7, 0, 1, 1, 0, 1, 0, transposed, layers, peers.FLOAT16, row)
    assert len(peers.random_state(one, S)) == 16 + 12 * S + 8 + 2 * layers * (12 + row * S)


def test_rows_of_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BYTES_IN_TURNS", 8_000_000)
    out = tmp_path / "rows.jsonl"
    assert peers.main(["layer", "--lengths", "256", "--turns", "2", "-o", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 10 and all(row["mean"] > 0 < row["ratio"] and row.keys() >= FIELDS.keys() for row in rows)


def test_a_wrong_argument_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["layer", "--lengths", "x", "-o", "rows.jsonl"])
    assert capsys.readouterr().err.startswith("peers.py: error: argument --lengths: ")
