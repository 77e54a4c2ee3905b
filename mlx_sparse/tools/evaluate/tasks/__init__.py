"""Tasks made from real text, teacher-forced: a prompt and the tokens after it, or one passage run as a whole."""

from collections.abc import Mapping

from .base import SHORTEST as SHORTEST
from .base import Example as Example
from .base import Maker as Maker
from .base import Passage as Passage
from .hidden import key_value, multi_key, needle, question
from .plain import bits_per_byte, copy_text, read_text, repetition

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
