"""Define the interface between the exporter and a method that decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from mlx_sparse.methods import Method

from ...operators import OPERATORS
from ..graph import Graph

# Of the check: tokens of its prompt, and most keys that its sparse step attends to, so that a short prompt shows it.
PROMPT, KEYS = 8, 4


@dataclass(frozen=True)
class Step:
    """One decode step of a layer in MLX.

    Attributes:
        layer: its number.
        query: ``(B, Hq, 1, D)``, and ``keys`` and ``values`` ``(B, Hkv, S, D)`` with those of the new token.
        before: the query and all keys before RoPE.
        scale: factor of the logits.
    """

    layer: int
    query: mx.array
    keys: mx.array
    values: mx.array
    before: tuple[mx.array, mx.array]
    scale: float


@dataclass(frozen=True)
class Decoding:
    """Decoding of the layers of a file: exact, except in subclasses.

    Attributes:
        operator: which appends to the caches and attends. Its states, ``past_*`` to ``present_*``, become inputs and
            outputs of the file.
        method: with every automatic choice made.
        group: keys that become a part of a state together, when the last of them is written; 0 if there are none.
    """

    operator: ClassVar[str] = "CachedAttention"
    group: ClassVar[int] = 0
    method: Method

    @classmethod
    def settled(cls, config: Any, model: Any) -> Decoding:
        """Return the method by the settings ``config``, every automatic choice made for mlx-lm's ``model``.

        Raises:
            ConfigError: a setting does not fit the model, or cannot be exported.
            ArtefactError: its file is damaged, or made for another model.
        """
        return cls(config)

    @property
    def has_body(self) -> bool:
        """Return True if the operator runs without the native kernels."""
        return OPERATORS[self.operator].has_body

    @property
    def sparse_from(self) -> int | None:
        """Keys from which steps are sparse; None where all are exact."""
        below = getattr(self.method, "dense_below", None)
        return None if below is None else int(below)

    @property
    def text(self) -> str:
        """Return the method as text."""
        return str(self.method)

    def serves(self, layer: int) -> bool:
        """Return True if a layer without a sliding window decodes by the operator."""
        return True

    def attributes(self, lanes: int) -> dict[str, float]:
        """Attributes of the operator but ``scale`` and ``window``; ``lanes`` are keys per chunk of its columns."""
        return {}

    def axes(self, capacity: int) -> dict[str, int]:
        """Lengths of axes of the operator's states that only it has, in caches of ``capacity`` tokens."""
        return {}

    def routing(self, before: Sequence[str], after: Sequence[str]) -> dict[str, str]:
        """Inputs of the operator that are its queries and keys ``before`` or ``after`` RoPE, (B, L, H, D)."""
        return {}

    def weights(self, graph: Graph, layer: int, scale: float) -> dict[str, str]:
        """Inputs of the operator that are weights of its own, stored by this call."""
        return {}

    def attend(self, call: Step) -> mx.array:
        """Return MLX's output of a sparse step, ``(B, Hq, 1, D)``, which a file is checked against."""
        raise NotImplementedError

    def shortened(self) -> Decoding:
        """Return the same method with a sparse step after `PROMPT` tokens, over at most `KEYS` keys."""
        return self
