"""Tasks made from real text, teacher-forced: a prompt processed densely, then tokens decoded one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..checks import ConfigError

BITS_TOKENS = 128  # scored tokens of one bits-per-byte example
COPY_PROMPT = 64  # tokens of the excerpt that the model is shown again ...
COPY_TARGET = 80  # ... and tokens that it then has to copy


@dataclass(frozen=True)
class Example:
    """Token ids: ``prompt`` is given, ``target`` is what follows it."""

    prompt: list[int]
    target: list[int]


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


def _starts(tokens: list[int], length: int, limit: int, rng: random.Random) -> list[int]:
    """``limit`` places in different parts of the text."""
    part = len(tokens) // limit
    if part < length:
        raise ConfigError(
            f"--limit: expected {limit} x {length:,} tokens of text, got {len(tokens):,}. Give more --text."
        )
    return [i * part + rng.randrange(part - length + 1) for i in range(limit)]
