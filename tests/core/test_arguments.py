"""Test the checks, defaults and `Stats` of the public functions against literal numbers, for MLX, torch and NumPy."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters import ADAPTERS, LIBRARIES
from json_tables import read_tables
from require import absent

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.checks import BackendUnavailable, ConfigError, ShapeError
from mlx_sparse.core import registry
from mlx_sparse.methods import METHODS

STEP = {"queries": "f32(1, 4, 1, 64)", "keys": "f32(1, 2, 50, 64)", "values": "f32(1, 2, 50, 64)"}
PROMPT = {"queries": "f32(1, 2, 8, 16)", "keys": "f32(1, 1, 8, 16)", "values": "f32(1, 1, 8, 16)"}
BUCKETS = {**STEP, "bucket_ids": "int32(1, 2, 50)", "visited": "int32(1, 2, 3)", "recent_tokens": 5}
NETWORK = {
    "queries": "f32(1, 4, 1, 64)",
    "out_weight": "f32(2, 32, 20)",
    "hidden_weight": "f32(2, 64, 32)",
    "probes": 3,
}
LISTS = {**PROMPT, "blocks": "int32(1, 2, 1, 3)", "block_size": 32}
GOOD: dict[str, dict[str, Any]] = {
    "sparq_attention": STEP,
    "streaming_attention": STEP,
    "flexgen_attention": STEP,
    "oracle_top_k_attention": STEP,
    "h2o_attention": {**STEP, "scores": "f32(1, 2, 50)"},
    "saap_attention": BUCKETS,
    "saap_route": NETWORK,
    "saap_assign": {"keys": "f32(1, 2, 8, 16)", "centroids": "f32(2, 5, 16)"},
    "sample_attention": PROMPT,
    "attend_blocks": LISTS,
    "attend_indices": {**STEP, "indices": "int32(1, 2, 9)"},
}

# By library: function, changes of its arguments, error class and message.
BAD = read_tables(__file__)
ERRORS: dict[str, type[Exception]] = {one.__name__: one for one in (BackendUnavailable, ConfigError, ShapeError)}
NOT_ON_TORCH = {"streaming_attention", "flexgen_attention", "oracle_top_k_attention", "h2o_attention"}
ROWS = [
    pytest.param(name, *row, id=f"{name}-{n}-{row[0]}-{'-'.join(row[1])}")
    for name, library in (("ops", "MLX"), ("triton", "torch"), ("oracle", "NumPy"))
    for n, row in enumerate([*BAD["every library"], *BAD[library]])
    if name != "triton" or row[0] not in NOT_ON_TORCH
]


@pytest.mark.parametrize(("backend", "function", "change", "error", "message"), ROWS, indirect=["backend"])
def test_a_wrong_argument_is_a_one_line_error(
    backend: Any, function: str, change: dict[str, Any], error: str, message: str
) -> None:
    def made(value: Any) -> Any:
        """Build the array of a text such as "int32(1, 2, 3) of 7", which has 0 without "of"."""
        array = re.fullmatch(r"(int32|f\d\d)\((.*)\)(?: of (\d+))?", value) if isinstance(value, str) else None
        if array is None:
            return value
        numbers = np.full([int(length) for length in array[2].split(",")], int(array[3] or 0))
        return backend.integers(numbers) if array[1] == "int32" else backend.array(numbers, array[1])

    given = {name: made(value) for name, value in {**GOOD[function], **change}.items()}
    with pytest.raises(ERRORS[error], match=message) as caught:
        getattr(backend.functions, function)(**given)
    assert "\n" not in str(caught.value)


by_library = pytest.mark.parametrize("backend", LIBRARIES, indirect=True)


def step(backend: Any, logits: list[float], heads: int = 1) -> list[Any]:
    """Return queries, keys and values of one KV head. The default scale gives ``logits``. Value j is 1 at index j."""
    queries, keys = np.zeros((1, heads, 1, 64)), np.zeros((1, 1, len(logits), 64))
    queries[..., 0], keys[0, 0, :, 0] = 8, logits
    values = np.eye(len(logits), 64)[None, None]
    return [backend.array(array, "f32") for array in (queries, keys, values)]


def attended(backend: Any, out: Any) -> list[int]:
    """Return the indices of the keys that the first query of `step` attends to."""
    return np.flatnonzero(backend.numpy(out)[0, 0, 0]).tolist()


FALLING = [7.0, 6, 5, 4, 3, 2, 1, 0]


@by_library
def test_the_default_scale_is_the_square_root_of_the_head_dim(backend: Any) -> None:
    arrays = step(backend, [1, 0, 0])
    weights = backend.numpy(backend.functions.dense_attention(*arrays))[0, 0, 0, :3]
    np.testing.assert_allclose(weights, [0.5761169, 0.2119416, 0.2119416], rtol=1e-6)
    weights = backend.numpy(backend.functions.dense_attention(*arrays, scale=0.0))[0, 0, 0, :3]
    np.testing.assert_allclose(weights, [1 / 3, 1 / 3, 1 / 3], rtol=1e-6)


@by_library
def test_the_default_local_window_is_a_quarter_of_top_k(backend: Any) -> None:
    arrays = step(backend, FALLING, heads=2)
    run = backend.functions.sparq_attention
    assert attended(backend, run(*arrays, top_k=4)) == [0, 1, 2, 7]
    assert attended(backend, run(*arrays, top_k=4, local_window=0)) == [0, 1, 2, 3]
    assert attended(backend, run(*arrays, top_k=4, local_window=4)) == [4, 5, 6, 7]
    assert attended(backend, run(*arrays, top_k=8)) == list(range(8))


@by_library
def test_the_mean_is_added_by_default_for_one_query_head(backend: Any) -> None:
    run = backend.functions.sparq_attention
    assert attended(backend, run(*step(backend, FALLING), top_k=4)) == list(range(8))
    assert attended(backend, run(*step(backend, FALLING), top_k=4, reallocate=False)) == [0, 1, 2, 7]
    assert attended(backend, run(*step(backend, FALLING, heads=2), top_k=4, reallocate=True)) == list(range(8))


@by_library
def test_padding_is_clamped_to_the_keys(backend: Any) -> None:
    arrays, run = step(backend, FALLING, heads=2), backend.functions.sparq_attention
    assert attended(backend, run(*arrays, top_k=4, left_padding=[3])) == [3, 4, 5, 7]
    assert attended(backend, run(*arrays, top_k=4, left_padding=[100])) == []
    assert attended(backend, run(*arrays, top_k=4, left_padding=[-5])) == [0, 1, 2, 7]


@by_library
def test_stats_of_a_decode_step_are_the_elements_of_the_specification(backend: Any) -> None:
    arrays, run = step(backend, [0.0] * 8, heads=2), backend.functions.sparq_attention
    _, stats = run(*arrays, rank=5, top_k=4, return_stats="recall")
    assert (stats.elements, stats.dense_elements, stats.density) == (808, 1152, 0.5)
    np.testing.assert_allclose(backend.numpy(stats.recall), np.full((1, 2, 1), 0.5), rtol=1e-6)
    _, stats = run(*arrays, rank=5, top_k=8, return_stats="recall")
    assert (stats.elements, stats.dense_elements, stats.density) == (1152, 1152, 1)
    assert (backend.numpy(stats.recall) == 1).all()


@by_library
def test_keys_of_visited_buckets_are_attended_and_counted_once(backend: Any) -> None:
    buckets = {"bucket_ids": [[[0, 0, 1, 1, 2, 2, 2, 2]]], "visited": [[[1, 1, -5]]]}
    given = {name: backend.integers(numbers) for name, numbers in buckets.items()}
    arrays = step(backend, FALLING)
    out, stats = backend.functions.saap_attention(*arrays, **given, recent_tokens=1, return_stats=True)
    assert attended(backend, out) == [0, 2, 3, 7]
    assert (stats.density, stats.selectivity) == (4 / 8, 2 / 6)


@by_library
def test_assigning_zero_keys_returns_an_empty_array(backend: Any) -> None:
    keys, centroids = (backend.array(np.zeros(shape), "f32") for shape in ((1, 2, 0, 16), (2, 5, 16)))
    assert tuple(backend.functions.saap_assign(keys, centroids).shape) == (1, 2, 0)


# Functions that the public functions load from a backend, besides those of the methods and of `oracle.__all__`.
LOADED = ["attend_blocks", "attend_indices", "code_keys", "dense_lse", "deviation", "h2o_scores", "masked_mean"]
LOADED += ["saap_assign", "saap_route", "sample_select", *(name for name in oracle.__all__ if name not in METHODS)]
FOUND = [(name, backend) for name in (*METHODS, *LOADED) for backend in registry.backends_of(name)]


@pytest.mark.parametrize(("function", "backend"), [pair for pair in FOUND if pair[1] not in ("onnx", "ort")])
def test_every_function_of_a_backend_loads(function: str, backend: str) -> None:
    if backend != "metal" and (reason := registry.unavailable(backend)):  # the launchers of Metal load on any machine
        absent(backend, reason)
    assert callable(registry.load(function, backend))


@pytest.mark.parametrize("backend", ["oracle", "ops", "metal"])
def test_one_file_of_a_backend_defines_a_function(backend: str) -> None:
    package = Path(mlx_sparse.__file__).parent
    files = [path for room in ("core", "methods") for path in package.glob(f"{room}/*/{backend}.py")]
    names = Counter(name for path in files for name in re.findall(r"^def (\w+)", path.read_text(), re.MULTILINE))
    found = {registry.load(function, backend).__name__ for function, other in FOUND if other == backend}
    assert len(found) > 5
    assert [name for name in found if names[name] > 1] == []


def test_settings_of_text_forms_are_no_arguments() -> None:
    row = mx.zeros((1, 1, 1, 64))
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'dense_below'"):
        mlx_sparse.sparq_attention(row, row, row, dense_below=7)


def test_every_backend_has_an_adapter() -> None:
    assert {name.partition("-")[0] for name in ADAPTERS} == registry.BACKENDS.keys() - {"oracle"}
