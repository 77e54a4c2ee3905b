"""Generate teacher-forced tasks from real text. A task scores tokens after a prompt or tokens inside a passage."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeVar

from ...checks import ConfigError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

SHORTEST = 512  # tokens of the shortest context that fits every task


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


# Predict ordinary text, and copy an excerpt of the context.

BITS_TOKENS = 128  # scored tokens of a bits-per-byte example
MAX_SCORED = 1024  # scored positions of a passage, to limit the memory of the logits
COPY_PROMPT = 64  # tokens of the repeated excerpt in the prompt
COPY_TARGET = 80  # tokens of the excerpt to copy
COPY_EVERY, MAX_COPIES = 512, 4  # tokens of the second half of a passage for each copy; largest number of copies


def bits_per_byte(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Yield examples from random positions of the text. The `BITS_TOKENS` tokens after the prompt are the target."""
    rng = random.Random(seed)
    first = opening(tokenizer)
    length = context - len(first) + BITS_TOKENS
    for start in starts(tokens, length, limit, rng):
        window = first + tokens[start : start + length]
        yield Example(window[:context], window[context:])


def read_text(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Yield passages of the text. In the second half of each passage, at most `MAX_SCORED` positions are scored.

    The scored positions are evenly spaced.
    """
    rng = random.Random(seed)
    first = opening(tokenizer)
    for start in starts(tokens, context - len(first), limit, rng):
        passage = first + tokens[start : start + context - len(first)]
        positions = range(context // 2, context - 1)
        yield Passage(passage, list(positions[:: -(-len(positions) // MAX_SCORED)]))


def repetition(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Yield examples in which the model must copy an excerpt from the middle 80 % of the prompt.

    The prompt ends with the first tokens of the excerpt. The other tokens of the excerpt are scored.
    """
    rng = random.Random(seed)
    first = opening(tokenizer)
    room = context - len(first) - COPY_PROMPT
    for start in starts(tokens, room, limit, rng):
        window = tokens[start : start + room]
        place = rng.randrange(room // 10, room - room // 10 - COPY_PROMPT - COPY_TARGET)
        excerpt = window[place : place + COPY_PROMPT + COPY_TARGET]
        yield Example(first + window + excerpt[:COPY_PROMPT], excerpt[COPY_PROMPT:])


def copy_text(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Yield passages that repeat excerpts from their first half at random positions in their second half.

    Only the copies are scored. The first `COPY_PROMPT` tokens of each copy are not scored.
    """
    rng = random.Random(seed)
    first = opening(tokenizer)
    half, length = context // 2, COPY_PROMPT + COPY_TARGET
    copies = max(1, min(half // COPY_EVERY, MAX_COPIES))
    for start in starts(tokens, context, limit, rng):
        text = iter(tokens[start : start + context])
        passage, scored = list(first), list[int]()
        for copy in range(copies):
            # Use random positions, because SampleAttention is exact at its sampled rows, whose positions are fixed.
            place = half + copy * half // copies + rng.randrange(half // copies - length)
            passage += [next(text) for _ in range(place - len(passage))]
            source = rng.randrange(len(first), half - length)
            passage += passage[source : source + length]
            scored += range(place + COPY_PROMPT - 1, place + length - 1)
        yield Passage(passage + [next(text) for _ in range(context - len(passage))], scored)


# Ask about a long text: find a needle, one of several keys or a line of a list, or complete a sentence.

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # depths of consecutive examples
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

Statements = tuple[list[tuple[float, str]], str, str]  # statements with their depths, the question, the answer


@dataclass(frozen=True)
class Question:
    """Tokens of a question and of its answer. ``scored`` lists the positions in ``answer`` that are not whitespace."""

    tokens: list[int]
    answer: list[int]
    scored: list[int]


def make_question(tokenizer: Tokenizer, question: str, answer: str) -> Question:
    """Encode a question and its answer as one text, because the tokens of the answer depend on the text before it."""
    asked, whole = encode(tokenizer, question), encode(tokenizer, question + answer)
    same = next((i for i, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), min(len(asked), len(whole)))
    target = whole[same:]
    # The space before the answer is not scored if it is a separate token.
    return Question(whole[:same], target, [i for i, token in enumerate(target) if tokenizer.decode([token]).strip()])


def insert_statements(
    tokenizer: Tokenizer,
    text: list[int],
    statements: Sequence[tuple[float, str]],
    question: Question,
    context: int,
    depth: float,
) -> Example:
    """Build an example whose prompt has ``context`` tokens and ends with ``question``.

    The rest of the prompt is the start of ``text``, with each of ``statements`` inserted at its depth. ``depth`` is the
    depth of the statement that contains the answer.
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
    """Return ``count`` different five-digit numbers that ``text`` does not contain."""
    found: list[str] = []
    while len(found) < count:
        drawn = str(rng.randrange(10_000, 100_000))
        if drawn not in text and drawn not in found:
            found.append(drawn)
    return found


def needle(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Yield examples whose text contains a pass key or a fact about a city.

    The prompt ends with a question about the pass key or the fact. Pass keys and facts alternate, and the depths rotate
    through `DEPTHS`. The five digits of the pass key or the last words of the fact are scored.
    """

    def make(rng: random.Random, i: int, text: str, depth: float) -> Statements:
        if i % 2 == 0:
            asked, stem = "What is the pass key?", "The pass key is"
            (answer,) = numbers(rng, 1, text)
        else:
            city = rng.choice(CITIES)
            asked, stem = f"What is the best thing to do in {city}?", f"The best thing to do in {city} is to"
            answer = " ".join(map(rng.choice, (DEEDS, PLACES, TIMES)))
        return [(depth, f"\n{stem} {answer}.\n")], f"\n{asked} {stem}", answer

    return _examples(make, tokens, tokenizer, context, limit, seed)


def multi_key(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Yield examples whose text contains the pass keys of eight cities, like RULER's multi-key needles.

    The question at the end of the prompt asks for one of the pass keys.
    """

    def make(rng: random.Random, i: int, text: str, depth: float) -> Statements:
        wanted = rng.choice(CITIES)
        keys = dict(zip(CITIES, numbers(rng, len(CITIES), text), strict=True))
        statements = [
            (depth if city == wanted else rng.random(), f"\nThe pass key of {city} is {key}.\n")
            for city, key in keys.items()
        ]
        return statements, f"\nWhat is the pass key of {wanted}? The pass key of {wanted} is", keys[wanted]

    return _examples(make, tokens, tokenizer, context, limit, seed)


def key_value(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Yield examples whose text contains `PAIRS` lines ``key: value``. The prompt ends with one of the keys.

    The model must repeat the value of the key at the end. The depths of the lines rotate through `DEPTHS`. Keys are
    words, and values have five digits. All five digits are scored.
    """

    def make(rng: random.Random, i: int, text: str, depth: float) -> Statements:
        values = numbers(rng, PAIRS, text)
        pairs = dict(zip(rng.sample(KEYS, PAIRS), values, strict=True))
        lines = "".join(f"{key}: {value}\n" for key, value in pairs.items())
        wanted = rng.choice(sorted(pairs))
        return [(depth, f"\n{lines}")], f"\nThe keys and their values again:\n{wanted}:", pairs[wanted]

    return _examples(make, tokens, tokenizer, context, limit, seed)


def _examples(
    make: Callable[[random.Random, int, str, float], Statements],
    tokens: list[int],
    tokenizer: Tokenizer,
    context: int,
    limit: int,
    seed: int,
) -> Iterator[Example]:
    rng = random.Random(seed)
    for i, start in enumerate(starts(tokens, context, limit, rng)):
        text, depth = tokens[start : start + context], DEPTHS[i % len(DEPTHS)]
        statements, question, answer = make(rng, i, tokenizer.decode(text), depth)
        yield insert_statements(
            tokenizer, text, statements, make_question(tokenizer, question, f" {answer}"), context, depth
        )


PARTS = 8  # the passage with the answer and the distractors (SparQ paper, section 5: SQuAD)
REQUEST = "Complete this sentence of the text:"
CANDIDATES = 200  # random candidates for the distractors
WORDS_BEFORE = range(6, 19)  # number of words before the answer
SENTENCE = re.compile(r"(?:(?<=[.!?]\s)|(?<=[.!?]\s\s)|(?<=\n\n))[A-Z][^.!?\n]*(?:\n[^.!?\n]+)*[.!?]")
WORD = re.compile(r"[A-Za-z]{4,}|[0-9]+")
WHOLE_WORD = re.compile(rf"({WORD.pattern})\W*")  # excludes parts of words such as `run-time`


@dataclass(frozen=True)
class Cloze:
    """A sentence that the model must complete. It consists of the words before the answer, and the answer."""

    words: str
    answer: str


def question(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Example]:
    """Yield examples in which the model must complete a sentence from one of eight passages.

    The task is similar to SQuAD with confusion contexts. The prompt ends with the sentence up to the answer, which is a
    word that occurs once in the passages: a number if possible, else a capitalized or long word. The other passages
    share as many words as possible with the quoted part of the sentence.
    """
    rng = random.Random(seed)
    first, gap = opening(tokenizer), encode(tokenizer, "\n\n")
    most = context // PARTS  # upper limit for the tokens of the question and of a passage
    least = (context - len(first) - most) // PARTS - len(gap)  # lower limit for the tokens of a passage
    for i, start in enumerate(starts(tokens, most, limit, rng)):
        for place, cloze in _clozes(tokens, tokenizer, start, least, most):
            asked = make_question(tokenizer, f"{REQUEST} {cloze.words}", f" {cloze.answer}")
            room = context - len(first) - len(asked.tokens) - PARTS * len(gap)
            places = _distractors(tokens, tokenizer, cloze, -(-room // PARTS), place, rng)
            if len(places) == PARTS - 1 and len(asked.tokens) <= most:
                break
        else:
            raise ConfigError("--text: expected sentences with a word that occurs once, got none. Give another --text.")
        places.insert(i % PARTS, place)
        prompt, cuts = list(first), [room * j // PARTS for j in range(PARTS + 1)]
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
    tokens: list[int], tokenizer: Tokenizer, cloze: Cloze, length: int, place: int, rng: random.Random
) -> list[int]:
    """Return start positions of at most `PARTS` - 1 passages that share many words with ``cloze``.

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
        if len(found) == PARTS - 1:
            break
    return found


RECALL = "attention_recall"
TASKS: Mapping[str, Maker[Example]] = {
    "bits_per_byte": bits_per_byte,
    "repetition": repetition,
    "needle": needle,
    "key_value": key_value,
    "multi_key": multi_key,
    "question": question,
}
PASSAGES: Mapping[str, Maker[Passage]] = {"bits_per_byte": read_text, "repetition": copy_text, RECALL: read_text}
