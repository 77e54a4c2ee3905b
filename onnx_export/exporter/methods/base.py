"""Define the interface between the exporter and a decoding method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from mlx_sparse.methods import Method

from ...operators import OPERATORS
from ..graph import Graph

# For verification: tokens of the prompt, and the largest number of keys that the sparse step may attend to. With so few
# keys a short prompt already has a sparse step.
PROMPT, KEYS = 8, 4


@dataclass(frozen=True)
class Step:
    """Inputs of one decode step of a layer in MLX.

    Attributes:
        layer: number of the layer.
        query: ``(B, Hq, 1, D)``.
        keys, values: ``(B, Hkv, S, D)``, the new token included.
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
    """Decoding method of the layers of a file. This class decodes densely; subclasses are sparse.

    Attributes:
        operator: name of the operator that appends to the caches and attends. Its states, ``past_*`` to ``present_*``,
            become inputs and outputs of the file.
        method: settings with every "auto" resolved.
        group: number of consecutive keys that are quantized together; 0 if the method quantizes no keys.
    """

    operator: ClassVar[str] = "CachedAttention"
    group: ClassVar[int] = 0
    method: Method

    @classmethod
    def settled(cls, config: Any, model: Any) -> Decoding:
        """Return the method with the settings ``config``, with every "auto" resolved for mlx-lm's ``model``.

        Raises:
            ConfigError: a setting does not fit the model, or cannot be exported.
            ArtefactError: the artefact is damaged, or was trained for another model.
        """
        return cls(config)

    @property
    def has_body(self) -> bool:
        """Return True if the operator runs without the native kernels."""
        return OPERATORS[self.operator].has_body

    @property
    def sparse_from(self) -> int | None:
        """Smallest number of keys at which decode steps are sparse; None if all steps are dense."""
        below = getattr(self.method, "dense_below", None)
        return None if below is None else int(below)

    @property
    def text(self) -> str:
        """Return the method as text."""
        return str(self.method)

    def serves(self, layer: int) -> bool:
        """Return True if a layer without a sliding window uses the operator."""
        return True

    def attributes(self, lanes: int) -> dict[str, float]:
        """Return the attributes except ``scale`` and ``window``; ``lanes`` is keys per component-major chunk."""
        return {}

    def axes(self, capacity: int) -> dict[str, int]:
        """Return the lengths of axes that only this operator's states have, for caches of ``capacity`` tokens."""
        return {}

    def routing(self, before: Sequence[str], after: Sequence[str]) -> dict[str, str]:
        """Return further inputs, selected from queries and keys ``before`` and ``after`` RoPE, (B, L, H, D)."""
        return {}

    def weights(self, graph: Graph, layer: int, scale: float) -> dict[str, str]:
        """Store the weights of the operator and return them as its inputs."""
        return {}

    def attend(self, call: Step) -> mx.array:
        """Return MLX's output of a sparse step, ``(B, Hq, 1, D)``, for verification."""
        raise NotImplementedError

    def shortened(self) -> Decoding:
        """Return the method with settings that are sparse after `PROMPT` tokens and attend to at most `KEYS` keys."""
        return self
