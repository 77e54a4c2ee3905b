"""Attention over a whole prompt on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

from mlx_sparse import oracle
from mlx_sparse.common.block_layout import Layout
from mlx_sparse.methods import Sample as SampleAttention
from mlx_sparse.tools.bench.core import Contender, Row, Sample, Shape, Sized, Turns, measure
from mlx_sparse.tools.bench.run import Plan, Request
from mlx_sparse.tools.bench.thresholds import length
from mlx_sparse.tools.environment import machine
from mlx_sparse.tools.formats import table

from ..build import TYPES, operator_model
from ..defaults import PIECE
from ..domain import DEFAULT
from ..runtime import memory
from . import contenders
from .caches import DTYPES
from .contenders import options
from .steps import where

Array = npt.NDArray[Any]

DENSITIES = (0.1, 0.25, 0.5)
DENSE = {
    "gqa": "ORT GroupQueryAttention",
    "attention": "ORT Attention (opset 24)",
    "torch": "torch SDPA, enable_gqa",
    "body-dense": f"our CachedAttention, body, {PIECE} tokens a call",
    "native-dense": "our CachedAttention, native",
}
SPARSE = {"body-sample": "our SampleAttention, body", "native-sample": "our SampleAttention, native"}
MOST_LOGITS = 2 << 30  # bytes; ORT's Attention holds those of all heads
CHECKED = 48  # rows of a head that are compared with float64 attention
PEAK = 7.0  # logits of the keys that stand out


@dataclass(frozen=True)
class Problem(Sized):
    """A prompt of S tokens; its queries find keys at distances of their head's, and a few keys that all find."""

    shape: Shape
    S: int
    block_size: int
    chunks: int

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data for programs."""
        return {"shape": str(self.shape), "batch": 1, "S": self.S}

    def __str__(self) -> str:
        return f"{self.shape}, S = {self.S:,}"

    @property
    def layout(self) -> Layout:
        return Layout(self.S, self.S, self.chunks, self.block_size)

    @cached_property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Queries (1, Hq, S, D), keys and values (1, Hkv, S, D): float32 numbers that float16 has too."""
        rng = np.random.default_rng(0)
        n, position = self.D // 4, np.arange(self.S)
        waves = rng.uniform(0.02, 1.5, size=n)
        distance = rng.integers(0, self.S // 3, size=self.Hq) * (rng.random(self.Hq) < 0.5)

        def wave(at: Array) -> Array:
            return np.concatenate([np.cos(at[..., None] * waves), np.sin(at[..., None] * waves)], axis=-1)

        queries = rng.normal(size=(1, self.Hq, self.S, self.D))
        keys, values = (rng.normal(size=(1, self.Hkv, self.S, self.D)) for _ in "kv")
        keys[..., : 2 * n] += wave(position)
        queries[..., : 2 * n] += wave(position - distance[:, None]) * (PEAK * self.D**0.5 / n)
        direction = rng.normal(size=(self.Hkv, 1, self.D - 2 * n))
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
        column = (rng.random(size=(1, self.Hkv, self.S, 1)) < 4 / self.S) | (position < 4)[:, None]
        keys[..., 2 * n :] += column * direction * self.D**0.25
        queries[..., 2 * n :] += np.repeat(direction, self.G, axis=0) * PEAK * self.D**0.25
        q, k, v = (array.astype(np.float16).astype(np.float32) for array in (queries, keys, values))
        return q, k, v

    @cached_property
    def scores(self) -> tuple[Array, Array]:
        """The oracle's, one head at a time."""
        q, k, _ = self.arrays
        found = [
            oracle.sample_scores(
                q[:, h : h + 1], k[:, h // self.G : h // self.G + 1], chunks=self.chunks, block_size=self.block_size
            )
            for h in range(self.Hq)
        ]
        column, slash = (np.concatenate(scores, axis=1) for scores in zip(*found, strict=True))
        return column, slash

    def blocks(self, alpha: float) -> Array:
        """Attended blocks, bool (1, Hq, R, Nk)."""
        column, slash = self.scores
        mask = oracle.merge(oracle.keep(column, alpha), oracle.keep(slash, alpha), self.layout)
        for block in self.layout.sampled_blocks:
            mask[:, :, block, : block + 1] = True
        return mask

    def density(self, alpha: float) -> float:
        return float(self.blocks(alpha).sum() / self.layout.causal_pairs / self.Hq)

    def alpha_of(self, density: float) -> float:
        """The alpha for both directions that comes nearest to a density."""
        low, high = 0.0, 1.0
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if self.density(middle) < density else (low, middle)
        return high

    def expected(self, alpha: float | None) -> tuple[Array, Array]:
        """Some rows, and the attention output of each head there in float64 (Hq, rows, D); dense without alpha."""
        q, k, v = (array[0] for array in self.arrays)
        rows = np.unique(np.linspace(0, self.S - 1, CHECKED).astype(int))
        key = np.arange(self.S)
        mask = np.broadcast_to(key <= rows[:, None], (self.Hq, len(rows), self.S))
        if alpha is not None:
            mask = mask & self.blocks(alpha)[0][:, rows // self.block_size][:, :, key // self.block_size]
        made = np.empty((self.Hq, len(rows), self.D))
        for h in range(self.Hq):
            own, keys, values = (a.astype(np.float64) for a in (q[h, rows], k[h // self.G], v[h // self.G]))
            logits = np.where(mask[h], self.scale * own @ keys.T, -np.inf)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            made[h] = weights / weights.sum(axis=1, keepdims=True) @ values
        return rows, made


class Buffers:
    """What contenders of one type share: inputs, caches and the output (1, Hq, S, D)."""

    def __init__(self, problem: Problem, dtype: str) -> None:
        self.kind = np.dtype(DTYPES[dtype])
        self.inputs = [array.astype(self.kind, copy=False) for array in problem.arrays]
        cache = (1, problem.Hkv, problem.S, problem.D)
        self.caches = {name: memory.zeros(cache, self.kind) for name in ("past_key", "past_value")}
        self.output = memory.zeros((1, problem.Hq, problem.S, problem.D), self.kind)


class Bound:
    """``run`` attends to the whole prompt; ``output`` gives what came out, (Hq, S, D)."""

    def __init__(self, run: Callable[[], object], output: Callable[[], Array]) -> None:
        self.run, self.output = run, output


class CpuPrompt(Contender):
    """A prompt on the CPU."""

    def __init__(self, row: Row, problem: Problem, buffers: Buffers) -> None:
        super().__init__(row)
        self._problem, self._buffers = problem, buffers

    def prepare(self) -> None:
        self._bound = build(self.row, self._problem, self._buffers)

    def check(self) -> str | None:
        self._bound.run()
        positions, expected = self._problem.expected(self.row.details["alpha"])
        got = self._bound.output()[:, positions].astype(np.float64)
        # Weights of half precision, where a contender rounds them, err by half an ulp each.
        eps = float(np.finfo(DTYPES[self.row.details["dtype"]]).eps)
        allowed = 4 * eps * float(np.abs(expected).max()) + 2e-5
        error = float(np.abs(got - expected).max())
        return None if error <= allowed else f"wrong result: error {error:.1e}, allowed {allowed:.1e}"

    def step(self, turn: int) -> Sample:
        # With one thread its own time: that leaves out what other programs take.
        clock = time.process_time if self.row.details["threads"] == 1 else time.perf_counter
        start = clock()
        self._bound.run()
        return Sample(clock() - start)


def plan(request: Request, config: SampleAttention) -> Plan:
    """Prompts with SampleAttention and without."""
    head = (
        f"{where()}\n\nAttention over a prompt in one call: seconds (with one thread: of the processor), least of "
        f"{request.repeat}; in parentheses how many times as fast as our native dense attention of that type. Blocks "
        f"of {config.block_size}, {config.chunks} region(s)."
    )
    return Plan(
        machine(),
        [Problem(shape, S, config.block_size, config.chunks) for shape in request.shapes for S in request.lengths],
        lambda problem, _: _measured(problem, request.threads, request.repeat),
        lambda rows: f"{head}\n\n{text(rows)}",
    )


def _measured(problem: Problem, threads: Sequence[int], repeat: int) -> Iterator[Row]:
    """Rows for each number of threads."""
    problem = replace(problem)  # whose arrays go with it
    types = {dtype for name in (*DENSE, *SPARSE) for dtype in types_of(name)}
    buffers = {dtype: Buffers(problem, dtype) for dtype in types}
    for n in threads:
        rows = rows_of(problem, n)
        for row in rows:
            row.note = unavailable(row.name, problem)
        made = (CpuPrompt(row, problem, buffers[row.details["dtype"]]) for row in rows)
        yield from measure(problem, made, Turns(repeat))


def types_of(name: str) -> tuple[str, ...]:
    """Types that a contender is timed in."""
    return ("float32", "float16") if name in ("native-dense", "native-sample") else ("float32",)


def rows_of(problem: Problem, threads: int) -> list[Row]:
    """Who takes part."""
    wanted: list[tuple[str, float, float | None]] = [(name, 1.0, None) for name in DENSE]
    for density in DENSITIES:
        alpha = problem.alpha_of(density)
        wanted += [(name, problem.density(alpha), alpha) for name in SPARSE]
    return [
        Row(problem, name, details={"dtype": dtype, "threads": threads, "density": density, "alpha": alpha})
        for name, density, alpha in wanted
        for dtype in types_of(name)
    ]


def unavailable(name: str, problem: Problem) -> str | None:
    """Why a contender cannot run here, None if it can."""
    logits = problem.Hq * problem.S**2 * 4
    if name == "attention" and logits > MOST_LOGITS:
        return f"holds {logits / 1e9:.1f} GB of logits"
    return contenders.torch_missing() if name == "torch" else contenders.unavailable(name)


def build(row: Row, problem: Problem, buffers: Buffers) -> Bound:
    """The contender of a row."""
    threads = row.details["threads"]
    if row.name == "torch":
        return _torch(buffers.inputs, problem, threads)
    model = {"gqa": _gqa, "attention": _attention}.get(row.name, _ours)(row, problem)
    mode = "auto" if row.name.startswith("native") else "off"
    session = onnxruntime.InferenceSession(model.SerializeToString(), options(threads, mode))
    piece = PIECE if row.name == "body-dense" else problem.S
    return _ort(session, problem, buffers, piece, flat=row.name == "gqa")


def _ort(session: onnxruntime.InferenceSession, p: Problem, buffers: Buffers, piece: int, *, flat: bool) -> Bound:
    """A model on onnxruntime that takes the prompt in pieces, caches bound in place."""
    inputs = {info.name for info in session.get_inputs()}
    bindings, outputs, kept = [], [], []
    for start in range(0, p.S, piece):
        stop = min(start + piece, p.S)
        given: dict[str, Array] = {
            name: np.ascontiguousarray(array[:, :, start:stop])
            for name, array in zip(("query", "key", "value"), buffers.inputs, strict=True)
        }
        if flat:
            given = {name: array.swapaxes(1, 2).reshape(1, stop - start, -1) for name, array in given.items()}
        whole = piece >= p.S
        out = buffers.output.reshape(given["query"].shape) if whole else np.zeros_like(given["query"])
        given |= buffers.caches | {
            "past_length": np.array([start]),
            "left_padding": np.array([0]),
            "seqlens_k": np.array([stop - 1], np.int32),
            "total_sequence_length": np.array(stop, np.int32),
        }
        binding = session.io_binding()
        for name in inputs:
            value = memory.ort_value(given[name])
            binding.bind_ortvalue_input(name, value)
            if name in buffers.caches:
                binding.bind_ortvalue_output(name.replace("past", "present"), value)
        binding.bind_ortvalue_output("output", memory.ort_value(out))
        kept.append(given)  # the runtime borrows its arrays
        outputs.append(out)
        bindings.append(binding)

    def attend() -> None:
        for binding, _ in zip(bindings, kept, strict=True):
            session.run_with_iobinding(binding)

    def output() -> Array:
        found: Array = np.concatenate(outputs, axis=1 if flat else 2)[0]
        return found.reshape(p.S, p.Hq, p.D).swapaxes(0, 1) if flat else found

    return Bound(attend, output)


def _ours(row: Row, p: Problem) -> onnx.ModelProto:
    sizes = {"B": 1, "Hq": p.Hq, "Hkv": p.Hkv, "C": p.S, "D": p.D}
    if row.details["alpha"] is None:
        return operator_model("CachedAttention", dtype=row.details["dtype"], sizes=sizes, scale=p.scale, window=0)
    settings: dict[str, Any] = {"chunks": p.chunks, "block_size": p.block_size, "dense_prompt_below": 0}
    settings |= {"alpha_column": row.details["alpha"], "alpha_slash": row.details["alpha"], "scale": p.scale}
    return operator_model("SampleAttention", dtype=row.details["dtype"], sizes=sizes, **settings)


def _model(node: onnx.NodeProto, inputs: dict[str, Any], outputs: dict[str, Any]) -> onnx.ModelProto:
    taken, given = ([make_tensor_value_info(n, t, s) for n, (t, s) in side.items()] for side in (inputs, outputs))
    opsets = [make_opsetid("", DEFAULT.opset), make_opsetid("com.microsoft", 1)]
    return make_model(make_graph([node], "prompt", taken, given), ir_version=DEFAULT.ir, opset_imports=opsets)


def _gqa(row: Row, p: Problem) -> onnx.ModelProto:
    kind, integer = TYPES[row.details["dtype"]], onnx.TensorProto.INT32
    cache = (kind, (1, p.Hkv, p.S, p.D))
    query, key = (kind, (1, p.S, p.Hq * p.D)), (kind, (1, p.S, p.Hkv * p.D))
    inputs = {"query": query, "key": key, "value": key, "past_key": cache, "past_value": cache}
    inputs |= {"seqlens_k": (integer, (1,)), "total_sequence_length": (integer, ())}
    outputs = {"output": query, "present_key": cache, "present_value": cache}
    sizes: dict[str, Any] = {"num_heads": p.Hq, "kv_num_heads": p.Hkv, "scale": p.scale, "domain": "com.microsoft"}
    return _model(make_node("GroupQueryAttention", [*inputs], [*outputs], **sizes), inputs, outputs)


def _attention(row: Row, p: Problem) -> onnx.ModelProto:
    kind = TYPES[row.details["dtype"]]
    query, key = (kind, (1, p.Hq, p.S, p.D)), (kind, (1, p.Hkv, p.S, p.D))
    node = make_node("Attention", ["query", "key", "value"], ["output"], is_causal=1, scale=p.scale)
    return _model(node, {"query": query, "key": key, "value": key}, {"output": query})


def _torch(arrays: list[Array], p: Problem, threads: int) -> Bound:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (torch.from_numpy(array) for array in arrays)
    state: dict[str, Any] = {}

    def attend() -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            state["out"] = scaled_dot_product_attention(q, k, v, scale=p.scale, is_causal=True, enable_gqa=True)

    return Bound(attend, lambda: np.asarray(state["out"].float().numpy()[0]))


def text(rows: Sequence[Row]) -> str:
    """Markdown: a table for each number of threads."""
    blocks, named = [], [row for row in rows if row.name]
    for threads in dict.fromkeys(row.details["threads"] for row in named):
        chosen = [row for row in named if row.details["threads"] == threads]
        cases = list(dict.fromkeys(row.case for row in chosen))
        heads = [f"{str(case.shape).replace('x', '/')}, {length(case.S)}" for case in cases]
        per_case = [[row for row in chosen if row.case == case] for case in cases]
        lines = [
            [{**DENSE, **SPARSE}[group[0].name], group[0].details["dtype"], *(_cell(row, chosen) for row in group)]
            for group in zip(*per_case, strict=True)
        ]
        blocks.append(f"### {threads} thread{'s' * (threads > 1)}\n\n{table(['', 'type', *heads], lines)}")
    return "\n\n".join([*blocks, *(f"* {row.case}: {row.note}" for row in rows if not row.name)])


def _cell(row: Row, rows: Sequence[Row]) -> str:
    if row.time is None:
        return row.note or ""
    ours = ("native-dense", row.details["dtype"], row.case)
    dense = [r.time.least for r in rows if (r.name, r.details["dtype"], r.case) == ours and r.time]
    ratio = f" ({dense[0] / row.time.least:.2f})" if dense else ""
    density = "" if row.details["alpha"] is None else f"density {row.details['density']:.2f}: "
    return f"{density}{row.time.least / 1e6:.3g}{ratio}"
