"""Predict ordinary text, and copy what stands in the context."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from .base import Example, Passage, opening, starts

BITS_TOKENS = 128  # scored tokens of one bits-per-byte example
MOST_SCORED = 1024  # positions of a passage, to bound the memory that logits take
COPY_PROMPT = 64  # tokens of the excerpt that the model is shown again ...
COPY_TARGET = 80  # ... and tokens that it then has to copy
COPY_EVERY, MOST_COPIES = 512, 4  # copies in a passage: one in so many tokens of its second half


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


def repetition(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Copy an excerpt from a random place in the middle eight tenths of the text, which begins again at the end."""
    rng = random.Random(seed)
    first = opening(tokenizer)
    room = context - len(first) - COPY_PROMPT
    for start in starts(tokens, room, limit, rng):
        window = tokens[start : start + room]
        place = rng.randrange(room // 10, room - room // 10 - COPY_PROMPT - COPY_TARGET)
        excerpt = window[place : place + COPY_PROMPT + COPY_TARGET]
        yield Example(first + window + excerpt[:COPY_PROMPT], excerpt[COPY_PROMPT:])


def copy_text(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Repeat excerpts of the first half in the second, at random places; predict all but their beginnings."""
    rng = random.Random(seed)
    first = opening(tokenizer)
    half, length = context // 2, COPY_PROMPT + COPY_TARGET
    copies = max(1, min(half // COPY_EVERY, MOST_COPIES))
    for start in starts(tokens, context, limit, rng):
        text = iter(tokens[start : start + context])
        passage, scored = list(first), list[int]()
        for copy in range(copies):
            # Not at a fixed place, nor always at the end: rows that were sampled are attended in full.
            place = half + copy * half // copies + rng.randrange(half // copies - length)
            passage += [next(text) for _ in range(place - len(passage))]
            source = rng.randrange(len(first), half - length)
            passage += passage[source : source + length]
            scored += range(place + COPY_PROMPT - 1, place + length - 1)
        yield Passage(passage + [next(text) for _ in range(context - len(passage))], scored)
