"""Generate tasks of long word lists: name the most frequent words, as in RULER (arXiv 2404.06654)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import chain, cycle
from typing import TYPE_CHECKING

from .base import WORD, Example, encode, make_question, opening, starts

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

COMMON, OFTEN = 5, 10  # common words of a list, and how often the list repeats them; other words occur once
CODED, COUNTS = 40, (6, 3, 2)  # invented words of a list; counts of the frequent ones per other word
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def common_words(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Yield lists of words of the text. The target names the repeated words in the order of the list."""
    asked = f"\nThe {COMMON} words that the list repeats are, in the order of the list:"
    rng = random.Random(seed)
    vocabulary = sorted({word for word in WORD.findall(tokenizer.decode(tokens)) if word.islower()})
    for start in starts(tokens, context, limit, rng):
        drawn = rng.sample(vocabulary, len(vocabulary))
        common = drawn[:COMMON]
        words = common * OFTEN + drawn[COMMON:]
        yield _list(tokenizer, rng, tokens[start : start + context], words, asked, set(common))


def frequent_words(
    tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int
) -> Iterator[Example]:
    """Yield lists of invented words. The target names the three most frequent words."""
    asked = f"\nThe {len(COUNTS)} most frequent words of the list, the most frequent first, are:"
    rng = random.Random(seed)
    for start in starts(tokens, context, limit, rng):
        names = ["".join(rng.choices(SYLLABLES, k=3)) for _ in range(CODED)]
        frequent = [name for name, count in zip(names, COUNTS, strict=False) for _ in range(count)]
        words = chain.from_iterable([*frequent, other] for other in cycle(names[len(COUNTS) :]))
        yield _list(tokenizer, rng, tokens[start : start + context], words, asked, names[: len(COUNTS)])


def _list(
    tokenizer: Tokenizer,
    rng: random.Random,
    text: list[int],
    words: Iterable[str],
    asked: str,
    answer: list[str] | set[str],
) -> Example:
    """Build a prompt of ``len(text)`` tokens: a start of ``text``, a list, and ``asked``.

    The list has as many of ``words`` as fit, shuffled. A set as ``answer`` is named in the order of the list.
    """
    first, title = opening(tokenizer), encode(tokenizer, "\n\nList:")
    room = len(text) - len(first) - len(title) - len(encode(tokenizer, asked + " ".join(answer))) - 8
    listed: list[tuple[str, list[int]]] = []
    for word in words:
        piece = encode(tokenizer, f" {word}")
        room -= len(piece)
        if room < 0:
            break
        listed.append((word, piece))
    rng.shuffle(listed)
    if isinstance(answer, set):
        answer = list(dict.fromkeys(word for word, _ in listed if word in answer))
    question = make_question(tokenizer, asked, f" {', '.join(answer)}")
    ending = [*title, *(token for _, piece in listed for token in piece), *question.tokens]
    return Example(first + text[: len(text) - len(first) - len(ending)] + ending, question.answer, question.scored)
