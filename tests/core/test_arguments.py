"""Test the checks, defaults and `Stats` of the public functions against literal numbers, for MLX, torch and NumPy."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters import ADAPTERS, LIBRARIES
from require import absent

import mlx_sparse
from mlx_sparse import oracle
from mlx_sparse.checks import BackendUnavailable, ConfigError, ShapeError
from mlx_sparse.core import registry
from mlx_sparse.methods import METHODS


@dataclass(frozen=True)
class Filled:
    """An array that is filled with one number."""

    shape: tuple[int, ...]
    dtype: str = "int32"
    number: int = 0


def f32(*shape: int) -> Filled:
    return Filled(shape, "f32")


def i32(*shape: int, number: int = 0) -> Filled:
    return Filled(shape, "int32", number)


STEP = {"queries": f32(1, 4, 1, 64), "keys": f32(1, 2, 50, 64), "values": f32(1, 2, 50, 64)}
PROMPT = {"queries": f32(1, 2, 8, 16), "keys": f32(1, 1, 8, 16), "values": f32(1, 1, 8, 16)}
BUCKETS = {**STEP, "bucket_ids": i32(1, 2, 50), "visited": i32(1, 2, 3), "recent_tokens": 5}
NETWORK = {"queries": f32(1, 4, 1, 64), "out_weight": f32(2, 32, 20), "hidden_weight": f32(2, 64, 32), "probes": 3}
LISTS = {**PROMPT, "blocks": i32(1, 2, 1, 3), "block_size": 32}
GOOD: dict[str, dict[str, Any]] = {
    "sparq_attention": STEP,
    "streaming_attention": STEP,
    "flexgen_attention": STEP,
    "oracle_top_k_attention": STEP,
    "h2o_attention": {**STEP, "scores": f32(1, 2, 50)},
    "saap_attention": BUCKETS,
    "saap_route": NETWORK,
    "saap_assign": {"keys": f32(1, 2, 8, 16), "centroids": f32(2, 5, 16)},
    "sample_attention": PROMPT,
    "attend_blocks": LISTS,
    "attend_indices": {**STEP, "indices": i32(1, 2, 9)},
}

BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("sparq_attention", {"rank": 0}, ConfigError, "rank: expected an integer of at least 1, got 0"),
    ("sparq_attention", {"rank": 65}, ConfigError, "rank: expected at most the head dim D=64, got 65"),
    ("sparq_attention", {"top_k": -3}, ConfigError, "top_k: expected an integer of at least 1, got -3"),
    ("sparq_attention", {"local_window": 200}, ConfigError, "local_window: expected at most top_k=128"),
    ("sparq_attention", {"reallocate": "yes"}, ConfigError, "reallocate: expected one of auto, true, false"),
    ("sparq_attention", {"component_score": "key"}, ConfigError, "component_score: expected one of query, query_key"),
    ("sparq_attention", {"keys_t": f32(1, 2, 50, 64)}, ShapeError, "keys_t: expected shape"),
    ("sparq_attention", {"value_mean": f32(1, 2)}, ShapeError, "value_mean: expected shape"),
    ("sparq_attention", {"left_padding": [0, 1]}, ShapeError, "left_padding: expected shape"),
    ("sparq_attention", {"left_padding": [0.5]}, ShapeError, "left_padding: expected integers"),
    ("sparq_attention", {"rank": 2.0}, ConfigError, "rank: expected an integer of at least 1, got 2.0"),
    ("sparq_attention", {"rank": True}, ConfigError, "rank: expected an integer of at least 1, got True"),
    ("sparq_attention", {"top_k": None}, ConfigError, "top_k: expected an integer of at least 1, got None"),
    ("sparq_attention", {"local_window": -1}, ConfigError, "local_window: expected an integer of at least 0, got -1"),
    ("sparq_attention", {"reallocate": 1}, ConfigError, "reallocate: expected one of auto, true, false, got 1"),
    ("sparq_attention", {"component_score": "auto"}, ConfigError, "component_score: expected one of query, query_key"),
    ("sparq_attention", {"key_bits": 5}, ConfigError, "key_bits: expected one of 16, 4, got 5"),
    ("sparq_attention", {"queries": f32(1, 4, 0, 64)}, ShapeError, "queries: expected a multiple of Hkv=2"),
    ("sparq_attention", {"queries": f32(2, 4, 1, 64)}, ShapeError, r"keys: expected \(B=2, Hkv, S, D=64\)"),
    ("sparq_attention", {"backend": "onnx"}, BackendUnavailable, "backend: expected auto or"),
    ("sparq_attention", {"return_stats": "all"}, ConfigError, "return_stats: expected one of"),
    ("sparq_attention", {"queries": f32(1, 4, 64)}, ShapeError, "queries: expected 4 axes"),
    ("sparq_attention", {"values": f32(1, 2, 49, 64)}, ShapeError, "values: expected the shape of keys"),
    ("sparq_attention", {"queries": f32(1, 4, 1, 32)}, ShapeError, "keys: expected"),
    ("sparq_attention", {"queries": f32(1, 5, 1, 64)}, ShapeError, "queries: expected a multiple of Hkv=2"),
    ("sparq_attention", {"queries": f32(1, 4, 51, 64)}, ShapeError, "keys: expected at least L=51 keys"),
    ("attend_indices", {"indices": i32(1, 3, 9)}, ShapeError, "indices: expected shape"),
    ("attend_indices", {"indices": f32(1, 2, 9)}, ShapeError, "indices: expected integers"),
    ("streaming_attention", {"recent_tokens": 0}, ConfigError, "recent_tokens: expected an integer of at least 1"),
    ("flexgen_attention", {"top_k": 0}, ConfigError, "top_k: expected an integer of at least 1"),
    ("oracle_top_k_attention", {"top_k": 0}, ConfigError, "top_k: expected an integer of at least 1"),
    ("oracle_top_k_attention", {"top_k": 4, "local_window": 5}, ConfigError, "local_window: expected at most top_k=4"),
    ("h2o_attention", {"scores": f32(1, 2, 3)}, ShapeError, "scores: expected shape"),
    ("h2o_attention", {"top_k": 0}, ConfigError, "top_k: expected an integer of at least 1"),
    ("h2o_attention", {"top_k": 4, "local_window": 5}, ConfigError, "local_window: expected at most top_k=4"),
    ("h2o_attention", {"queries": f32(1, 4, 3, 64)}, ShapeError, "queries: expected"),
    ("saap_attention", {"bucket_ids": i32(1, 2, 49)}, ShapeError, r"bucket_ids: expected shape \(1, 2, 50\)"),
    ("saap_attention", {"bucket_ids": f32(1, 2, 50)}, ShapeError, "bucket_ids: expected integers"),
    ("saap_attention", {"visited": i32(2, 2, 3)}, ShapeError, r"visited: expected shape \(B=1, Hkv=2, n\)"),
    ("saap_attention", {"visited": f32(1, 2, 3)}, ShapeError, "visited: expected integers"),
    ("saap_attention", {"sink_tokens": -1}, ConfigError, "sink_tokens: expected an integer of at least 0, got -1"),
    ("saap_attention", {"recent_tokens": 0}, ConfigError, "recent_tokens: expected an integer of at least 1, got 0"),
    ("saap_attention", {"backend": "onnx"}, BackendUnavailable, "backend: expected auto or"),
    ("saap_attention", {"return_stats": "all"}, ConfigError, "return_stats: expected one of"),
    ("saap_route", {"out_weight": f32(2, 30, 20)}, ShapeError, r"hidden_weight: expected shape \(2, 64, 30\)"),
    ("saap_route", {"out_weight": f32(3, 32, 20)}, ShapeError, "out_weight: expected|Hkv a divisor of Hq=4, got"),
    ("saap_route", {"out_weight": f32(32, 20)}, ShapeError, "out_weight: expected"),
    ("saap_route", {"hidden_weight": None}, ShapeError, r"out_weight: expected shape \(2, 64, 20\)"),
    ("saap_route", {"hidden_bias": f32(2, 31)}, ShapeError, "hidden_bias: expected"),
    ("saap_route", {"out_bias": f32(2, 21)}, ShapeError, "out_bias: expected"),
    ("saap_route", {"probes": 21}, ConfigError, "probes: expected an integer of at least 1 and at most 20"),
    ("saap_route", {"probes": 0}, ConfigError, "probes: expected an integer of at least 1 and at most 20"),
    ("saap_route", {"queries": f32(1, 4, 2, 64)}, ShapeError, "queries: expected"),
    *(
        ("saap_assign", {"centroids": f32(*shape)}, ShapeError, "centroids: expected")
        for shape in ((2, 5, 8), (2, 0, 16), (3, 5, 16), (5, 16))
    ),
    (
        "sample_attention",
        {"alpha_column": 0},
        ConfigError,
        "alpha_column: expected a number above 0 and at most 1, got",
    ),
    ("sample_attention", {"alpha_slash": 1.01}, ConfigError, "alpha_slash: expected a number above 0 and at most 1"),
    ("sample_attention", {"alpha_slash": np.nan}, ConfigError, "alpha_slash: expected a number above 0 and at most 1"),
    ("sample_attention", {"chunks": 0}, ConfigError, "chunks: expected an integer of at least 1, got 0"),
    ("sample_attention", {"block_size": 48}, ConfigError, "block_size: expected one of 32, 64, 128, got 48"),
    ("sample_attention", {"return_stats": "all"}, ConfigError, "return_stats: expected one of"),
    (
        "sample_attention",
        {"keys": f32(1, 1, 5, 16), "values": f32(1, 1, 5, 16)},
        ShapeError,
        r"^keys: expected at least L=8 keys, got S=5\. Keys include [^\n]*$",
    ),
    ("attend_blocks", {"blocks": i32(1, 1, 1, 3)}, ShapeError, "^blocks: expected shape"),
    ("attend_blocks", {"blocks": f32(1, 2, 1, 3)}, ShapeError, "^blocks: expected integers"),
    ("attend_blocks", {"block_size": 48}, ConfigError, "block_size: expected one of 32, 64, 128, got 48"),
]
# Errors that only one library can have.
MLX: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("sparq_attention", {"backend": "oracle"}, BackendUnavailable, "got oracle .*mlx_sparse.oracle"),
    ("sparq_attention", {"backend": "metal"}, BackendUnavailable, r"got metal .MLX finds no Metal GPU"),
    ("sparq_attention", {"backend": "triton"}, BackendUnavailable, r"got triton .*: .* mlx_sparse.cuda_ref"),
    ("saap_attention", {"backend": "triton"}, BackendUnavailable, "torch tensors"),
    (
        "saap_attention",
        {"visited": i32(1, 2, 3, number=1 << 30)},
        ConfigError,
        "visited: expected buckets of at most 4095, got 1073741824",
    ),
]
TORCH: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("sparq_attention", {"keys_t": Filled((1, 2, 64, 50), "f16")}, ConfigError, "keys_t: expected the type"),
    ("sparq_attention", {"keys_t": [1]}, ConfigError, "keys_t: expected a torch tensor, got list"),
    ("sparq_attention", {"left_padding": [None]}, ShapeError, r"left_padding: expected 1 integers, got \[None\]"),
    ("sparq_attention", {"backend": "ops"}, BackendUnavailable, "expected auto or triton for mlx_sparse.cuda_ref"),
    ("saap_attention", {"visited": [1]}, ConfigError, "visited: expected a torch tensor, got list"),
    ("saap_attention", {"backend": "ops"}, BackendUnavailable, "backend: expected auto or triton"),
    ("saap_route", {"out_weight": i32(2, 32, 20)}, ConfigError, "out_weight: expected float32, float16"),
    ("saap_route", {"hidden_weight": i32(2, 64, 32)}, ConfigError, "hidden_weight: expected float32, float16"),
    ("saap_route", {"out_weight": f32(2, 32, 5000)}, ConfigError, "buckets: expected .* at most 4096, got"),
    ("saap_route", {"backend": "metal"}, BackendUnavailable, "backend: expected auto or triton"),
    ("attend_blocks", {"blocks": [[1]]}, ConfigError, "blocks: expected a torch tensor, got list"),
]
NUMPY: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "sparq_attention",
        {"backend": "ops"},
        BackendUnavailable,
        "expected auto or oracle for mlx_sparse.oracle, got ops",
    ),
    ("sparq_attention", {"keys": [1]}, ConfigError, "keys: expected a NumPy array, got list"),
    ("sparq_attention", {"left_padding": 3}, ShapeError, "left_padding: expected shape"),
]
NOT_ON_TORCH = {"streaming_attention", "flexgen_attention", "oracle_top_k_attention", "h2o_attention"}
ROWS = [
    pytest.param(name, *row, id=f"{name}-{n}-{row[0]}-{'-'.join(row[1])}")
    for name, rows in (("ops", [*BAD, *MLX]), ("triton", [*BAD, *TORCH]), ("oracle", [*BAD, *NUMPY]))
    for n, row in enumerate(rows)
    if name != "triton" or row[0] not in NOT_ON_TORCH
]


@pytest.mark.parametrize(("backend", "function", "change", "error", "message"), ROWS, indirect=["backend"])
def test_a_wrong_argument_is_a_one_line_error(
    backend: Any, function: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    def made(value: Any) -> Any:
        if not isinstance(value, Filled):
            return value
        numbers = np.full(value.shape, value.number)
        return backend.integers(numbers) if value.dtype == "int32" else backend.array(numbers, value.dtype)

    given = {name: made(value) for name, value in {**GOOD[function], **change}.items()}
    with pytest.raises(error, match=message) as caught:
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
        mlx_sparse.quest_attention(row, row, row, dense_below=7)


def test_every_backend_has_an_adapter() -> None:
    assert {name.partition("-")[0] for name in ADAPTERS} == registry.BACKENDS.keys() - {"oracle"}
