"""Select the demo's task, the length of its text and the settings, so that something is sparse on any machine."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from ...checks import ArtefactError
from ...methods import NEVER, Method, Prefill, parse
from .command import run_command

TOPIC = "compound"
KEY = "71853"
CHARACTERS = (10_000, 12_000, 14_000)  # of texts in which SmolLM2-135M finds the key; in others it may not
POSITION = 0.5


@dataclass(frozen=True)
class Task:
    """A prompt whose answer contains ``key``, its question, and a description."""

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


MOST_TOKENS = {"cpu": 4096, "gpu": 32768}  # of a text that nobody waits long for
ANSWERED = 3640  # tokens, of the longest text in which SmolLM2-135M finds the key
STEP = 2_000  # characters, between longer texts
MARGIN = 1.1  # a text is so much longer than where sparse attention begins to pay

Row = Mapping[str, Any]
_AT_ONCE: dict[str, Any] = {"dense_below": 0}


@dataclass(frozen=True)
class Settled:
    """Task and settings that the demo runs.

    Attributes:
        attn: for ``--attn``.
        note: a sentence on the reason; empty if the user's settings decided.
        forced: True if a method is sparse before it pays.
    """

    attn: str
    task: Task
    note: str = ""
    forced: bool = False


def thresholds(model: Path, attn: str, environment: dict[str, str]) -> list[Row]:
    """Return what `mlx-sparse calibrate` measures for ``attn``; nothing if the user's settings decide."""
    if not any(config.measurable for config in parse(attn)):
        return []
    command = [sys.executable, "-m", "mlx_sparse.cli", "calibrate", "--model", str(model), "--attn", attn, "--json"]
    out, err = run_command("calibrate", command, "", environment, codes=(0, 1))  # 1: the model decides somewhere
    try:
        rows: list[Row] = json.loads(out)
    except ValueError:
        last = (err.strip().splitlines() or ["no message"])[-1]
        raise ArtefactError(f"calibrate: expected it to succeed with {model}, got: {last}") from None
    return rows


def settle(attn: str, rows: Sequence[Row], count: Callable[[str], int], most: int) -> Settled:
    """Make the text long enough for the methods to pay, or else the methods sparse where they do not.

    Args:
        rows: of `thresholds`.
        count: returns the number of tokens of a text.
        most: tokens that the text may have.
    """
    configs = parse(attn)
    starts = {config: start_of(config, rows) for config in configs if config.measurable}
    within = {config: start for config, start in starts.items() if start * MARGIN <= most}
    task = _long_enough(count, MARGIN * max(within.values(), default=0), most)
    forced = {config for config in starts if task is None or config not in within}
    notes, parts = [], []
    for config in configs:
        part: Any = dataclasses.replace(config, **_AT_ONCE) if config in forced else config
        parts.append(str(part))
        if config in starts:
            forces = "; dense_below=0 forces it here, where it may be slower than dense attention"
            notes.append(f"{_outlook(config, rows)}{forces if config in forced else ''}")
    return Settled("+".join(parts) if forced else attn, task or pass_key_task(), ". ".join(notes), bool(forced))


def start_of(config: Method, rows: Sequence[Row]) -> int:
    """Return the keys from which a method is sparse in all layers that it serves, or `NEVER`."""
    values = [row["value"] for row in _of(config, rows)]
    if isinstance(config, Prefill):
        return config.shortest_context() if min(values, default=0) > 0 else NEVER
    return int(max(values, default=NEVER))


def _of(config: Method, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["attn"].partition(":")[0] == config.name]


def _outlook(config: Method, rows: Sequence[Row]) -> str:
    """Return when a method is sparse, in the words of the layers with the largest threshold."""
    found = max(_of(config, rows), key=lambda row: row["value"], default={"outlook": "never sparse"})
    return f"{config.name}: {found['outlook']}"


def _long_enough(count: Callable[[str], int], tokens: float, most: int) -> Task | None:
    """Return the usual text or a longer one of so many tokens; None if the text ends before, or has too many."""
    for characters in (*CHARACTERS, *range(CHARACTERS[-1] + STEP, len(topics[TOPIC]) + STEP, STEP)):
        task = pass_key_task(characters=characters)
        found = count(task.prompt)
        if found >= tokens:
            return task if found <= max(most, tokens) else None
    return None
