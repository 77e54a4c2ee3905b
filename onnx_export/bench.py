"""Time our operators in ONNX Runtime on a CPU, with the native kernels or with the function bodies.

The KV caches already contain the new token, so the same decode step can run repeatedly. Successive steps use different
copies of the KV caches, so that no copy stays in the processor's cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from typing import Any

import numpy as np
import onnx
import onnxruntime

from mlx_sparse.checks import ConfigError
from mlx_sparse.methods.sparq.scoring_keys import GROUP, KeyCodes
from mlx_sparse.oracle import code_keys
from mlx_sparse.tools import environment
from mlx_sparse.tools.bench import inputs
from mlx_sparse.tools.bench.core import Case, Request, Variant, check_memory

from .build import operator_model
from .defaults import PREFILL_CHUNK, lanes_for
from .operators import CODE_RECORD, coded_axes
from .runtime import memory, native

Array = np.ndarray

BYTES_IN_TURNS = 600_000_000  # total bytes of the KV cache copies that a variant cycles through
LARGEST_SHARE = 0.8  # maximum share of the machine's memory that a case may use
PAUSE = 0.003  # seconds between two variants, so that the threads of the previous variant stop


def machine() -> dict[str, object]:
    """Return a description of the machine and the versions of onnxruntime and onnx, for the report."""
    return environment.machine() | {"onnxruntime": version("onnxruntime"), "onnx": version("onnx")}


def check(request: Request) -> None:
    """Validate a request before anything runs."""
    inputs.check_request(request, ("native", "standard"))
    for case, config in product(request.cases, request.methods):
        if case.B > 1 or case.dtype == "bfloat16" or getattr(config, "component_score", "query") == "query_key":
            some = "batch 1 in float32 or float16 without component_score=query_key"
            raise ConfigError(f"--runtime onnx: expected {some}, got {case} with {config}.")


def variants(request: Request, case: Case) -> Iterator[Variant]:
    """Yield the variants to time for a case. They run dense attention and each sparse method on each backend."""
    decode = case.step is None
    needed = 4 * max(2 * case.keys, BYTES_IN_TURNS) if decode else 16 * case.S * case.shape.D * case.shape.Hq
    check_memory(needed, environment.memory(), LARGEST_SHARE)
    shared: Any = Caches(case) if decode else inputs.Prompt(case)
    kind = OrtStep if decode else OrtPrefill
    for backend, config in product(request.backends, (None, *request.methods)):
        yield kind(case, shared, request.threads, config, backend)


def records_of(coded: KeyCodes) -> Array:
    """Convert int4 scoring keys to the layout of the operators, uint8 ``(B, Hkv * D, groups, 36)``.

    The last axis contains the 36 bytes for one component of a group of 64 keys.
    """
    ranges = np.stack([coded.lo, coded.step], axis=-1).astype("<f2").view(np.uint8)
    records = np.concatenate([ranges, coded.codes.reshape(*coded.lo.shape, -1)], axis=-1)
    return records.reshape(len(records), -1, *records.shape[-2:])


class Caches:
    """Several equal copies of the KV caches of one case, filled with random numbers.

    There are three kinds of arrays: "rows" (keys and values), "transposed" (component-major keys) and "codes" (int4
    scoring keys).
    """

    def __init__(self, case: Case) -> None:
        self.case, self.lanes = case, lanes_for(case.S)
        self.capacity = -(-case.S // self.lanes) * self.lanes
        self.count = max(2, -(-BYTES_IN_TURNS // (2 * case.keys)))
        self.problem = inputs.random_problem(case)
        self._sets: dict[str, list[dict[str, Array]]] = {}

    def sets(self, kind: str) -> list[dict[str, Array]]:
        """Return all copies of the arrays of ``kind``. Each copy is a dict from input names to arrays."""
        if kind not in self._sets:
            self._sets[kind] = [self.arrays(self.problem, kind) for _ in range(self.count)]
        return self._sets[kind]

    def arrays(self, problem: inputs.Problem, kind: str) -> dict[str, Array]:
        """Return the arrays of ``kind`` as a dict from input name to array.

        The arrays are computed from the keys and values of ``problem`` and padded to the capacity of the caches.
        """
        _, Hkv, S, D = problem.keys.shape
        keys, values = (memory.zeros((1, Hkv, self.capacity, D), self.case.dtype) for _ in "kv")
        keys[:, :, :S], values[:, :, :S] = problem.keys, problem.values
        if kind == "rows":
            return {"past_key": keys, "past_value": values}
        if kind == "transposed":
            values.reshape(Hkv, -1, D, self.lanes)[:] = keys.reshape(Hkv, -1, self.lanes, D).swapaxes(2, 3)
            return {"past_key_t": values}
        coded = code_keys(problem.keys)
        records = memory.zeros((1, Hkv * D, coded_axes(self.capacity)["groups"], CODE_RECORD), np.uint8)
        records[:, :, : coded.lo.shape[-1]] = records_of(coded)
        summary = np.zeros((1, 3 * Hkv, D), np.float32)
        summary[0, 1::3] = coded.center[0]
        return {"past_key_codes": records, "past_summary": summary}


class OrtVariant(Variant):
    """Base class of variants that run a one-node model on onnxruntime. If ``config`` is None, attention is dense."""

    def __init__(self, case: Case, shared: Any, threads: int, config: Any, backend: str) -> None:
        name = None if config else "CachedAttention"
        super().__init__(case, str(config or "dense"), backend, dense=name, threads=threads)
        self.role = "sparse" if config else "dense"
        self.shared, self.config, self.backend, self.threads = shared, config, backend, threads
        reason = native.unavailable() if backend == "native" else None
        self.row.note = reason and reason.partition(".")[0]

    def common(self, **sizes: int) -> dict[str, Any]:
        """Return the arguments that `operator_model` needs for every operator: dtype, axis lengths and scale."""
        shape = self.case.shape
        axes = {"B": 1, "Hq": shape.Hq, "Hkv": shape.Hkv, "D": shape.D}
        return {"dtype": self.case.dtype, "sizes": axes | sizes, "scale": shape.D**-0.5}

    def load(self, model: onnx.ModelProto) -> None:
        """Create an ONNX Runtime session. Idle threads sleep, because spinning would slow down other sessions."""
        options = native.session_options("auto" if self.backend == "native" else "off")
        options.intra_op_num_threads = self.threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        self._inputs, self._outputs = (
            {info.name for info in side} for side in (self._session.get_inputs(), self._session.get_outputs())
        )
        self._binding = self._session.io_binding()

    def new_tokens(self, rows: Sequence[Array], start: int) -> dict[str, Array]:
        """Return a dict from name to array for all inputs and outputs of a call that are not caches.

        ``rows`` are the queries, keys and values of the new tokens. ``start`` is the number of tokens before them.
        """
        names = ("query", "key", "value")
        new = {name: np.ascontiguousarray(row, self.case.dtype) for name, row in zip(names, rows, strict=True)}
        numbers: dict[str, Array] = {"past_length": np.array([start]), "left_padding": np.array([0])}
        return new | numbers | {"output": np.zeros_like(new["query"])}

    def place(self, arrays: Mapping[str, Array]) -> None:
        """Bind each array to the input or output of its name. Bind each ``past_X`` to the output ``present_X`` too."""
        for name, array in arrays.items():
            value = memory.ort_value(array)
            if name in self._inputs:
                self._binding.bind_ortvalue_input(name, value)
            if (now := name.replace("past_", "present_")) in self._outputs:
                self._binding.bind_ortvalue_output(now, value)


class OrtStep(OrtVariant):
    """Variant that runs one decode step with one operator."""

    def __init__(self, case: Case, shared: Caches, threads: int, config: Any, backend: str) -> None:
        super().__init__(case, shared, threads, config, backend)
        self._index = inputs.Index.of(case, config, 2 * case.shape.D) if config and config.pre_rope else None
        self._coded = getattr(config, "key_bits", 16) < 16
        self.row.details["bytes_plain"] = 2 * case.keys
        if self._coded and backend != "native":
            self.row.note = "int4 scoring keys need the native kernels"
        if config and config.attended >= case.S:
            self.row.note = f"dense: all of {case.S:,} keys are attended"

    def prepare(self) -> None:
        case, config, caches = self.case, self.config, self.shared
        Hkv, D = case.shape.Hkv, case.shape.D
        common = self.common(L=1, C=caches.capacity)
        more: dict[str, Array] = {}
        self._kinds = ["rows"]
        self._problem: inputs.Problem = caches.problem
        if config is None:
            model = operator_model("CachedAttention", **common, window=0)
        elif self._index is not None:
            self._problem = self._index.problem(case, config)
            self.row.details["bytes_formula"] = self._index.bytes(self._problem, case)
            common["sizes"] |= {"N": inputs.BUCKETS, "H": 2 * D, "features": 2 * D}
            window = {name: getattr(config, name) for name in ("probes", "sink_tokens", "recent_tokens")}
            model = operator_model("SaapAttention", weights="float16", **common, **window, dense_below=0)
            ids = np.zeros((1, Hkv, caches.capacity), np.int16)
            ids[0, :, : case.S] = self._index.bucket_ids
            before = {"query_before": self._problem.queries, "key_before": self._problem.keys[:, :, -1:]}
            more = {name: np.ascontiguousarray(array, case.dtype) for name, array in before.items()}
            more |= {"past_bucket_ids": ids, "centroids": np.zeros((Hkv, inputs.BUCKETS, D), np.float16)}
            more |= self._index.network
        else:
            # Every 64th step also quantizes a group. If the step at S is such a step, time an earlier step.
            early = self._coded and case.S % GROUP == 0
            self._problem = inputs.planted_problem(replace(case, S=case.S - GROUP // 2) if early else case, config)
            self.row.details["bytes_formula"] = int(case.rows * case.item * config.at(0).elements(case.S, D))
            found = config.parameters(case.shape.G)
            own = {name: found[name] for name in ("rank", "top_k", "local_window")} | {"component_score": 0}
            own |= {"reallocate": int(found["reallocate"]), "dense_below": 0}  # dense_below=0: sparse at every length
            if self._coded:
                common["sizes"] |= {"3Hkv": 3 * Hkv, "HkvD": Hkv * D, **coded_axes(caches.capacity)}
                model = operator_model("SparQCodedAttention", **common, **own)
            else:
                model = operator_model("SparQAttention", **common, **own, lanes=caches.lanes)
                more = {"past_sums": np.zeros((1, Hkv, 3, D), np.float32)}
            self._kinds.append("codes" if self._coded else "transposed")
        p = self._problem
        self._arrays = self.new_tokens((p.queries, p.keys[:, :, -1:], p.values[:, :, -1:]), p.keys.shape[2] - 1) | more
        for kind in self._kinds:
            self._arrays |= caches.arrays(p, kind)
        self.load(model)

    def check(self) -> str | None:
        return self._problem.wrong(self.output())

    def output(self) -> Array:
        """Run the decode step that `check` verifies, and return its attention output."""
        self.place(self._arrays)
        self._session.run_with_iobinding(self._binding)
        return self._arrays["output"]

    def run(self, turn: int) -> float:
        """Run two decode steps and return the time of the second step in seconds. The first step wakes the threads.

        ``turn`` is the index of the measurement. It selects the cache copies, which differ between the two steps. With
        one thread, the time is processor time, which other processes affect less.
        """
        clock = time.process_time if self.threads == 1 else time.perf_counter
        time.sleep(PAUSE)
        start = 0.0
        for n in (2 * turn, 2 * turn + 1):
            for kind in self._kinds:
                self.place(self.shared.sets(kind)[n % self.shared.count])
            start = clock()
            self._session.run_with_iobinding(self._binding)
        return clock() - start


class OrtPrefill(OrtVariant):
    """Variant that runs prefill in one call, except that dense function bodies use chunks of `PREFILL_CHUNK` tokens."""

    def prepare(self) -> None:
        case, prompt, common = self.case, self.shared, self.common(C=self.case.S)
        chunk = PREFILL_CHUNK if self.config is None and self.backend == "standard" else case.S
        if self.config is None:
            self.load(operator_model("CachedAttention", **common, window=0))
        else:
            at, names = self.config.at(case.S), ("alpha_column", "alpha_slash", "chunks", "block_size")
            own = {name: getattr(at, name) for name in names} | {"dense_prompt_below": 0}
            self.load(operator_model("SampleAttention", **common, **own))
            self.row.details["density"] = prompt.density(self.config)
        rows = prompt.queries, prompt.keys, prompt.values
        cuts = [(start, min(start + chunk, case.S)) for start in range(0, case.S, chunk)]
        self._chunks = [self.new_tokens([row[:, :, a:b] for row in rows], a) for a, b in cuts]
        self._caches = {f"past_{name}": memory.zeros(prompt.keys.shape, case.dtype) for name in ("key", "value")}
        self.place(self._caches)

    def check(self) -> str | None:
        found: str | None = self.shared.wrong(self.output(), self.config)
        return found

    def output(self) -> Array:
        """Run the prefill and return the attention output of all chunks."""
        self.run(0)
        return np.concatenate([chunk["output"] for chunk in self._chunks], axis=2)

    def run(self, turn: int) -> float:
        start = time.perf_counter()
        for chunk in self._chunks:
            self.place(chunk)
            self._session.run_with_iobinding(self._binding)
        return time.perf_counter() - start
