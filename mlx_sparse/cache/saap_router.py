"""What SAAP knows about a layer of a model: how its tensors before RoPE are had, and what routes its queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx


class BeforeRope(Protocol):
    """How queries and keys of a layer are had before RoPE: `mlx_sparse.lm.rope.Source`."""

    @property
    def irreversible(self) -> str | None:
        """Why keys that were not recorded cannot be turned back; None where they can."""

    def before(self, recorder: Any, rows: mx.array, offset: int | mx.array) -> mx.array | None:
        """Rows before RoPE of ``rows (B, H, n, D)``, the first of them at position ``offset``; None if unknown."""

    def turned_back(self, rows: mx.array, offset: int | mx.array) -> mx.array:
        """`before` of rows that were not recorded."""


@dataclass(frozen=True, eq=False)
class Router:
    """What SAAP knows about a layer, the same for all caches of a model.

    Attributes:
        source: how its tensors before RoPE are had.
        scale: of its attention scores.
        buckets: how many there are.
        centroids: ``(Hkv, C, D)``; None where each sequence has its own.
        network: the weights that `saap_route` takes; empty where the centroids route.
    """

    source: BeforeRope
    scale: float
    buckets: int
    centroids: mx.array | None = None
    network: Mapping[str, mx.array] | None = None

    def __deepcopy__(self, memo: Any) -> Router:
        return self  # copies of a cache share the model's


def kmeans_network(centroids: mx.array, scale: float) -> dict[str, mx.array]:
    """The router whose logits are the scores of the centroids ``(..., C, D)``."""
    return {"out_weight": mx.contiguous((centroids * scale).swapaxes(-1, -2))}
