"""Test with scripts/traffic.py that the bytes of one SparQ step equal the formula."""

from __future__ import annotations

import json

import pytest
import traffic

pytestmark = pytest.mark.slow  # counts bytes


def test_sparq_reads_the_selected_components_and_rows_once(capsys: pytest.CaptureFixture[str]) -> None:
    traffic.main(["sparq"])
    row = json.loads(capsys.readouterr().out)
    heads, rank, top_k = traffic.KV_HEADS, 32, 128
    assert row["bytes"]["keys_t"] == heads * rank * traffic.KEYS * traffic.ITEM
    assert row["bytes"]["keys"] == row["bytes"]["values"] == heads * top_k * traffic.D * traffic.ITEM
    assert row["formula"] < row["mean"] < row["dense"]


def test_an_unknown_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        traffic.main(["dense"])
    assert "invalid choice: 'dense'" in capsys.readouterr().err
