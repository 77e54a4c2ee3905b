"""The facts of a run: everything that its figures depend on, and nothing else about the machine or its user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from ...model_info import config_of, kv_shapes, model_type, weights_hash
from .. import environment
from .texts import Text


@dataclass(frozen=True)
class ModelFacts:
    """The model and its attention. KV heads and head dims that differ between layers are lists."""

    name: str
    type: str
    hash: str
    layers: int
    query_heads: int | None
    kv_heads: int | list[int]
    head_dim: int | list[int]


@dataclass(frozen=True)
class TextFacts:
    """A text that examples were made of: its name, the hash and number of its bytes, and its tokens."""

    name: str
    sha256: str
    bytes: int
    tokens: int


@dataclass(frozen=True)
class Facts:
    """What a command ran, and where. Paths stay as they were typed; no environment variable is read."""

    command: str
    date: str
    seed: int
    prefill_step_size: int
    batch: int
    versions: dict[str, str | None]
    machine: dict[str, str | int | None]
    model: ModelFacts
    texts: list[TextFacts]


def run_facts(command: str, name: str, model: Any, texts: Sequence[tuple[Text, int]], **options: int) -> Facts:
    """Return the facts of ``command``.

    Args:
        name: the model as the user named it.
        texts: each with its number of tokens.
        options: ``seed``, ``prefill_step_size`` and ``batch``.
    """
    shapes = [shape for shape in kv_shapes(model) if shape is not None]
    kv_heads, head_dims = (sorted({shape[axis] for shape in shapes}) for axis in (0, 1))
    sizes = [each[0] if len(each) == 1 else each for each in (kv_heads, head_dims)]
    heads = config_of(model).get("num_attention_heads")
    return Facts(
        command=command,
        date=date.today().isoformat(),
        **options,
        versions=environment.versions(),
        machine=environment.hardware(),
        model=ModelFacts(name, model_type(model), weights_hash(model), len(shapes), heads, *sizes),
        texts=[TextFacts(text.name, text.sha256, len(text.text.encode()), tokens) for text, tokens in texts],
    )
