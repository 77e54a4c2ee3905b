"""Test single Metal kernels with lengths, lists and groups that tests/core does not have."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import reference
from adapters import ADAPTERS
from cases import Case, every_parameter
from fixtures_msl import Launched
from mlx_arrays import to_mlx, to_numpy
from msl import Metal
from saap_cases import SaapCase, visited
from sample_cases import SampleCase

import mlx_sparse
from mlx_sparse.cache.kv_cache import SparseBatchKVCache, SparseKVCache
from mlx_sparse.core import launch, registry
from mlx_sparse.core.attend import metal_rows as attend_rows
from mlx_sparse.methods import SparQ
from mlx_sparse.methods.saap import metal as saap
from mlx_sparse.methods.sparq import metal as sparq

PACKAGE = Path(mlx_sparse.__file__).parent

# the decode step


def test_a_long_context_is_selected_in_tiles(metal: Metal) -> None:
    case = Case(2, 4, 2, 8200, 64, "f32", padding=(0, 4100))
    ADAPTERS["metal"].sparq(case, {**every_parameter(case, "paper"), "top_k": 16, "local_window": 4})
    if metal.emulated:
        names = [report.kernel for report in metal.launches][:3]
        assert names == ["sparq_scores", "sparq_candidates", "attend_candidates"]


METAL = ADAPTERS["metal"]


def step_of(S: int) -> Case:
    return Case(1, 4, 2, S, 64, "f16")


def verification(S: int) -> Any:
    return attend_rows.attend_rows(*(to_mlx(array, "f16") for array in step_of(S).inputs(L=3)), scale=1.0)


# By method: a call over S keys in buffers of various lengths, the smallest S, and the number of kernels.
GROWING: dict[str, tuple[Callable[[int], Any], int, int]] = {
    "sparq": (lambda S: METAL.sparq(step_of(S), every_parameter(step_of(S), "reallocate")), 900, 4),
    "saap": (lambda S: METAL.saap(buckets := SaapCase(step_of(S), "balanced"), visited(buckets)), 900, 4),
    "sample": (lambda S: METAL.sample_scores(SampleCase(1, 4, 2, S // 4, S, 64, "f16", 32, chunks=2)), 900, 2),
    "several queries": (verification, 100, 3),  # attend_rows with float16 results, and with float32 results of splits
}


@pytest.mark.parametrize("method", GROWING)
def test_nothing_recompiles_as_the_context_grows(metal: Metal, method: str) -> None:
    call, shortest, kernels = GROWING[method]
    texts: set[tuple[str, str]] = set()
    for S in (shortest, 901, 2102, 3997):
        mx.eval(call(S))
        texts.update(metal.texts.items())
    assert len(texts) == (kernels if metal.emulated else 0), sorted(name for name, _ in texts)


# the cache and the model


@pytest.mark.parametrize(
    ("make", "bits"),
    [(SparseKVCache, 16), (lambda: SparseBatchKVCache([0, 40]), 4)],
    ids=["one sequence", "a padded batch"],
)
def test_a_cache_decodes_on_metal_as_on_ops(metal: Metal, make: Callable[[], Any], bits: int) -> None:
    rng = np.random.default_rng(3)
    cache = make()
    config = SparQ(rank=8, top_k=16, component_score="query_key", reallocate=True, key_bits=bits, dense_below=0)
    for L in (70, 1, 1, 1, 200, 1, 1):
        k, v = (to_mlx(rng.normal(size=(2, 2, L, 64)), "f16") for _ in range(2))
        cache.update_and_fetch(k, v)
        queries = to_mlx(rng.standard_t(3, size=(2, 4, 1, 64)), "f16")
        metal_out, metal_lse = cache.attend(queries, config, scale=0.125, backend="metal")
        ops_out, ops_lse = cache.attend(queries, config, scale=0.125, backend="ops")
        np.testing.assert_allclose(to_numpy(metal_out), to_numpy(ops_out), rtol=0, atol=2e-3)
        np.testing.assert_allclose(np.array(metal_lse), np.array(ops_lse), rtol=0, atol=1e-4)


def test_kernels_receive_the_whole_buffers_of_a_cache(metal: Metal, launched: list[Launched]) -> None:
    """Test that kernels receive cache buffers and not slices, which MLX would copy. Rows of keys_t must be aligned."""
    cache = SparseKVCache()
    for L in (301, 1, 1001, 1):  # mlx-lm's buffers have odd lengths
        row = mx.ones((1, 2, L, 64), mx.float16)
        cache.update_and_fetch(row, row)
    config = SparQ(rank=8, top_k=16, component_score="query", key_bits=16, dense_below=0)
    cache.attend(mx.ones((1, 4, 1, 64), mx.float16), config, scale=1.0, backend="metal")
    (scores, how), *_, (attended, _) = launched
    assert attended["keys"] is cache.keys
    assert attended["values"] is cache.values
    assert scores["keys_t"].shape[3] % 64 == 0
    assert scores["keys_t"].shape[3] >= cache.keys.shape[2]
    assert how["ALIGNED"]
    launched.clear()
    coded = SparQ(rank=8, top_k=16, key_bits=4, dense_below=0)
    cache.attend(mx.ones((1, 4, 1, 64), mx.float16), coded, scale=1.0, backend="metal")
    scores, _ = launched[0]
    assert scores["keys"] is cache.keys
    assert scores["codes"] is cache.aux_states["sparq"].codes.coded.codes  # type: ignore[attr-defined]
    assert scores["codes"].shape[3] * 4 % 128 == 0


def test_layers_of_a_step_share_launches(metal: Metal) -> None:
    config = SparQ(rank=8, top_k=16, component_score="query", dense_below=0)
    layers = [SparseKVCache() for _ in range(3)]
    sparq.launches.cache_clear()
    for L in (100, 1):
        for cache in layers:
            cache.update_and_fetch(mx.ones((1, 2, L, 64)), mx.ones((1, 2, L, 64)))
            cache.attend(mx.ones((1, 4, 1, 64)), config, scale=1.0, backend="metal")
    assert sparq.launches.cache_info()[:2] == (4, 2)  # hits, misses


def test_auto_is_metal_if_it_runs_and_supports_the_shape(metal: Metal) -> None:
    assert registry.resolve("auto", "sparq", D=128, G=4) == "metal"
    assert registry.resolve("auto", "streaming", D=128, G=4) == "ops"
    assert registry.resolve("auto", "sparq", D=576, G=128) == "metal"
    assert registry.resolve("auto", "saap", D=320, G=4) == registry.resolve("auto", "saap", D=64, G=17) == "ops"
    with pytest.raises(mlx_sparse.BackendUnavailable, match="head dims that are multiples of 4 from 8 to 576, not 580"):
        registry.resolve("metal", "sparq", D=580, G=4)
    for D in (4, 6):
        assert registry.resolve("auto", "sparq", D=D, G=4) == "ops"
    with pytest.raises(mlx_sparse.BackendUnavailable, match="up to 16 query heads per KV head, not 17"):
        registry.resolve("metal", "saap", D=64, G=17)
    with pytest.raises(mlx_sparse.BackendUnavailable, match=r"expected auto or ops, .*it does not support streaming"):
        registry.resolve("metal", "streaming", D=64, G=2)
    with pytest.raises(mlx_sparse.BackendUnavailable, match="expected auto, ops or metal, got oracle"):
        registry.resolve("oracle", "sparq", D=64, G=2)


@pytest.mark.parametrize("score", ["query", "query_key"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("G", [20, 130])
def test_a_large_query_group_is_divided_or_runs_in_array_operations(
    metal: Metal, G: int, packed: bool, score: str
) -> None:
    q, k, v = Case(1, G, 1, 90, 64, "f32").inputs()
    settings: dict[str, Any] = {"rank": 64, "top_k": 20, "component_score": score}
    keys, values = (mx.array(rows) for rows in (k, v))
    if packed:
        keys, values = (mlx_sparse.PackedRows.of(rows, bits=8) for rows in (keys, values))
        k, v = (np.array(rows[:]) for rows in (keys, values))
    out = mlx_sparse.sparq_attention(mx.array(q), keys, values, **settings)
    np.testing.assert_allclose(np.array(out), reference.sparq_attention(q, k, v, **settings), atol=2e-5)
    assert bool(metal.launches) == (metal.emulated and G <= 128)
    if G <= 128:
        return
    with pytest.raises(mlx_sparse.BackendUnavailable, match=f"up to 128 query heads per KV head, not {G}"):
        mlx_sparse.sparq_attention(mx.array(q), keys, values, **settings, backend="metal")


def test_metal_is_refused_while_the_cpu_is_the_default_device(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu, 0))
    assert registry.resolve("auto", "sparq", D=128, G=4) != "metal"
    with pytest.raises(mlx_sparse.BackendUnavailable, match="the default device is not the GPU"):
        registry.resolve("metal", "sparq", D=128, G=4)


@pytest.mark.skipif(mx.metal.is_available(), reason="there is a Metal GPU")
def test_without_a_metal_gpu_metal_is_refused_and_not_selected() -> None:
    assert registry.resolve("auto", "sparq", D=128, G=4) != "metal"
    with pytest.raises(mlx_sparse.BackendUnavailable, match=r"got metal .MLX finds no Metal GPU on this machine"):
        registry.resolve("metal", "sparq", D=128, G=4)


# comments of the kernels

FILES = [file.relative_to(PACKAGE.parent).with_suffix("") for file in PACKAGE.rglob("metal*.py")]
MODULES = [importlib.import_module(".".join(file.parts)) for file in sorted(FILES)]
KERNELS = [value for module in MODULES for value in vars(module).values() if isinstance(value, launch.Kernel)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_comment_of_a_kernel_lists_its_inputs_and_outputs(kernel: launch.Kernel) -> None:
    comment = re.sub(r"\n// {10,}", " ", launch.text(f"{kernel.body}.metal"))
    fields = dict(re.findall(r"^// (\w+) {2,}(.+)$", comment, re.M))
    assert {"grid", "threadgroup", "reads", "writes"} <= fields.keys()
    for field, expected in (("inputs", kernel.inputs), ("outputs", kernel.outputs)):
        groups = (group.partition(" (")[0].strip() for group in fields[field].split("; "))
        assert tuple(name for group in groups for name in group.split(", ")) == expected


# edge cases and shared constants


def test_shared_constants_serve_every_thread() -> None:
    """Test that shared arrays are evaluated, because a lazy array belongs to its thread."""
    shared: list[Any] = [launch.repeated, launch.unread, saap._zeros]
    sizes = [(7, 0), (), (2, 5)]

    def made() -> list[mx.array]:
        return [make(*size) for make, size in zip(shared, sizes, strict=True)]

    for make in shared:
        make.cache_clear()
    maker = threading.Thread(target=made)
    maker.start()
    maker.join()
    try:
        mx.eval([array + 1 for array in made()])
    finally:
        for make in shared:
            make.cache_clear()
