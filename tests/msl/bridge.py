"""Replace `mx.fast.metal_kernel`, so that the kernels of unchanged product code run on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from .compile import typed_check
from .kernel import Kernel, Report
from .lint import lint


@dataclasses.dataclass
class Metal:
    """Settings and records of the harness. On a Mac `emulated` is False and nothing is recorded."""

    emulated: bool
    seed: int = 0  # seed of the schedule of later launches
    line: int = 128  # bytes per cache line in traffic counts
    strict: bool = True  # check and lint every new kernel text
    launches: list[Report] = dataclasses.field(default_factory=list)
    texts: dict[str, str] = dataclasses.field(default_factory=dict)  # latest generated text by kernel name
    replaced: dict[str, str] = dataclasses.field(default_factory=dict)  # text to run in place of a generated text
    record: Callable[[Generated], None] | None = None  # called in place of each run; outputs are zeros

    def last(self, kernel: str) -> Report:
        """Return the report of the latest launch of a kernel."""
        return next(report for report in reversed(self.launches) if report.kernel == kernel)

    def clear(self) -> None:
        """Remove all recorded launches."""
        self.launches.clear()


_metal_kernel = mx.fast.metal_kernel
_active: list[Metal] = []  # kernels outlive an `emulated()` context, so each call reads the current one


@contextmanager
def emulated(
    seed: int = 0, *, strict: bool = True, record: Callable[[Generated], None] | None = None
) -> Iterator[Metal]:
    """Simulate a Metal GPU in MLX. Enter the context before you import modules that build kernels on import."""
    metal = Metal(emulated=True, seed=seed, strict=strict, record=record)
    _active.append(metal)
    try:
        with (
            patch.object(mx.fast, "metal_kernel", _stand_in),
            patch.object(mx.metal, "is_available", lambda: True),
            patch.object(mx, "default_device", lambda: mx.Device(mx.gpu, 0)),
        ):
            yield metal
    finally:
        _active.remove(metal)


def _stand_in(
    name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, *rest: Any, **options: Any
) -> Callable[..., list[mx.array]]:
    real = _metal_kernel(name, input_names, output_names, source, *rest, **options)

    def call(*, inputs: Sequence[Any], init_value: float | None = None, stream: Any = None, **how: Any) -> Any:
        if not _active:
            return real(inputs=inputs, init_value=init_value, stream=stream, **how)
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        launch = capture(lambda *traced: real(inputs=list(traced), **how), arrays)
        if record := _active[-1].record:
            record(Generated(name, dict(how.get("template", [])), launch))
            return [mx.full(shape, init_value or 0, dtype) for shape, dtype in launch.outputs]
        named = dict(zip(input_names, arrays, strict=True))
        return _run(_active[-1], name, source, launch, named, output_names, init_value)

    return call


class Launch(NamedTuple):
    """The data that MLX passes to the GPU for one call."""

    host_name: str
    text: str
    grid: tuple[int, ...]
    threadgroup: tuple[int, ...]
    parameters: list[tuple[bool, bool, bool]]  # by input: if X_shape, X_strides and X_ndim are passed
    row_contiguous: bool
    outputs: list[tuple[tuple[int, ...], mx.Dtype]]


class Generated(NamedTuple):
    """A kernel call: name in product code, template arguments, and the launch with the text that MLX generates."""

    kernel: str
    template: dict[str, Any]
    launch: Launch


def capture(call: Callable[..., Any], inputs: Sequence[mx.array]) -> Launch:
    """Return the launch that `call` makes, read from MLX's export of the call."""
    nodes: list[dict[str, Any]] = []
    mx.export_function(nodes.append, call, *inputs)
    (node,) = (node for node in nodes if node.get("name") == "CustomKernel")
    arguments = node["arguments"]
    if len(arguments) != 14 or [type(a) for a in arguments[:10]] != [str, str, *[int] * 6, list, bool]:
        raise RuntimeError(f"MLX {mx.__version__} exports custom kernels in another way; adapt msl.bridge: {arguments}")
    name, text, *sizes, parameters, row_contiguous = arguments[:10]
    threadgroup = tuple(map(min, sizes[3:], sizes[:3]))
    return Launch(
        name, text, tuple(sizes[:3]), threadgroup, parameters, row_contiguous, [o[1:] for o in node["outputs"]]
    )


_kernel = cache(Kernel)


@cache
def check(text: str) -> None:
    """Raise AssertionError for errors that Apple's compiler would report in the generated text."""
    findings = [*lint(text), *typed_check(text)]
    if findings:
        raise AssertionError("\n".join(str(finding) for finding in findings))


def _run(
    metal: Metal,
    name: str,
    source: str,
    launch: Launch,
    inputs: dict[str, mx.array],
    outputs: Sequence[str],
    init_value: float | None,
) -> list[mx.array]:
    head, body, tail = launch.text.rpartition(source)
    text = metal.texts[name] = f'#line 1 "header"\n{head}#line 1 "body"\n{body}{tail}'
    if metal.strict:
        check(text)
    buffers: dict[str, np.ndarray] = {}
    for (label, x), passed in zip(inputs.items(), launch.parameters, strict=True):
        buffers[label], strides = _memory(x, launch.row_contiguous)
        facts = np.array(x.shape, np.int32), strides, np.array(x.ndim, np.int32)
        named = zip(("shape", "strides", "ndim"), facts, passed, strict=True)
        buffers |= {f"{label}_{fact}": value for fact, value, wanted in named if wanted and x.ndim}
    for label, (shape, dtype) in zip(outputs, launch.outputs, strict=True):
        buffers[label] = np.array(_bits(mx.full(shape, init_value or 0).astype(dtype)))
    report = _kernel(metal.replaced.get(text, text), launch.host_name, label=name)(
        buffers,
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        seed=metal.seed,
        line=metal.line,
        written=() if init_value is None else outputs,
    )
    metal.launches.append(report)
    results = [(mx.array(buffers[label]), dtype) for label, (_, dtype) in zip(outputs, launch.outputs, strict=True)]
    return [x.view(dtype) if x.dtype != dtype else x for x, dtype in results]


def _bits(x: mx.array) -> mx.array:
    return x.view(mx.uint16) if x.dtype == mx.bfloat16 else x  # NumPy has no bfloat16


def _memory(x: mx.array, row_contiguous: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the memory of an input as a GPU would see it, and its strides in elements."""
    view = np.asarray(_bits(x))
    if row_contiguous and not view.flags.c_contiguous:
        view = view.copy()
    strides = np.array(view.strides, np.int64) // view.itemsize
    extent = 1 + sum((n - 1) * int(s) for n, s in zip(view.shape, strides, strict=True)) if view.size else 0
    return np.lib.stride_tricks.as_strided(view, (extent,), (view.itemsize,)), strides
