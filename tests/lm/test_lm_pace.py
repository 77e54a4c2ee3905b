"""Test the draft length, the pauses of drafting, and the statistics of drafts."""

from __future__ import annotations

import itertools
import json

import pytest

from mlx_sparse.api.call_report import Counts, Report
from mlx_sparse.core.registry import METAL_ROWS
from mlx_sparse.lm.dense import drafts_per_kernel
from mlx_sparse.lm.speculative.draft_length import DENSE_EVERY, MAX_DRAFTS, PAUSE, DraftLength
from mlx_sparse.lm.statistics import DraftStatistics


def simulate(
    draft: float, query: float, chances: float, tokens: int, most: int = MAX_DRAFTS
) -> tuple[DraftLength, list[int]]:
    """Simulate a run with given seconds per draft and per verified query, and acceptance rate ``chances``."""
    draft_length, lengths, done = DraftLength(most=most), [], 0
    failed = 0.0
    while done < tokens:
        drafts, timed = draft_length.next_draft(10**6)
        lengths.append(drafts)
        if not drafts:
            draft_length.note_step(1.0 if timed else None)
            done += 1
            continue
        accepted = 0
        while accepted < drafts and (failed := failed + 1 - chances) < 1:
            accepted += 1
        failed %= 1
        draft_length.note_check(drafts, accepted, (drafts * draft, 1.0 + drafts * query) if timed else None)
        done += accepted + 1
    return draft_length, lengths


@pytest.mark.parametrize(
    ("draft", "query", "chances", "least", "most"),
    [
        (0.1, 0.0, 0.98, 6, 7),  # fast and accepted
        (0.1, 0.0, 0.5, 2, 4),  # fast and often rejected
        (0.5, 0.05, 0.9, 1, 4),
        (0.95, 0.1, 0.9, 0, 0),  # a draft costs as much as it saves
        (0.2, 1.0, 0.95, 0, 0),  # verifying a query costs a decode step
    ],
)
def test_draft_length_maximizes_tokens_per_second(
    draft: float, query: float, chances: float, least: int, most: int
) -> None:
    draft_length, lengths = simulate(draft, query, chances, 2000)
    settled = lengths[len(lengths) // 2 :]
    usual = max(set(settled), key=settled.count)
    assert least <= usual <= most
    best = max(range(MAX_DRAFTS + 1), key=lambda n: sum(chances**i for i in range(n + 1)) / (1 + n * (draft + query)))
    assert draft_length.rate(usual) >= 0.9 * draft_length.rate(best) or usual == best == 0


def test_pauses_of_slow_drafts_double() -> None:
    draft_length, lengths = simulate(0.95, 0.5, 0.5, 3000)
    checks = [position for position, drafts in enumerate(lengths) if drafts]
    pauses = [b - a - 1 for a, b in itertools.pairwise(checks) if b - a > PAUSE // 2]
    assert draft_length.pauses >= 4
    assert pauses[0] >= PAUSE and all(b >= 1.9 * a or b >= 1000 for a, b in itertools.pairwise(pauses))


def test_dense_steps_are_timed_at_intervals() -> None:
    draft_length, lengths = simulate(0.1, 0.0, 0.98, 10 * DENSE_EVERY)
    assert 10 <= lengths.count(0) <= 14 and not draft_length.pauses


def test_pause_is_short_again_after_accepted_drafts() -> None:
    draft_length = DraftLength()

    def rest(accepted: int) -> int:
        """Return the steps of the pause after verifications with ``accepted`` accepted drafts."""
        while (turn := draft_length.next_draft(100)).drafts or turn.timed:
            if turn.drafts:
                draft_length.note_check(turn.drafts, min(accepted, turn.drafts), (0.1, 1.0) if turn.timed else None)
            else:
                draft_length.note_step(1.0)
            if accepted and draft_length._rounds > 8:
                return 0
        steps = 0
        while not (turn := draft_length.next_draft(100)).drafts and not turn.timed:
            draft_length.note_step(None)
            steps += 1
        return steps

    assert [rest(0), rest(0), rest(MAX_DRAFTS), rest(0)] == [PAUSE, 2 * PAUSE, 0, PAUSE]


def test_acceptance_rate_counts_examined_drafts_and_decays() -> None:
    draft_length = DraftLength(3)
    draft_length.note_check(3, 1, None)  # the third follows a rejected draft
    assert draft_length.acceptance == 2 / 3
    for accepted, least, most in ((0, 0.0, 0.05), (3, 0.95, 1.0)):
        for _ in range(100):
            draft_length.note_check(3, accepted, None)
        assert least <= draft_length.acceptance <= most


def test_stopped_clock_does_not_stop_an_answer() -> None:
    draft_length = DraftLength()
    for _ in range(50):
        drafts, timed = draft_length.next_draft(100)
        if drafts:
            draft_length.note_check(drafts, 0, (0.0, 0.0) if timed else None)
        else:
            draft_length.note_step(0.0 if timed else None)
    assert draft_length.next_draft(100).drafts <= MAX_DRAFTS


def test_given_draft_length_stays_fixed() -> None:
    draft_length = DraftLength(5)
    assert [draft_length.next_draft(most).drafts for most in (100, 3, 0)] == [5, 3, 0]


@pytest.mark.parametrize(("G", "mlx", "ours"), [(1, 7, 7), (5, 5, 7), (8, 3, 7), (16, 1, 7), (32, 1, 3), (64, 1, 1)])
def test_draft_length_fits_the_kernel(G: int, mlx: int, ours: int) -> None:
    assert (drafts_per_kernel(G), drafts_per_kernel(G, METAL_ROWS)) == (mlx, ours)
    for drafts in (mlx, ours):
        assert max(simulate(0.01, 0.0, 0.99, 300, most=drafts)[1]) == drafts


def test_slow_verification_is_discarded_after_its_pause() -> None:
    draft_length, checks = DraftLength(), 0
    while draft_length.pauses == 0 or checks < 40:
        paused = draft_length.pauses > 0
        drafts, timed = draft_length.next_draft(10**6)
        checks += paused and drafts > 0
        if drafts:
            draft_length.note_check(drafts, drafts, (0.1 * drafts, 1.0 if paused else 50.0) if timed else None)
        else:
            draft_length.note_step(1.0 if timed else None)
    assert draft_length.pauses == 1


def test_figures_are_summed_and_printed() -> None:
    one = DraftStatistics(
        checks=1, examined=(1, 1), accepted=(1, 0), drafted=3, draft_seconds=1, check_seconds=2, timed=1
    )
    both = one + DraftStatistics(checks=1, examined=(1,), accepted=(0,), drafted=1, alone=0) + DraftStatistics(alone=4)
    assert (both.checks, both.examined, both.accepted, both.drafted, both.tokens) == (2, (2, 1), (1, 0), 4, 7)
    first, second, third = both.lines()
    assert "1 of 4 accepted (50%, 0% by position), 1.5 tokens per check in 2 checks" in first
    assert "4 tokens" in second and "drafts 33%, checks 67%" in third


def test_the_report_counts_bytes_per_token() -> None:
    report = Report(attn="sparq", backend="ops", model_type="llama")
    report.served_layers = 1
    drafts = DraftStatistics(checks=2, examined=(2, 1), accepted=(1, 1), drafted=4)
    report.add(Counts(2, modeled_bytes=100, dense_bytes=1000, checked_bytes=500, drafts=drafts))
    assert "keys and values for each token: 150 B, dense 500 B, modeled" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["drafts"]["accepted"] == [1, 1]
