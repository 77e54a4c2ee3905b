"""Find the layers and heads that this process runs after `model.shard` or `model.pipeline`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx import nn

# Classes of `mlx.nn` that have a shard of a matrix and the group of ranks.
SHARDED = ("AllToShardedLinear", "ShardedToAllLinear", "QuantizedAllToShardedLinear", "QuantizedShardedToAllLinear")


@dataclass(frozen=True)
class Part:
    """Layers and heads of a model that one process runs. The default is the whole model.

    Attributes:
        first_layer: index of the part's first layer in the whole model.
        layers: number of layers in the part; None for all layers.
        rank, size: the heads of every layer are split into ``size`` equal parts, and this part has index ``rank``.
    """

    first_layer: int = 0
    layers: int | None = None
    rank: int = 0
    size: int = 1

    @property
    def whole(self) -> bool:
        return self.layers is None and self.size == 1


def part_of(model: nn.Module) -> Part:
    """Return the layers and heads of ``model`` that this process runs."""
    first, layers, rank, size = 0, None, 0, 1
    for _, module in model.named_modules():
        if getattr(module, "pipeline_size", 1) > 1:
            first, layers = module.start_idx, module.end_idx - module.start_idx
        elif size == 1 and type(module).__name__ in SHARDED:
            rank, size = module.group.rank(), module.group.size()
    return Part(first, layers, rank, size)


@contextlib.contextmanager
def without_pipeline(model: nn.Module) -> Iterator[None]:
    """Disable communication between ``model`` and the other ranks of its pipeline inside the ``with`` block."""
    stages = [module for _, module in model.named_modules() if getattr(module, "pipeline_size", 1) > 1]
    kept = [(stage.pipeline_rank, stage.pipeline_size) for stage in stages]
    for stage in stages:
        stage.pipeline_rank, stage.pipeline_size = 0, 1
    try:
        yield
    finally:
        for stage, (rank, size) in zip(stages, kept, strict=True):
            stage.pipeline_rank, stage.pipeline_size = rank, size
