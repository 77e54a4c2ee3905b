"""Compare SaapAttention with the oracle, as a function body and as a native kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
from cases import Case
from onnx_operators import Operator, by_runtime, padding, saap_settings, saap_step
from saap_cases import SaapCase, assert_attends

from mlx_sparse import oracle

SMALL = SaapCase(Case(2, 6, 2, 150, 64, "f32", padding=(0, 40)), "random")


def attention(runtime: str, case: SaapCase, **changes: Any) -> Operator:
    return Operator(runtime, "SaapAttention", case.step.dtype, **{**saap_settings(case), **changes})


@by_runtime
def test_rows_of_different_length(runtime: str) -> None:
    case = replace(SMALL, step=replace(SMALL.step, padding=(3, 0)))
    q, k, v = case.inputs()
    given, past = saap_step(case), np.array([149, 60])
    given |= {"past_length": past, "key": k[[0, 1], :, past][:, :, None], "value": v[[0, 1], :, past][:, :, None]}
    for name in ("past_key", "past_value"):
        given[name] = np.where(
            np.arange(given[name].shape[2])[:, None] < past[:, None, None, None], given[name], np.nan
        )
    got = attention(runtime, case)(**given)["output"]
    visited = oracle.saap_route(case.queries_before(), probes=case.probes, **case.network())
    for b, S in enumerate(past + 1):
        row = slice(b, b + 1)
        chosen = {
            "bucket_ids": case.bucket_ids()[row, :, :S],
            "visited": visited[row],
            "left_padding": [padding(case.step)[b]],
        }
        expected = reference.saap_attention(q[row], k[row, :, :S], v[row, :, :S], **chosen, **case.window)
        np.testing.assert_allclose(got[row], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["sink_tokens", "recent_tokens"])
@by_runtime
def test_a_window_longer_than_any_text_is_dense_attention(runtime: str, name: str) -> None:
    q, k, v = SMALL.inputs()
    expected = reference.dense_attention(q, k, v, left_padding=SMALL.step.padding)
    got = attention(runtime, SMALL, **{name: 2**63 - 1})(**saap_step(SMALL))["output"]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize("filling", ["skewed", "one"])
def test_any_number_of_threads_gives_the_same_answer(filling: str, workers: int, limit: Any) -> None:
    """Divide work for more workers, so that the list of a head is attended in splits."""
    limit(None, workers)
    case = SaapCase(Case(2, 6, 2, 5000, 64, "f32", padding=(0, 2500)), filling, recent_tokens=600)
    given = saap_step(case)
    outputs = [attention("native", case, threads=threads)(**given)["output"] for threads in (1, 2, 4)]
    assert_attends(outputs[0], None, case)
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])
