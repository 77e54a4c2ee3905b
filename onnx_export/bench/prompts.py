"""Attention over a whole prompt on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx.helper import make_node

from mlx_sparse import oracle
from mlx_sparse.methods.block_layout import Layout
from mlx_sparse.tools.bench import inputs
from mlx_sparse.tools.bench.core import Case, Contender, Row, Sample, Turns, wrong
from mlx_sparse.tools.bench.run import Plan, Request
from mlx_sparse.tools.bench.thresholds import length
from mlx_sparse.tools.environment import machine

from ..build import TYPES, operator_model
from ..defaults import PIECE
from ..runtime import memory
from . import bound
from .bound import Bound, group_query_attention, model_of, of_torch, session
from .caches import DTYPES
from .report import by_threads, tables, where

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


@dataclass(frozen=True)
class Problem(Case):
    """A prompt of S tokens."""

    block_size: int
    chunks: int

    @property
    def layout(self) -> Layout:
        return Layout(self.S, self.S, self.chunks, self.block_size)

    @cached_property
    def arrays(self) -> list[Array]:
        """Queries (1, Hq, S, D), keys and values (1, Hkv, S, D): float32 numbers that float16 has too."""
        return [array.astype(np.float16).astype(np.float32) for array in inputs.prompt(self)]

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
        """Share of the blocks that are attended."""
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
            own, keys, values = (array.astype(np.float64) for array in (q[h, rows], k[h // self.G], v[h // self.G]))
            made[h] = inputs.attention(own, keys, values, mask[h])
        return rows, made


class Buffers:
    """What contenders of one type share: inputs, caches and the output (1, Hq, S, D)."""

    def __init__(self, problem: Problem, dtype: str) -> None:
        self.kind = np.dtype(DTYPES[dtype])
        self.inputs = [array.astype(self.kind, copy=False) for array in problem.arrays]
        cache = (1, problem.Hkv, problem.S, problem.D)
        self.caches = {name: memory.zeros(cache, self.kind) for name in ("past_key", "past_value")}
        self.output = memory.zeros((1, problem.Hq, problem.S, problem.D), self.kind)


class CpuPrompt(Contender):
    """A prompt on the CPU."""

    def __init__(self, row: Row, problem: Problem, buffers: Buffers) -> None:
        super().__init__(row)
        self._problem, self._buffers = problem, buffers

    def prepare(self) -> None:
        self._bound = build(self.row, self._problem, self._buffers)

    def check(self) -> str | None:
        assert self._bound.output is not None
        self._bound.run()
        positions, expected = self._problem.expected(self.row.details["alpha"])
        got = self._bound.output()[:, positions].astype(np.float64)
        # Weights of half precision, where a contender rounds them, err by half an ulp each.
        eps = float(np.finfo(DTYPES[self.row.details["dtype"]]).eps)
        return wrong(float(np.abs(got - expected).max()), 4 * eps * float(np.abs(expected).max()) + 2e-5)

    def step(self, turn: int) -> Sample:
        # With one thread its own time: that leaves out what other programs take.
        clock = time.process_time if self.row.details["threads"] == 1 else time.perf_counter
        start = clock()
        self._bound.run()
        return Sample(clock() - start)


def plan(request: Request, config: Any) -> Plan:
    """Prompts with SampleAttention and without."""
    head = (
        f"{where()}\n\nAttention over a prompt in one call: seconds (with one thread: of the processor), least of "
        f"{request.repeat}; in parentheses how many times as fast as our native dense attention of that type. Blocks "
        f"of {config.block_size}, {config.chunks} region(s)."
    )

    def column(case: Case) -> str:
        return f"{str(case.shape).replace('x', '/')}, {length(case.S)}"

    return Plan(
        machine(),
        [
            Problem("", shape, 1, S, config.block_size, config.chunks)
            for shape in request.shapes
            for S in request.lengths
        ],
        lambda problem, _: _measured(problem, request.threads, request.repeat),
        lambda rows: f"{head}\n\n{tables(rows, {**DENSE, **SPARSE}, 'type', column, _cell)}",
    )


def _measured(problem: Problem, threads: Sequence[int], repeat: int) -> Iterator[Row]:
    """Rows for each number of threads."""
    problem = replace(problem)  # whose arrays go with it
    buffers = {dtype: Buffers(problem, dtype) for dtype in bound.HALF}

    def contender(row: Row) -> CpuPrompt:
        row.note = unavailable(row.name, problem)
        return CpuPrompt(row, problem, buffers[row.details["dtype"]])

    yield from by_threads(problem, threads, lambda n: rows_of(problem, n), contender, Turns(repeat))


def rows_of(problem: Problem, threads: int) -> list[Row]:
    """Who takes part; the bodies in float32 only."""
    wanted: list[tuple[str, float, float | None]] = [(name, 1.0, None) for name in DENSE]
    for density in DENSITIES:
        alpha = problem.alpha_of(density)
        wanted += [(name, problem.density(alpha), alpha) for name in SPARSE]
    return [
        Row(problem, name, details={"dtype": dtype, "threads": threads, "density": density, "alpha": alpha})
        for name, density, alpha in wanted
        for dtype in (bound.HALF if name.startswith("native") else bound.HALF[:1])
    ]


def unavailable(name: str, problem: Problem) -> str | None:
    """Why a contender cannot run here, None if it can."""
    logits = problem.Hq * problem.S**2 * 4
    if name == "attention" and logits > MOST_LOGITS:
        return f"holds {logits / 1e9:.1f} GB of logits"
    return bound.unavailable(name)


def build(row: Row, p: Problem, buffers: Buffers) -> Bound:
    """The contender of a row."""
    name, dtype, threads = row.name, row.details["dtype"], row.details["threads"]
    if name == "torch":
        q, k, v = buffers.inputs
        return of_torch(q, [k], [v], threads, scale=p.scale, is_causal=True, enable_gqa=True)
    if name == "gqa":
        model = group_query_attention(p, dtype, p.S, p.S)
    elif name == "attention":
        query, key = ((TYPES[dtype], (1, heads, p.S, p.D)) for heads in (p.Hq, p.Hkv))
        node = make_node("Attention", ["query", "key", "value"], ["output"], is_causal=1, scale=p.scale)
        model = model_of([node], {"query": query, "key": key, "value": key}, {"output": query})
    else:
        model = _ours(row, p)
    piece = PIECE if name == "body-dense" else p.S
    return _in_pieces(session(model, name, threads), p, buffers, piece, flat=name == "gqa")


def _ours(row: Row, p: Problem) -> onnx.ModelProto:
    sizes = {"B": 1, "Hq": p.Hq, "Hkv": p.Hkv, "C": p.S, "D": p.D}
    if (alpha := row.details["alpha"]) is None:
        return operator_model("CachedAttention", dtype=row.details["dtype"], sizes=sizes, scale=p.scale, window=0)
    settings: dict[str, Any] = {"chunks": p.chunks, "block_size": p.block_size, "dense_prompt_below": 0}
    settings |= {"alpha_column": alpha, "alpha_slash": alpha, "scale": p.scale}
    return operator_model("SampleAttention", dtype=row.details["dtype"], sizes=sizes, **settings)


def _in_pieces(running: onnxruntime.InferenceSession, p: Problem, buffers: Buffers, piece: int, *, flat: bool) -> Bound:
    """A model that takes the prompt in pieces, caches bound in place."""
    names = {info.name for info in running.get_inputs()}
    bindings, outputs, kept = [], [], []
    for start in range(0, p.S, piece):
        stop = min(start + piece, p.S)
        given: dict[str, Array] = {
            name: np.ascontiguousarray(array[:, :, start:stop])
            for name, array in zip(("query", "key", "value"), buffers.inputs, strict=True)
        }
        if flat:
            given = {name: array.swapaxes(1, 2).reshape(1, stop - start, -1) for name, array in given.items()}
        shape = given["query"].shape
        out = buffers.output.reshape(shape) if piece >= p.S else np.zeros(shape, buffers.kind)
        given |= buffers.caches | {
            "past_length": np.array([start]),
            "left_padding": np.array([0]),
            "seqlens_k": np.array([stop - 1], np.int32),
            "total_sequence_length": np.array(stop, np.int32),
        }
        binding = running.io_binding()
        for name in names:
            value = memory.ort_value(given[name])
            binding.bind_ortvalue_input(name, value)
            if name in buffers.caches:
                binding.bind_ortvalue_output(name.replace("past", "present"), value)
        binding.bind_ortvalue_output("output", memory.ort_value(out))
        kept.append(given)
        outputs.append(out)
        bindings.append(binding)

    def attend() -> None:
        for binding in bindings:
            running.run_with_iobinding(binding)

    def output() -> Array:
        found: Array = np.concatenate(outputs, axis=1 if flat else 2)[0]
        return found.reshape(p.S, p.Hq, p.D).swapaxes(0, 1) if flat else found

    return Bound(attend, output=output, kept=kept)


def _cell(row: Row, rows: Sequence[Row]) -> str:
    if row.time is None:
        return row.note or ""
    ours = ("native-dense", row.details["dtype"], row.case)
    dense = [r.time.least for r in rows if (r.name, r.details["dtype"], r.case) == ours and r.time]
    ratio = f" ({dense[0] / row.time.least:.2f})" if dense else ""
    density = "" if row.details["alpha"] is None else f"density {row.details['density']:.2f}: "
    return f"{density}{row.time.least / 1e6:.3g}{ratio}"
