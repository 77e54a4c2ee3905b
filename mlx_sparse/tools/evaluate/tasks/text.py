"""Generate tasks of ordinary text: continue the text, or copy an excerpt of the prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .base import Example, Passage, opening, starts

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

BITS_TOKENS = 128  # scored tokens of a bits-per-byte example
MAX_SCORED = 1024  # scored positions of a passage, to limit the memory of the logits
COPY_PROMPT = 64  # tokens of the repeated excerpt in the prompt
COPY_TARGET = 80  # tokens of the excerpt to copy
COPY_EVERY, MAX_COPIES = 512, 4  # tokens of the second half of a passage for each copy; largest number of copies


def bits_per_byte(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Yield examples from random positions of the text. The `BITS_TOKENS` tokens after the prompt are the target."""
    for window in _windows(tokens, tokenizer, context, limit, seed):
        yield Example(window[:context], window[context:])


def read_text(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Yield passages of the text. In the second half of each passage, at most `MAX_SCORED` positions are scored.

    The scored positions are evenly spaced.
    """
    rng = random.Random(seed)
    first = opening(tokenizer)
    for start in starts(tokens, context - len(first), limit, rng):
        passage = first + tokens[start : start + context - len(first)]
        positions = range(context // 2, context - 1)
        yield Passage(passage, list(positions[:: -(-len(positions) // MAX_SCORED)]))


def copying(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Yield examples in which the model must copy an excerpt from the middle 80 % of the prompt.

    The prompt ends with the first tokens of the excerpt. The other tokens of the excerpt are scored.
    """
    rng = random.Random(seed + 1)
    room, size = context - COPY_PROMPT, COPY_PROMPT + COPY_TARGET
    for window in _windows(tokens, tokenizer, context, limit, seed):
        place = rng.randrange(room // 10, room - room // 10 - size)
        excerpt = window[place : place + size]
        yield Example(window[:room] + excerpt[:COPY_PROMPT], excerpt[COPY_PROMPT:])


def _windows(tokens: list[int], tokenizer: Tokenizer, context: int, limit: int, seed: int) -> Iterator[list[int]]:
    """Yield text of ``context + BITS_TOKENS`` tokens. Both tasks use the same text, so that they share a prefill."""
    first = opening(tokenizer)
    length = context - len(first) + BITS_TOKENS
    for start in starts(tokens, length, limit, random.Random(seed)):
        yield first + tokens[start : start + length]


def copy_text(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Yield passages that repeat excerpts from their first half at random positions in their second half.

    Only the copies are scored. The first `COPY_PROMPT` tokens of each copy are not scored.
    """
    rng = random.Random(seed)
    first = opening(tokenizer)
    half, length = context // 2, COPY_PROMPT + COPY_TARGET
    copies = max(1, min(half // COPY_EVERY, MAX_COPIES))
    for start in starts(tokens, context, limit, rng):
        text = iter(tokens[start : start + context])
        passage, scored = list(first), list[int]()
        for copy in range(copies):
            # Use random positions, because SampleAttention is exact at its sampled rows, whose positions are fixed.
            place = half + copy * half // copies + rng.randrange(half // copies - length)
            passage += [next(text) for _ in range(place - len(passage))]
            source = rng.randrange(len(first), half - length)
            passage += passage[source : source + length]
            scored += range(place + COPY_PROMPT - 1, place + length - 1)
        yield Passage(passage + [next(text) for _ in range(context - len(passage))], scored)
