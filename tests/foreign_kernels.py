"""Kernels of MLX, read from the installed wheel when a test runs, with inputs and an independent answer for each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from msl import Kernel, Report

HEADERS = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"
NUMPY = {"half": np.float16, "float": np.float32, "bfloat16_t": np.uint16}


@dataclass
class Foreign:
    """One instance of a kernel of MLX: where it is, how it is launched, what must come out."""

    file: str
    name: str
    buffers: dict[str, np.ndarray]
    answers: dict[str, np.ndarray]  # output -> float32 reference
    grid: tuple[int, int, int]  # threadgroups
    threadgroup: tuple[int, int, int]
    tolerance: float
    constants: dict[str, int | bool] = field(default_factory=dict)

    def text(self) -> str:
        path = HEADERS / self.file
        if not path.exists():
            pytest.skip(f"MLX {mx.__version__} has no {self.file}")
        return path.read_text()

    def run(self, text: str | None = None, seed: int = 0) -> Report:
        """Run the kernel (or a changed text of it) and fill its outputs."""
        source = f'#line 1 "{Path(self.file).name}"\n{text or self.text()}'
        kernel = Kernel(source, self.name, constants=self.constants)
        return kernel(self.buffers, grid=self.grid, threadgroup=self.threadgroup, threads=False, seed=seed)

    def error(self) -> float:
        """Largest difference from the reference."""
        return max(float(np.abs(widen(self.buffers[k]) - a).max()) for k, a in self.answers.items())


def widen(a: np.ndarray) -> np.ndarray:
    """Float32 values of an array; uint16 holds bfloat16."""
    return (a.astype(np.uint32) << 16).view(np.float32) if a.dtype == np.uint16 else a.astype(np.float32)


def random(type_: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers in the storage type."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if type_ == "bfloat16_t" else values.astype(NUMPY[type_])


def i32(value: int) -> np.ndarray:
    return np.array(value, np.int32)


def softmax(kind: str, type_: str, n: int, tolerance: float, rows: int = 3) -> Foreign:
    x = random(type_, rows, n)
    threads = 1024 if kind == "looped" else -(-n // 128) * 32  # the looped kernel needs all 32 simdgroups
    expected = np.array(mx.softmax(mx.array(widen(x)), axis=-1))
    out = np.empty_like(x)
    buffers = {"in": x, "out": out, "axis_size": i32(n)}
    name = f"softmax_{kind}<{type_}, float, 4>"
    return Foreign("softmax.h", name, buffers, {"out": expected}, (rows, 1, 1), (threads, 1, 1), tolerance)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, causal: bool = False) -> np.ndarray:
    """Float32 attention of MLX's array operations on the CPU; (heads, length, D)."""
    q, k, v = (mx.array(widen(a))[None] for a in (q, k, v))
    return np.array(mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal" if causal else None))[0]


FLAGS = ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks")


def sdpa(
    kernel: str, type_: str, heads: tuple[int, int], S: int, D: int, tolerance: float, blocks: int = 32
) -> Foreign:
    """The vector kernels: one pass, or the first of two (whose partial results are merged here in NumPy)."""
    hq, hk = heads
    q, k, v = random(type_, hq, 1, D), random(type_, hk, S, D, seed=1), random(type_, hk, S, D, seed=2)
    strides = {f"{a}_{b}_stride": np.array(n, np.uint64) for a in "kv" for b, n in (("head", S * D), ("seq", D))}
    common = {"queries": q, "keys": k, "values": v}
    tail = {"N": i32(S), **strides, "scale": np.array(D**-0.5, np.float32)}
    constants: dict[str, int | bool] = dict.fromkeys(FLAGS, False) | {"blocks": blocks}
    answers = {"out": attention(q, k, v, D**-0.5)}
    if kernel == "sdpa_vector":
        buffers = {**common, "out": np.empty_like(q), "gqa_factor": i32(hq // hk), **tail}
        grid, name = (hq, 1, 1), f"sdpa_vector<{type_}, {D}, {D}>"
        return Foreign("sdpa_vector.h", name, buffers, answers, grid, (1024, 1, 1), tolerance, constants)
    partial = np.empty((hq, 1, blocks, D), q.dtype)
    sums, maxs = np.empty((hq, 1, blocks), np.float32), np.empty((hq, 1, blocks), np.float32)
    buffers = {**common, "out": partial, "sums": sums, "maxs": maxs, **tail}
    args = f"{type_}, {D}, {D}, {hq // hk}, 4" if kernel.endswith("gqa") else f"{type_}, {D}, {D}, 4"
    group = (32, hq // hk, 1)
    return Foreign("sdpa_vector.h", f"{kernel}<{args}>", buffers, answers, (hk, 1, blocks), group, tolerance, constants)


def second_pass(first: Foreign) -> Foreign:
    """The merge of what a first pass wrote."""
    partial, sums, maxs = (first.buffers[name] for name in ("out", "sums", "maxs"))
    hq, _, blocks, D = partial.shape
    type_ = first.name.split("<")[1].split(",")[0]
    out = np.empty((hq, 1, D), partial.dtype)
    buffers = {"partials": partial, "sums": sums, "maxs": maxs, "out": out, "blocks": i32(blocks)}
    name, group = f"sdpa_vector_2pass_2<{type_}, {D}>", (1024, 1, 1)
    return Foreign("sdpa_vector.h", name, buffers, first.answers, (hq, 1, 1), group, first.tolerance, first.constants)


def steel_attention(type_: str, q_len: int, S: int, D: int, causal: bool, tolerance: float) -> Foreign:
    """Prefill attention with 8 x 8 matrix units: 2 query heads of one KV head."""
    bq, bk = 32, 32 if D < 128 else 16
    q, k, v = random(type_, 2, q_len, D), random(type_, 1, S, D, seed=1), random(type_, 1, S, D, seed=2)
    head, tail = ["B", "H", "D", "qL", "kL", "gqa_factor"], ["NQ", "NK", "NQ_aligned", "NK_aligned"]
    tail += ["qL_rem", "kL_rem", "qL_off"]
    fields = [(n, "i4") for n in head] + [("scale", "f4")] + [(n, "i4") for n in tail]
    params = np.zeros((), np.dtype([*fields, *((f"{n}_strides", "i8", 3) for n in "QKVO")], align=True))
    values = (1, 2, D, q_len, S, 2, D**-0.5, -(-q_len // bq), -(-S // bk), q_len // bq, S // bk)
    strides = [[h * n * D, n * D, D] for h, n in ((2, q_len), (1, S), (1, S), (2, q_len))]
    params[...] = (*values, q_len % bq, S % bk, S - q_len, *strides)
    buffers = {"Q": q, "K": k, "V": v, "O": np.empty_like(q), "params": params}
    constants = {"align_Q": q_len % bq == 0, "align_K": S % bk == 0, "has_mask": False, "do_causal": causal}
    constants |= {"has_sinks": False, "save_lse": False}
    name = f"attention<{type_}, {bq}, {bk}, {D}, {D}, 4, 1, {type_}, float>"
    file, answers = "steel/attn/kernels/steel_attention.h", {"O": attention(q, k, v, D**-0.5, causal)}
    grid = (-(-q_len // bq), 2, 1)
    return Foreign(file, name, buffers, answers, grid, (32, 4, 1), tolerance, constants)


def block_sort(type_: str, n: int) -> Foreign:
    """Argsort of two rows, exact."""
    x = np.random.default_rng(0).permutation(np.arange(2 * n, dtype=NUMPY[type_])).reshape(2, n)
    out = np.empty((2, n), np.uint32)
    numbers = {"size_sorted_axis": n, "in_stride_sorted_axis": 1, "out_stride_sorted_axis": 1}
    numbers |= {"in_stride_segment_axis": n, "out_stride_segment_axis": n}
    buffers = {"inp": x, "out": out, **{k: i32(v) for k, v in numbers.items()}}
    answers = {"out": np.array(mx.argsort(mx.array(x), axis=-1)).astype(np.float32)}
    return Foreign("sort.h", f"block_sort<{type_}, uint, true, 128, 4>", buffers, answers, (1, 2, 1), (128, 1, 1), 0)


# Tolerances: a few roundings of the storage type at the size of the values; float32 accumulation throughout.
KERNELS: dict[str, Callable[[], Foreign]] = {
    "softmax of one half row": lambda: softmax("single_row", "half", 1000, 2e-4),
    "softmax of one bfloat row": lambda: softmax("single_row", "bfloat16_t", 4096, 2e-3),
    "softmax looped": lambda: softmax("looped", "float", 5001, 1e-6),
    "vector attention": lambda: sdpa("sdpa_vector", "half", (8, 8), 2048, 128, 2e-4),
    "vector attention, grouped": lambda: sdpa("sdpa_vector", "bfloat16_t", (8, 2), 333, 64, 4e-3),
    "two passes": lambda: sdpa("sdpa_vector_2pass_1", "half", (8, 8), 2048, 128, 2e-4),
    "two passes, grouped": lambda: sdpa("sdpa_vector_2pass_1", "bfloat16_t", (32, 4), 1000, 128, 4e-3),
    "two passes, each byte read twice": lambda: sdpa("sdpa_vector_2pass_1_gqa", "half", (32, 4), 1000, 128, 4e-4),
    "matrix units": lambda: steel_attention("half", 96, 96, 64, False, 2e-3),
    "matrix units, causal and ragged": lambda: steel_attention("float", 77, 130, 64, True, 2e-6),
    "matrix units, bfloat of 128": lambda: steel_attention("bfloat16_t", 64, 100, 128, True, 2e-2),
    "block sort": lambda: block_sort("half", 400),
}
