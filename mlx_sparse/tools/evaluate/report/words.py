"""What tasks and their figures are called, for people."""

from __future__ import annotations

from collections.abc import Iterable

BITS, MASS = "bits_per_byte", "retained_mass"

TITLES = {
    "repetition": "Repetition: copy on from an excerpt of the prompt",
    BITS: "Bits per byte: predict real text",
    "needle": "Needle: find what is stated once in a long text",
    "key_value": "Key-value recall: find a key's value in a long list",
    "multi_key": "Multi-key: find one key's value among keys like it",
    "question": "Question: find an answer among passages that confuse",
    MASS: "Retained mass: attention that a sparse prompt keeps",
}


def title(task: str) -> str:
    """The heading of a task; its name if it has none."""
    return TITLES.get(task, task)


def count(examples: Iterable[int]) -> str:
    """The numbers of examples as "n = 50", or as a range where rows differ."""
    found = sorted(set(examples))
    return f"n = {found[0]:,}" if len(found) == 1 else f"n = {found[0]:,} to {found[-1]:,}"
