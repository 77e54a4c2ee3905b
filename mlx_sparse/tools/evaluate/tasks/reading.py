"""Predict ordinary text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from .base import Example, Passage, opening, starts

BITS_TOKENS = 128  # scored tokens of one bits-per-byte example
MOST_SCORED = 1024  # positions of a passage, to bound the memory that logits take


def bits_per_byte(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Continue the text: ``context`` tokens from a random place, then the next `BITS_TOKENS`."""
    rng = random.Random(seed)
    first = opening(tokenizer)
    length = context - len(first) + BITS_TOKENS
    for start in starts(tokens, length, limit, rng):
        window = first + tokens[start : start + length]
        yield Example(window[:context], window[context:])


def read_text(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Predict the second half of a text, at up to `MOST_SCORED` positions in equal distances."""
    rng = random.Random(seed)
    first = opening(tokenizer)
    for start in starts(tokens, context - len(first), limit, rng):
        passage = first + tokens[start : start + context - len(first)]
        positions = range(context // 2, context - 1)
        yield Passage(passage, list(positions[:: -(-len(positions) // MOST_SCORED)]))
