"""Find what is stated in a long text: a needle, one of several keys, or a line of a list."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ....checks import ConfigError
from .base import Example, encode, opening, starts

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the examples in turn
CITIES = ("Cairo", "Lisbon", "Oslo", "Quito", "Dakar", "Hanoi", "Lima", "Perth")
DEEDS = ("eat grilled sardines", "read old letters", "paint small boats", "listen to street music")
PLACES = ("on the harbour wall", "behind the town hall", "under the stone bridge", "in the walled garden")
TIMES = ("before sunrise", "after the rain", "on a cold evening", "when the bells ring")
PAIRS = 8
KEYS = (
    *("amber", "anchor", "basil", "basket", "candle", "cedar", "coral", "drawer", "ebony", "engine", "fiddle"),
    *("garden", "hammer", "hazel", "island", "ivory", "jacket", "kettle", "ladder", "linen", "maple", "olive"),
    *("pearl", "raven"),
)

Hidden = tuple[list[tuple[float, str]], str, str]  # statements with their depths, the question, the answer


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
    """State a pass key or, by turns, a sentence once in a text, at one of `DEPTHS` in turn, and ask for it at the end.

    The key's five digits are scored, or the sentence's last words.
    """

    def make(rng: random.Random, i: int, text: str, depth: float) -> Hidden:
        if i % 2 == 0:
            asked, stem = "What is the pass key?", "The pass key is"
            (answer,) = numbers(rng, 1, text)
        else:
            city = rng.choice(CITIES)
            asked, stem = f"What is the best thing to do in {city}?", f"The best thing to do in {city} is to"
            answer = " ".join(map(rng.choice, (DEEDS, PLACES, TIMES)))
        return [(depth, f"\n{stem} {answer}.\n")], f"\n{asked} {stem}", answer

    return _examples(make, tokens, tokenizer, context, limit, seed)


def multi_key(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """State the pass keys of eight cities in a text, and ask for one (multi-key needles of RULER)."""

    def make(rng: random.Random, i: int, text: str, depth: float) -> Hidden:
        wanted = rng.choice(CITIES)
        keys = dict(zip(CITIES, numbers(rng, len(CITIES), text), strict=True))
        statements = [
            (depth if city == wanted else rng.random(), f"\nThe pass key of {city} is {key}.\n")
            for city, key in keys.items()
        ]
        return statements, f"\nWhat is the pass key of {wanted}? The pass key of {wanted} is", keys[wanted]

    return _examples(make, tokens, tokenizer, context, limit, seed)


def key_value(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """State a list of `PAIRS` lines ``key: value`` at one of `DEPTHS` in turn, and repeat one key at the end.

    Keys are words, values are five digits, of which each is scored.
    """

    def make(rng: random.Random, i: int, text: str, depth: float) -> Hidden:
        values = numbers(rng, PAIRS, text)
        pairs = dict(zip(rng.sample(KEYS, PAIRS), values, strict=True))
        lines = "".join(f"{key}: {value}\n" for key, value in pairs.items())
        wanted = rng.choice(sorted(pairs))
        return [(depth, f"\n{lines}")], f"\nThe keys and their values again:\n{wanted}:", pairs[wanted]

    return _examples(make, tokens, tokenizer, context, limit, seed)


def _examples(
    make: Callable[[random.Random, int, str, float], Hidden],
    tokens: list[int],
    tokenizer: Any,
    context: int,
    limit: int,
    seed: int,
) -> Iterator[Example]:
    rng = random.Random(seed)
    for i, start in enumerate(starts(tokens, context, limit, rng)):
        text, depth = tokens[start : start + context], DEPTHS[i % len(DEPTHS)]
        statements, question, answer = make(rng, i, tokenizer.decode(text), depth)
        yield hide(tokenizer, text, statements, ask(tokenizer, question, f" {answer}"), context, depth)
