"""What a run was: everything that its figures depend on, and nothing else of the machine or its user."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any, Protocol

from ...common.model_info import config_of, kv_shapes, model_type, weights_hash
from .. import environment
from .journal import fields, whole

RUN = ("command", "date", "seed", "prefill_step_size", "batch", "versions", "machine", "model", "texts")
MODEL = ("name", "type", "hash", "layers", "query_heads", "kv_heads", "head_dim")
TEXT = ("name", "sha256", "bytes", "tokens")
LONGEST, MOST = 20_000, 1000  # characters of a text, entries of a list


class Text(Protocol):
    """A text that examples are made of (`texts.Text`)."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def sha256(self) -> str: ...


def run_facts(
    command: str,
    *,
    name: str,
    model: Any,
    texts: Sequence[tuple[Text, int]],
    seed: int,
    prefill_step_size: int,
    batch: int,
) -> dict[str, Any]:
    """Plain data for JSON: what ``command`` ran.

    ``name`` is the model as it was asked for; ``texts`` come with their numbers of tokens. Paths stay as they were
    written, and no variable of the environment is read.
    """
    return {
        "command": command,
        "date": date.today().isoformat(),
        "seed": seed,
        "prefill_step_size": prefill_step_size,
        "batch": batch,
        "versions": environment.versions(),
        "machine": environment.hardware(),
        "model": model_facts(name, model),
        "texts": [
            {"name": text.name, "sha256": text.sha256, "bytes": len(text.text.encode()), "tokens": tokens}
            for text, tokens in texts
        ],
    }


def model_facts(name: str, model: Any) -> dict[str, Any]:
    """Which model, and its attention; KV heads and head dims that differ between layers are lists."""
    shapes = [shape for shape in kv_shapes(model) if shape is not None]
    kv_heads, head_dims = (sorted({shape[axis] for shape in shapes}) for axis in (0, 1))
    return {
        "name": name,
        "type": model_type(model),
        "hash": weights_hash(model),
        "layers": len(shapes),
        "query_heads": config_of(model).get("num_attention_heads"),
        "kv_heads": kv_heads[0] if len(kv_heads) == 1 else kv_heads,
        "head_dim": head_dims[0] if len(head_dims) == 1 else head_dims,
    }


def read_facts(data: Any) -> dict[str, Any]:
    """What `run_facts` made.

    Raises:
        ValueError: it did not.
    """
    found = dict(zip(RUN, fields(data, *RUN), strict=True))
    for name in ("command", "date"):
        read_text(found[name])
    for name in ("seed", "prefill_step_size", "batch"):
        whole(found[name], 0)
    versions, where, texts = found["versions"], found["machine"], found["texts"]
    kinds = ((versions, dict), (where, dict), (texts, list))
    if any(not isinstance(part, kind) or len(part) > MOST for part, kind in kinds):
        raise ValueError(data)
    for entry in (*versions, *versions.values(), *where):
        read_text(entry)
    for value in where.values():
        if value is not None and not isinstance(value, str):
            whole(value, 0)
    *names, layers, query_heads, kv_heads, head_dim = fields(found["model"], *MODEL)
    for entry in names:
        read_text(entry)
    whole(layers, 0)
    for value in (query_heads, kv_heads, head_dim):
        _counts(value)
    for text in texts:
        name, sha256, size, tokens = fields(text, *TEXT)
        for entry in (name, sha256):
            read_text(entry)
        for count in (size, tokens):
            whole(count, 0)
    return found


def read_text(value: Any) -> str:
    """``value`` if it is a text of a sane length; raise `ValueError` otherwise."""
    if not isinstance(value, str) or len(value) > LONGEST:
        raise ValueError(value)
    return value


def _counts(value: Any) -> None:
    """Nothing, a number, or one for each layer."""
    if isinstance(value, list) and len(value) > MOST:
        raise ValueError(value)
    for entry in value if isinstance(value, list) else [] if value is None else [value]:
        whole(entry, 0)
