"""Test the decision between sparse and dense attention against its definition."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_sparse.core import reasons
from mlx_sparse.core.base import Method, Prefill
from mlx_sparse.core.decide import NEVER, Facts, chunk_refusal, decide, refusal
from mlx_sparse.methods import HyperAttention, Quest, Sample, SparQ, Streaming

CONFIGS = st.sampled_from(
    [SparQ(top_k=8), SparQ(), SparQ(dense_below=30), Quest(page_size=8, top_k=20), Streaming(sink_tokens=1)]
)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=3)
WAITS = st.none() | st.integers(1, 80)


@given(CONFIGS, st.integers(0, 70), WAITS, LENGTHS)
def test_a_step_is_sparse_if_the_longest_sequence_reaches_the_crossover_length(
    config: Method, estimate: int, measured_at: int | None, lengths: list[int]
) -> None:
    found = decide(config, Facts(estimate=estimate, measured_at=measured_at), lengths)
    below = getattr(config, "dense_below", 0)
    if below == "auto":
        below = 0 if config.experiment else estimate
    assert found.crossover == max(below, config.attended + 1)
    assert (found.reason is None) == (max(lengths) >= found.crossover)
    assert found.reason in (None, reasons.shorter_than(found.crossover))
    assert found.served == [i for i, n in enumerate(lengths) if n >= found.crossover]
    rest = [i for i, n in enumerate(lengths) if n < found.crossover and n > config.attended]
    assert found.short == rest  # a sparse step attends to all keys of shorter sequences


@given(CONFIGS, st.integers(0, 70), WAITS, LENGTHS)
def test_a_decision_is_valid_until_a_sequence_or_a_measurement_changes_it(
    config: Method, estimate: int, measured_at: int | None, lengths: list[int]
) -> None:
    facts, longest = Facts(estimate=estimate, measured_at=measured_at), max(lengths)
    found = decide(config, facts, lengths)

    def later(length: int) -> Any:
        return decide(config, facts, [n + length - longest for n in lengths])

    assert found.start <= longest < found.stop
    first = max(found.start, longest - min(lengths) + 1)  # no sequence is empty
    assert all(later(length) == found for length in range(first, min(found.stop, 200)))
    if found.stop < NEVER:
        after = later(found.stop)
        assert (after.reason, after.served, after.short) != (found.reason, found.served, found.short) or (
            found.stop == measured_at or found.stop - longest + min(lengths) <= config.attended + 1
        )


@pytest.mark.parametrize(
    ("config", "facts", "reason"),
    [
        (None, Facts(), reasons.NO_DECODE),
        (SparQ(), Facts(prompts_only=True), reasons.LAST_OF_PROMPT),
        (SparQ(), Facts(sinks=True), reasons.SINKS),  # one query head per KV head, so SparQ reallocates
        (SparQ(), Facts(4, sinks=True), None),
        (Streaming(), Facts(other_mask=True), reasons.ARRAY_MASK),
        (SparQ(), Facts(sinks=True, other_mask=True), reasons.SINKS),  # of the layer, not only of this call
        (SparQ(), Facts(checked=True, prompts_only=True), reasons.CHECKED),
        (SparQ(), Facts(latent=True, bias=True), reasons.LATENT),
        (SparQ(), Facts(bias=True), None),
        (SparQ(reallocate=True), Facts(bias=True), reasons.ARRAY_MASK),
        (Streaming(), Facts(bias=True), reasons.ARRAY_MASK),
        (Streaming(), Facts(unready=reasons.UNCOUNTED), reasons.UNCOUNTED),
    ],
)
def test_facts_that_exclude_sparse_steps_at_every_length(config: Any, facts: Facts, reason: str | None) -> None:
    assert refusal(config, facts) == reason
    if reason is not None:
        assert decide(config, facts, [100_000]).reason == reason


def test_a_method_that_saves_nothing_is_dense_at_every_length() -> None:
    found = decide(SparQ(), Facts(estimate=NEVER), [1 << 30])
    assert (found.reason, found.served) == (reasons.NOTHING_SAVED, [])


@pytest.mark.parametrize(
    ("config", "facts", "L", "S", "reason"),
    [
        (None, Facts(), 2, 100, reasons.A_FEW),
        (None, Facts(), 16, 16, reasons.PROMPT),
        (None, Facts(), 17, 100, reasons.PROMPT),
        (None, Facts(checked=True), 2, 100, reasons.CHECKED),
        (None, Facts(checked=True), 16, 16, reasons.PROMPT),
        (Sample(), Facts(), 16, 16, reasons.A_FEW),
        (Sample(), Facts(other_mask=True), 512, 512, reasons.ARRAY_MASK),
        (Sample(), Facts(causal=False), 512, 512, reasons.NOT_CAUSAL),
        (Sample(), Facts(), 512, 512, reasons.UNTUNED),
        (Sample(dense_below=600), Facts(), 512, 512, reasons.shorter_than(600)),
        (Sample(dense_below=0, block_size=32), Facts(sinks=True), 512, 512, None),
        (HyperAttention(), Facts(sinks=True), 512, 512, reasons.SINKS),
    ],
)
def test_a_chunk_is_dense_for_the_first_reason(
    config: Prefill | None, facts: Facts, L: int, S: int, reason: str | None
) -> None:
    assert chunk_refusal(config, facts, L, S) == reason
