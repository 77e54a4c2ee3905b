"""Find what is stated somewhere in a long text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from .base import Passage, encode, opening, starts

CITIES = ("Cairo", "Lisbon", "Oslo", "Quito")


def find_needles(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Numbers are stated once each at random places of a text, asked for at its end and answered there."""
    rng = random.Random(seed)

    def ids(text: str) -> list[int]:
        return encode(tokenizer, text)

    first = opening(tokenizer)
    for start in starts(tokens, context, limit, rng):
        numbers = {city: f" {rng.randrange(10_000, 100_000)}" for city in CITIES}
        needles = [ids(f"\nThe pass key of {city} is{number}.\n") for city, number in numbers.items()]
        rng.shuffle(needles)
        questions, scored = _questions(ids, tokenizer.decode, rng.sample(sorted(numbers.items()), len(numbers)))
        room = context - len(first) - len(questions) - sum(map(len, needles))
        text = tokens[start : start + room]
        cuts = [0, *sorted(rng.randrange(1, room * 9 // 10) for _ in needles), room]
        passage = list(first)
        for needle, (before, after) in zip([[], *needles], pairwise(cuts), strict=True):
            passage += needle + text[before:after]
        yield Passage(passage + questions, [len(passage) + position for position in scored])


def _questions(
    ids: Callable[[str], list[int]], decode: Callable[[list[int]], str], numbers: list[tuple[str, str]]
) -> tuple[list[int], list[int]]:
    """Questions with their answers, and the positions before the tokens of the numbers."""
    tokens: list[int] = []
    scored = []
    for city, number in numbers:
        tokens += ids(f"\nWhat is the pass key of {city}? The pass key of {city} is")
        for token in ids(number):
            if decode([token]).strip():  # not the blank before a number, where it is a token of its own
                scored.append(len(tokens) - 1)
            tokens.append(token)
        tokens += ids(".")
    return tokens, scored
