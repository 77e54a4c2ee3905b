"""Define the interface between the exporter and a decode method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx

from mlx_sparse.core.base import Method

from ...operators import OPERATORS
from ..graph import Graph

if TYPE_CHECKING:
    from mlx import nn

# For verification: number of prompt tokens, and maximum number of keys that a sparse step attends to. KEYS is less than
# PROMPT, so that a step after the prompt is sparse.
PROMPT, KEYS = 8, 4


@dataclass(frozen=True)
class Step:
    """Inputs of one decode step of a layer in MLX.

    Attributes:
        query: query of the new token, ``(B, Hq, 1, D)``.
        keys, values: keys and values of all tokens, the new token included, ``(B, Hkv, S, D)``.
        before: pre-RoPE ``query`` and ``keys``.
    """

    layer: int
    query: mx.array
    keys: mx.array
    values: mx.array
    before: tuple[mx.array, mx.array]
    scale: float


@dataclass(frozen=True)
class Decoding:
    """Decode method of an exported file. This class uses dense attention, and subclasses use sparse attention.

    Attributes:
        operator: name of the operator that appends to the caches and computes attention. Its states (``past_*`` and
            ``present_*``) become inputs and outputs of the file.
        method: settings, with every "auto" resolved.
        group: number of consecutive keys that are quantized together; 0 if the method quantizes no keys.
    """

    operator: ClassVar[str] = "CachedAttention"
    group: ClassVar[int] = 0
    method: Method

    @classmethod
    def resolve(cls, config: Any, model: nn.Module, *, native: bool) -> Decoding:
        """Return the decode method for ``config``. Resolve every "auto" for mlx-lm's ``model``.

        If ``native`` is set, the file will run with the native kernels only.
        """
        return cls(config)

    @property
    def has_body(self) -> bool:
        return OPERATORS[self.operator].has_body

    @property
    def sparse_from(self) -> int | None:
        """Number of keys at and above which decode steps are sparse; None if all steps are dense."""
        below = getattr(self.method, "dense_below", None)
        return None if below is None else int(below)

    @property
    def text(self) -> str:
        """Return the method and its settings as text, such as "sparq:rank=16"."""
        return str(self.method)

    def supports(self, layer: int) -> bool:
        """Return True if ``layer`` can use the method. The caller excludes layers with a sliding window."""
        return True

    def attributes(self, lanes: int) -> dict[str, float]:
        """Return the attributes of the operator except ``scale`` and ``window``.

        ``lanes`` is the number of keys per chunk of component-major keys.
        """
        return {}

    def routing(self, before: Sequence[str], after: Sequence[str]) -> dict[str, str]:
        """Return the operator's additional inputs as a dict from input names to value names in the graph.

        ``before`` and ``after`` name the queries and keys (B, L, H, D) before and after RoPE.
        """
        return {}

    def weights(self, graph: Graph, layer: int, scale: float) -> dict[str, str]:
        """Add the weights of the operator to the graph. Return a dict from input names to weight names."""
        return {}

    def attend(self, call: Step) -> mx.array:
        """Compute a sparse decode step with MLX for verification. Return its output ``(B, Hq, 1, D)``.

        The base class stands for dense attention, which has no such step.
        """
        raise NotImplementedError

    def shortened(self) -> Decoding:
        """Return a copy for verification that is sparse after `PROMPT` tokens and attends to at most `KEYS` keys."""
        return self
