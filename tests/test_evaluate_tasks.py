"""The tasks of `mlx-sparse eval` and `mlx-sparse tune-sample`: what they show a model and ask of it."""

from __future__ import annotations

from typing import Any

import pytest
from text_tokenizers import Letters, Words
from tiny_models import VOCAB

from mlx_sparse.evaluate.tasks import (
    BITS_TOKENS,
    COPY_PROMPT,
    COPY_TARGET,
    PASSAGES,
    RETRIEVAL,
    TASKS,
)

CONTEXT = 400
TOKENS = [1 + (i * i + i // 7) % (VOCAB - 1) for i in range(4 * (CONTEXT + BITS_TOKENS))]


def test_a_bits_per_byte_example_continues_the_text() -> None:
    for example in TASKS["bits_per_byte"](TOKENS, Words(), context=CONTEXT, limit=3, seed=1):
        text = example.prompt[1:] + example.target
        assert (len(example.prompt), len(example.target), example.prompt[0]) == (CONTEXT, BITS_TOKENS, 1)
        assert any(TOKENS[i : i + len(text)] == text for i in range(len(TOKENS)))


def test_a_repetition_example_asks_for_what_stands_in_the_prompt() -> None:
    for example in TASKS["repetition"](TOKENS, Words(), context=CONTEXT, limit=3, seed=1):
        assert (len(example.prompt), len(example.target), example.prompt[0]) == (CONTEXT, COPY_TARGET, 1)
        excerpt = example.prompt[-COPY_PROMPT:] + example.target
        assert any(example.prompt[i : i + len(excerpt)] == excerpt for i in range(CONTEXT - len(excerpt)))


@pytest.mark.parametrize("task", dict.fromkeys([*PASSAGES.values(), *RETRIEVAL.values()]))
@pytest.mark.parametrize("context", [512, 1024])
def test_a_passage_is_as_long_as_asked_for_and_the_same_every_time(task: Any, context: int) -> None:
    first, second = (list(task(TOKENS, Words(), context=context, limit=2, seed=3)) for _ in range(2))
    assert first == second
    for passage in first:
        assert len(passage.tokens) == context
        assert passage.scored == sorted(set(passage.scored))
        assert context // 2 <= passage.scored[0] and passage.scored[-1] < context - 1
        assert passage.tokens[0] == 1  # what the tokenizer opens a text with


def test_copies_in_a_passage_stand_in_its_first_half() -> None:
    (passage,) = PASSAGES["repetition"](TOKENS * 2, Words(), context=4096, limit=1, seed=3)
    starts = [position for position in passage.scored if position - 1 not in passage.scored]
    assert len(starts) == 4
    assert len({start % 512 for start in starts}) == 4  # not at fixed places
    for start in starts:
        first = start + 1 - COPY_PROMPT
        excerpt = passage.tokens[first : first + COPY_PROMPT + COPY_TARGET]
        assert any(passage.tokens[i : i + len(excerpt)] == excerpt for i in range(2048 - len(excerpt)))
        assert set(range(start, start + COPY_TARGET)) <= set(passage.scored)


def test_a_passage_states_a_needle_once_and_asks_for_it_at_the_end() -> None:
    letters = Letters()
    (passage,) = RETRIEVAL["needles"](letters.encode("text. " * 400), letters, context=2000, limit=1, seed=1)
    text, answers = letters.decode(passage.tokens), letters.decode(passage.targets)
    assert len(answers) == 20 and answers.isdigit()
    for number in (answers[i : i + 5] for i in range(0, 20, 5)):
        assert text.count(number) == 2
        city = text.split(f" is {number}")[0].split()[-1]
        assert f"What is the pass key of {city}? The pass key of {city} is {number}." in text[-400:]
