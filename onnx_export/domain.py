"""Name the operator domain and the ONNX versions of files."""

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
