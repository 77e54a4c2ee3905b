"""The parts of every task: examples, passages, and places in a text."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ....checks import ConfigError

SHORTEST = 512  # tokens of the shortest context that every task has room in


@dataclass(frozen=True)
class Example:
    """Token ids: ``prompt`` is given, ``target`` is what follows it.

    Attributes:
        scored: positions of ``target``, ascending, that count; None means all.
        depth: where in the prompt the answer stands, from 0 (its beginning) to 1 (its end), where that is a question.
    """

    prompt: list[int]
    target: list[int]
    scored: list[int] | None = None
    depth: float | None = None


@dataclass(frozen=True)
class Passage:
    """Token ids that are processed as one prompt; at the positions ``scored``, ascending, the next one is predicted."""

    tokens: list[int]
    scored: list[int]

    @property
    def targets(self) -> list[int]:
        """The tokens that the scored positions have to predict."""
        return [self.tokens[position + 1] for position in self.scored]


def digest(example: Example | Passage) -> str:
    """Return a hash of the tokens and the scored positions, to which results belong, not to a task's name."""
    return hashlib.sha256(json.dumps(vars(example)).encode()).hexdigest()[:16]


M_co = TypeVar("M_co", Example, Passage, covariant=True)


class Maker(Protocol[M_co]):
    """A function that makes examples or passages from a text, the same ones for the same ``seed``."""

    def __call__(self, tokens: list[int], tokenizer: Any, /, *, context: int, limit: int, seed: int) -> Iterator[M_co]:
        """Yield ``limit`` examples or passages, ``context`` tokens each, from different parts of ``tokens``.

        Raises:
            ConfigError: there is too little text.
        """
        ...


def opening(tokenizer: Any) -> list[int]:
    """Return the tokens that the model expects before a text: none, or one of its own."""
    ids: list[int] = tokenizer.encode("")
    return ids


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a part of a text, without opening tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def starts(tokens: list[int], length: int, limit: int, rng: random.Random) -> list[int]:
    """Return ``limit`` random places in different parts of the text."""
    part = len(tokens) // limit
    if part < length:
        raise ConfigError(
            f"--limit: expected {limit} x {length:,} tokens of text, got {len(tokens):,}. Give more --text."
        )
    return [i * part + rng.randrange(part - length + 1) for i in range(limit)]
