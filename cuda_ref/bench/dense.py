"""Who takes part in a case of decode steps: dense attention, torch's and ours, and the launches of a method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mlx_sparse.tools.bench.core import Row

from ..launchers.attend import dense_decode
from .device import Device, Output, Recorded, Step, Wrong
from .inputs import Caches, expected_dense

NAMES = {  # in the order of the tables
    "flash-gqa": "torch SDPA flash, enable_gqa",
    "flash-rows": "torch SDPA flash, group as rows",
    "cudnn-gqa": "torch SDPA cuDNN, enable_gqa",
    "cudnn-rows": "torch SDPA cuDNN, group as rows",
    "efficient-gqa": "torch SDPA memory-efficient, enable_gqa",
    "efficient-rows": "torch SDPA memory-efficient, group as rows",
    "flex": "torch flex_attention, compiled",
    "dense": "our dense_decode",
}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
NOT_COMPILED = "left out: compiled only for the cases with a bar, for time"


class Field(Protocol):
    """The contenders of one setting over the inputs of a case.

    Attributes:
        names: theirs, besides those of dense attention, and what they are.
    """

    names: Mapping[str, str]

    def bytes(self, name: str) -> int:
        """What a contender has to move."""

    def make(self, name: str) -> tuple[Step, Wrong]:
        """A contender's step and its check."""


def contenders(
    inputs: Caches, device: Device, field: Callable[[Any, Any], Field], *, compiled: bool
) -> Iterator[Recorded]:
    """Who takes part. With one query head per KV head the two views of the queries are one.

    Args:
        field: of inputs and a setting.
        compiled: whether flex_attention takes part on a GPU.
    """
    case, expected, pool = inputs.case, cache(lambda: expected_dense(inputs)), device.pool()

    def dense(name: str) -> tuple[Step, Wrong]:
        return dense_step(name, inputs), lambda out: expected().wrong(out[0])

    for name in NAMES:
        if case.G > 1 or not name.endswith("-rows"):
            row = Row(case, name, details={"bytes": case.dense_bytes})
            if name == "flex" and device.cuda and not compiled:
                row.note = NOT_COMPILED
            yield Recorded(row, partial(dense, name), device, ours=name == "dense", copies=inputs.copies, pool=pool)
    for setting in case.settings:
        made = field(inputs, setting)
        for name in made.names:
            row = Row(case, name, setting, {"bytes": made.bytes(name)})
            ours = not name.startswith("plain")
            yield Recorded(row, partial(made.make, name), device, ours=ours, copies=inputs.copies, pool=pool)


def dense_step(name: str, inputs: Caches) -> Step:
    """A decode step of dense attention."""
    case, scale = inputs.case, inputs.case.scale
    if name == "dense":
        return lambda i: dense_decode(inputs.queries, inputs.keys[i], inputs.values[i], scale, None)
    if name == "flex":
        attend = flex(inputs.keys.device)
        grouped = case.G > 1
        return lambda i: (attend(inputs.queries, inputs.keys[i], inputs.values[i], enable_gqa=grouped),)
    backend, view = name.split("-")
    rows = view == "rows"
    queries = inputs.queries.view(case.B, case.Hkv, case.G, case.D) if rows else inputs.queries

    def step(i: int) -> Output:
        with sdpa_kernel(BACKENDS[backend]):
            grouped = not rows and case.G > 1
            return (scaled_dot_product_attention(queries, inputs.keys[i], inputs.values[i], enable_gqa=grouped),)

    return step


def flex(device: torch.device) -> Callable[..., torch.Tensor]:
    """flex_attention, compiled for the sizes of one case; on the CPU, where only tests call it, as it is."""
    from torch.nn.attention.flex_attention import flex_attention

    if device.type != "cuda":
        return flex_attention
    torch.compiler.reset()  # it stops to compile after a number of sizes
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled
