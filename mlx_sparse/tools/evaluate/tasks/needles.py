"""Find what is stated once somewhere in a long text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from .base import Example, Passage, encode, opening, starts
from .hiding import DEPTHS, ask, hide, numbers

CITIES = ("Cairo", "Lisbon", "Oslo", "Quito")
MORE_CITIES = (*CITIES, "Dakar", "Hanoi", "Lima", "Perth")
DEEDS = ("eat grilled sardines", "read old letters", "paint small boats", "listen to street music")
PLACES = ("on the harbour wall", "behind the town hall", "under the stone bridge", "in the walled garden")
TIMES = ("before sunrise", "after the rain", "on a cold evening", "when the bells ring")


def needle(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """One statement in a text, by turns a pass key and a sentence, at one of `DEPTHS` in turn; a question repeats it.

    The statement is made once only. Scored are the key's five digits, or the sentence's last words.
    """
    rng = random.Random(seed)
    for i, start in enumerate(starts(tokens, context, limit, rng)):
        text = tokens[start : start + context]
        if i % 2 == 0:
            question, stem = "What is the pass key?", "The pass key is"
            (answer,) = numbers(rng, 1, tokenizer.decode(text))
        else:
            city = rng.choice(MORE_CITIES)
            question, stem = f"What is the best thing to do in {city}?", f"The best thing to do in {city} is to"
            answer = " ".join(map(rng.choice, (DEEDS, PLACES, TIMES)))
        depth = DEPTHS[i % len(DEPTHS)]
        asked = ask(tokenizer, f"\n{question} {stem}", f" {answer}")
        yield hide(tokenizer, text, [(depth, f"\n{stem} {answer}.\n")], asked, context, depth)


def multi_key(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """The pass keys of eight cities in a text, one of them asked for (multi-key needles of RULER)."""
    rng = random.Random(seed)
    for i, start in enumerate(starts(tokens, context, limit, rng)):
        text = tokens[start : start + context]
        depth, wanted = DEPTHS[i % len(DEPTHS)], rng.choice(MORE_CITIES)
        keys = dict(zip(MORE_CITIES, numbers(rng, len(MORE_CITIES), tokenizer.decode(text)), strict=True))
        statements = [
            (depth if city == wanted else rng.random(), f"\nThe pass key of {city} is {key}.\n")
            for city, key in keys.items()
        ]
        asked = ask(tokenizer, f"\nWhat is the pass key of {wanted}? The pass key of {wanted} is", f" {keys[wanted]}")
        yield hide(tokenizer, text, statements, asked, context, depth)


def find_needles(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Numbers are stated once each at random places of a text, asked for at its end and answered there."""
    rng = random.Random(seed)

    def ids(text: str) -> list[int]:
        return encode(tokenizer, text)

    first = opening(tokenizer)
    for start in starts(tokens, context, limit, rng):
        keys = {city: f" {rng.randrange(10_000, 100_000)}" for city in CITIES}
        needles = [ids(f"\nThe pass key of {city} is{key}.\n") for city, key in keys.items()]
        rng.shuffle(needles)
        questions, scored = _questions(ids, tokenizer.decode, rng.sample(sorted(keys.items()), len(keys)))
        room = context - len(first) - len(questions) - sum(map(len, needles))
        text = tokens[start : start + room]
        cuts = [0, *sorted(rng.randrange(1, room * 9 // 10) for _ in needles), room]
        passage = list(first)
        for needle, (before, after) in zip([[], *needles], pairwise(cuts), strict=True):
            passage += needle + text[before:after]
        yield Passage(passage + questions, [len(passage) + position for position in scored])


def _questions(
    ids: Callable[[str], list[int]], decode: Callable[[list[int]], str], keys: list[tuple[str, str]]
) -> tuple[list[int], list[int]]:
    """Questions with their answers, and the positions before the tokens of the numbers."""
    tokens: list[int] = []
    scored = []
    for city, key in keys:
        tokens += ids(f"\nWhat is the pass key of {city}? The pass key of {city} is")
        for token in ids(key):
            if decode([token]).strip():  # not the blank before a number, where it is a token of its own
                scored.append(len(tokens) - 1)
            tokens.append(token)
        tokens += ids(".")
    return tokens, scored
