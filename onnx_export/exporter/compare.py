"""Verify that an exported file computes the same logits as MLX with the same weights.

MLX runs the model twice in float32. The second run adds noise as large as rounding errors to the embeddings. The
tolerance is twice the difference between the logits of the two runs.

Half-precision caches cause larger errors and may change the keys that a sparse step selects, so two files are verified.
The first file is a copy with float32 caches, whose attention is sparse even for short prompts. Its logits must be
within the tolerance. The second file is the exported file. For this file, the tolerance also includes the error of
rounding to the cache type.

SampleAttention and int4 scoring keys are verified on the first layers only, because all layers would take minutes. The
prompt for SampleAttention has several small blocks. The prompt for int4 scoring keys fills a group of keys, and the
following step fills another group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto

from mlx_sparse.checks import ArtefactError, ConfigError

from ..domain import DOMAIN
from ..runtime.memory import zeros
from ..runtime.runner import Runner
from .decoder import Target, output_of
from .methods.base import PROMPT
from .reference import Array, Expected, largest

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
Lower = Callable[[onnx.ModelProto], onnx.ModelProto]


@dataclass(frozen=True)
class Agreement:
    """Differences between the logits of an exported file and MLX's logits.

    Attributes:
        dense: largest absolute difference in any row with dense attention.
        sparse: median over rows of each row's largest difference after a sparse step; None if decoding is dense.
        largest: largest absolute logit of MLX.
        sampled: median like ``sparse``, but after prefill with SampleAttention; None if prefill is dense.
        coded: median like ``sparse``, but after a step with int4 scoring keys; None if the file has no such keys.
    """

    dense: float
    sparse: float | None
    largest: float
    sampled: float | None = None
    coded: float | None = None

    def __str__(self) -> str:
        sparse = {"sparse": self.sparse, "coded": self.coded, "sampled": self.sampled}
        others = "".join(f", {error:.1e} {name}" for name, error in sparse.items() if error is not None)
        errors = f"{self.dense:.1e}" + (f" dense{others}" if others else "")
        return f"logits of up to {self.largest:.3g} are within {errors} of MLX's"


def compare(model: onnx.ModelProto, folder: Path, expected: Expected, target: Target, lower: Lower) -> Agreement:
    """Run an exported file and a copy with float32 caches on ONNX Runtime. Compare their logits with MLX's logits.

    Native kernels are used only if the operators have no function body.

    Args:
        model: the model before ``lower`` was applied.
        lower: function that transformed ``model`` before the file was written, such as `inline`. `compare` also
            applies this function to the copy.
    """
    logits = expected.logits
    native = "off" if target.decode.has_body else "auto"
    got = _steps(File(folder / "model.onnx", len(expected.tokens), native), expected.tokens)
    sparse_from = target.decode.sparse_from  # larger than the number of keys that are always attended to
    is_sparse = sparse_from is not None
    if sparse_from is not None:
        got = got[: 1 + (PROMPT + 1 < sparse_from)]
    of_dense = largest(got, logits[: len(got)])
    if not of_dense <= expected.rounded:
        raise _disagreement("dense attention", of_dense, expected.rounded)
    median = None
    check = folder / "check.onnx"
    if is_sparse or target.dtype != "float32":
        onnx.save(lower(copy_for_check(model, target)), check)
        got = _steps(File(check, len(expected.tokens), native), expected.tokens)
        exact = largest(got[:1] if is_sparse else got, logits[:1] if is_sparse else logits)
        if not exact <= expected.dense:
            raise _disagreement("dense attention and float32 caches", exact, expected.dense)
        if is_sparse:
            median = _median_error(got[1], logits[2], logits[1], expected.sparse, where="sparse attention")
    of_long: list[float | None] = []
    longer = ((expected.sampled, "a sampled prompt"), (expected.coded, "int4 scoring keys"))
    for long, where in longer:
        if long is None:
            of_long.append(None)
            continue
        first = copy_for_check(model, target)
        keep_layers(first, long.layers)
        onnx.save(lower(first), check)
        file = File(check, len(long.logits), native)
        got_long = [file.step(chunk).copy() for chunk in long.chunks][-1]
        of_long.append(_median_error(got_long, long.logits, long.dense, long.error, where=where))
    check.unlink(missing_ok=True)
    return Agreement(of_dense, median, float(np.abs(logits[0]).max()), *of_long)


def _median_error(got: Array, wanted: Array, dense: Array, allowed: float, *, where: str) -> float:
    """Return the median over rows of each row's largest difference between ``got`` and ``wanted``.

    Rounding may change the selection between keys or blocks with almost equal scores. Such changes are rare, so they do
    not affect the median. A single row may therefore differ by ``allowed`` plus the largest difference between
    ``wanted`` and ``dense`` in this row.
    """
    error = np.abs(got - wanted).max(axis=1)
    median = float(np.median(error))
    if not median <= allowed or not (error <= allowed + np.abs(wanted - dense).max(axis=1)).all():
        raise _disagreement(where, float(error.max()), allowed)
    return median


def _disagreement(where: str, error: float, allowed: float) -> ArtefactError:
    return ArtefactError(
        f"model.onnx: expected logits within {allowed:.1e} of MLX's, got {error:.1e} with {where}. Nothing was "
        "written; please report the model and the command."
    )


def _steps(file: File, tokens: Array) -> list[Array]:
    return [file.step(tokens[:, begin:end]).copy() for begin, end in ((0, PROMPT), (PROMPT, PROMPT + 1))]


class File(Runner):
    """A runner whose ``max_length`` is the full capacity of the caches."""

    def __init__(self, path: Path, rows: int, native: str) -> None:
        super().__init__(path, native=native, batch=rows)
        self.max_length = self._capacity

    def _open(self, options: onnxruntime.SessionOptions, **how: Any) -> onnxruntime.InferenceSession:
        # Without constant folding, half-precision weights become float32 one at a time, which needs less memory.
        options.enable_cpu_mem_arena = False
        return super()._open(options, disabled_optimizers=["ConstantFolding"], **how)

    def _zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        try:
            return zeros(shape, dtype)
        except MemoryError:
            raise ConfigError(
                f"--max-length: expected caches that fit into memory, got shape {shape}. Set a smaller number."
            ) from None


def copy_for_check(model: onnx.ModelProto, target: Target) -> onnx.ModelProto:
    """Return a copy of the model that has float32 caches and sparse attention even for short prompts."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for tensor in (*made.graph.input, *made.graph.output):
        if tensor.type.tensor_type.elem_type in HALVES:
            tensor.type.tensor_type.elem_type = TensorProto.FLOAT
    own, short = (each.attributes(each.decode, sampled=True) for each in (target, target.shortened()))
    for node in made.graph.node:
        for attribute in node.attribute:
            name = attribute.name
            if node.op_type == "Cast":  # casts from the type of the weights, or to the type of the caches
                attribute.i = TensorProto.FLOAT
            elif node.domain == DOMAIN and short.get(name) != own.get(name):
                setattr(attribute, "f" if isinstance(short[name], float) else "i", short[name])
    return made


def keep_layers(model: onnx.ModelProto, count: int) -> None:
    """Keep only the first ``count`` layers. Remove the caches and weights of all later layers."""
    graph = model.graph
    made = {output for node in graph.node for output in node.output}
    last = next(i for i in itertools.count(count) if output_of(i) not in made) - 1
    needed, nodes = {"logits"}, []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            # Outside the layers, only the norm before the head reads the output of the last layer.
            node.input[:] = [output_of(count - 1) if name == output_of(last) else name for name in node.input]
            needed.update(name for name in node.input if name)
            nodes.append(node)
    made = {output for node in nodes for output in node.output}
    for field, names in (("output", made), ("input", needed), ("initializer", needed)):
        kept = [tensor for tensor in getattr(graph, field) if tensor.name in names]
        graph.ClearField(field)
        getattr(graph, field).extend(kept)
    graph.ClearField("node")
    graph.node.extend(reversed(nodes))
