"""Check the library of native kernels: instruction sets, threads, caches, versions and errors."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import reference
from adapters import ADAPTERS, SETS
from cases import CASES, Array, Case, assert_same_selection
from expected import assert_conforms, expected
from mlx_sparse.onnx_export.runtime import native
from onnx_operators import (
    CACHES,
    Operator,
    advance,
    assert_is_sparq,
    attributes,
    by_case,
    coded_step,
    empty_caches,
    padding,
    parameters,
    select,
    step,
    windowed_attention,
)
from require import absent
from saap_cases import SAAP_CASES, SaapCase, visited
from saap_cases import assert_attends as assert_lists
from sample_cases import SAMPLE_CASES, assert_same_blocks, selection
from sample_cases import assert_attends as assert_blocks

from mlx_sparse import __version__, onnx_export, oracle
from mlx_sparse.checks import BackendUnavailable, ConfigError

pytestmark = pytest.mark.slow  # instruction sets, threads, another machine's code

DENSE = {"scale": 0.125, "window": 0}
KERNELS = Path(__file__).parents[3] / "mlx_sparse" / "native"


def prompted(case: Case, k: Array, v: Array, tokens: int) -> dict[str, Array]:
    """Return caches after ``tokens`` tokens."""
    append = Operator("native", "SparQAttention", case.dtype, **CACHES, **attributes(parameters(case, "paper")))
    caches = empty_caches(case, case.S)
    queries = np.ones((case.B, case.Hq, tokens, case.D))
    got = append(query=queries, key=k[:, :, :tokens], value=v[:, :, :tokens], left_padding=padding(case), **caches)
    return advance(caches, got, tokens)


@pytest.mark.parametrize("setting", ["odd-sizes", "reallocate", "own-scale"])
@by_case
@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_runs_sparq_as_the_oracle(name: str, case: Case, setting: str, limit: Any) -> None:
    limit(name)
    found = ADAPTERS["ort"].sparq(case, parameters(case, setting))
    assert_conforms(found, expected(case, setting, "sparq"), case)


@pytest.mark.parametrize("case", CASES[3::3], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_runs_int4_sparq_as_the_oracle(name: str, case: Case, limit: Any) -> None:
    limit(name)
    wanted = oracle.sparq.code_keys(case.inputs()[1], left_padding=case.padding)
    for found, array in zip(ADAPTERS["ort"].code_keys(case), wanted, strict=True):
        np.testing.assert_array_equal(found, array)
    params = {**parameters(case, "odd-sizes"), "key_bits": 4}
    got = Operator("native", "SparQCoded", case.dtype, **attributes(params))(**coded_step(case))
    chosen = select(case, *case.inputs()[:2], params)
    assert_same_selection(got["indices"], chosen.indices, chosen.scores)
    assert_is_sparq(got["output"], case, params, *case.inputs())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("case", [*SAMPLE_CASES[1:8], *SAAP_CASES[2::2]], ids=str)
def test_every_instruction_set_runs_sample_and_saap_as_the_oracle(name: str, case: Any, limit: Any) -> None:
    limit(name)
    if isinstance(case, SaapCase):
        assert_lists(ADAPTERS["ort"].saap(case, visited(case)).out, None, case)
        return
    choice, out, lse = ADAPTERS["ort"].sample(case)
    assert_same_blocks(choice, case, selection(case))
    assert_blocks(out, lse, case, choice)


def test_neon_kernels_agree_with_the_scalar_ones(tmp_path: Path) -> None:
    """Compile the NEON and scalar kernels for 64-bit Arm and compare them in an emulator."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None or importlib.util.find_spec("ziglang") is None:
        absent("neon", "qemu-aarch64 and ziglang")
    target = ["-target", "aarch64-linux-musl", "-static", "-std=c++17", "-O2", f"-I{KERNELS}"]
    compiler = [sys.executable, "-m", "ziglang", "c++", *target]
    objects = []
    for name, source in itertools.product(("SCALAR", "NEON"), ("kernels", "tiles")):
        objects.append(tmp_path / f"{name}-{source}.o")
        run(*compiler, f"-DSPARSE_{name}", "-c", KERNELS / f"{source}.cc", "-o", objects[-1])
    run(*compiler, Path(__file__).with_name("kernels_agree.cc"), *objects, "-o", tmp_path / "agree")
    run(emulator, tmp_path / "agree")


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("group", "D"), [(1, 30), (2, 7), (3, 1), (5, 64), (3, 30), (5, 7)])
@pytest.mark.parametrize("name", SETS)
def test_odd_sizes_are_attended_exactly(name: str, group: int, D: int, limit: Any) -> None:
    limit(name)
    case = Case(2, 2 * group, 2, 150, D, "f32", padding=(0, 3))
    q, k, v = case.inputs(L=9)
    given = {"query": q, "keys": k, "values": v, "left_padding": padding(case), "length": np.full(2, case.S)}
    got = Operator("native", "DenseAttention", "f32", scale=0.2, window=70)(**given)["output"]
    np.testing.assert_allclose(got, windowed_attention(q, k, v, padding(case), 70, 0.2), rtol=0, atol=1e-5)
    params = {**parameters(case, "odd-sizes"), "rank": max(1, D // 2)}
    got = Operator("native", "SparQ", "f32", **attributes(params))(**step(case, q[:, :, -1:], k, v))["output"]
    expected = reference.sparq_attention(q[:, :, -1:], k, v, left_padding=case.padding, **params)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("setting", ["paper", "odd-sizes", "reallocate"])
@pytest.mark.parametrize("workers", [1, 8])
def test_any_number_of_threads_gives_the_same_answer(workers: int, setting: str, limit: Any) -> None:
    """Divide work for 8 workers, so that the keys of a head are scored in splits."""
    limit(None, workers)
    case = Case(2, 6, 2, 9000, 64, "f32", padding=(0, 4500))
    q, k, v = case.inputs()
    params = parameters(case, setting)
    caches = prompted(case, k, v, case.S - 1)
    new = {"query": q, "key": k[:, :, -1:], "value": v[:, :, -1:], "left_padding": padding(case)}
    sparse, coded, dense = [], [], []
    for threads in (1, 2, 4):
        attend = Operator("native", "SparQAttention", "f32", threads, **CACHES, **attributes(params))
        sparse.append(attend(**new, **caches)["output"])
        attend = Operator("native", "SparQCoded", "f32", threads, **attributes(params))
        coded.append(attend(**coded_step(case))["output"])
        attend = Operator("native", "CachedAttention", "f32", threads, **DENSE)
        past = {name: caches[name] for name in ("past_key", "past_value", "past_length")}
        dense.append(attend(**new, **past)["output"])
    assert_is_sparq(sparse[0], case, params, q, k, v)
    assert_is_sparq(coded[0], case, {**params, "key_bits": 4}, q, k, v)
    np.testing.assert_allclose(dense[0], reference.dense_attention(q, k, v, left_padding=case.padding), atol=1e-5)
    for outputs in (sparse, coded, dense):
        np.testing.assert_array_equal(outputs[0], outputs[1])
        np.testing.assert_array_equal(outputs[0], outputs[2])


def test_sessions_run_from_several_threads_at_once() -> None:
    case = Case(1, 8, 2, 3000, 64, "f16")
    params = parameters(case, "odd-sizes")
    attend = Operator("native", "SparQ", "f16", 2, **attributes(params))
    inputs = [case.inputs(seed) for seed in range(6)]

    def run(seed: int) -> Array:
        return attend(**step(case, *inputs[seed]))["output"]

    alone = [run(seed) for seed in range(6)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, [*range(6)] * 5))
    for seed, out in enumerate(together):
        np.testing.assert_array_equal(out, alone[seed % 6])


@pytest.mark.parametrize("name", ["CachedAttention", "SparQAttention"])
def test_separate_buffers_leave_the_past_unchanged(name: str) -> None:
    case = Case(2, 4, 2, 100, 64, "f32")
    q, k, v = case.inputs()
    caches = prompted(case, k, v, case.S - 1)
    settings = {"CachedAttention": DENSE, "SparQAttention": {**CACHES, **attributes(parameters(case, "paper"))}}
    attend = Operator("native", name, "f32", **settings[name])
    caches = {tensor.name: caches[tensor.name] for tensor in attend.schema.inputs if tensor.name in caches}
    before = {key: array.copy() for key, array in caches.items()}
    got = attend(query=q, key=k[:, :, -1:], value=v[:, :, -1:], left_padding=padding(case), **caches)
    for key, array in caches.items():
        np.testing.assert_array_equal(array, before[key])
    np.testing.assert_array_equal(got["present_key"][:, :, : case.S], k)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", onnx_export.OPERATORS)
def test_nodes_run_on_the_kernel_and_have_shapes(name: str, dtype: str, tmp_path: Path) -> None:
    if reason := native.unavailable():
        absent("ort", reason)
    operator = onnx_export.OPERATORS[name]
    settings = {a.name: a.choices[0] if a.choices else 1 for a in operator.attributes if a.name != "spec"}
    sizes = {"B": 2, "Hq": 4, "Hkv": 2, "C": 128, "D": 64, "L": 3, "groups": 2, "3Hkv": 6, "HkvD": 128}
    model = onnx_export.operator_model(name, dtype=dtype, sizes=sizes, **settings)
    for output in model.graph.output:  # the kernel's shape inference must set them
        output.type.tensor_type.ClearField("shape")
    # Without kernels all types run the same function body.
    for kernels, count in (("auto", 1), *[("off", 0)] * (dtype == "float32" and operator.has_body)):
        options = native.session_options(kernels)
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        made = session_of(model, options)
        kept = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node if node.op_type == name]
        assert len(kept) == count
        if kernels == "auto":
            shapes = [output.shape for output in made.get_outputs()]
            known = [shape for shape in shapes if all(isinstance(length, int) for length in shape) and shape]
            inputs = [
                tensor.axes for tensor in operator.inputs
            ]  # an output has the shape of an input or an unknown shape
            assert len(known) == sum(tensor.axes in inputs for tensor in operator.outputs)


def session_of(model: onnx.ModelProto, options: Any) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def test_session_options_validate_their_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="native: expected one of auto, off"):
        native.session_options("on")
    monkeypatch.setattr(native.library, "path", lambda: None)
    assert "no C++ compiler" in str(native.unavailable())
    with pytest.raises(BackendUnavailable, match=r"native: expected a usable libmlx_sparse_native.*not built"):
        native.library_path()
    native.session_options("auto")


@pytest.mark.parametrize("content", [None, "0.0.9 spec 1", f"{__version__} spec 7"])
def test_a_library_of_another_version_is_refused(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / native.library.LIBRARY
    if content is None:
        path.write_text("not a library")
    else:
        compiler = shutil.which("c++") or absent("ort", "no C++ compiler")
        source = tmp_path / "other.cc"
        source.write_text(f'extern "C" const char* mlx_sparse_version() {{ return "{content}"; }}')
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", path], check=True)
    monkeypatch.setattr(native.library, "path", lambda: path)
    message = "does not load" if content is None else f"has version {content}, this package {__version__} spec 1"
    for refused in (native.library_path, native.session_options):
        with pytest.raises(BackendUnavailable, match=message) as raised:
            refused()
        assert "\n" not in str(raised.value)
