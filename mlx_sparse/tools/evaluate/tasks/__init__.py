"""Generate teacher-forced tasks from real text. A task scores tokens after a prompt or tokens inside a passage."""

from collections.abc import Mapping

from . import cloze, needles, text, words
from .base import SHORTEST, Example, Maker, Passage, digest, encode

RECALL = "attention_recall"
TASKS: Mapping[str, Maker[Example]] = {
    "bits_per_byte": text.bits_per_byte,
    "copying": text.copying,
    **needles.TASKS,
    "ruler_common_words": words.common_words,
    "ruler_frequent_words": words.frequent_words,
    "cloze": cloze.cloze,
}
PASSAGES: Mapping[str, Maker[Passage]] = {
    "bits_per_byte": text.read_text,
    "copying": text.copy_text,
    "needle": needles.ask_inside,
    RECALL: text.read_text,
}


def family(task: str) -> str:
    """Return the name of the tasks whose prompts have the same first tokens as the prompts of ``task``."""
    return "needles" if task in needles.TASKS else "text" if task in ("bits_per_byte", "copying") else task


__all__ = ["PASSAGES", "RECALL", "SHORTEST", "TASKS", "Example", "Maker", "Passage", "digest", "encode", "family"]
