"""``mlx-sparse bench --onnx --attn saap``: time of one decode step with SAAP and without, on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.numpy_helper import from_array

from mlx_sparse.bars import length
from mlx_sparse.checks import ConfigError, check_int
from mlx_sparse.config import SAAP

from ..build import operator_model
from . import caches as sets_of
from . import report
from .caches import Caches, Problem
from .contenders import HALF, Contender, Ort, options, ours, unavailable
from .run import Row, check, machine, measure

Array = npt.NDArray[Any]

BUCKETS = 1024
PLANTED = 96  # keys of the check, in buckets that are visited
NAMES = ("body-dense", "native-dense", "body-saap", "native-saap", "native-saap-kmeans")
WEIGHTS = ("centroids", "hidden_weight", "hidden_bias", "out_weight", "out_bias")


def hidden_of(D: int) -> int:
    """Hidden units of a network, as `mlx-sparse train-saap` makes them."""
    return 2 * D


@dataclass(frozen=True)
class Indexed(Problem):
    """One decode step over keys in buckets of equal size."""

    saap: SAAP = field(default_factory=SAAP)

    @property
    def attended(self) -> int:
        """Keys per KV head."""
        exact = self.saap.attended
        return exact + (self.S - exact) * self.saap.probes // BUCKETS

    def copies(self, dtype: str) -> tuple[int, int]:
        """The more sets as a step reads the smaller part of one."""
        read = 2 * self.bytes(dtype) * self.attended // self.S
        return max(2, -(-sets_of.IN_PLAY // read)), 0


class Index:
    """Queries before RoPE, the network that routes them, and the buckets of the keys.

    Attributes:
        arrays: inputs of `SaapAttention`, weights in float16.
        visited: (Hkv, probes).
    """

    def __init__(self, problem: Indexed, *, trained: bool) -> None:
        p, rng = problem, np.random.default_rng(4)
        self.problem = p
        H = hidden_of(p.D) if trained else 0
        shapes = {"centroids": (BUCKETS, p.D), "hidden_weight": (p.D, H), "hidden_bias": (H,)}
        shapes |= {"out_weight": (H or p.D, BUCKETS), "out_bias": (BUCKETS,)}
        # Weights that keep the variance: large ones would leave single buckets all of the mass. No biases.
        spread = {"centroids": p.D**-0.5, "hidden_weight": p.D**-0.5, "out_weight": (H or p.D) ** -0.5}
        self.weights = {
            name: (spread.get(name, 0.0) * rng.standard_normal((p.Hkv, *shape), np.float32)).astype(np.float16)
            for name, shape in shapes.items()
        }
        self.query = rng.standard_normal((1, p.Hq, 1, p.D), np.float32).astype(np.float16)
        self.key = rng.standard_normal((1, p.Hkv, 1, p.D), np.float32).astype(np.float16)

    @cached_property
    def visited(self) -> Array:
        p = self.problem
        w1, b1, w2, b2 = (self.weights[name].astype(np.float64) for name in WEIGHTS[1:])
        x = self.query.astype(np.float64).reshape(p.Hkv, p.G, p.D)
        if w1.shape[2]:
            x = np.maximum(x @ w1 + b1[:, None], 0)
        logits = x @ w2 + b2[:, None]
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        score = (weights / weights.sum(axis=2, keepdims=True)).sum(axis=1)
        chosen: Array = np.argsort(-score, axis=1, kind="stable")[:, : p.saap.probes]
        return chosen

    @cached_property
    def bucket_ids(self) -> Array:
        """(1, Hkv, C), balanced but for the planted keys, which are all visited."""
        p = self.problem
        ids = np.zeros((1, p.Hkv, p.C), np.int16)
        rng = np.random.default_rng(5)
        for h, chosen in enumerate(self.visited):
            ids[0, h, : p.S] = rng.permutation(np.arange(p.S) % BUCKETS)
            ids[0, h, p.planted] = np.resize(chosen, len(p.planted))
        return ids

    def inputs(self, dtype: str) -> dict[str, Array | list[Array]]:
        """Of a node, with as many copies of the weights as the caches of a processor do not hold."""
        kind = np.dtype(dtype)
        read = sum(self.weights[name].nbytes for name in WEIGHTS)
        count = -(-sets_of.IN_PLAY // read)
        copies = {name: [self.weights[name].copy() for _ in range(count)] for name in WEIGHTS}
        one = {"query_before": self.query.astype(kind), "key_before": self.key.astype(kind)}
        return {**one, "past_bucket_ids": self.bucket_ids.copy(), **copies}


def run(
    lengths: Sequence[int], threads: Sequence[int], shape: tuple[int, int, int], config: SAAP, repeat: int
) -> tuple[list[dict[str, Any]], str, bool]:
    """Measure; return rows for programs, Markdown for people, and whether all results were right.

    Raises:
        ConfigError: more probes than buckets, or a length of which everything is attended.
    """
    from tqdm import tqdm

    check_int("probes", config.probes, 1, BUCKETS)
    if short := [S for S in lengths if S <= config.attended + PLANTED]:
        raise ConfigError(f"--lengths: expected more than the {config.attended} keys always attended, got {short[0]}.")
    rows: list[Row] = []
    problems = [Indexed(*shape, S, shape[2], PLANTED + 32, 32, config) for S in lengths]
    cases = [(problem, dtype) for problem in problems for dtype in HALF]
    for problem, dtype in tqdm(cases, unit="case", disable=None):
        rows += _case(problem, dtype, threads, repeat)
    shares = ", ".join(f"{100 * p.attended / p.S:.0f} % of {length(p.S)}" for p in problems)
    Hq, Hkv, D = shape
    text = (
        f"{machine()}\n\nOne decode step in milliseconds, median (minimum): {Hq} query heads, {Hkv} KV heads, D = {D}; "
        f"SAAP with {config.probes} of {BUCKETS} equal buckets and {config.sink_tokens} + {config.recent_tokens} keys "
        f"exactly ({shares} keys); networks of {hidden_of(D)} hidden units in float16."
    )
    order = sorted(rows, key=lambda row: (threads.index(row.threads), NAMES.index(row.contender), row.dtype, row.S))
    return [row.as_dict() for row in rows], f"{text}\n\n{report.text(order, [])}", not any(row.failed for row in rows)


def _case(problem: Indexed, dtype: str, threads: Sequence[int], repeat: int) -> list[Row]:
    caches = Caches(problem, dtype, component_major=False)
    rows = []
    for n in threads:
        entered = []
        for name in NAMES:
            size = 2 * problem.bytes(dtype) * problem.S / problem.C / 1e9
            row = Row(name, dtype, problem.S, n, size, note=unavailable(name))
            rows.append(row)
            if row.note is not None:
                continue
            contender = build(name, dtype, caches, n)
            row.note = check(contender, caches)
            row.failed = row.note is not None
            if not row.failed:
                entered.append((row, contender))
        measure(entered, repeat)
        del entered
        gc.collect()
    del caches
    gc.collect()  # before the next ones
    return rows


def build(name: str, dtype: str, caches: Caches, threads: int) -> Contender:
    """The contender ``name`` over these caches, of an `Indexed` problem."""
    if not name.startswith(("body-saap", "native-saap")):
        return ours(name, dtype, caches, threads)
    p = caches.problem
    assert isinstance(p, Indexed)
    index = Index(p, trained=not name.endswith("kmeans"))
    H, rows = index.weights["hidden_weight"].shape[2], index.weights["out_weight"].shape[1]
    sizes = {"B": 1, "Hq": p.Hq, "Hkv": p.Hkv, "L": 1, "C": p.C, "D": p.D, "N": BUCKETS, "H": H, "features": rows}
    settings = {name: getattr(p.saap, name) for name in ("probes", "sink_tokens", "recent_tokens")}
    model = operator_model(
        "SaapAttention", dtype=dtype, weights="float16", sizes=sizes, **settings, scale=p.scale, dense_below=0
    )
    inputs = index.inputs(dtype)
    if name == "body-saap":
        _fix(model, {weight: inputs.pop(weight)[0] for weight in WEIGHTS})
    return Ort(name, dtype, model, caches, options(threads, "auto" if name.startswith("native") else "off"), inputs)


def _fix(model: onnx.ModelProto, weights: dict[str, Array]) -> None:
    """Make constants of weights, as they are in a model, where onnxruntime widens them once and for all."""
    graph = model.graph
    kept = [info for info in graph.input if info.name not in weights]
    graph.ClearField("input")
    graph.input.extend(kept)
    graph.initializer.extend(from_array(array, name) for name, array in weights.items())
