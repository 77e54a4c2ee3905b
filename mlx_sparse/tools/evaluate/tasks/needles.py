"""Generate retrieval tasks: find statements in a long text, as in RULER (arXiv 2404.06654).

All tasks of this file ask about the same prompts, so `mlx-sparse eval` runs their common prefill once. A prompt is a
text with inserted statements: a needle, the door codes of eight cities, eight lines of keys and values, four locker
numbers of one town, and a chain of variables. The prompt ends with the question of the task.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from ....checks import ConfigError
from .base import Example, Passage, encode, make_question, opening, starts

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # depths of consecutive examples
CITIES = ("Cairo", "Lisbon", "Oslo", "Quito", "Dakar", "Hanoi", "Lima", "Perth")
TOWNS = ("Bergen", "Cork", "Delft", "Ghent", "Leeds", "Malmo", "Porto", "Turin")
DEEDS = ("eat grilled sardines", "read old letters", "paint small boats", "listen to street music")
PLACES = ("on the harbour wall", "behind the town hall", "under the stone bridge", "in the walled garden")
TIMES = ("before sunrise", "after the rain", "on a cold evening", "when the bells ring")
PAIRS, VALUES, HOPS = 8, 4, 4  # lines of keys and values, locker numbers of a town, assignments after the first
KEYS = (
    *("amber", "anchor", "basil", "basket", "candle", "cedar", "coral", "drawer", "ebony", "engine", "fiddle"),
    *("garden", "hammer", "hazel", "island", "ivory", "jacket", "kettle", "ladder", "linen", "maple", "olive"),
    *("pearl", "raven"),
)
ENDING = 128  # tokens at the end of a prompt that differ between the tasks
QUESTIONS = 4  # questions in one passage


@dataclass(frozen=True)
class Haystack:
    """Statements with their depths from 0 to 1, and the question and the answer of each task."""

    statements: list[tuple[float, str]]
    questions: dict[str, tuple[str, str]]


def make_haystack(rng: random.Random, i: int, text: str, depth: float) -> Haystack:
    """Make the statements and questions of example ``i``. The answers of most tasks are at ``depth`` in ``text``."""
    drawn = iter(numbers(rng, len(CITIES) + PAIRS + VALUES + 2, text))
    key, value = next(drawn), next(drawn)
    city, town = rng.choice(CITIES), rng.choice(TOWNS)
    if i % 2 == 0:
        asked, stem, found = "What is the pass key?", "The pass key is", key
    else:
        asked, stem = f"What is the best thing to do in {town}?", f"The best thing to do in {town} is to"
        found = " ".join(map(rng.choice, (DEEDS, PLACES, TIMES)))
    codes = {each: next(drawn) for each in CITIES}
    pairs = {each: next(drawn) for each in rng.sample(KEYS, PAIRS)}
    lockers = [next(drawn) for _ in range(VALUES)]
    variables = ["".join(rng.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=3)) for _ in range(HOPS + 1)]
    chain = zip(variables, [value, *(f"VAR {name}" for name in variables)], strict=False)
    lines = "".join(f"{name}: {number}\n" for name, number in pairs.items())
    wanted, second = rng.choice(sorted(pairs)), rng.choice([each for each in CITIES if each != city])
    spread = [(at, _locker(town, number)) for at, number in zip(_depths(rng, VALUES), lockers, strict=True)]
    spread += [
        (at, f"\nVAR {name} = {given}\n") for at, (name, given) in zip(_depths(rng, HOPS + 1), chain, strict=True)
    ]
    return Haystack(
        [
            (depth, f"\n{stem} {found}.\n"),
            *((depth if each == city else rng.random(), _door(each, code)) for each, code in codes.items()),
            (depth, f"\n{lines}"),
            *spread,
        ],
        {
            "needle": (f"\n{asked} {stem}", found),
            "key_value": (f"\nThe keys and their values again:\n{wanted}:", pairs[wanted]),
            "ruler_multi_key": (_ask_door(city), codes[city]),
            "ruler_multi_query": (
                f"\nWhat are the door codes of {city} and {second}? The door codes of {city} and {second} are",
                f"{codes[city]} and {codes[second]}",
            ),
            "ruler_multi_value": (
                f"\nWhat are the {VALUES} locker numbers of {town}? In the order of the text, the locker numbers of "
                f"{town} are",
                ", ".join(lockers),
            ),
            "ruler_variable_tracking": (
                f"\nFind all variables that are assigned the value {value}. The variables are", ", ".join(variables)
            ),
        },
    )  # fmt: skip


def _depths(rng: random.Random, count: int) -> list[float]:
    return sorted(rng.random() for _ in range(count))


def _locker(town: str, number: str) -> str:
    return f"\nA locker number of {town} is {number}.\n"


def _door(city: str, code: str) -> str:
    return f"\nThe door code of {city} is {code}.\n"


def _ask_door(city: str) -> str:
    return f"\nWhat is the door code of {city}? The door code of {city} is"


def numbers(rng: random.Random, count: int, text: str) -> list[str]:
    """Return ``count`` different five-digit numbers that ``text`` does not contain."""
    found: list[str] = []
    while len(found) < count:
        drawn = str(rng.randrange(10_000, 100_000))
        if drawn not in text and drawn not in found:
            found.append(drawn)
    return found


def retrieve(
    task: str, tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int
) -> Iterator[Example]:
    """Yield examples whose prompts end with the question of ``task`` about a statement in the text.

    The depths rotate through `DEPTHS`. The answer is the target; a space before the answer is not scored.
    """
    rng = random.Random(seed)
    for i, start in enumerate(starts(tokens, context, limit, rng)):
        text, depth = tokens[start : start + context], DEPTHS[i % len(DEPTHS)]
        haystack = make_haystack(rng, i, tokenizer.decode(text), depth)
        question, answer = haystack.questions[task]
        asked = make_question(tokenizer, question, f" {answer}")
        room = max(ENDING, len(asked.tokens))
        prefix, rest = insert_statements(tokenizer, text, haystack.statements, context - room)
        yield Example(prefix + rest[: room - len(asked.tokens)] + asked.tokens, asked.answer, asked.scored, depth)


def insert_statements(
    tokenizer: Tokenizer, text: list[int], statements: Sequence[tuple[float, str]], length: int
) -> tuple[list[int], list[int]]:
    """Insert each of ``statements`` into the start of ``text`` at its depth.

    Returns:
        The ``length`` tokens of the result, and the rest of ``text``.
    """
    first = opening(tokenizer)
    pieces = [(place, encode(tokenizer, statement)) for place, statement in sorted(statements)]
    room = length - len(first) - sum(len(piece) for _, piece in pieces)
    if room < 0:
        raise ConfigError(f"--context: expected at least {length - room:,} tokens before the question, got {length:,}.")
    cuts = [0, *(round(place * room) for place, _ in pieces), room]
    found = list(first)
    for piece, (before, after) in zip([[], *(piece for _, piece in pieces)], pairwise(cuts), strict=True):
        found += piece + text[before:after]
    return found, text[room:]


def ask_inside(tokens: list[int], tokenizer: Tokenizer, *, context: int, limit: int, seed: int) -> Iterator[Passage]:
    """Yield passages with the door codes of eight cities in the first half, and `QUESTIONS` questions after it.

    The last question ends the passage. The others are at random positions of the second half. The answers are scored.
    """
    rng = random.Random(seed)
    half = context // 2
    for start in starts(tokens, context, limit, rng):
        text = tokens[start : start + context]
        codes = dict(zip(CITIES, numbers(rng, len(CITIES), tokenizer.decode(text)), strict=True))
        doors = [(rng.random(), _door(city, code)) for city, code in codes.items()]
        passage, rest = insert_statements(tokenizer, text, doors, half)
        scored: list[int] = []
        for number, city in enumerate(rng.sample(CITIES, QUESTIONS), 1):
            asked = make_question(tokenizer, _ask_door(city), f" {codes[city]}")
            size, end = len(asked.tokens) + len(asked.answer), half + number * half // QUESTIONS
            slack = end - size - len(passage)
            if slack < 0:
                raise ConfigError(
                    f"--context: expected at least {2 * QUESTIONS * size:,} tokens for needles, got {context:,}."
                )
            fill = slack if number == QUESTIONS else rng.randrange(slack + 1)
            passage, rest = passage + rest[:fill] + asked.tokens, rest[fill:]
            scored += [len(passage) - 1 + position for position in asked.scored]
            passage = passage + asked.answer
        yield Passage(passage, scored)


TASKS: Mapping[str, partial[Iterator[Example]]] = {
    task: partial(retrieve, task) for task in make_haystack(random.Random(0), 0, "", 0.0).questions
}
