"""Test the length of the demo's text and forced sparse attention for low, high and infinite crossover lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_sparse.methods import NEVER, SparQ, Step
from mlx_sparse.tools.demo import run
from mlx_sparse.tools.demo.settle import ANSWERED, KEY, MARGIN, pass_key_task, settle, thresholds

USUAL = pass_key_task().prompt
FORCES = "; dense_below=0 forces it here, where it may be slower than dense attention"


def count(text: str) -> int:
    return len(text) // 4


def row(attn: str, value: float, how: str = "modelled") -> dict[str, Any]:
    return {"attn": attn, "value": value, "how": how, "outlook": f"sparse from {value:,.0f} keys on ({how})"}


def test_the_text_grows_with_the_threshold() -> None:
    measured = row("sparq:reallocate=false,component_score=query_key", 2048, "measured on this machine")
    settled = settle("sparq", [measured], count, 6000)
    assert (settled.attn, settled.task.prompt, settled.forced) == ("sparq", USUAL, False)
    assert settled.note == "sparq: sparse from 2,048 keys on (measured on this machine)"
    settled = settle("sparq", [row("sparq", 4000)], count, 6000)
    assert (settled.attn, settled.forced) == ("sparq", False)
    assert 4000 * MARGIN <= count(settled.task.prompt) < 6000
    assert KEY in settled.task.prompt


MODELLED = [SparQ().shortest_context(Step(3, 3, 64, 4, gpu)) for gpu in "gsd"]


@pytest.mark.parametrize(
    ("values", "most"),
    [
        *(([value], ANSWERED) for value in MODELLED),  # a Mac that was not calibrated
        *(([value], 6000) for value in (5900, 19_602, NEVER)),
        ([40_000], 100_000),  # longer than the text
        ([2000, 9000, 1000], 6000),  # the highest threshold counts
    ],
)
def test_sparse_attention_is_forced_where_the_text_would_be_too_long(values: list[int], most: int) -> None:
    settled = settle("sparq:rank=16", [row("sparq:rank=16", value) for value in values], count, most)
    assert (settled.attn, settled.task.prompt, settled.forced) == ("sparq:rank=16,dense_below=0", USUAL, True)
    assert settled.note == f"sparq: sparse from {max(values):,} keys on (modelled){FORCES}"
    assert min(MODELLED) > 14_000


@pytest.mark.parametrize(
    ("share", "most", "forced"),
    [
        (0.5, 20_000, False),
        (0.5, 6000, True),
        (0.5, 8500, True),
        (0.0, 20_000, True),
    ],  # at 8,500 the threshold fits, but not its margin
)
def test_prefill_and_decode_methods_are_forced_separately(share: float, most: int, forced: bool) -> None:
    settled = settle("sample+sparq", [row("sample", share), row("sparq", 3500)], count, most)
    assert settled.forced == forced
    assert settled.attn == ("sample:dense_below=0+sparq" if forced else "sample+sparq")
    assert count(settled.task.prompt) >= MARGIN * (3500 if forced else 8192)
    assert settled.note.count(FORCES) == forced


@pytest.mark.parametrize("attn", ["sparq:dense_below=100000", "sparq:top_k=16", "streaming", "sample:dense_below=9"])
def test_thresholds_of_the_user_stay(attn: str) -> None:
    assert thresholds(Path("nowhere"), attn, {}) == []
    settled = settle(attn, [], count, 6000)
    assert (settled.attn, settled.task.prompt, settled.note, settled.forced) == (attn, USUAL, "", False)
    both = settle(f"sample+{attn}" if "sample" not in attn else f"{attn}+sparq", [], count, 6000)
    assert attn in both.attn
    assert both.forced


def test_the_text_leaves_room_for_the_answer(tmp_path: Path) -> None:
    for text, most in (('{"max_position_embeddings": 4096}', 4096 - 32 - run.CHAT_TOKENS), ("{}", None), ("[]", None)):
        (tmp_path / "config.json").write_text(text)
        assert run._most_tokens(tmp_path, 32) == (most or run.MOST_TOKENS[run.device_kind()])
