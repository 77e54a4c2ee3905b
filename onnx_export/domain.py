"""Define the operator domain: its name, versions of ONNX, and the classes that describe operators."""

from __future__ import annotations

from dataclasses import dataclass

DOMAIN = "mlx_sparse"
VERSION = 1
SPEC = 1  # written on every node as `spec`; a kernel of another meaning must refuse the node


@dataclass(frozen=True)
class Profile:
    """Version of the standard operators and of the file format; chosen, because the newest ones load nowhere."""

    opset: int
    ir: int


DEFAULT = Profile(opset=24, ir=11)
COMPAT = Profile(opset=18, ir=8)

T = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
W = ("tensor(float)", "tensor(float16)")  # what query networks and centroids are stored in


@dataclass(frozen=True)
class Tensor:
    """An input or output; ``axes`` names its axis lengths, "?" is a length that inference leaves open."""

    name: str
    type: str
    axes: str
    doc: str

    @property
    def dims(self) -> list[str | int]:
        return [int(axis) if axis.isdigit() else axis for axis in self.axes.split()]

    @property
    def as_keys(self) -> bool:
        """Return True for a cache of rows, as keys and values are."""
        return self.axes.rpartition(" ")[0] == "B Hkv C"


@dataclass(frozen=True)
class Attribute:
    """An attribute; ``low`` and ``high`` bound an integer, or ``choices`` lists its values.

    A float with ``high`` is a share: above 0 and at most 1.
    """

    name: str
    type: type
    doc: str
    low: int | None = None
    high: int | None = None
    choices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operator:
    """One operator of the domain.

    Its body is a text in bodies/, or composed from the body of ``base`` (compose.py). Without ``has_body`` only the
    native kernels run it.
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
        """Inputs ``past_NAME`` that have an output ``present_NAME``, by NAME."""
        given = {tensor.name for tensor in self.outputs}
        pasts = {tensor.name.removeprefix("past_"): tensor for tensor in self.inputs}
        return {name: tensor for name, tensor in pasts.items() if f"present_{name}" in given}

    @property
    def weighted(self) -> bool:
        """Return True if the operator has weights, which have a type of their own."""
        return any(tensor.type == "W" for tensor in self.inputs)
