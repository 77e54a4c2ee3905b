"""Tasks made from real text, teacher-forced: a prompt and the tokens after it, or one passage run as a whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..checks import ConfigError

BITS_TOKENS = 128  # scored tokens of one bits-per-byte example
COPY_PROMPT = 64  # tokens of the excerpt that the model is shown again ...
COPY_TARGET = 80  # ... and tokens that it then has to copy
MOST_SCORED = 1024  # positions of a passage, to bound the memory that logits take
COPY_EVERY, MOST_COPIES = 512, 4  # copies in a passage: one in so many tokens of its second half
CITIES = ("Cairo", "Lisbon", "Oslo", "Quito")
SHORTEST = 2 * COPY_EVERY  # tokens of a passage


@dataclass(frozen=True)
class Example:
    """Token ids: ``prompt`` is given, ``target`` is what follows it."""

    prompt: list[int]
    target: list[int]


@dataclass(frozen=True)
class Passage:
    """Token ids that are processed as one prompt; at the positions ``scored``, ascending, the next one is predicted."""

    tokens: list[int]
    scored: list[int]

    @property
    def targets(self) -> list[int]:
        """The tokens that the scored positions have to predict."""
        return [self.tokens[position + 1] for position in self.scored]


def bits_per_byte(tokens: list[int], *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Continue the text: ``context`` tokens from a random place, then the next `BITS_TOKENS`."""
    rng = random.Random(seed)
    for start in _starts(tokens, context + BITS_TOKENS, limit, rng):
        window = tokens[start : start + context + BITS_TOKENS]
        yield Example(window[:context], window[context:])


def repetition(tokens: list[int], *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Copy from the context (SparQ paper, section 5): an excerpt is begun again at the end and must be continued."""
    rng = random.Random(seed)
    for start in _starts(tokens, context, limit, rng):
        window = tokens[start : start + context - COPY_PROMPT]
        place = rng.randrange(len(window) // 10, len(window) - len(window) // 10 - COPY_PROMPT - COPY_TARGET)
        excerpt = window[place : place + COPY_PROMPT + COPY_TARGET]
        yield Example(window + excerpt[:COPY_PROMPT], excerpt[COPY_PROMPT:])


TASKS: Mapping[str, Callable[..., Iterator[Example]]] = {"bits_per_byte": bits_per_byte, "repetition": repetition}


def read_text(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Predict the second half of a text, at up to `MOST_SCORED` positions in equal distances."""
    rng = random.Random(seed)
    opening = tokenizer.encode("")  # what the model expects before a text: nothing, or a token of its own
    for start in _starts(tokens, context - len(opening), limit, rng):
        passage = opening + tokens[start : start + context - len(opening)]
        positions = range(context // 2, context - 1)
        yield Passage(passage, list(positions[:: -(-len(positions) // MOST_SCORED)]))


def copy_text(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Excerpts of the first half come again in the second, at random places: predict all but their beginnings."""
    rng = random.Random(seed)
    opening = tokenizer.encode("")
    half, length = context // 2, COPY_PROMPT + COPY_TARGET
    copies = min(half // COPY_EVERY, MOST_COPIES)
    for start in _starts(tokens, context, limit, rng):
        text = iter(tokens[start : start + context])
        passage, scored = list(opening), list[int]()
        for copy in range(copies):
            # Not at a fixed place, nor always at the end: rows that were sampled are attended in full.
            place = half + copy * half // copies + rng.randrange(half // copies - length)
            passage += [next(text) for _ in range(place - len(passage))]
            first = rng.randrange(len(opening), half - length)
            passage += passage[first : first + length]
            scored += range(place + COPY_PROMPT - 1, place + length - 1)
        yield Passage(passage + [next(text) for _ in range(context - len(passage))], scored)


def find_needles(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Numbers are stated once each at random places of a text, asked for at its end and answered there."""
    rng = random.Random(seed)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    opening = tokenizer.encode("")
    for start in _starts(tokens, context, limit, rng):
        numbers = {city: f" {rng.randrange(10_000, 100_000)}" for city in CITIES}
        needles = [encode(f"\nThe pass key of {city} is{number}.\n") for city, number in numbers.items()]
        rng.shuffle(needles)
        questions, scored = _questions(encode, tokenizer.decode, rng.sample(sorted(numbers.items()), len(numbers)))
        room = context - len(opening) - len(questions) - sum(map(len, needles))
        text = tokens[start : start + room]
        cuts = [0, *sorted(rng.randrange(1, room * 9 // 10) for _ in needles), room]
        passage = list(opening)
        for needle, (before, after) in zip([[], *needles], pairwise(cuts), strict=True):
            passage += needle + text[before:after]
        yield Passage(passage + questions, [len(passage) + position for position in scored])


PASSAGES: Mapping[str, Callable[..., Iterator[Passage]]] = {"bits_per_byte": read_text, "repetition": copy_text}
RETRIEVAL: Mapping[str, Callable[..., Iterator[Passage]]] = {"needles": find_needles, "repetition": copy_text}


def _questions(
    encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], numbers: list[tuple[str, str]]
) -> tuple[list[int], list[int]]:
    """Questions with their answers, and the positions before the tokens of the numbers."""
    tokens: list[int] = []
    scored = []
    for city, number in numbers:
        tokens += encode(f"\nWhat is the pass key of {city}? The pass key of {city} is")
        for token in encode(number):
            if decode([token]).strip():  # not the blank before a number, where it is a token of its own
                scored.append(len(tokens) - 1)
            tokens.append(token)
        tokens += encode(".")
    return tokens, scored


def _starts(tokens: list[int], length: int, limit: int, rng: random.Random) -> list[int]:
    """``limit`` places in different parts of the text."""
    part = len(tokens) // limit
    if part < length:
        raise ConfigError(
            f"--limit: expected {limit} x {length:,} tokens of text, got {len(tokens):,}. Give more --text."
        )
    return [i * part + rng.randrange(part - length + 1) for i in range(limit)]
