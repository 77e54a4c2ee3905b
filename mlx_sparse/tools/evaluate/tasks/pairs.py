"""Recall the value of one of many keys."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from .base import Example, starts
from .hiding import DEPTHS, ask, hide, numbers

PAIRS = 8
KEYS = (
    *("amber", "anchor", "basil", "basket", "candle", "cedar", "coral", "drawer", "ebony", "engine", "fiddle"),
    *("garden", "hammer", "hazel", "island", "ivory", "jacket", "kettle", "ladder", "linen", "maple", "olive"),
    *("pearl", "raven"),
)


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
