"""Run any attention method of any backend on a test case, through one interface.

An adapter has one Python method for each attention method. The Python methods take a case and the parameters of the
attention method. `Arrays` adapts backends whose functions take arrays, and `Onnx` adapts backends that run ONNX nodes.
Libraries are imported inside functions, because some libraries may not be installed.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from cases import Array, Case
from saap_cases import SaapCase
from sample_cases import SampleCase

from mlx_sparse.core import registry
from mlx_sparse.methods.sparq.config import Selection
from mlx_sparse.methods.sparq.scoring_keys import GROUP, WORDS

Params = dict[str, Any]
# Instruction sets of the native kernels on this kind of machine, the fastest last.
SETS = ["scalar", "neon"] if platform.machine() in ("aarch64", "arm64") else ["scalar", "avx2", "avx512"]


class Result(NamedTuple):
    """Result that a backend computes for a case.

    Attributes:
        choice: indices of the selected keys, key blocks or buckets; None if the backend does not return its selection.
        out: output in float32.
        lse: log-sum-exp over the attended keys in float32; None if the backend does not return it.
    """

    choice: Array | None
    out: Array
    lse: Array | None = None


class Arrays(ABC):
    """Adapter for a backend of the registry whose functions take the arrays of one library."""

    functions: Any  # module with the public functions of the backend
    integers: Callable[..., Any]  # converts NumPy integers to the library's arrays, int32 by default
    array: Callable[[Array, str], Any]  # converts NumPy numbers to the library's arrays of a given type
    numpy: Callable[[Any], Array]

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self, function: str) -> Callable[..., Any]:
        return registry.load(function, self.name)

    def arrays(self, case: Case | SampleCase) -> list[Any]:
        return [self.array(array, case.dtype) for array in case.inputs()]

    def padding(self, case: Case) -> Any:
        return None if case.padding is None else self.integers(case.padding)

    def cached(self, array: Any) -> Any:
        """Return a longer buffer that begins with ``array``. If the backend takes no buffers, return ``array``."""
        return array

    @abstractmethod
    def columns(self, keys: Any) -> Any:
        """Return a component-major copy of ``keys`` that is stored in a buffer, as in a real cache."""

    def cached_codes(self, coded: Any) -> Any:
        """Copy ``coded`` to buffers that end with unused groups. If the backend takes no buffers, return ``coded``."""
        return coded

    def code_keys(self, case: Case) -> list[Array]:
        """Quantize the keys of a case to int4. Return the arrays of `KeyCodes`. The codes are uint8."""
        _, k, _ = self.arrays(case)
        codes, *ranges = self.load("code_keys")(k, self.padding(case))
        return [self.numpy(codes).view(np.uint8), *(self.numpy(array) for array in ranges)]

    def length(self, S: int) -> Params:
        """Return the number of keys as ``{"length": S}`` if the backend receives whole buffers, else an empty dict."""
        return {"length": S} if self.name in registry.WHOLE_BUFFERS else {}

    def result(self, choice: Any, out: Any, lse: Any, case: Case | SampleCase) -> Result:
        assert out.dtype == self.array(np.zeros(1), case.dtype).dtype
        assert lse.dtype == self.array(np.zeros(1), "f32").dtype
        return Result(None if choice is None else self.numpy(choice), self.numpy(out), self.numpy(lse))

    def public(self, name: str, case: Case | SampleCase, **parameters: Any) -> Any:
        """Call the backend's public function ``name`` with the arrays of a case, which have no unused rows."""
        given = {"backend": self.name, **parameters}
        return getattr(self.functions, name)(*self.arrays(case), **given)

    # Decode

    def dense(self, case: Case, params: Params) -> Result:
        q, k, v = self.arrays(case)
        how = {"scale": params["scale"], "left_padding": self.padding(case)}
        return self.result(None, self.load("dense")(q, k, v, **how), self.load("dense_lse")(q, k, **how), case)

    def attend_indices(self, case: Case, indices: Array, scale: float, **more: Any) -> Result:
        q, k, v = self.arrays(case)
        given = (q, self.cached(k), self.cached(v), self.integers(indices))
        how = {**more, **self.length(case.S)}
        return self.result(None, *self.load("attend_indices")(*given, scale=scale, **how), case)

    def sparq(self, case: Case, params: Params) -> Result:
        q, k, v = self.arrays(case)
        padding = self.padding(case)
        coded = self.load("code_keys")(k, padding) if params.get("key_bits", 16) < 16 else None
        weight = None
        if params["component_score"] == "query_key":
            spread = [self.load("deviation"), k] if coded is None else [self.load("key_spread"), coded, k]
            weight = spread[0](*spread[1:], padding)
        biased = {"bias": params["bias"]} if "bias" in params else {}
        selection = {
            **{name: params[name] for name in ("rank", "top_k", "local_window", "scale")},
            "component_weight": weight,
            "left_padding": padding,
            **biased,
        }
        out, lse, *_ = self.load("sparq")(
            q,
            self.cached(k),
            self.cached(v),
            keys_t=self.columns(k) if coded is None else self.cached_codes(coded),
            reallocate=params["reallocate"],
            value_mean=self.load("masked_mean")(v, padding, **biased),
            **selection,
            **self.length(case.S),
        )
        return self.result(self.sparq_select(q, k, coded, selection, params["reallocate"]), out, lse, case)

    @abstractmethod
    def sparq_select(self, q: Any, k: Any, coded: Any, selection: Params, reallocate: bool) -> Any:
        """Select the keys for `sparq` with the int4 scoring keys ``coded``, or with ``k`` if ``coded`` is None."""

    # Prompts

    def sample(self, case: SampleCase) -> Result:
        q, k, v = self.arrays(case)
        given = (q, self.cached(k), self.cached(v))
        out, lse, _ = self.load("sample")(*given, **case.parameters, **self.length(case.S))
        blocks = self.load("sample_select")(*given[:2], **case.parameters, **self.length(case.S))
        return self.result(blocks, out, lse, case)

    def gather(self, case: SampleCase) -> tuple[Result, Array, Array]:
        """Return the result of `gather`, the number of attended pairs and the estimated attention recall."""
        q, k, v = self.arrays(case)
        out, lse, *more = self.load("gather")(
            q, self.cached(k), self.cached(v), **case.parameters, **self.length(case.S)
        )
        pairs, recall = map(self.numpy, more)
        return self.result(None, out, lse, case), pairs, recall

    def sample_scores(self, case: SampleCase, **more: Any) -> list[Array]:
        """Return two arrays of SampleAttention: the scores of the key blocks and the scores of the offset bins."""
        q, k, _ = self.arrays(case)
        how = {**case.sampling, **more, **self.length(case.S)}
        return [self.numpy(scores) for scores in self.load("sample_scores")(q, self.cached(k), **how)]

    def attend_blocks(self, case: SampleCase, blocks: Array, **more: Any) -> Result:
        q, k, v = self.arrays(case)
        how = {"block_size": case.block_size, "scale": case.scale, **self.length(case.S)}
        given = (q, self.cached(k), self.cached(v), self.integers(blocks, **more))
        return self.result(None, *self.load("attend_blocks")(*given, **how), case)

    # Buckets

    def network(self, case: SaapCase) -> Params:
        return {name: self.array(array, case.weights) for name, array in case.network().items()}

    def route(self, case: SaapCase) -> Array:
        """Return the buckets ``(B, Hkv, probes)`` that each group of query heads visits."""
        queries = self.array(case.queries_before(), case.step.dtype)
        how = {"probes": case.probes, "backend": self.name, **self.network(case)}
        return self.numpy(self.functions.saap_route(queries, **how))

    def lists(self, case: SaapCase, visited: Array, covered: Any, capacity: int, sinks: int | None = None) -> Any:
        """Index the first ``covered`` keys by bucket, and list the keys that a decode step attends to.

        ``covered`` is one number for all sequences, or a list with one number per sequence. The decode step visits the
        buckets ``visited``. Return the arrays of the index, and the indices and counts of the listed keys.
        """
        window = {"sink_tokens": case.sink_tokens if sinks is None else sinks, "left_padding": self.padding(case.step)}
        most = int(np.max(covered))
        ids = np.where(np.arange(most) < np.reshape(covered, (-1, 1, 1)), case.bucket_ids()[..., :most], -1)
        index = self.load("saap_index")(self.integers(ids), buckets=case.buckets, **window)
        known = covered if isinstance(covered, int) else self.integers(covered)
        sizes = {"length": case.step.S, "covered": known, "capacity": capacity}
        found = self.load("saap_indices")(self.integers(visited), *index, **sizes, **window)
        return [self.numpy(array) for array in index], [self.numpy(array) for array in found]

    def saap(self, case: SaapCase, visited: Array) -> Result:
        """Attend to the keys in the ``visited`` buckets. The result's ``choice`` lists the buckets from `route`."""
        q, k, v = self.arrays(case.step)
        ids = case.bucket_ids()
        if self.name in registry.WHOLE_BUFFERS:  # unused rows have a visited bucket
            ids = np.pad(ids, [(0, 0), (0, 0), (0, 45)], constant_values=int(visited.flat[0]))
        given = {"bucket_ids": self.integers(ids), "visited": self.integers(visited)}
        if self.name != "triton":
            given["buckets"] = case.buckets
        how = {"scale": case.scale, "left_padding": self.padding(case.step), **self.length(case.step.S)}
        out, lse, _ = self.load("saap")(q, self.cached(k), self.cached(v), **given, **case.window, **how)
        return self.result(None, out, lse, case.step)._replace(choice=self.route(case))

    def assign(self, keys: Array, centroids: Array, dtype: str = "f32") -> Array:
        """Return the bucket of each key in ``keys (B, Hkv, n, D)``."""
        return self.numpy(self.load("saap_assign")(self.array(keys, dtype), self.array(centroids, "f32")))


class Mlx(Arrays):
    """Adapter for the backends on MLX arrays: MLX operations, native kernels and Metal kernels."""

    def load(self, function: str) -> Callable[..., Any]:
        """Return the implementation of ``function``, which is that of `ops` if the backend has none."""
        return registry.load(function, self.name if self.name in registry.backends_of(function) else "ops")

    @cached_property
    def functions(self) -> Any:
        import mlx_sparse

        return mlx_sparse

    def array(self, array: Array, dtype: str) -> Any:
        from mlx_arrays import to_mlx

        return to_mlx(array, dtype)

    def integers(self, array: Any, dtype: str = "int32") -> Any:
        import mlx.core as mx

        return mx.array(np.asarray(array)).astype(getattr(mx, dtype))

    def numpy(self, array: Any) -> Array:
        import mlx.core as mx

        return np.array(array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array)

    def cached(self, array: Any) -> Any:
        import mlx.core as mx

        spare = array.shape[2] % 5
        if self.name not in registry.WHOLE_BUFFERS or spare == 0:
            return array
        return mx.concatenate([array, mx.full((*array.shape[:2], spare, array.shape[3]), mx.nan, array.dtype)], axis=2)

    def cached_codes(self, coded: Any) -> Any:
        import mlx.core as mx

        if self.name not in registry.WHOLE_BUFFERS:
            return coded
        room = [(0, 0)] * 3
        codes = mx.pad(coded.codes, [*room, (0, 3 * WORDS)], constant_values=0x5A5A5A5A)
        lo, step = (mx.pad(array, [*room, (0, 3)], constant_values=mx.nan) for array in coded[1:3])
        return type(coded)(codes, lo, step, coded.center)

    def columns(self, keys: Any) -> Any:
        import mlx.core as mx

        return mx.contiguous(self.cached(keys).swapaxes(-1, -2))

    def sparq_select(self, q: Any, k: Any, coded: Any, selection: Params, reallocate: bool) -> Any:
        from mlx_sparse.methods.sparq import metal as kernels
        from mlx_sparse.methods.sparq import ops

        if self.name == "metal":
            return kernels.sparq_select(q, k, Selection(keys_t=coded, **selection), exact=reallocate)
        return ops.sparq_select(q, k, Selection(keys_t=coded, **selection))[0]


class Torch(Arrays):
    """Adapter for the Triton kernels. Keys and values are slices of longer torch tensors, as in a real cache."""

    @cached_property
    def functions(self) -> Any:
        from mlx_sparse import cuda_ref

        return cuda_ref

    def arrays(self, case: Case | SampleCase) -> list[Any]:
        """Return queries, keys and values. As in a model, all heads of one token's query are adjacent in memory."""
        q, *rows = super().arrays(case)
        return [q.transpose(1, 2).contiguous().transpose(1, 2), *rows]

    def array(self, array: Array, dtype: str) -> Any:
        from torch_arrays import to_torch

        return to_torch(array, dtype)

    def integers(self, array: Any, dtype: str = "int32") -> Any:
        import torch
        from torch_arrays import DEVICE

        return torch.tensor(np.asarray(array), dtype=getattr(torch, dtype), device=DEVICE)

    def numpy(self, array: Any) -> Array:
        from torch_arrays import to_numpy

        return to_numpy(array)

    def cached(self, array: Any) -> Any:
        from torch_arrays import cached

        return cached(array)

    def columns(self, keys: Any) -> Any:
        from torch_arrays import component_major

        return component_major(keys)

    def cached_codes(self, coded: Any) -> Any:
        from torch.nn.functional import pad

        rooms = ((coded.codes, 3 * GROUP // 2, 0x5A), (coded.lo, 3, np.nan), (coded.step, 3, np.nan))
        held = (pad(array, (0, room), value=stale)[..., : array.shape[-1]] for array, room, stale in rooms)
        return type(coded)(*held, coded.center)

    def sparq_select(self, q: Any, k: Any, coded: Any, selection: Params, reallocate: bool) -> Any:
        from mlx_sparse.cuda_ref.launchers import sparq

        given = Selection(keys_t=k.mT if coded is None else coded, **selection)
        return sparq.sparq_select(q.contiguous(), k, given, exact=reallocate)[0]


class Onnx:
    """Adapter that runs ONNX models with one node on one of the runtimes in onnx_operators.py."""

    def __init__(self, runtime: str) -> None:
        self.name = self.runtime = runtime

    def operator(self, name: str, dtype: str, **settings: Any) -> Any:
        from onnx_operators import Operator

        return Operator(self.runtime, name, dtype, **settings)

    def result(self, got: dict[str, Array], dtype: str, choice: str | None = None) -> Result:
        from onnx_operators import DTYPES

        assert got["output"].dtype == DTYPES[dtype]
        assert choice is None or got[choice].dtype == np.int32
        return Result(choice and got[choice], got["output"].astype(np.float32))

    def dense(self, case: Case, params: Params) -> Result:
        from onnx_operators import padding

        q, k, v = case.inputs()
        given = {"query": q, "keys": k, "values": v, "left_padding": padding(case), "length": np.full(case.B, case.S)}
        attend = self.operator("DenseAttention", case.dtype, scale=params["scale"], window=0)
        return self.result(attend(**given), case.dtype)

    def code_keys(self, case: Case) -> list[Array]:
        """Append the keys of a case in up to three calls. Return the arrays of `KeyCodes`. The codes are uint8."""
        from onnx_operators import appended_codes, unpacked

        return unpacked(appended_codes(self.runtime, case), case)

    def sparq(self, case: Case, params: Params) -> Result:
        from onnx_operators import attributes, coded_step, step

        if params.get("key_bits", 16) < 16:
            attend = self.operator("SparQCoded", case.dtype, **attributes(params))
            return self.result(attend(**coded_step(case)), case.dtype, "indices")
        attend = self.operator("SparQ", case.dtype, **attributes(params))
        return self.result(attend(**step(case, *case.inputs())), case.dtype, "indices")

    def sample(self, case: SampleCase) -> Result:
        """Run a `Sample` node on key and value buffers whose unused rows are NaN."""
        q, k, v = case.inputs()
        keys, values = (np.pad(array, [(0, 0), (0, 0), (0, 21), (0, 0)], constant_values=np.nan) for array in (k, v))
        attend = self.operator("Sample", case.dtype, **case.parameters)
        got = attend(query=q, keys=keys, values=values, length=np.array([case.S]))
        return self.result(got, case.dtype, "blocks")

    def saap(self, case: SaapCase, visited: Array) -> Result:
        """Run a `SaapAttention` node on the last token of a case. Check the caches that the node returns."""
        from onnx_operators import assert_same_assignment, saap_settings, saap_step

        given, past = saap_step(case), case.step.S - 1
        got = self.operator("SaapAttention", case.step.dtype, **saap_settings(case))(**given)
        _, k, v = case.inputs()
        for name, array in (("key", k), ("value", v)):
            np.testing.assert_array_equal(got[f"present_{name}"][:, :, : past + 1].astype(np.float32), array)
        ids, before = got["present_bucket_ids"], given["past_bucket_ids"]
        assert ids.dtype == np.int16
        np.testing.assert_array_equal(np.delete(ids, past, axis=2), np.delete(before, past, axis=2))
        assert_same_assignment(ids[:, :, past : past + 1], given["key_before"], given["centroids"])
        return self.result(got, case.step.dtype)

    def assign(self, keys: Array, centroids: Array, dtype: str = "f32") -> Array:
        """Append ``keys (1, 2, n, 64)`` with a `SaapAttention` node. Return the bucket that each key gets."""
        from onnx_operators import saap_settings, saap_step

        B, Hkv, n, D = keys.shape
        case = SaapCase(Case(B, 2 * Hkv, Hkv, 60, D, dtype), "random", buckets=centroids.shape[1])
        given = saap_step(case, room=n)
        queries = np.zeros((B, 2 * Hkv, n, D), np.float32)
        new = {"query": queries, "query_before": queries, "key": keys, "value": keys, "key_before": keys}
        attend = self.operator("SaapAttention", dtype, **saap_settings(case))
        ids = attend(**{**given, **new, "centroids": centroids})["present_bucket_ids"]
        return ids[:, :, case.step.S - 1 :][:, :, :n]


class NumPy:
    """Adapter for the public functions on NumPy arrays, which run the oracle."""

    name = "oracle"

    @cached_property
    def functions(self) -> Any:
        from mlx_sparse import oracle

        return oracle

    def array(self, array: Array, dtype: str) -> Array:
        return np.asarray(array, np.float16 if dtype == "f16" else np.float32)

    def integers(self, array: Any) -> Array:
        return np.asarray(array, np.int32)

    def numpy(self, array: Any) -> Array:
        return np.asarray(array)


# `fixtures_backends.backend` limits the native kernels to the instruction set in the name of an adapter.
ADAPTERS: dict[str, Any] = {
    "ops": Mlx("ops"),
    "cpu": Mlx("cpu"),
    **{f"cpu-{name}": Mlx("cpu") for name in SETS[:-1]},
    "metal": Mlx("metal"),
    "triton": Torch("triton"),
    "onnx": Onnx("onnxruntime"),
    "onnx-compat": Onnx("onnxruntime-compat"),
    "onnx-reference": Onnx("reference"),
    "ort": Onnx("native"),
}
# One adapter for each array library of the public functions.
LIBRARIES: dict[str, Any] = {"ops": ADAPTERS["ops"], "triton": ADAPTERS["triton"], "oracle": NumPy()}


def backends_with(method: str) -> list[str]:
    """Return the names of the backends that implement a method."""
    return [name for name, adapter in ADAPTERS.items() if hasattr(adapter, method)]
