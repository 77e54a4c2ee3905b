"""The short report: at most eight lines, the saving of a step, and one hint."""

from collections import Counter

import numpy as np
import pytest

from mlx_sparse.api.call_report import Counts, Report
from mlx_sparse.core.reasons import shorter_than
from mlx_sparse.lm.statistics import RECALL_STEPS, DraftStatistics, LayerStatistics, PrefillStatistics, RecallStatistics

SHORT = shorter_than(4096)


def report(counts: Counts | None = None, attn: str = "sparq", **attributes) -> Report:
    found = Report(attn=attn, backend="ops", model_type="llama", layers=2, served_layers=2, **attributes)
    found.add(counts or Counts())
    return found


@pytest.mark.parametrize(
    "statistics",
    [  # --lossless refuses prefill methods
        {"prefill": PrefillStatistics(1, 64, 32.0, layers={0: LayerStatistics(4, (2,))})},
        {"drafts": DraftStatistics(checks=1, drafted=2, timed=1)},
    ],
    ids=["prefill", "lossless"],
)
def test_summary_has_at_most_eight_lines_and_the_full_report_has_all_reasons(statistics):
    reasons = Counter({"in prefill": 4, SHORT: 3, "with an array mask": 2, "without a causal mask": 1})
    counts = Counts(20, reasons, 100, 1000, time_to_first_token=(1.0, 2.0), **statistics)
    found = report(counts, weight_bytes=100, dense_layers=Counter({"a": 2, "b": 1}))
    found.recalls = RecallStatistics(np.ones((1, RECALL_STEPS + 1), np.int64))
    lines = found.summary().splitlines()

    assert len(lines) <= 8
    assert lines[1].endswith("time to first token: 1.50 s (mean of 2 prompts)")
    assert lines[0].endswith("; dense layers: 2 a, 1 for other reasons")
    assert f"  dense calls: 4 in prefill, 3 {SHORT}, 3 for other reasons" in lines
    assert lines[-1] == "  hint: --attn-report full lists all reasons"
    assert f"  dense calls: 4 in prefill, 3 {SHORT}, 2 with an array mask, 1 without a causal mask" in str(found)


def test_saving_is_a_share_of_all_bytes_of_a_step():
    # 10 steps of 2 layers: 100 dense bytes and 40 sparse bytes for each step, beside 140 bytes of weights
    found = report(Counts(20, modeled_bytes=400, dense_bytes=1000), weight_bytes=140)
    assert found.saved_share == pytest.approx(60 / 240)
    assert "  estimated saving: 25% of the bytes of a decode step, with the weights" in found.summary()


@pytest.mark.parametrize(
    ("counts", "attributes", "hint"),
    [
        (Counts(0, Counter({SHORT: 4})), {}, "dense_below=N in --attn changes the length"),
        (Counts(0, Counter({SHORT: 4})), {"attn": "sparq:dense_below=0"}, None),  # the user has set the length
        (Counts(0, drafts=DraftStatistics(alone=4, pauses=1)), {}, "drop --lossless here"),
        (Counts(2, Counter(), 4, 10), {"weight_bytes": 1000}, "longer contexts gain more"),
        (Counts(2, Counter(), 4, 1000), {"weight_bytes": 1000}, None),
    ],
    ids=["short context", "short context, given length", "slow drafts", "large weights", "nothing to improve"],
)
def test_summary_ends_with_the_hint_that_helps_most(counts, attributes, hint):
    last = report(counts, **attributes).summary().splitlines()[-1]
    assert last.endswith(hint) if hint else "hint" not in last
