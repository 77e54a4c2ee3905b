"""How many tokens are drafted for a check, when drafting pauses, and the figures of what was drafted."""

from __future__ import annotations

import itertools
import json

import pytest

from mlx_sparse.api.call_report import Counts, Report
from mlx_sparse.lm.chunks import drafts_per_kernel
from mlx_sparse.lm.figures import DraftFigures
from mlx_sparse.lm.speculative.draft_length import DENSE_EVERY, MOST, PAUSE, DraftLength
from mlx_sparse.methods.registry import METAL_ROWS


def paced(draft: float, query: float, chances: float, tokens: int, most: int = MOST) -> tuple[DraftLength, list[int]]:
    """A run with these seconds for a draft and for each query of a check; of ``1 / (1 - chances)`` drafts one fails."""
    pace, lengths, done = DraftLength(most=most), [], 0
    failed = 0.0
    while done < tokens:
        drafts, timed = pace.turn(10**6)
        lengths.append(drafts)
        if not drafts:
            pace.note_step(1.0 if timed else None)
            done += 1
            continue
        accepted = 0
        while accepted < drafts and (failed := failed + 1 - chances) < 1:
            accepted += 1
        failed %= 1
        pace.note_check(drafts, accepted, (drafts * draft, 1.0 + drafts * query) if timed else None)
        done += accepted + 1
    return pace, lengths


@pytest.mark.parametrize(
    ("draft", "query", "chances", "least", "most"),
    [
        (0.1, 0.0, 0.98, 6, 7),  # cheap and right
        (0.1, 0.0, 0.5, 2, 4),  # cheap and often wrong
        (0.5, 0.05, 0.9, 1, 4),
        (0.95, 0.1, 0.9, 0, 0),  # a draft costs what it could save
        (0.2, 1.0, 0.95, 0, 0),  # each query is checked for the price of a step
    ],
)
def test_the_pace_is_that_of_most_tokens_per_second(
    draft: float, query: float, chances: float, least: int, most: int
) -> None:
    pace, lengths = paced(draft, query, chances, 2000)
    settled = lengths[len(lengths) // 2 :]
    usual = max(set(settled), key=settled.count)
    assert least <= usual <= most
    best = max(range(MOST + 1), key=lambda n: sum(chances**i for i in range(n + 1)) / (1 + n * (draft + query)))
    assert pace.rate(usual) >= 0.9 * pace.rate(best) or usual == best == 0


def test_drafts_that_do_not_pay_pause_for_longer_each_time() -> None:
    pace, lengths = paced(0.95, 0.5, 0.5, 3000)
    checks = [place for place, drafts in enumerate(lengths) if drafts]
    pauses = [b - a - 1 for a, b in itertools.pairwise(checks) if b - a > PAUSE // 2]
    assert pace.pauses >= 4
    assert pauses[0] >= PAUSE and all(b >= 1.9 * a or b >= 1000 for a, b in itertools.pairwise(pauses))


def test_dense_steps_are_timed_now_and_then() -> None:
    pace, lengths = paced(0.1, 0.0, 0.98, 10 * DENSE_EVERY)
    assert 10 <= lengths.count(0) <= 14 and not pace.pauses


def test_a_pause_is_short_again_after_drafts_that_paid() -> None:
    pace = DraftLength()

    def rest(accepted: int) -> int:
        """The steps of the pause that follows checks of which so many drafts are accepted."""
        while (turn := pace.turn(100)).drafts or turn.timed:
            if turn.drafts:
                pace.note_check(turn.drafts, min(accepted, turn.drafts), (0.1, 1.0) if turn.timed else None)
            else:
                pace.note_step(1.0)
            if accepted and pace._rounds > 8:
                return 0
        steps = 0
        while not (turn := pace.turn(100)).drafts and not turn.timed:
            pace.note_step(None)
            steps += 1
        return steps

    assert [rest(0), rest(0), rest(MOST), rest(0)] == [PAUSE, 2 * PAUSE, 0, PAUSE]


def test_the_rate_of_acceptance_is_of_drafts_that_were_reached_and_forgets() -> None:
    pace = DraftLength(3)
    pace.note_check(3, 1, None)  # the third came behind a wrong one
    assert pace.acceptance == 2 / 3
    for accepted, least, most in ((0, 0.0, 0.05), (3, 0.95, 1.0)):
        for _ in range(100):
            pace.note_check(3, accepted, None)
        assert least <= pace.acceptance <= most


def test_a_clock_that_stands_still_stops_no_answer() -> None:
    pace = DraftLength()
    for _ in range(50):
        drafts, timed = pace.turn(100)
        if drafts:
            pace.note_check(drafts, 0, (0.0, 0.0) if timed else None)
        else:
            pace.note_step(0.0 if timed else None)
    assert pace.turn(100).drafts <= MOST


def test_a_pace_that_is_given_stays() -> None:
    pace = DraftLength(5)
    assert pace.turn(100).drafts == 5 and pace.turn(3).drafts == 3 and pace.turn(0).drafts == 0


@pytest.mark.parametrize(("G", "mlx", "ours"), [(1, 7, 7), (5, 5, 7), (8, 3, 7), (16, 1, 7), (32, 1, 3), (64, 1, 1)])
def test_a_check_is_one_that_there_is_a_kernel_for(G: int, mlx: int, ours: int) -> None:
    assert (drafts_per_kernel(G), drafts_per_kernel(G, METAL_ROWS)) == (mlx, ours)
    for drafts in (mlx, ours):
        assert max(paced(0.01, 0.0, 0.99, 300, most=drafts)[1]) == drafts


def test_a_slow_check_is_forgotten_after_the_pause_that_it_caused() -> None:
    pace, checks = DraftLength(), 0
    while pace.pauses == 0:
        drafts, timed = pace.turn(10**6)
        if drafts:
            pace.note_check(drafts, drafts, (0.1 * drafts, 50.0) if timed else None)
        else:
            pace.note_step(1.0 if timed else None)
    while checks < 40:
        drafts, timed = pace.turn(10**6)
        checks += drafts > 0
        if drafts:
            pace.note_check(drafts, drafts, (0.1 * drafts, 1.0) if timed else None)
        else:
            pace.note_step(1.0 if timed else None)
    assert pace.pauses == 1


def test_figures_add_up_and_are_said() -> None:
    one = DraftFigures(checks=1, examined=(1, 1), accepted=(1, 0), drafted=3, draft_seconds=1, check_seconds=2, timed=1)
    both = one + DraftFigures(checks=1, examined=(1,), accepted=(0,), drafted=1, alone=0) + DraftFigures(alone=4)
    assert (both.checks, both.examined, both.accepted, both.drafted, both.tokens) == (2, (2, 1), (1, 0), 4, 7)
    first, second, third = both.lines()
    assert "1 of 4 accepted (50%, 0% by position), 1.5 tokens for each of 2 checks" in first
    assert "4 tokens" in second and "drafts 33%, checks 67%" in third


def test_the_report_counts_bytes_per_token() -> None:
    report = Report("sparq", "ops", "llama")
    report.served_layers = 1
    drafts = DraftFigures(checks=2, examined=(2, 1), accepted=(1, 1), drafted=4)
    report.add(Counts(2, formula_bytes=100, dense_bytes=1000, checked_bytes=500, drafts=drafts))
    assert "keys and values for each token: 150 B, dense 500 B, by formula" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["drafts"]["accepted"] == [1, 1]
