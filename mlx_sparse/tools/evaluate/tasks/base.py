"""Define examples and passages, the teacher-forced units of a task, and what all tasks share."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from ....checks import ConfigError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

SHORTEST = 512  # tokens of the shortest context; some tasks need more
WORD = re.compile(r"[A-Za-z]{4,}|[0-9]+")


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of the text after it.

    Attributes:
        scored: ascending positions in ``target`` that are scored; None if all positions are scored.
        depth: depth of the answer in the prompt, from 0 (start) to 1 (end); None if the task has no depth.
    """

    prompt: list[int]
    target: list[int]
    scored: list[int] | None = None
    depth: float | None = None


@dataclass(frozen=True)
class Passage:
    """Token ids of one prompt. At the ascending positions ``scored``, the prediction of the next token is scored."""

    tokens: list[int]
    scored: list[int]

    @property
    def targets(self) -> list[int]:
        return [self.tokens[position + 1] for position in self.scored]


def digest(example: Example | Passage) -> str:
    """Return a hash of the tokens, scored positions and depth. The hash identifies stored results."""
    return hashlib.sha256(json.dumps(vars(example)).encode()).hexdigest()[:16]


M_co = TypeVar("M_co", Example, Passage, covariant=True)


class Maker(Protocol[M_co]):
    """A function that makes examples or passages from a text. The same ``seed`` gives the same result."""

    def __call__(
        self, tokens: list[int], tokenizer: Tokenizer, /, *, context: int, limit: int, seed: int
    ) -> Iterator[M_co]:
        """Yield ``limit`` examples or passages from different parts of ``tokens``. Each prompt has ``context`` tokens.

        Raises:
            ConfigError: the text is too short.
        """
        ...


def opening(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the model requires before a text, such as BOS."""
    ids: list[int] = tokenizer.encode("")
    return ids


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text. The tokens of `opening` are omitted."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def starts(tokens: list[int], length: int, limit: int, rng: random.Random) -> list[int]:
    """Return random start positions of ``limit`` excerpts of ``length`` tokens, from different parts of ``tokens``."""
    part = len(tokens) // limit
    if part < length:
        raise ConfigError(
            f"--limit: expected {limit} x {length:,} tokens of text, got {len(tokens):,}. Give more --text."
        )
    return [i * part + rng.randrange(part - length + 1) for i in range(limit)]


@dataclass(frozen=True)
class Question:
    """Tokens of a question and of its answer. ``scored`` lists the positions in ``answer`` with letters or digits."""

    tokens: list[int]
    answer: list[int]
    scored: list[int]


def make_question(tokenizer: Tokenizer, question: str, answer: str) -> Question:
    """Encode a question and its answer as one text, because the tokens of the answer depend on the text before it."""
    asked, whole = encode(tokenizer, question), encode(tokenizer, question + answer)
    same = next((i for i, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), min(len(asked), len(whole)))
    target = whole[same:]
    # Spaces and commas are not scored if they are separate tokens.
    scored = [i for i, token in enumerate(target) if any(map(str.isalnum, tokenizer.decode([token])))]
    return Question(whole[:same], target, scored)
