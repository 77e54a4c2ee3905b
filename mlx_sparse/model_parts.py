"""What part of a model this process holds, where it was cut for several (`model.shard`, `model.pipeline`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Classes of `mlx.nn` whose modules hold a part of a matrix, and know of whom.
SHARDED = ("AllToShardedLinear", "ShardedToAllLinear", "QuantizedAllToShardedLinear", "QuantizedShardedToAllLinear")


@dataclass(frozen=True)
class Part:
    """A part of a model; the whole one by default.

    Attributes:
        first_layer: of the whole model, the layer that is the first one here.
        layers: held here; None where all are.
        rank, size: it has the ``rank``-th of ``size`` equal shares of every layer's heads.
        sharers: processes that run it together on one context, of whose keys and values each holds a share.
    """

    first_layer: int = 0
    layers: int | None = None
    rank: int = 0
    size: int = 1
    sharers: int = 1

    @property
    def whole(self) -> bool:
        """Whether nothing is held elsewhere."""
        return self.layers is None and self.size == 1


def part_of(model: Any) -> Part:
    """The part that this process holds of ``model``."""
    first, layers, rank, size = 0, None, 0, 1
    for _, module in model.named_modules():
        if getattr(module, "pipeline_size", 1) > 1:
            first, layers = module.start_idx, module.end_idx - module.start_idx
        elif size == 1 and type(module).__name__ in SHARDED:
            rank, size = module.group.rank(), module.group.size()
    return Part(first, layers, rank, size)


@contextlib.contextmanager
def by_itself(model: Any) -> Iterator[None]:
    """Meanwhile a call of ``model`` neither waits for another rank of a pipeline nor sends it anything."""
    stages = [module for _, module in model.named_modules() if getattr(module, "pipeline_size", 1) > 1]
    kept = [(stage.pipeline_rank, stage.pipeline_size) for stage in stages]
    for stage in stages:
        stage.pipeline_rank, stage.pipeline_size = 0, 1
    try:
        yield
    finally:
        for stage, (rank, size) in zip(stages, kept, strict=True):
            stage.pipeline_rank, stage.pipeline_size = rank, size
