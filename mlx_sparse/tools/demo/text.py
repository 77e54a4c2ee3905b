"""The demo's task: a real text that comes with Python, a pass key stated inside it, and a question about it."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics

TOPIC = "compound"
KEY = "71853"
CHARACTERS = (10_000, 12_000, 14_000)  # of texts in which SmolLM2-135M finds the key; in others it may not
POSITION = 0.5


@dataclass(frozen=True)
class Task:
    """A prompt whose answer contains ``key``, and words that say what is in it."""

    prompt: str
    key: str
    question: str
    about: str


def pass_key_task(key: str = KEY, position: float = POSITION, characters: int = CHARACTERS[0]) -> Task:
    """State ``key`` between two paragraphs, ``position`` of the way through the text, and ask for it at the end."""
    paragraphs = topics[TOPIC].split("\n\n")
    lengths = [len(paragraph) + 2 for paragraph in paragraphs]
    kept = sum(1 for i in range(len(paragraphs)) if sum(lengths[: i + 1]) <= characters)
    before = sum(1 for i in range(kept) if sum(lengths[: i + 1]) <= position * sum(lengths[:kept]))
    needle = f"A note to the reader: the pass key of this text is {key}. Please remember that the pass key is {key}."
    question = "What is the pass key? Answer with: The pass key is, and its five digits."
    text = [*paragraphs[:before], needle, *paragraphs[before:kept]]
    start, end = "Here is a text. A pass key, a number, is hidden in it.", f"That was the text. {question}"
    about = (
        f"the first {sum(lengths[:kept]):,} characters of Python's language reference on {TOPIC} statements "
        f"(pydoc_data.topics); the pass key {key} is stated {sum(lengths[:before]) / sum(lengths[:kept]):.0%} "
        "of the way in"
    )
    return Task("\n\n".join([start, *text, end]), key, question, about)
