"""Generate cloze tasks: complete a sentence of one of several passages (SparQ paper, section 5: SQuAD)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ....checks import ConfigError
from .base import WORD, Example, encode, make_question, opening, starts

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

PASSAGE = 256  # tokens of a passage, if the prompt has `PARTS` of them
PARTS = range(8, 65)  # passages in a prompt: one with the answer, and distractors (SparQ paper, figure 6)
REQUEST = "Complete this sentence of the text:"
CANDIDATES = 200  # random candidates for the distractors
WORDS_BEFORE = range(6, 19)  # number of words before the answer
SENTENCE = re.compile(r"(?:(?<=[.!?]\s)|(?<=[.!?]\s\s)|(?<=\n\n))[A-Z][^.!?\n]*(?:\n[^.!?\n]+)*[.!?]")
WHOLE_WORD = re.compile(rf"({WORD.pattern})\W*")  # excludes parts of words such as `run-time`


@dataclass(frozen=True)
class Cloze:
    """A sentence that the model must complete. It consists of the words before the answer, and the answer."""

    words: str
    answer: str


def passages(context: int) -> int:
    """Return the number of passages in a prompt of ``context`` tokens."""
    return min(max(context // PASSAGE, PARTS[0]), PARTS[-1])


def cloze(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Yield examples in which the model must complete a sentence from one of 8 to 64 passages.

    The task is similar to SQuAD with confusion contexts. The prompt ends with the sentence up to the answer, which is a
    word that occurs once in the passages: a number if possible, else a capitalized or long word. The other passages
    share as many words as possible with the quoted part of the sentence.
    """
    rng = random.Random(seed)
    first, gap = opening(tokenizer), encode(tokenizer, "\n\n")
    parts = passages(context)
    most = context // parts  # upper limit for the tokens of the question and of a passage
    least = (context - len(first) - most) // parts - len(gap)  # lower limit for the tokens of a passage
    for i, start in enumerate(starts(tokens, most, limit, rng)):
        for place, cloze in _clozes(tokens, tokenizer, start, least, most):
            asked = make_question(tokenizer, f"{REQUEST} {cloze.words}", f" {cloze.answer}")
            room = context - len(first) - len(asked.tokens) - parts * len(gap)
            places = _distractors(tokens, tokenizer, cloze, -(-room // parts), parts - 1, place, rng)
            if len(places) == parts - 1 and len(asked.tokens) <= most:
                break
        else:
            raise ConfigError("--text: expected sentences with a word that occurs once, got none. Give another --text.")
        places.insert(i % parts, place)
        prompt, cuts = list(first), [room * j // parts for j in range(parts + 1)]
        for at, (before, after) in zip(places, pairwise(cuts), strict=True):
            prompt += tokens[at : at + after - before] + gap
        yield Example(prompt + asked.tokens, asked.answer, asked.scored)


def _clozes(tokens: list[int], tokenizer: Tokenizer, start: int, least: int, most: int) -> Iterator[tuple[int, Cloze]]:
    """Yield pairs of a passage's start position and a cloze from the passage. The first passage starts at ``start``.

    The sentence is within the first ``least`` tokens of the passage. The answer occurs only once in the first ``most``
    tokens of the passage.
    """
    places = len(tokens) - most + 1
    for step in range(0, places, least):
        place = (start + step) % places
        around = tokenizer.decode(tokens[place : place + most]) + REQUEST
        for sentence in SENTENCE.findall(tokenizer.decode(tokens[place : place + least])):
            cloze = _cloze(" ".join(sentence.split()).split(" "), around)
            if cloze is not None:
                yield place, cloze


def _cloze(words: list[str], around: str) -> Cloze | None:
    whole = {i: match.group(1) for i in WORDS_BEFORE if i < len(words) and (match := WHOLE_WORD.fullmatch(words[i]))}
    once = [(i, word) for i, word in whole.items() if _count(word, around) == 1]
    if not once:
        return None
    i, answer = min(once, key=lambda found: (not found[1].isdigit(), not found[1][0].isupper(), -len(found[1])))
    return Cloze(" ".join(words[:i]), answer)


def _count(word: str, text: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


def _distractors(
    tokens: list[int], tokenizer: Tokenizer, cloze: Cloze, length: int, count: int, place: int, rng: random.Random
) -> list[int]:
    """Return start positions of at most ``count`` passages that share many words with ``cloze``.

    No passage contains the answer. Each passage has ``length`` tokens. The passages overlap neither each other nor the
    passage at ``place``.
    """
    quoted = {token for token in encode(tokenizer, cloze.words) if WORD.search(tokenizer.decode([token]))}
    drawn = rng.sample(range(len(tokens) - length + 1), min(CANDIDATES, len(tokens) - length + 1))
    drawn.sort(key=lambda other: -len(quoted.intersection(tokens[other : other + length])))
    found: list[int] = []
    for other in drawn:
        apart = all(abs(other - taken) >= length for taken in (place, *found))
        if apart and _count(cloze.answer, tokenizer.decode(tokens[other : other + length])) == 0:
            found.append(other)
        if len(found) == count:
            break
    return found
