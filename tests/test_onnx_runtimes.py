"""The same operator files on other runtimes, each fetched once and run in a process of its own."""

from __future__ import annotations

import functools
import hashlib
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
import pytest
from cases import Array, Case, assert_as_good_as_plain, assert_same_choice, plain_attention
from mlx_sparse.onnx_export import lower
from onnx_operators import (
    CACHES,
    DTYPES,
    LANES,
    assert_is_sparq,
    attributes,
    filled_caches,
    padding,
    parameters,
    select,
    step,
    windowed_attention,
)
from require import absent

from mlx_sparse import onnx_export
from mlx_sparse.demo.store import cache_directory

HERE = Path(__file__).parent
WEB = HERE / "web"
MINUTES = 5 * 60


@dataclass(frozen=True)
class File:
    """One model of one operator, what goes in, and what must come out."""

    operator: str
    dtype: str
    attributes: dict[str, float]
    inputs: dict[str, Array]
    check: Callable[[dict[str, Array]], None]
    sizes: dict[str, int]


def sparq_step(case: Case, setting: str) -> File:
    """One step over buffers."""
    q, k, v = case.inputs()
    params = parameters(case, setting)
    expected = select(case, q, k, params)

    def check(got: dict[str, Array]) -> None:
        assert_same_choice(got["indices"], expected.indices, expected.scores)
        assert_is_sparq(got["output"], case, params, q, k, v)

    inputs = step(case, q, k, v)
    sizes = {"chunks": 1, "lanes": case.S, "C": case.S}
    return File("SparQ", case.dtype, attributes(params), inputs, check, sizes)


def cached(case: Case, setting: str) -> File:
    """One token after a prompt, in caches whose free slots are NaN."""
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

    return File("SparQAttention", case.dtype, {**CACHES, **attributes(params)}, inputs, check, {})


def dense(case: Case, window: int) -> File:
    """One token by dense attention."""
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

    return File("CachedAttention", case.dtype, {"scale": scale, "window": window}, inputs, check, {})


FILES = {
    "sparq": sparq_step(Case(2, 6, 2, 300, 64, "f32", padding=(0, 290)), "eval"),
    "sparq-f16": sparq_step(Case(2, 4, 4, 300, 64, "f16", padding=(0, 40)), "reallocate"),
    "cached-sparq": cached(Case(2, 6, 2, 300, 64, "f32", padding=(5, 250)), "robust"),
    "cached-sparq-f16": cached(Case(1, 8, 2, 300, 80, "f16"), "paper"),
    "cached-sparq-blocks": cached(Case(2, 8, 8, 1300, 64, "f32", padding=(3, 700)), "rank-D"),
    "cached-dense": dense(Case(2, 6, 2, 300, 64, "f32", padding=(5, 250)), 0),
    "cached-dense-f16": dense(Case(1, 8, 2, 300, 80, "f16"), 0),
    "cached-window": dense(Case(2, 6, 2, 300, 64, "f32", padding=(5, 290)), 40),
    "cached-dense-blocks": dense(Case(2, 8, 8, 1300, 64, "f32", padding=(3, 700)), 0),
}


def as_exported(file: File, model: onnx.ModelProto) -> onnx.ModelProto:
    return model


def inlined(file: File, model: onnx.ModelProto) -> onnx.ModelProto:
    return lower.inline(model)


def static(file: File, model: onnx.ModelProto) -> onnx.ModelProto:
    rows = file.inputs["query"].shape[0]
    return lower.static(model, rows, file.inputs["past_key" if "past_key" in file.inputs else "keys"].shape[2])


@dataclass(frozen=True)
class Package:
    """A runtime as its registry has it: a name for the cache, how a folder is filled with it, what runs files on it."""

    key: str
    fetch: Callable[[Path], list[str]]
    run: list[str]


def wheel(requirement: str) -> Package:
    """A wheel, unpacked away from the environment of the tests."""

    def fetch(folder: Path) -> list[str]:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
        return [*pip, "--no-deps", "--only-binary", ":all:", "--target", str(folder), requirement]

    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return Package(f"{requirement}-{version}", fetch, [sys.executable, str(HERE / "run_onnx_files.py")])


def web() -> Package:
    """onnxruntime-web: WebAssembly, in Node."""

    def fetch(folder: Path) -> list[str]:
        folder.mkdir()
        for name in ("package.json", "package-lock.json"):
            shutil.copy(WEB / name, folder)
        return ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]

    lock = hashlib.sha256((WEB / "package-lock.json").read_bytes()).hexdigest()
    return Package(f"onnxruntime-web-{lock[:12]}", fetch, ["node", str(WEB / "run.mjs")])


@dataclass(frozen=True)
class Runtime:
    """A runtime and the files it takes."""

    package: Package
    profile: onnx_export.Profile
    lowered: Callable[[File, onnx.ModelProto], onnx.ModelProto]


RUNTIMES = {
    "web": Runtime(web(), onnx_export.DEFAULT, as_exported),
    "web-compat": Runtime(web(), onnx_export.COMPAT, as_exported),
    "onnxruntime-1.19.2": Runtime(wheel("onnxruntime==1.19.2"), onnx_export.COMPAT, as_exported),
    "openvino": Runtime(wheel("openvino==2026.4.1"), onnx_export.DEFAULT, inlined),
    "tract": Runtime(wheel("tract==0.23.9"), onnx_export.COMPAT, static),
}


@functools.cache
def fetched(name: str) -> Path | str:
    """The folder with a runtime, from the cache where it is there; or why it cannot be had."""
    package = RUNTIMES[name].package
    place = cache_directory() / "runtimes" / package.key
    if not shutil.which(package.run[0]):
        return f"there is no {package.run[0]} here."
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetching-") as scratch:
            made = Path(scratch) / "made"
            done = subprocess.run(package.fetch(made), capture_output=True, text=True, timeout=MINUTES, check=False)
            if done.returncode:
                return f"{package.key} could not be fetched: {done.stderr.strip().splitlines()[-1:]}"
            if not place.is_dir():  # another process may have been faster
                made.rename(place)
    return place


@functools.cache
def outputs(name: str) -> dict[str, dict[str, Array] | str]:
    """What every file puts out on a runtime that was fetched, or the error it ends in."""
    runtime = RUNTIMES[name]
    with tempfile.TemporaryDirectory(prefix="runtimes-") as scratch:
        folder = Path(scratch)
        listed = {key: write(folder / key, file, runtime) for key, file in FILES.items()}
        (folder / "files.json").write_text(json.dumps(listed))
        command = [*runtime.package.run, str(fetched(name)), scratch]
        done = subprocess.run(command, capture_output=True, text=True, timeout=MINUTES, check=False)
        assert done.returncode == 0, done.stderr
        return {key: read(folder / key, file) for key, file in FILES.items()}


def write(path: Path, file: File, runtime: Runtime) -> dict[str, list]:
    """Write a model and its inputs; return what the runner must know of them."""
    dtype = DTYPES[file.dtype]
    query, key = file.inputs["query"].shape, file.inputs["key" if "key" in file.inputs else "keys"].shape
    sizes = {"Hq": query[1], "Hkv": key[1], "D": query[3], **file.sizes}
    fixed = sizes if runtime.lowered is static else {}
    model = onnx_export.operator_model(
        file.operator, dtype=dtype.name, profile=runtime.profile, sizes=fixed, **file.attributes
    )
    onnx.save(runtime.lowered(file, model), f"{path}.onnx")
    inputs = []
    for tensor in onnx_export.OPERATORS[file.operator].inputs:
        kind = {"T": dtype, "tensor(float)": np.float32, "tensor(int64)": np.int64}[tensor.type]
        array = np.ascontiguousarray(file.inputs[tensor.name], kind)
        array.tofile(f"{path}.{tensor.name}")
        inputs.append({"name": tensor.name, "type": array.dtype.name, "dims": array.shape})
    return {"inputs": inputs, "outputs": [tensor.name for tensor in onnx_export.OPERATORS[file.operator].outputs]}


def read(path: Path, file: File) -> dict[str, Array] | str:
    error = Path(f"{path}.error")
    if error.exists():
        return error.read_text()
    shapes = {name.replace("past", "present"): array.shape for name, array in file.inputs.items()}
    shapes["output"] = file.inputs["query"].shape
    got = {}
    for tensor in onnx_export.OPERATORS[file.operator].outputs:
        kind = {"T": DTYPES[file.dtype], "tensor(float)": np.float32, "tensor(int32)": np.int32}[tensor.type]
        shape = (*file.inputs["keys"].shape[:2], -1) if tensor.name == "indices" else shapes[tensor.name]
        got[tensor.name] = np.fromfile(f"{path}.{tensor.name}", kind).reshape(shape)
    return got


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_other_runtimes_compute_the_same(runtime: str, file: str) -> None:
    place = fetched(runtime)
    if isinstance(place, str):
        absent(runtime, place)
    got = outputs(runtime)[file]
    assert not isinstance(got, str), got
    FILES[file].check(got)


def test_the_lock_file_pins_what_npm_installs_and_names_no_host_of_ours() -> None:
    packages = json.loads((WEB / "package-lock.json").read_text())["packages"]
    for name, package in packages.items():
        assert not name or package["integrity"].startswith("sha512-")
        assert package.get("resolved", "https://registry.npmjs.org/").startswith("https://registry.npmjs.org/")
