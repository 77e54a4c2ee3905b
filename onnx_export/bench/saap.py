"""Decode steps with SAAP and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.numpy_helper import from_array

from mlx_sparse.checks import ConfigError, check_int
from mlx_sparse.methods import SAAP
from mlx_sparse.tools.bench.core import Row
from mlx_sparse.tools.bench.run import Plan, Request
from mlx_sparse.tools.bench.thresholds import length
from mlx_sparse.tools.environment import machine

from ..build import operator_model
from . import caches as sets_of
from . import steps
from .bound import HALF, Bound, ort_step, session
from .caches import Caches, Problem
from .report import where

Array = npt.NDArray[Any]

BUCKETS = 1024
PLANTED = 96  # keys of the check, in buckets that are visited
NAMES = {
    **{name: steps.NAMES[name] for name in ("body-dense", "native-dense")},
    "body-saap": "our SaapAttention, function body",
    "native-saap": "our SaapAttention, native",
    "native-saap-kmeans": "the same, routed by centroids",
}
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
        """The inputs of a node, with as many copies of the weights as the caches of a processor do not hold."""
        kind = np.dtype(dtype)
        read = sum(self.weights[name].nbytes for name in WEIGHTS)
        count = -(-sets_of.IN_PLAY // read)
        copies = {name: [self.weights[name].copy() for _ in range(count)] for name in WEIGHTS}
        one = {"query_before": self.query.astype(kind), "key_before": self.key.astype(kind)}
        return {**one, "past_bucket_ids": self.bucket_ids.copy(), **copies}


def plan(request: Request, config: SAAP) -> Plan:
    """Decode steps with SAAP and without.

    Raises:
        ConfigError: more probes than buckets, or a length of which everything is attended.
    """
    check_int("probes", config.probes, 1, BUCKETS)
    if short := [S for S in request.lengths if S <= config.attended + PLANTED]:
        raise ConfigError(f"--lengths: expected more than the {config.attended} keys always attended, got {short[0]}.")
    (shape,) = request.shapes
    problems = [Indexed("", shape, 1, S, shape.D, PLANTED + 32, 32, config) for S in request.lengths]
    shares = ", ".join(f"{100 * p.attended / p.S:.0f} % of {length(p.S)}" for p in problems)
    head = (
        f"{where()}\n\nOne decode step in milliseconds, median (minimum): {shape.Hq} query heads, {shape.Hkv} KV "
        f"heads, D = {shape.D}; SAAP with {config.probes} of {BUCKETS} equal buckets and {config.sink_tokens} + "
        f"{config.recent_tokens} keys exactly ({shares} keys); networks of {hidden_of(shape.D)} hidden units in "
        "float16."
    )

    def text(rows: Sequence[Row]) -> str:
        named = sorted((row for row in rows if row.name), key=lambda row: (row.case.S, row.details["dtype"]))
        named.sort(key=lambda row: list(NAMES).index(row.name))
        return f"{head}\n\n{steps.text_of([*named, *(row for row in rows if not row.name)], NAMES)}"

    def measured(problem: Indexed, _: float) -> Iterator[Row]:
        for dtype in HALF:
            names = [(name, dtype) for name in NAMES]
            yield from steps.measured(problem, names, request.threads, request.repeat, build)

    return Plan(machine(), problems, measured, text)


def build(name: str, dtype: str, caches: Caches, threads: int) -> Bound:
    """The contender ``name`` over these caches, of an `Indexed` problem."""
    if name.endswith("dense"):
        return steps.build(name, dtype, caches, threads)
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
    return ort_step(session(model, name, threads), dtype, caches, inputs)


def _fix(model: onnx.ModelProto, weights: dict[str, Array]) -> None:
    """Make constants of weights, as they are in a model, where onnxruntime widens them once and for all."""
    graph = model.graph
    kept = [info for info in graph.input if info.name not in weights]
    graph.ClearField("input")
    graph.input.extend(kept)
    graph.initializer.extend(from_array(array, name) for name, array in weights.items())
