"""Find what is stated in a long text: a needle, one of several keys, or a line of a list."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ....checks import ConfigError
from .base import Example, Passage, encode, opening, starts

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the examples in turn
CITIES = ("Cairo", "Lisbon", "Oslo", "Quito")
MORE_CITIES = (*CITIES, "Dakar", "Hanoi", "Lima", "Perth")
DEEDS = ("eat grilled sardines", "read old letters", "paint small boats", "listen to street music")
PLACES = ("on the harbour wall", "behind the town hall", "under the stone bridge", "in the walled garden")
TIMES = ("before sunrise", "after the rain", "on a cold evening", "when the bells ring")
PAIRS = 8
KEYS = (
    *("amber", "anchor", "basil", "basket", "candle", "cedar", "coral", "drawer", "ebony", "engine", "fiddle"),
    *("garden", "hammer", "hazel", "island", "ivory", "jacket", "kettle", "ladder", "linen", "maple", "olive"),
    *("pearl", "raven"),
)


@dataclass(frozen=True)
class Question:
    """Tokens of a question, of its answer, and the positions in the answer that are more than a blank."""

    tokens: list[int]
    answer: list[int]
    scored: list[int]


def ask(tokenizer: Any, question: str, answer: str) -> Question:
    """Encode both as one text, so that the answer has the tokens that it has after those words in any text."""
    asked, whole = encode(tokenizer, question), encode(tokenizer, question + answer)
    same = next((i for i, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), min(len(asked), len(whole)))
    target = whole[same:]
    # Not the blank before the answer, where it is a token of its own.
    return Question(whole[:same], target, [i for i, token in enumerate(target) if tokenizer.decode([token]).strip()])


def hide(
    tokenizer: Any,
    text: list[int],
    statements: Sequence[tuple[float, str]],
    question: Question,
    context: int,
    depth: float,
) -> Example:
    """``context`` tokens: as much of ``text`` as there is room for, the statements at their depths, the question.

    Raises:
        ConfigError: there is no room for the statements.
    """
    first = opening(tokenizer)
    pieces = [(place, encode(tokenizer, statement)) for place, statement in sorted(statements)]
    room = context - len(first) - len(question.tokens) - sum(len(piece) for _, piece in pieces)
    if room < 0:
        raise ConfigError(f"--context: expected at least {context - room:,} tokens for this task, got {context:,}.")
    cuts = [0, *(round(place * room) for place, _ in pieces), room]
    prompt = list(first)
    for piece, (before, after) in zip([[], *(piece for _, piece in pieces)], pairwise(cuts), strict=True):
        prompt += piece + text[before:after]
    return Example(prompt + question.tokens, question.answer, question.scored, depth)


def numbers(rng: random.Random, count: int, text: str) -> list[str]:
    """Different numbers of five digits that ``text`` does not hold."""
    found: list[str] = []
    while len(found) < count:
        drawn = str(rng.randrange(10_000, 100_000))
        if drawn not in text and drawn not in found:
            found.append(drawn)
    return found


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


def key_value(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """A list of `PAIRS` lines ``key: value`` in a text, at one of `DEPTHS` in turn; one key is repeated at the end.

    Keys are words, values are five digits, of which each is scored.
    """
    rng = random.Random(seed)
    for i, start in enumerate(starts(tokens, context, limit, rng)):
        text = tokens[start : start + context]
        depth, values = DEPTHS[i % len(DEPTHS)], numbers(rng, PAIRS, tokenizer.decode(text))
        pairs = dict(zip(rng.sample(KEYS, PAIRS), values, strict=True))
        lines = "".join(f"{key}: {value}\n" for key, value in pairs.items())
        wanted = rng.choice(sorted(pairs))
        asked = ask(tokenizer, f"\nThe keys and their values again:\n{wanted}:", f" {pairs[wanted]}")
        yield hide(tokenizer, text, [(depth, f"\n{lines}")], asked, context, depth)


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
