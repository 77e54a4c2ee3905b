"""A question about one passage among others that look as if they could answer it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ....checks import ConfigError
from .base import Example, encode, opening, starts
from .hidden import ask

PASSAGES = 8  # one that holds the answer, the others to confuse (SparQ paper, section 5: SQuAD)
REQUEST = "Complete this sentence of the text:"
CANDIDATES = 200  # places that the others are chosen from
BEFORE = range(6, 19)  # words of a sentence before its answer
SENTENCE = re.compile(r"(?:(?<=[.!?]\s)|(?<=[.!?]\s\s)|(?<=\n\n))[A-Z][^.!?\n]*(?:\n[^.!?\n]+)*[.!?]")
WORD = re.compile(r"[A-Za-z]{4,}|[0-9]+")
ALONE = re.compile(rf"({WORD.pattern})\W*")  # no part of a longer one, such as `run-time`


@dataclass(frozen=True)
class Cloze:
    """The words of a sentence before the answer, and the answer."""

    words: str
    answer: str


def question(tokens: list[int], tokenizer: Any, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Complete a sentence of one of eight passages: SQuAD among confusion contexts, as real text can have it.

    A sentence is quoted up to one of its words: its first number, else its first word with a capital, else its longest
    word, which has at least six words before it and stands nowhere else in the prompt. That word is to be told. The
    seven other passages, none of which holds it, are those of `CANDIDATES` random ones that share most words with what
    is quoted. The passage with the answer is the first, the second, ... of the eight in turn.
    """
    rng = random.Random(seed)
    first, gap = opening(tokenizer), encode(tokenizer, "\n\n")
    most = context // PASSAGES  # tokens of the question, and of a passage
    least = (context - len(first) - most) // PASSAGES - len(gap)  # of a passage, if the question has that many
    for i, start in enumerate(starts(tokens, most, limit, rng)):
        for place, cloze in _clozes(tokens, tokenizer, start, least, most):
            asked = ask(tokenizer, f"{REQUEST} {cloze.words}", f" {cloze.answer}")
            room = context - len(first) - len(asked.tokens) - PASSAGES * len(gap)
            places = _confusing(tokens, tokenizer, cloze, -(-room // PASSAGES), place, rng)
            if len(places) == PASSAGES - 1 and len(asked.tokens) <= most:
                break
        else:
            raise ConfigError("--text: expected sentences with a word to ask for, got none. Give another --text.")
        places.insert(i % PASSAGES, place)
        prompt, cuts = list(first), [room * j // PASSAGES for j in range(PASSAGES + 1)]
        for at, (before, after) in zip(places, pairwise(cuts), strict=True):
            prompt += tokens[at : at + after - before] + gap
        yield Example(prompt + asked.tokens, asked.answer, asked.scored)


def _clozes(tokens: list[int], tokenizer: Any, start: int, least: int, most: int) -> Iterator[tuple[int, Cloze]]:
    """Passages from ``start`` on and what can be asked about each."""
    places = len(tokens) - most + 1
    for step in range(0, places, least):
        place = (start + step) % places
        around = tokenizer.decode(tokens[place : place + most]) + REQUEST
        for sentence in SENTENCE.findall(tokenizer.decode(tokens[place : place + least])):
            cloze = _cloze(" ".join(sentence.split()).split(" "), around)
            if cloze is not None:
                yield place, cloze


def _cloze(words: list[str], around: str) -> Cloze | None:
    whole = {i: match.group(1) for i in BEFORE if i < len(words) and (match := ALONE.fullmatch(words[i]))}
    once = [(i, word) for i, word in whole.items() if _count(word, around) == 1]
    if not once:
        return None
    i, answer = min(once, key=lambda found: (not found[1].isdigit(), not found[1][0].isupper(), -len(found[1])))
    return Cloze(" ".join(words[:i]), answer)


def _count(word: str, text: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


def _confusing(
    tokens: list[int], tokenizer: Any, cloze: Cloze, length: int, place: int, rng: random.Random
) -> list[int]:
    """Where the other passages begin, as far as there are any."""
    quoted = {token for token in encode(tokenizer, cloze.words) if WORD.search(tokenizer.decode([token]))}
    drawn = rng.sample(range(len(tokens) - length + 1), min(CANDIDATES, len(tokens) - length + 1))
    drawn.sort(key=lambda other: -len(quoted.intersection(tokens[other : other + length])))
    found: list[int] = []
    for other in drawn:
        apart = all(abs(other - taken) >= length for taken in (place, *found))
        if apart and _count(cloze.answer, tokenizer.decode(tokens[other : other + length])) == 0:
            found.append(other)
        if len(found) == PASSAGES - 1:
            break
    return found
