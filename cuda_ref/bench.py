"""Time torch's attention and the public functions of this package on an NVIDIA GPU. MLX is not required.

Steps are captured in CUDA graphs and timed with CUDA events. The steps of a graph rotate through copies of the KV
cache. All copies together are larger than the L2 cache. In Triton's interpreter, the steps are plain calls and the
times are meaningless.
"""

from __future__ import annotations

import gc
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from mlx_sparse import cuda_ref
from mlx_sparse.checks import BackendUnavailable
from mlx_sparse.tools.bench.core import Case, Request, Variant, check_memory
from mlx_sparse.tools.bench.inputs import (
    BUCKETS,
    Index,
    Problem,
    Prompt,
    check_request,
    planted_problem,
    random_problem,
)
from mlx_sparse.tools.environment import memory, versions

from . import interpreted, unavailable

Step = Callable[[int], torch.Tensor]  # takes the index of a cache copy and returns the attention output

ROTATIONS = 3  # steps read this multiple of the L2 cache before they read the same keys and values again
MOST_COPIES = 64  # maximum number of cache copies
LARGEST_SHARE = 0.8  # maximum share of the free memory that a case may use
ENOUGH = 300e-6  # minimum duration in seconds of all steps of one graph
FASTEST = 4e12  # bytes per second, used only to compute the number of steps of a graph


def device() -> torch.device:
    """Return the torch device that the kernels run on."""
    return torch.device("cpu" if interpreted() else "cuda")


def machine() -> dict[str, object]:
    """Return a dict that describes the GPU, the platform and the package versions for the report."""
    found: dict[str, object] = {
        "platform": platform.platform(),
        **versions(("torch", "triton", "mlx-sparse-attention")),
    }
    if interpreted():
        return found | {"chip": "CPU, Triton's interpreter: the times are meaningless", "device": "cpu"}
    gpu = torch.cuda.get_device_properties(0)
    about = {"chip": gpu.name, "device": "cuda", "memory": gpu.total_memory, "l2": gpu.L2_cache_size}
    return found | about | {"processors": gpu.multi_processor_count, "cuda": torch.version.cuda}


def check(request: Request) -> None:
    """Validate a request before anything runs."""
    check_request(request, ("triton",))
    if reason := unavailable():
        raise BackendUnavailable(f"--runtime cuda: expected an NVIDIA GPU with torch and triton, got none ({reason}).")


def variants(request: Request, case: Case) -> Iterator[Variant]:
    """Yield the attention variants to time for a case, which are torch, dense Triton, and each sparse method."""
    shape = case.shape
    if case.step is not None:
        check_memory(8 * case.rows * case.S * shape.D * case.item * (shape.G + 2), free_memory(), LARGEST_SHARE)
        prompt = Inputs(case)
        yield TorchPrefill(case, prompt, "torch")
        yield DensePrefill(case, prompt, "triton")
        yield from (SamplePrefill(case, prompt, config) for config in request.methods)
        return
    caches = Caches(case)
    check_memory(3 * (caches.count + 1) * case.keys, free_memory(), LARGEST_SHARE)
    yield TorchStep(case, caches, "torch, enable_gqa")
    if shape.G > 1:
        yield TorchStep(case, caches, "torch, group as rows")
    yield DenseStep(case, caches, "triton")
    for config in request.methods:
        yield (SaapStep if config.pre_rope else SparqStep)(case, caches, config)


def free_memory() -> int:
    """Return the number of free bytes in GPU memory, or in main memory if Triton interprets the kernels."""
    if interpreted():
        return memory()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class Timer:
    """Timer of attention calls.

    On a GPU, it replays a CUDA graph that rotates through cache copies. On a CPU, it makes one plain call.
    """

    def __init__(self, step: Step, copies: int, moved: int) -> None:
        self._step, self.output = step, step(0)  # the first call also compiles the kernels
        self._graph: torch.cuda.CUDAGraph | None = None
        if interpreted():
            return
        self._count = copies * math.ceil(ENOUGH / (copies * moved / FASTEST))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(copies - 1)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                for n in range(self._count):
                    step(n % copies)
        torch.cuda.current_stream().wait_stream(stream)

    def sample(self) -> float:
        """Return the time per step in seconds. The graph is replayed twice, and only the second replay is timed."""
        if self._graph is None:
            start = time.perf_counter()
            self._step(0)
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._graph.replay()
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return 1e-3 * float(begin.elapsed_time(end)) / self._count


def to_torch(array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
    """Copy a NumPy array to the device, and convert it to ``dtype`` if ``dtype`` is not None."""
    found = torch.from_numpy(np.ascontiguousarray(array)).to(device())
    return found if dtype is None else found.to(getattr(torch, dtype))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as a float32 NumPy array."""
    return tensor.float().cpu().numpy()


class TorchVariant(Variant):
    """Base class for attention variants that run on torch tensors and are timed with a `Timer`."""

    copies = 1

    def __init__(self, case: Case, method: str, name: str | None = None, **details: object) -> None:
        super().__init__(case, method, "" if name else "triton", dense=name, bytes_plain=2 * case.keys, **details)
        self.role, self.ours = ("dense" if name else "sparse"), not (name or "").startswith("torch")

    def batch(self, array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
        """Copy ``array (1, ...)`` to the device as ``dtype``, and repeat the array for each sequence of the batch."""
        found = to_torch(array, dtype)
        return found.expand(self.case.B, *found.shape[1:]).contiguous()

    def time(self, step: Step) -> None:
        """Create the `Timer` for `run`. The timer captures calls of ``step`` in a CUDA graph."""
        self._timer = Timer(step, self.copies, self.row.details["bytes_formula"] or 2 * self.case.keys)

    def run(self, turn: int) -> float:
        return self._timer.sample()


# Decode steps


class Caches:
    """Copies of a KV cache with random keys and values. All copies together are larger than the L2 cache."""

    def __init__(self, case: Case) -> None:
        self.case = case
        l2 = 0 if interpreted() else torch.cuda.get_device_properties(0).L2_cache_size
        # The factor 8 allows for sparse steps, which read only a fraction of the keys and values.
        self.count = min(MOST_COPIES, max(1, math.ceil(8 * ROTATIONS * l2 / (2 * case.keys))))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device(), dtype=getattr(torch, self.case.dtype))

    @cached_property
    def queries(self) -> torch.Tensor:
        return self.normal(self.case.B, self.case.shape.Hq, 1, self.case.shape.D)

    @cached_property
    def sets(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values ``(B, Hkv, S, D)`` of each cache copy."""
        shape = self.case.B, self.case.shape.Hkv, self.case.S, self.case.shape.D
        first = self.normal(*shape), self.normal(*shape)
        return [first, *((first[0].clone(), first[1].clone()) for _ in range(self.count - 1))]


class DenseStep(TorchVariant):
    """Decode step with the dense attention of this package, and base class of the other decode variants."""

    def __init__(self, case: Case, caches: Caches, name: str | None = None, config: Any = None) -> None:
        super().__init__(case, str(config or "dense"), name)
        self.caches, self.copies, self.config = caches, caches.count, config
        if config is not None and config.attended >= case.S:
            self.row.note = f"dense: all of {case.S:,} keys are attended"

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, state: Any) -> torch.Tensor:
        """Return the attention output of a decode step. ``state`` is the result of the method `state`."""
        out: torch.Tensor = cuda_ref.dense_attention(queries, keys, values)
        return out

    def state(self, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Return the method's auxiliary cache state for ``keys`` and ``values``, or None if the method has none."""
        return None

    def problem(self) -> Problem:
        """Build inputs with a known attention output. `check` compares this output with the result of `attend`."""
        return random_problem(self.case)

    def check(self) -> str | None:
        problem = self.problem()
        q, k, v = (self.batch(array, self.case.dtype) for array in (problem.queries, problem.keys, problem.values))
        found = problem.wrong(to_numpy(self.attend(q, k, v, self.state(k, v))))
        if found is None:
            states = [self.state(*rows) for rows in self.caches.sets]
            self.time(lambda n: self.attend(self.caches.queries, *self.caches.sets[n], states[n]))
        return found


class TorchStep(DenseStep):
    """Decode step with torch's attention, either with ``enable_gqa`` or with a query group as the rows of one head."""

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, state: Any) -> torch.Tensor:
        B, Hkv, _, D = keys.shape
        if self.row.details["dense"] == "torch, enable_gqa":
            return scaled_dot_product_attention(queries, keys, values, enable_gqa=queries.shape[1] > Hkv)
        return scaled_dot_product_attention(queries.view(B, Hkv, -1, D), keys, values).view(queries.shape)


class SparqStep(DenseStep):
    """Decode step with SparQ and 16-bit or int4 scoring keys."""

    def __init__(self, case: Case, caches: Caches, config: Any) -> None:
        super().__init__(case, caches, None, config)
        self.row.details["bytes_formula"] = int(case.rows * case.item * config.elements(case.S, case.shape.D))
        found = config.at(case.S).parameters(case.shape.G)
        names = ("rank", "top_k", "local_window", "reallocate")
        # Select components by the paper's rule, because the other rule needs running statistics of a cache.
        self._settings = {name: found[name] for name in names} | {"key_bits": config.key_bits}

    def problem(self) -> Problem:
        return planted_problem(self.case, self.config.at(self.case.S))

    def state(self, keys: torch.Tensor, values: torch.Tensor) -> Any:
        coded = cuda_ref.code_keys(keys) if self.config.key_bits < 16 else keys.transpose(2, 3).contiguous()
        return {"keys_t": coded, "value_mean": values.float().mean(dim=2) if self._settings["reallocate"] else None}

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, state: Any) -> torch.Tensor:
        out: torch.Tensor = cuda_ref.sparq_attention(queries, keys, values, **state, **self._settings)
        return out


class SaapStep(DenseStep):
    """Decode step with SAAP and a trained router: select buckets, list their keys, and attend to these keys."""

    def __init__(self, case: Case, caches: Caches, config: Any) -> None:
        super().__init__(case, caches, None, config)
        self._index = Index.of(case, config, 2 * case.shape.D)

    def problem(self) -> Problem:
        found = self._index.problem(self.case, self.config)
        self.row.details["bytes_formula"] = self._index.bytes(found, self.case)
        assert found.selected is not None
        self._capacity = max(map(len, found.selected))
        return found

    def state(self, keys: torch.Tensor, values: torch.Tensor) -> Any:
        covered = self.case.S - self.config.recent_tokens
        ids = self.batch(self._index.bucket_ids[None]).int()[:, :, :covered]
        sinks = self.config.sink_tokens
        index = cuda_ref.saap_index(ids, buckets=BUCKETS, sink_tokens=sinks)
        network = {name: to_torch(array) for name, array in self._index.network.items()}
        sizes = {"length": self.case.S, "covered": covered, "sink_tokens": sinks, "capacity": self._capacity}
        return network, partial(cuda_ref.saap_indices, offsets=index[0], key_ids=index[1], **sizes)

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, state: Any) -> torch.Tensor:
        network, listing = state
        visited = cuda_ref.saap_route(queries, probes=self.config.probes, **network)
        out: torch.Tensor = cuda_ref.attend_indices(queries, keys, values, listing(visited)[0])[0]
        return out


# Prefill


class Inputs(Prompt):
    """The prompt of a prefill case, with its tensors on the device."""

    @cached_property
    def tensors(self) -> Sequence[torch.Tensor]:
        made = (to_torch(array, self.case.dtype) for array in (self.queries, self.keys, self.values))
        return [array.expand(self.case.B, *array.shape[1:]).contiguous() for array in made]


class DensePrefill(TorchVariant):
    """Prefill in one call with the dense attention of this package."""

    def __init__(self, case: Case, prompt: Inputs, name: str | None = None, config: Any = None) -> None:
        super().__init__(case, "dense" if config is None else str(config), name, density=None)
        self.prompt, self.config = prompt, config

    def attend(self, *rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cuda_ref.dense_attention(*rows)
        return out

    def check(self) -> str | None:
        self.time(lambda _: self.attend(*self.prompt.tensors))
        return self.prompt.wrong(to_numpy(self._timer.output), self.config)


class TorchPrefill(DensePrefill):
    """Prefill in one call with torch's attention."""

    def attend(self, *rows: torch.Tensor) -> torch.Tensor:
        q, k, v = rows
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])


class SamplePrefill(DensePrefill):
    """Prefill in one call with SampleAttention. The time includes the selection of key blocks."""

    def __init__(self, case: Case, prompt: Inputs, config: Any) -> None:
        super().__init__(case, prompt, None, config)

    def prepare(self) -> None:
        self.row.details["density"] = self.prompt.density(self.config)

    def attend(self, *rows: torch.Tensor) -> torch.Tensor:
        at = self.config.at(self.case.S)
        names = ("alpha_column", "alpha_slash", "chunks", "block_size")
        out: torch.Tensor = cuda_ref.sample_attention(*rows, **{name: getattr(at, name) for name in names})
        return out
