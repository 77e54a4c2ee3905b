"""Test the tasks of `mlx-sparse eval` and `mlx-sparse tune`: prompts, targets and errors."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import commands
import pytest
from text_tokenizers import CharacterTokenizer, SplitTokenizer, WordTokenizer

from mlx_sparse.checks import ConfigError
from mlx_sparse.tools.evaluate.tasks import PASSAGES, TASKS, Example
from mlx_sparse.tools.evaluate.tasks.needles import ENDING, insert_statements
from mlx_sparse.tools.evaluate.tasks.needles import TASKS as NEEDLES
from mlx_sparse.tools.evaluate.tasks.text import BITS_TOKENS, COPY_PROMPT, COPY_TARGET

CONTEXT = 400
LONG = 640  # tokens of a context that fits every task
TOKENS = commands.tokens(4 * (CONTEXT + BITS_TOKENS))


def test_bits_per_byte_continues_the_text() -> None:
    for example in TASKS["bits_per_byte"](TOKENS, WordTokenizer(), context=CONTEXT, limit=3, seed=1):
        text = example.prompt[1:] + example.target
        assert (len(example.prompt), len(example.target), example.prompt[0]) == (CONTEXT, BITS_TOKENS, 1)
        assert any(TOKENS[i : i + len(text)] == text for i in range(len(TOKENS)))


def test_copying_target_is_in_the_prompt() -> None:
    for example in TASKS["copying"](TOKENS, WordTokenizer(), context=CONTEXT, limit=3, seed=1):
        assert (len(example.prompt), len(example.target), example.prompt[0]) == (CONTEXT, COPY_TARGET, 1)
        excerpt = example.prompt[-COPY_PROMPT:] + example.target
        assert any(example.prompt[i : i + len(excerpt)] == excerpt for i in range(CONTEXT - len(excerpt)))


@pytest.mark.parametrize("task", dict.fromkeys(PASSAGES.values()))
@pytest.mark.parametrize("context", [512, 1024])
def test_passages_are_deterministic_and_exactly_long(task: Any, context: int) -> None:
    first, second = (list(task(TOKENS, WordTokenizer(), context=context, limit=2, seed=3)) for _ in range(2))
    assert first == second
    for passage in first:
        assert len(passage.tokens) == context
        assert passage.scored == sorted(set(passage.scored))
        assert context // 2 <= passage.scored[0] and passage.scored[-1] < context - 1
        assert passage.tokens[0] == 1  # the tokenizer's first token of a text


def test_copied_excerpts_come_from_the_first_half() -> None:
    (passage,) = PASSAGES["copying"](TOKENS * 2, WordTokenizer(), context=4096, limit=1, seed=3)
    starts = [position for position in passage.scored if position - 1 not in passage.scored]
    assert len(starts) == 4
    assert len({start % 512 for start in starts}) == 4  # not at fixed positions
    for start in starts:
        first = start + 1 - COPY_PROMPT
        excerpt = passage.tokens[first : first + COPY_PROMPT + COPY_TARGET]
        assert any(passage.tokens[i : i + len(excerpt)] == excerpt for i in range(2048 - len(excerpt)))
        assert set(range(start, start + COPY_TARGET)) <= set(passage.scored)


TEXT = " ".join(
    f"On the {i}th day the {color} {animal} of {place} went to see what had become of its old {thing}. "
    f"It found nothing there, and {verb} until the evening came."
    for i, (color, animal, place, thing, verb) in enumerate(
        itertools.product(
            ("grey", "brown", "spotted"),
            ("badger", "heron", "squirrel", "lizard"),
            ("Arden", "Lorne", "Ostwick"),
            ("lantern", "bicycle", "umbrella", "teapot"),
            ("waited", "slept", "whistled"),
        )
    )
)
TOKENIZERS = {
    "letters": CharacterTokenizer(),
    "digits": SplitTokenizer(1, blank=False),
    "triples": SplitTokenizer(3, blank=False),
    "sentencepiece": SplitTokenizer(1, blank=True),
}
LETTERS = {"letters": 3}  # factor on the number of tokens
RETRIEVAL_TASKS = ("needle", "key_value", "ruler_multi_key", "cloze")  # with an answer that the prompt has once


@dataclass(frozen=True)
class TaskExamples:
    """Examples of a task with their tokenizer."""

    tokenizer: Any
    context: int
    examples: list[Example]

    def prompt(self, example: Example) -> str:
        return self.tokenizer.decode(example.prompt)

    def scored(self, example: Example) -> str:
        assert example.scored is not None
        return self.tokenizer.decode([example.target[i] for i in example.scored])


def make_examples(task: str, kind: str, *, limit: int = 10, seed: int = 3) -> TaskExamples:
    tokenizer, context = TOKENIZERS[kind], LONG * LETTERS.get(kind, 1)
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    return TaskExamples(
        tokenizer, context, list(TASKS[task](tokens, tokenizer, context=context, limit=limit, seed=seed))
    )


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_examples_are_deterministic_and_exactly_long(task: str, kind: str) -> None:
    first = make_examples(task, kind)
    assert len(first.examples) == 10
    for example in first.examples:
        assert len(example.prompt) == first.context
        assert [SplitTokenizer.OPENING] * (kind != "letters") == example.prompt[: kind != "letters"]
    assert make_examples(task, kind).examples == first.examples
    assert make_examples(task, kind, seed=4).examples != first.examples


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("task", RETRIEVAL_TASKS)
def test_scored_tokens_spell_the_answer(task: str, kind: str) -> None:
    found = make_examples(task, kind)
    for example in found.examples:
        answer = found.tokenizer.decode(example.target)
        assert answer[0] == " " and len(answer.split()) >= 1
        assert found.scored(example).strip() in (answer.strip(), answer.replace(" ", ""))
        assert found.prompt(example).count(answer.strip()) == 1
        assert not found.prompt(example).endswith(" ")  # the space belongs to the answer


# Statements of the other tasks in the prompt of a needle.
OTHERS = re.compile(r"\n\s?(?:The door code of|A locker number of|VAR|\w+:).*(?=\n)")


def test_retrieval_tasks_ask_about_the_same_prompts() -> None:
    prompts = [[example.prompt[:-ENDING] for example in make_examples(task, "digits").examples] for task in NEEDLES]
    assert all(prompt == prompts[0] for prompt in prompts)
    assert len(set(map(tuple, prompts[0]))) == 10


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_several_statements_are_found_in_the_order_of_the_text(kind: str) -> None:
    values, hops = make_examples("ruler_multi_value", kind), make_examples("ruler_variable_tracking", kind)
    for example in values.examples:
        town = re.search(r"locker numbers of (\w+) are$", values.prompt(example)).group(1)
        found = re.findall(rf"A locker number of {town} is ([0-9]{{5}})", values.prompt(example))
        assert values.tokenizer.decode(example.target).strip() == ", ".join(found) and len(found) == 4
    for example in hops.examples:
        chain = re.findall(r"VAR ([A-Z]{3}) = (?:VAR )?(\w+)", hops.prompt(example))
        names = [name for name, _ in chain]
        assert hops.tokenizer.decode(example.target).strip() == ", ".join(names) and len(names) == 5
        assert [given for _, given in chain][1:] == names[:-1]
        assert f"assigned the value {chain[0][1]}." in hops.prompt(example)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_most_frequent_words_are_the_answer(kind: str) -> None:
    for task in ("ruler_common_words", "ruler_frequent_words"):
        found = make_examples(task, kind)
        for example in found.examples:
            listed, asked, _ = re.split("\n ?(The .* words .*:)$", found.prompt(example).split("List:")[1])
            counts = Counter(listed.split())
            answer = found.tokenizer.decode(example.target).strip().split(", ")
            if "common" in asked or "repeats" in asked:
                assert set(answer) == {word for word, count in counts.items() if count >= 10}
                assert answer == [word for word in dict.fromkeys(listed.split()) if word in answer]
            else:
                assert answer == [word for word, _ in counts.most_common(3)]


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_statements_are_inserted_exactly_at_their_depths(depth: float) -> None:
    tokenizer = TOKENIZERS["digits"]
    text, statement = tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.encode("\nVAR XYZ = 12345\n")[1:]
    prompt, rest = insert_statements(tokenizer, text, [(depth, "\nVAR XYZ = 12345\n")], 401)
    room = 400 - len(statement)  # the tokenizer begins a text with one token
    assert prompt[1:] == text[: int(depth * room)] + statement + text[int(depth * room) : room]
    assert rest == text[room:]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_needle_is_at_its_depth(kind: str) -> None:
    found = make_examples("needle", kind)
    assert [example.depth for example in found.examples] == [0.0, 0.25, 0.5, 0.75, 1.0] * 2
    kinds = set()
    for example in found.examples:
        prompt, answer = found.prompt(example), found.tokenizer.decode(example.target).strip()
        statement, stem = re.search(rf"\n\s?((The [a-zA-Z ]+ is(?: to)?) {answer}\.)\n", prompt).groups()
        end = re.search(rf"\n\s?(What is [a-zA-Z ]+\?) {stem}$", prompt)
        assert end is not None
        haystack = found.tokenizer.decode(example.prompt[:-ENDING])
        text = [OTHERS.sub("", part).replace("\n", "").strip() for part in haystack.split(statement)]
        before, after = (len(found.tokenizer.encode(part, add_special_tokens=False)) for part in text)
        assert before / (before + after) == pytest.approx(example.depth, abs=0.05)
        kinds.add((example.depth, answer.isdigit()))
        assert answer.isdigit() == (len(answer) == 5)
    assert len(kinds) == 10  # both kinds of needles at every depth


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_multi_key_queries_one_of_eight_keys(kind: str) -> None:
    found = make_examples("ruler_multi_key", kind)
    for example in found.examples:
        prompt, answer = found.prompt(example), found.tokenizer.decode(example.target).strip()
        keys = dict(re.findall(r"\n\s?The door code of (\w+) is ([0-9]{5})\.\n", prompt))
        assert len(keys) == len(set(keys.values())) == 8
        (wanted,) = re.findall(r"What is the door code of (\w+)\? The door code of \1 is$", prompt)
        assert keys[wanted] == answer
        before = prompt.index(f"The door code of {wanted} is {answer}") / prompt.index("What is")
        assert before == pytest.approx(example.depth, abs=0.4)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_key_value_queries_one_of_the_pairs(kind: str) -> None:
    found = make_examples("key_value", kind)
    wanted = set()
    for example in found.examples:
        prompt, answer = found.prompt(example), found.tokenizer.decode(example.target).strip()
        pairs = re.findall(r"(?<=\n)(\w+): ([0-9]{5})\n", re.sub(r"\n (?=\w+:)", "\n", prompt))
        assert len(pairs) == len(dict(pairs)) == 8
        key = re.search(r"\n\s?(\w+):$", prompt).group(1)
        assert dict(pairs)[key] == answer
        wanted.add([name for name, _ in pairs].index(key))
    assert len(wanted) > 2  # from several positions in the list


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_question_completes_a_sentence_of_a_passage(kind: str) -> None:
    found, text = make_examples("cloze", kind), " ".join(TEXT.split())
    holding = []
    for example in found.examples:
        *passages, end = found.prompt(example).split("\n\n")
        answer = found.tokenizer.decode(example.target).strip()
        quoted = end.strip().removeprefix("Complete this sentence of the text: ")
        assert len(passages) == 8
        assert len(quoted.split()) >= 6
        assert f"{quoted} {answer}" in text
        (place,) = (i for i, passage in enumerate(passages) if answer in passage)
        assert f"{quoted} {answer}" in " ".join(passages[place].split())
        holding.append(place)
    assert holding == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no capital and no stop. " * 2000, "--text: expected sentences with a word that occurs once, got none"),
        ("The cat sat on a mat when Peter came. " * 2000, "--text: expected sentences with a word"),
    ],
)
def test_text_without_questions_is_an_error(text: str, message: str) -> None:
    tokenizer = SplitTokenizer(1, blank=False)
    with pytest.raises(ConfigError, match=message):
        list(TASKS["cloze"](tokenizer.encode(text), tokenizer, context=LONG, limit=1, seed=0))


@pytest.mark.parametrize("task", TASKS)
def test_short_text_is_an_error(task: str) -> None:
    tokenizer = SplitTokenizer(1, blank=False)
    tokens = tokenizer.encode(TEXT)[:1500]
    with pytest.raises(ConfigError, match=r"^--limit: expected 30 x \d+ tokens of text, got 1,500. Give more --text.$"):
        list(TASKS[task](tokens, tokenizer, context=LONG, limit=30, seed=0))


def test_short_context_is_an_error() -> None:
    letters = CharacterTokenizer()
    with pytest.raises(ConfigError, match=r"^--context: expected at least \d+ tokens before the question, got 128.$"):
        list(TASKS["ruler_multi_key"](letters.encode(TEXT), letters, context=256, limit=1, seed=0))
