"""Run the same files on other runtimes, each in its own process."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from cases import Array, Case, assert_as_good_as_plain, assert_same_selection, plain_attention
from exported import SPARQ, exported
from mlx_sparse.onnx_export import compose
from mlx_sparse.onnx_export.runtime import native
from onnx_operators import (
    CACHES,
    DTYPES,
    LANES,
    TYPES,
    assert_is_sparq,
    attributes,
    filled_caches,
    padding,
    parameters,
    saap_settings,
    saap_step,
    select,
    step,
    windowed_attention,
)
from packages import MINUTES, WEB, Package, fetched, web, wheel
from repository_paths import FIXTURES
from require import absent
from saap_cases import SaapCase
from saap_cases import assert_attends as assert_lists
from sample_cases import SampleCase, assert_attends, assert_same_blocks, selection

from mlx_sparse import onnx_export

pytestmark = pytest.mark.slow  # other runtimes


@dataclass(frozen=True)
class File:
    """A model of one operator, its inputs and the check of its outputs."""

    operator: str
    dtype: str
    attributes: dict[str, float]
    inputs: dict[str, Array]
    check: Callable[[dict[str, Array]], None]
    weights: str = "f32"


def sparq_step(case: Case, setting: str) -> File:
    """Build a file with one SparQ step over buffers."""
    q, k, v = case.inputs()
    params = parameters(case, setting)
    expected = select(case, q, k, params)

    def check(got: dict[str, Array]) -> None:
        assert_same_selection(got["indices"], expected.indices, expected.scores)
        assert_is_sparq(got["output"], case, params, q, k, v)

    inputs = step(case, q, k, v)
    return File("SparQ", case.dtype, attributes(params), inputs, check)


def cached(case: Case, setting: str) -> File:
    """Build a file with one SparQ step over caches whose free slots are NaN."""
    q, k, v = case.inputs()
    params = parameters(case, setting)
    new = {"query": q, "key": k[:, :, -1:], "value": v[:, :, -1:], "left_padding": padding(case)}
    inputs = {**filled_caches(case, k, v, case.S - 1, case.S + LANES), **new}
    caches = {name: inputs[name].astype(np.float32) for name in ("past_key", "past_value")}

    def check(got: dict[str, Array]) -> None:
        assert_is_sparq(got["output"], case, params, q, k, v)
        for name, new in (("key", k), ("value", v)):
            expected = caches[f"past_{name}"].copy()
            expected[:, :, case.S - 1] = new[:, :, -1]
            np.testing.assert_array_equal(got[f"present_{name}"].astype(np.float32), expected)

    return File("SparQAttention", case.dtype, {**CACHES, **attributes(params)}, inputs, check)


def dense(case: Case, window: int) -> File:
    """Build a file with one dense step over caches."""
    q, k, v = case.inputs()
    new = {"query": q, "key": k[:, :, -1:], "value": v[:, :, -1:], "left_padding": padding(case)}
    inputs = {**filled_caches(case, k, v, case.S - 1, case.S + LANES), **new}
    scale = case.D**-0.5
    first = np.maximum(padding(case), case.S - window if window else 0)
    attended = np.where(np.arange(case.S) >= first[:, None], np.arange(case.S), -1)
    chosen = np.broadcast_to(attended[:, None], (case.B, case.Hkv, case.S))

    def check(got: dict[str, Array]) -> None:
        expected = windowed_attention(q, k, v, padding(case), window or case.S, scale)
        assert_as_good_as_plain(
            got["output"], expected, plain_attention(q, k, v, chosen, scale, case.dtype), case.dtype
        )

    return File("CachedAttention", case.dtype, {"scale": scale, "window": window}, inputs, check)


def sampled(case: SampleCase) -> File:
    """Build a file with sampled prefill over buffers with free slots."""
    q, k, v = case.inputs()
    free = np.full((case.B, case.Hkv, 5, case.D), np.nan)
    inputs = {"query": q, "keys": np.concatenate([k, free], axis=2), "values": np.concatenate([v, free], axis=2)}
    inputs["length"] = np.array([case.S])

    def check(got: dict[str, Array]) -> None:
        blocks = got["blocks"].reshape(case.B, case.Hq, case.layout.row_blocks, -1)
        assert_same_blocks(blocks, case, selection(case))
        assert_attends(got["output"], None, case, blocks)

    return File("Sample", case.dtype, case.parameters, inputs, check)


def sampled_after_others(case: SampleCase) -> File:
    """Build a file with a sampled prefill chunk over the caches of SparQ."""
    decode = Case(case.B, case.Hq, case.Hkv, case.S, case.D, case.dtype)
    q, k, v = case.inputs()
    past = case.S - case.L
    new = {"query": q, "key": k[:, :, past:], "value": v[:, :, past:], "left_padding": padding(decode)}
    inputs = {**filled_caches(decode, k, v, past, case.S + LANES), **new}
    settings = {**CACHES, **attributes(parameters(decode, "paper")), **case.parameters, "dense_prompt_below": 0}

    def check(got: dict[str, Array]) -> None:
        assert_attends(got["output"], None, case, selection(case).blocks)
        np.testing.assert_array_equal(got["present_key"][:, :, : case.S].astype(np.float32), k)

    return File("SampleSparQAttention", case.dtype, settings, inputs, check)


def bucketed(case: SaapCase) -> File:
    """Build a file with one SAAP step over caches."""
    arrays = saap_step(case)
    settings = saap_settings(case)
    weights = settings.pop("weights")

    def check(got: dict[str, Array]) -> None:
        assert_lists(got["output"], None, case)
        past = case.step.S - 1
        np.testing.assert_array_equal(got["present_bucket_ids"][:, :, :past], arrays["past_bucket_ids"][:, :, :past])

    return File("SaapAttention", case.step.dtype, settings, arrays, check, weights)


FILES = {
    "sparq": sparq_step(Case(2, 6, 2, 300, 64, "f32", padding=(0, 290)), "odd-sizes"),
    "sparq-f16": sparq_step(Case(2, 4, 4, 300, 64, "f16", padding=(0, 40)), "reallocate"),
    "cached-sparq": cached(Case(2, 6, 2, 300, 64, "f32", padding=(5, 250)), "robust"),
    "cached-sparq-f16": cached(Case(1, 8, 2, 300, 80, "f16"), "paper"),
    "cached-sparq-blocks": cached(Case(2, 8, 8, 1300, 64, "f32", padding=(3, 700)), "rank-D"),
    "cached-dense": dense(Case(2, 6, 2, 300, 64, "f32", padding=(5, 250)), 0),
    "cached-dense-f16": dense(Case(1, 8, 2, 300, 80, "f16"), 0),
    "cached-window": dense(Case(2, 6, 2, 300, 64, "f32", padding=(5, 290)), 40),
    "cached-dense-blocks": dense(Case(2, 8, 8, 1300, 64, "f32", padding=(3, 700)), 0),
    "saap": bucketed(SaapCase(Case(2, 6, 2, 300, 64, "f32", padding=(5, 250)), "random")),
    "saap-f16": bucketed(SaapCase(Case(1, 8, 2, 300, 80, "f16"), "skewed", weights="f16")),
    "saap-linear": bucketed(SaapCase(Case(2, 8, 8, 1300, 64, "f32", padding=(3, 700)), "balanced", hidden=None)),
    "sample": sampled(SampleCase(2, 6, 2, 257, 400, 64, "f32", 32, chunks=2)),
    "sample-f16": sampled(SampleCase(1, 4, 2, 300, 300, 64, "f16", 64)),
    "cached-sample": sampled_after_others(SampleCase(1, 4, 2, 257, 400, 64, "f32", 32)),
}


def as_exported(file: File, model: onnx.ModelProto) -> onnx.ModelProto:
    return model


def without_bodies(file: File, model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove the function bodies, so that only the native kernels run the file."""
    del model.functions[:]
    return model


def inlined(file: File, model: onnx.ModelProto) -> onnx.ModelProto:
    return compose.inline(model)


ONNX_FILES = (sys.executable, str(FIXTURES / "run_onnx_files.py"))
IN_NODE = ("node", str(WEB / "run.mjs"))


@dataclass(frozen=True)
class Runtime:
    """A runtime, the transformation of files for it, and the command that runs files."""

    package: Package
    profile: onnx_export.Profile
    lowered: Callable[[File, onnx.ModelProto], onnx.ModelProto]
    native: bool = False
    runner: tuple[str, str] = ONNX_FILES


RUNTIMES = {
    "web": Runtime(web(), onnx_export.DEFAULT, as_exported, runner=IN_NODE),
    "web-compat": Runtime(web(), onnx_export.COMPAT, as_exported, runner=IN_NODE),
    "onnxruntime-1.19.2": Runtime(wheel("onnxruntime==1.19.2"), onnx_export.COMPAT, as_exported),
    "onnxruntime-1.19.2-native": Runtime(wheel("onnxruntime==1.19.2"), onnx_export.COMPAT, without_bodies, native=True),
    "onnxruntime-1.25.1": Runtime(wheel("onnxruntime==1.25.1"), onnx_export.DEFAULT, as_exported),
    "openvino": Runtime(wheel("openvino==2026.4.1"), onnx_export.DEFAULT, inlined),
}


@dataclass(frozen=True)
class Call:
    """A model, its inputs, and the types and shapes of its outputs."""

    model: onnx.ModelProto
    inputs: dict[str, Array]
    outputs: dict[str, tuple[np.dtype, tuple[int, ...]]]


def run(runtime: str, calls: dict[str, Call]) -> dict[str, dict[str, Array] | str]:
    """Return the outputs or the error of every call on a runtime. Skip the test if the runtime is not available."""
    if not shutil.which(RUNTIMES[runtime].runner[0]):
        absent(runtime, f"there is no {RUNTIMES[runtime].runner[0]} here.")
    place = fetched(RUNTIMES[runtime].package)
    if isinstance(place, str):
        absent(runtime, place)
    if RUNTIMES[runtime].native and (reason := native.unavailable()):
        absent("ort", reason)
    with tempfile.TemporaryDirectory(prefix="runtimes-") as scratch:
        folder, listed = Path(scratch), {}
        for name, call in calls.items():
            onnx.save(call.model, folder / f"{name}.onnx")
            for key, array in call.inputs.items():
                array.tofile(folder / f"{name}.{key}")
            inputs = [{"name": key, "type": a.dtype.name, "dims": a.shape} for key, a in call.inputs.items()]
            listed[name] = {"inputs": inputs, "outputs": list(call.outputs)}
        (folder / "files.json").write_text(json.dumps(listed))
        library = [str(native.library_path())] if RUNTIMES[runtime].native else []
        command = [*RUNTIMES[runtime].runner, str(place), scratch, *library]
        done = subprocess.run(command, capture_output=True, text=True, timeout=MINUTES, check=False)
        assert done.returncode == 0, done.stderr
        return {name: read(folder, name, call) for name, call in calls.items()}


def read(folder: Path, name: str, call: Call) -> dict[str, Array] | str:
    error = folder / f"{name}.error"
    if error.exists():
        return error.read_text()
    return {key: np.fromfile(folder / f"{name}.{key}", t).reshape(shape) for key, (t, shape) in call.outputs.items()}


@functools.cache
def operators(runtime: str) -> dict[str, dict[str, Array] | str]:
    """Return the outputs of all operator files."""
    return run(runtime, {name: call(FILES[name], RUNTIMES[runtime]) for name in FILES})


def call(file: File, runtime: Runtime) -> Call:
    operator, given = onnx_export.OPERATORS[file.operator], file.inputs
    types = {**TYPES, "T": DTYPES[file.dtype], "W": DTYPES[file.weights], "tensor(int32)": np.dtype(np.int32)}
    shapes = {name.replace("past", "present"): array.shape for name, array in given.items()}
    query, key = shapes["query"], shapes["key" if "key" in shapes else "keys"]
    shapes |= {"output": query, "indices": (*key[:2], -1), "blocks": (-1,)}
    model = onnx_export.operator_model(
        file.operator,
        dtype=DTYPES[file.dtype].name,
        weights=DTYPES[file.weights].name,
        profile=runtime.profile,
        **file.attributes,
    )
    return Call(
        runtime.lowered(file, model),
        {tensor.name: np.ascontiguousarray(given[tensor.name], types[tensor.type]) for tensor in operator.inputs},
        {tensor.name: (np.dtype(types[tensor.type]), shapes[tensor.name]) for tensor in operator.outputs},
    )


# Files that a runtime rejects, with its message (docs/onnx.md).
REFUSED = {("openvino", "cached-sample"): "have to have the same number of outputs"}


@pytest.mark.parametrize(("runtime", "file"), [(r, f) for r in RUNTIMES for f in FILES])
def test_other_runtimes_compute_the_same(runtime: str, file: str) -> None:
    got = operators(runtime)[file]
    if (runtime, file) in REFUSED:
        assert isinstance(got, str) and REFUSED[runtime, file] in got
        return
    assert not isinstance(got, str), got
    FILES[file].check(got)


@pytest.mark.parametrize("method", ["dense", SPARQ], ids=["dense", "sparq"])
@pytest.mark.parametrize("runtime", ["web", "openvino"])
def test_a_whole_model_gives_the_same_logits(runtime: str, method: str) -> None:
    """Run a prompt, then one more token with the same caches."""
    model = onnx.load(exported(method) / "model.onnx")
    session = ort.InferenceSession(model.SerializeToString())
    inputs, names = session.get_inputs(), [output.name for output in session.get_outputs()]
    tokens = np.random.default_rng(0).integers(0, 90, (2, 71))
    kinds = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8}
    caches = {i.name: np.zeros([2 if dim == "batch" else dim for dim in i.shape], kinds[i.type]) for i in inputs[2:]}
    calls, expected = {}, {}
    for name, start, stop in (("prompt", 0, 70), ("token", 70, 71)):
        mask = np.ones((2, stop), np.int64)
        mask[1, :7] = 0
        feeds = {"input_ids": np.ascontiguousarray(tokens[:, start:stop]), "attention_mask": mask, **caches}
        got = dict(zip(names, session.run(names, feeds), strict=True))
        lowered = compose.inline(model) if RUNTIMES[runtime].lowered is inlined else model
        calls[name] = Call(lowered, feeds, {key: (array.dtype, array.shape) for key, array in got.items()})
        expected[name] = got["logits"]
        caches = {past: got[past.replace("past_key_values", "present").replace("past_", "present_")] for past in caches}
    for name, out in run(runtime, calls).items():
        assert not isinstance(out, str), out
        np.testing.assert_allclose(out["logits"], expected[name], rtol=0, atol=1e-4)
        np.testing.assert_array_equal(out["logits"].argmax(axis=-1), expected[name].argmax(axis=-1))


def test_the_lock_file_pins_packages_of_the_public_registry() -> None:
    packages = json.loads((WEB / "package-lock.json").read_text())["packages"]
    for name, package in packages.items():
        assert not name or package["integrity"].startswith("sha512-")
        assert package.get("resolved", "https://registry.npmjs.org/").startswith("https://registry.npmjs.org/")
