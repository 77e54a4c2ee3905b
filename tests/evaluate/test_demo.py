"""Test the demo: the parser of the two runs, errors, and one complete run with the real commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tier
from json_tables import read_tables
from mlx_sparse.tools.demo import KEY, compare
from tiny_models import write

from mlx_sparse import cli
from mlx_sparse.checks import ArtefactError
from mlx_sparse.tools import demo
from mlx_sparse.tools.generate_command import Outcome, parse_outcome, parse_report

DATA = read_tables(__file__)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_torch")]  # the demo

REPORT = DATA["report"]
OUT = (
    "==========\nThe pass key is 71853.\n==========\nPrompt: 2434 tokens, 101.331 tokens-per-sec\n"
    "Generation: 12 tokens, 10.291 tokens-per-sec\nPeak memory: 1.972 GB\n"
)


def err(reports: object) -> str:
    return "a warning\n" + json.dumps({"mlx_sparse_report": reports}) + "\n"


def test_output_of_a_run_is_parsed() -> None:
    assert parse_outcome((OUT, "")) == Outcome("The pass key is 71853.", 2434, 101.331, 12, 10.291, peak_memory=1.972)
    assert parse_outcome((OUT, err([REPORT]))).report == REPORT
    with pytest.raises(ArtefactError, match="usual output"):
        parse_outcome(("Please provide a prompt", ""))


@pytest.mark.parametrize("reports", [[], {}, [{"attn": "sparq"}], 3])
def test_report_without_counts_is_refused(reports: object) -> None:
    with pytest.raises(ArtefactError, match="expected counts"):
        parse_report(err(reports))


def test_runs_are_compared(smollm2: Path) -> None:
    dense = Outcome("The pass key is 71853.", 2434, 100.0, 12, 10.0)
    sparse = Outcome("The pass key is 71863! Yes", 2434, 100.0, 12, 10.0, REPORT)
    result = compare(smollm2, KEY, "sparq", dense, sparse)
    # The first four words, the space, each of the five digits and the punctuation are one token each.
    assert (result["same_tokens"], result["tokens"]) == (9, 12)
    assert result["dense"]["right"] and not result["sparse"]["right"]
    assert result["bytes_ratio"] == 0.25
    assert result["sparse"]["bytes_per_token"] == 100_000_000 / 300 * 30


def test_table_fits_a_terminal(smollm2: Path) -> None:
    outcome = Outcome("71853", 2434, 100.0, 12, 10.0, REPORT)
    for attn in ("sparq", "sparq:rank=16,top_k=256,component_score=query_key"):
        table = demo._table(compare(smollm2, KEY, attn, outcome, outcome))
        assert "25%" in table and max(map(len, table.splitlines())) < 80
    none = Outcome("71853", 20, 100.0, 12, 10.0, REPORT | {"sparse_calls": 0, "sparse_bytes": 0, "dense_bytes": 0})
    assert "0 sparse" in demo._table(compare(smollm2, KEY, "sparq", outcome, none))


def test_failing_command_is_shown(demo_cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "tiny")
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert cli.main(["demo", "--model", str(tmp_path / "tiny"), "--cache-dir", str(demo_cache)]) != 0
    assert "Error" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("attn", "expected"),
    [
        ("sparq", "sparq:dense_below=0"),
        ("sample+sparq:dense_below=100000", "sample:dense_below=0+sparq:dense_below=100000"),
        ("sparq:dense_below=100000", "sparq:dense_below=100000"),
        ("sparq:top_k=16", "sparq:top_k=16"),
    ],
)
def test_open_thresholds_are_zero(attn: str, expected: str) -> None:
    assert demo.sparse_at_once(attn) == (expected, attn != expected)


def test_demo_with_the_default_model(
    demo_cache: Path, smollm2: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the demo on the full text with ``--every``, otherwise on the beginning, which also contains the key."""
    if not tier.every:
        monkeypatch.setattr(demo, "CHARACTERS", 2_000)
    options = ["--attn", "sparq:dense_below=0", "--fast-blas", "--json"]
    assert cli.main(["demo", "--cache-dir", str(demo_cache), *options]) == 0
    result: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert KEY in result["dense"]["text"] and KEY in result["sparse"]["text"]
    assert result["same_tokens"] == result["tokens"] > 8
    assert result["dense"]["prompt_tokens"] > (2000 if tier.every else 400)
    report = result["report"]
    assert report["served_layers"] == report["layers"] == 30
    assert report["sparse_calls"] > 0 and 0 < result["bytes_ratio"] < 0.5
    assert not result["forced"]  # the user set the threshold
