"""Test the lines that commands print before the first token, and the smallest sparse context."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build

import mlx_sparse
from mlx_sparse.api.call_report import Report
from mlx_sparse.calibrate import GIVEN, MODELED, Calibration, Threshold, describe
from mlx_sparse.core.decide import NEVER
from mlx_sparse.core.reasons import UNTUNED
from mlx_sparse.lm.model import enable, plan_of
from mlx_sparse.methods import Sample, SparQ, parse

ONLINE = "saap:mode=online,buckets=4,probes=2,recent_tokens=8,dense_layers=0,dense_below=0"


@pytest.fixture(autouse=True)
def nothing_measured(calibration_folder: Path) -> None:
    """Use an empty calibration folder, because other tests measure the same shapes."""


def plan(attn: str, **options: Any) -> Any:
    model = build()
    enable(model, attn, backend="ops", calibration=Calibration(**options))
    return plan_of(model)


def test_describe_names_thresholds() -> None:
    assert describe(SparQ(), Threshold(NEVER, MODELED)) == "never sparse (modeled)"
    assert describe(parse("sample:ranges=9:0.3:0.3:1")[0], Threshold(0, MODELED)) == "prefill never sparse (modeled)"
    assert describe(Sample(), Threshold(1, MODELED)) == f"dense {UNTUNED}"
    assert describe(Sample(dense_below=9), Threshold(1, GIVEN)) == "prefill sparse at 9 keys and longer (given)"


@pytest.mark.parametrize(
    ("attn", "measures", "starts"),
    [
        ("sparq:rank=4", False, 2048),
        ("sparq:rank=4", True, 1024),  # a measurement may find this length
        ("sparq:rank=4,dense_below=3000", True, 3000),
        ("sparq:rank=4,top_k=4", True, 5),
        ("sample", True, NEVER),
    ],
)
def test_smallest_sparse_context(attn: str, measures: bool, starts: int) -> None:
    assert plan(attn, measures=measures).sparse_from() == starts


def test_finished_measurement_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan("sparq:rank=4", measures=True, seconds=0.01)
    assert found.crossovers() == ["sparse at 2,048 keys and longer (modeled; will be measured at 1,024 keys)"]
    monkeypatch.setattr(Calibration, "measure", lambda *_: None)  # as on a machine that is too noisy
    ((config, layer),) = found.layers
    assert found.calibration.threshold(config, layer, 1024).how == MODELED
    assert found.crossovers() == ["sparse at 2,048 keys and longer (modeled)"]
    assert found.sparse_from() == 2048


def test_prefill_command_prints_no_decode_threshold() -> None:
    found = plan("sample:ranges=9999:0.95:0.95:1+sparq:rank=4")
    assert len(found.crossovers()) == 2
    found.decodes = False
    assert found.crossovers() == [
        "prefill sparse at 8,192 keys and longer if at most 75% of the blocks are selected (modeled)"
    ]


@pytest.mark.parametrize("attn", ["sparq:rank=4", "sample+sparq:rank=4", "h2o", ONLINE])
def test_report_does_not_keep_its_model_alive(attn: str) -> None:
    """Test a server that loads another model: it frees the first model but still prints its report."""
    model = build()
    report: Report = mlx_sparse.enable(model, attn)
    weights = weakref.ref(model.layers[0].self_attn.q_proj)
    del model
    gc.collect()
    assert weights() is None
    assert report.crossovers()
