"""Statements hidden in a text, and a question about one of them at its end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ....checks import ConfigError
from .base import Example, encode, opening

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the examples in turn


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
