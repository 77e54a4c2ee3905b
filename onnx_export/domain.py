"""Define the operator domain: its name, the supported ONNX versions, and the classes that describe operators."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_sparse.native import SPEC as SPEC

DOMAIN = "mlx_sparse"
VERSION = 1
# `SPEC`, the version of the operator specification: every node stores it as `spec`, and the kernels check it.


@dataclass(frozen=True)
class Profile:
    """Opset version (standard operators) and IR version (file format) of an exported model."""

    opset: int
    ir: int


DEFAULT = Profile(opset=24, ir=11)
COMPAT = Profile(opset=18, ir=8)

T = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
W = ("tensor(float)", "tensor(float16)")  # types of query networks and centroids


@dataclass(frozen=True)
class Tensor:
    """An input or output of an operator.

    ``axes`` lists the axes, separated by spaces. Each axis is a name, a fixed length such as "36", or "?" for an
    unknown length.
    """

    name: str
    type: str
    axes: str
    doc: str

    @property
    def dims(self) -> list[str | int]:
        return [int(axis) if axis.isdigit() else axis for axis in self.axes.split()]

    @property
    def as_keys(self) -> bool:
        """Return True for a cache of shape ``(B, Hkv, C, D)``, such as keys and values."""
        return self.axes.rpartition(" ")[0] == "B Hkv C"


@dataclass(frozen=True)
class Attribute:
    """An attribute of an operator. An integer may have bounds ``low`` and ``high``, or a list of ``choices``.

    If ``high`` is set for a float, its values must be above 0 and at most 1.
    """

    name: str
    type: type
    doc: str
    low: int | None = None
    high: int | None = None
    choices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operator:
    """An operator of the domain.

    Attributes:
        base: name of the operator that this operator extends with SampleAttention for prefill, else "".
        has_body: True if the operator has a function body (see `compose.function`), False if it needs native kernels.
    """

    name: str
    doc: str
    attributes: tuple[Attribute, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    base: str = ""
    has_body: bool = True

    @property
    def attribute_names(self) -> list[str]:
        return [attribute.name for attribute in self.attributes]

    @property
    def states(self) -> dict[str, Tensor]:
        """Dict from NAME to each input ``past_NAME`` for which the operator has an output ``present_NAME``."""
        given = {tensor.name for tensor in self.outputs}
        pasts = {tensor.name.removeprefix("past_"): tensor for tensor in self.inputs}
        return {name: tensor for name, tensor in pasts.items() if f"present_{name}" in given}

    @property
    def weighted(self) -> bool:
        return any(tensor.type == "W" for tensor in self.inputs)
