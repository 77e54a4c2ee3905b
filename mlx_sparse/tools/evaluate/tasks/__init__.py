"""Tasks made from real text, teacher-forced: a prompt and the tokens after it, or one passage run as a whole."""

from collections.abc import Mapping

from .base import SHORTEST, Example, Maker, Passage, Task
from .hidden import find_needles, key_value, multi_key, needle
from .plain import BITS_TOKENS, COPY_PROMPT, COPY_TARGET, bits_per_byte, copy_text, read_text, repetition
from .question import question

TASKS: Mapping[str, Task] = {
    "bits_per_byte": bits_per_byte,
    "repetition": repetition,
    "needle": needle,
    "key_value": key_value,
    "multi_key": multi_key,
    "question": question,
}
PASSAGES: Mapping[str, Maker[Passage]] = {
    "bits_per_byte": read_text,
    "repetition": copy_text,
    "retained_mass": read_text,
}
RETRIEVAL: Mapping[str, Maker[Passage]] = {"needles": find_needles, "repetition": copy_text}

__all__ = [
    "BITS_TOKENS",
    "COPY_PROMPT",
    "COPY_TARGET",
    "PASSAGES",
    "RETRIEVAL",
    "SHORTEST",
    "TASKS",
    "Example",
    "Maker",
    "Passage",
    "Task",
]
