"""What a run was: everything that its figures depend on, and nothing else of the machine or its user."""

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
    """Which model, and its attention; KV heads and head dims that differ between layers are lists."""

    name: str
    type: str
    hash: str
    layers: int
    query_heads: int | None
    kv_heads: Any
    head_dim: Any


@dataclass(frozen=True)
class TextFacts:
    """A text that examples were made of: its name, the hash and number of its bytes, and its tokens."""

    name: str
    sha256: str
    bytes: int
    tokens: int


@dataclass(frozen=True)
class Facts:
    """What a command ran, and where. Paths stay as they were written; no variable of the environment is read."""

    command: str
    date: str
    seed: int
    prefill_step_size: int
    batch: int
    versions: dict[str, Any]
    machine: dict[str, Any]
    model: ModelFacts
    texts: list[TextFacts]


def run_facts(
    command: str,
    *,
    name: str,
    model: Any,
    texts: Sequence[tuple[Text, int]],
    seed: int,
    prefill_step_size: int,
    batch: int,
) -> Facts:
    """What ``command`` ran: ``name`` is the model as it was asked for, ``texts`` come with their numbers of tokens."""
    return Facts(
        command,
        date.today().isoformat(),
        seed,
        prefill_step_size,
        batch,
        environment.versions(),
        environment.hardware(),
        model_facts(name, model),
        [TextFacts(text.name, text.sha256, len(text.text.encode()), tokens) for text, tokens in texts],
    )


def model_facts(name: str, model: Any) -> ModelFacts:
    """The facts of a ``model`` that was asked for by ``name``."""
    shapes = [shape for shape in kv_shapes(model) if shape is not None]
    kv_heads, head_dims = (sorted({shape[axis] for shape in shapes}) for axis in (0, 1))
    return ModelFacts(
        name,
        model_type(model),
        weights_hash(model),
        len(shapes),
        config_of(model).get("num_attention_heads"),
        kv_heads[0] if len(kv_heads) == 1 else kv_heads,
        head_dims[0] if len(head_dims) == 1 else head_dims,
    )
