"""What torch expects of an operator, for those of every method."""

from collections.abc import Sequence
from typing import Any

import torch


def assert_keeps_its_promises_and_compiles(name: str, arguments: Sequence[Any]) -> None:
    """Its schema, its fake and its results under `torch.compile` agree with what it does when called."""
    operator = getattr(torch.ops.mlx_sparse, name)
    torch.library.opcheck(operator, tuple(arguments))
    # Dynamo compiles all operators of a process through one function, of which it keeps eight versions at most.
    torch.compiler.reset()
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    found, expected = compiled(*arguments), operator(*arguments)
    assert type(found) is type(expected)
    for got, wanted in zip(*(pair if isinstance(pair, tuple) else (pair,) for pair in (found, expected)), strict=True):
        assert torch.equal(got, wanted)
