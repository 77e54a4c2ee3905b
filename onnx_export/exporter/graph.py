"""Build an ONNX graph from nodes and weights. Weights are written to an external data file one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..build import TYPES
from ..compose import bodies
from ..domain import DOMAIN, VERSION, Profile

MICROSOFT = "com.microsoft"
DATA = "model.onnx.data"
ALIGNMENT = 4096  # bytes of a page, because runtimes map the file into memory


class DataFile:
    """The external data file of a model. Tensors are written one by one, so that only one tensor is in memory."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / DATA).open("wb")

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def add(self, name: str, array: np.ndarray, element: int) -> TensorProto:
        """Write an array of ONNX data type ``element`` to the data file. Return an initializer that refers to it."""
        array = np.ascontiguousarray(array)
        self._file.write(bytes(-self._file.tell() % ALIGNMENT))
        tensor = TensorProto(name=name, data_type=element, dims=array.shape, data_location=TensorProto.EXTERNAL)
        place = {"location": DATA, "offset": self._file.tell(), "length": array.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._file.write(array.reshape(-1).view(np.uint8).data)
        return tensor


class Graph:
    """Builder of an ONNX graph. The names of new nodes begin with ``scope``."""

    def __init__(self, data: DataFile) -> None:
        self.scope = ""
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._data = data
        self._initializers: list[TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def op(self, kind: str, *inputs: str, domain: str = "", output: str = "", **attributes: Any) -> str:
        """Add a node with one output. Return the name of the output: ``output`` if set, else a new name."""
        name = f"{self.scope}{kind}_{len(self.nodes)}"
        self.add(helper.make_node(kind, inputs, [output or name], name, domain=domain or None, **attributes))
        return output or name

    def split(self, value: str, sizes: Sequence[int]) -> list[str]:
        """Add a node that splits a value along its last axis, and return the names of the outputs."""
        name = f"{self.scope}Split_{len(self.nodes)}"
        outputs = [f"{name}_{i}" for i in range(len(sizes))]
        self.add(helper.make_node("Split", [value, self.constant(sizes)], outputs, name, axis=-1))
        return outputs

    def add(self, node: onnx.NodeProto) -> None:
        self.nodes.append(node)

    def constant(self, value: object, dtype: type = np.int64) -> str:
        """Return the name of a small constant. If the graph has no equal constant, add the constant first."""
        array: np.ndarray = np.asarray(value, dtype)
        key = array.dtype.name, array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            self._initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def weight(self, name: str, array: np.ndarray, dtype: str | None = None) -> str:
        """Write a weight to the data file and return its name. If ``array`` contains bfloat16 bits, set ``dtype``."""
        element = TYPES[dtype] if dtype else helper.np_dtype_to_tensor_dtype(array.dtype)
        self._initializers.append(self._data.add(name, array, element))
        return name

    def input(self, name: str, element: int, dims: Sequence[str | int]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, element, dims))
        return name

    def output(self, name: str, element: int, dims: Sequence[str | int]) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, element, dims))
        return name

    def model(self, profile: Profile, metadata: dict[str, str]) -> onnx.ModelProto:
        """Return the finished model with the function bodies of all its operators."""
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, self._initializers)
        domains = {node.domain for node in self.nodes}
        opsets = [helper.make_opsetid("", profile.opset), helper.make_opsetid(DOMAIN, VERSION)]
        if MICROSOFT in domains:
            opsets.append(helper.make_opsetid(MICROSOFT, 1))
        model = helper.make_model(
            graph,
            producer_name=DOMAIN,
            ir_version=profile.ir,
            opset_imports=opsets,
            functions=bodies(self.nodes, profile),
        )
        helper.set_model_props(model, metadata)
        return model
