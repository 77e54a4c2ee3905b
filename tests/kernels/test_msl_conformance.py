"""Foreign kernels run right in the harness: MLX's own and some of mlx-lm's, read from the installed wheels."""

from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from foreign_kernels import KERNELS, Foreign, block_sort, sdpa, second_pass, softmax, steel_attention
from msl import Fault, emulated
from msl.mutation import barriers


@pytest.mark.parametrize("name", KERNELS)
def test_mlx_kernel_agrees_with_mlx_on_the_cpu(name: str) -> None:
    kernel = KERNELS[name]()
    report = kernel.run()
    assert report.unwritten == 0
    if "2pass_1" in kernel.name:
        kernel = second_pass(kernel)
        assert kernel.run().unwritten == 0
    assert kernel.error() <= kernel.tolerance


def test_mlx_comment_on_bytes_read_holds() -> None:
    """Plain grouped first pass: each key byte G = 8 times; the other variant: G / HPT = 2 times."""
    plain = sdpa("sdpa_vector_2pass_1", "half", (32, 4), 1000, 128, 0)
    frugal = sdpa("sdpa_vector_2pass_1_gqa", "half", (32, 4), 1000, 128, 0)
    keys = plain.buffers["keys"].nbytes
    assert [k.run().reads["keys"].lane / keys for k in (plain, frugal)] == [8, 2]


def merge() -> Foreign:
    first = sdpa("sdpa_vector_2pass_1", "half", (2, 1), 100, 64, 0)
    first.run()
    return second_pass(first)


# Kernel, and which of the barriers of its file it needs. The matrix-unit kernel has eight more, which order nothing
# here: mem_none (a hint to the hardware's scheduler), before the first use, or in a branch that is compiled out.
BARRIERS: dict[str, tuple[Callable[[], Foreign], Iterable[int]]] = {
    "softmax of one row": (lambda: softmax("single_row", "float", 400, 0), range(5)),
    "softmax looped": (lambda: softmax("looped", "float", 5001, 0), range(5, 7)),
    "vector attention": (lambda: sdpa("sdpa_vector", "half", (2, 1), 100, 64, 0), range(3)),
    "two passes, each byte read twice": (
        lambda: sdpa("sdpa_vector_2pass_1_gqa", "half", (8, 1), 100, 64, 0),
        range(3, 4),
    ),
    "second of two passes": (merge, range(4, 6)),
    "matrix units": (lambda: steel_attention("float", 77, 130, 64, True, 0), (1, 2, 7, 8)),
    "block sort": (lambda: block_sort("half", 400), range(5)),
}


@pytest.mark.parametrize(("name", "i"), [(name, i) for name, (_, own) in BARRIERS.items() for i in own])
def test_deleted_barrier_is_flagged(name: str, i: int) -> None:
    kernel = BARRIERS[name][0]()
    with pytest.raises(Fault, match=r"RACE|UNINITIALISED"):
        kernel.run(barriers(kernel.text())[i])


@cache
def mlx_lm(name: str, *needed: str) -> ModuleType:
    """A new copy of a module of mlx-lm, imported as if there were a GPU; its kernels run inside `emulated()`."""
    try:
        spec = find_spec(f"mlx_lm.{name}")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.loader is None:
        pytest.skip(f"mlx-lm {version('mlx-lm')} has no {name}")
    module = module_from_spec(spec)
    with emulated():
        spec.loader.exec_module(module)
    for function in needed:
        if not hasattr(module, function):
            pytest.skip(f"{name} of mlx-lm {version('mlx-lm')} has no {function}")
    return module


def normal(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def close(got: Any, expected: Any, tolerance: float) -> None:
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape
        assert mx.abs(g.astype(mx.float32) - e.astype(mx.float32)).max().item() <= tolerance


def test_expert_routing() -> None:
    logits, bias = normal(5, 40), normal(40, seed=1)
    how = {"top_k": 4, "multiplier": 1.5, "score_eps": 1e-6, "route_scale": 2.0}
    with emulated(strict=False):
        experts, weights = mlx_lm("kernels.expert_routing").expert_routing(logits, bias, **how)
    scores = mx.sigmoid(logits * 1.5)
    expected = mx.argsort(-(scores + bias), axis=-1)[:, :4]
    chosen = mx.take_along_axis(scores, expected, axis=-1)
    close((experts, weights), (expected, 2.0 * chosen / (chosen.sum(-1, keepdims=True) + 1e-6)), 1e-6)


def gated_delta_inputs(Dk: int, vector: bool = False) -> list[mx.array]:
    q, k = (0.1 * normal(2, 3, 2, Dk, seed=seed) for seed in (0, 1))
    g = mx.sigmoid(normal(*((2, 3, 4, Dk) if vector else (2, 3, 4)), seed=3))
    return [q, k, normal(2, 3, 4, 16, seed=2), g, mx.sigmoid(normal(2, 3, 4, seed=4)), normal(2, 4, 16, Dk, seed=5)]


MASK = mx.array([[True, True, True], [False, True, True]])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vector", [False, True])
def test_gated_delta(vector: bool, masked: bool) -> None:
    inputs = [*gated_delta_inputs(64, vector), mx.ones((2, 3), mx.bool_) if masked else None]
    module = mlx_lm("models.gated_delta")
    with emulated(strict=False):
        got = module.gated_delta_kernel(*inputs)
    close(got, module.gated_delta_ops(*inputs), 1e-5)


def test_masked_gated_delta_writes_its_zeros_from_every_lane() -> None:
    """Harmless on today's GPUs, for all lanes write the same value, but a race by Metal's rules."""
    with emulated(strict=False), pytest.raises(Fault, match=r"RACE write of 4 bytes at offset 768 of buffer y "):
        mlx_lm("models.gated_delta").gated_delta_kernel(*gated_delta_inputs(64), MASK)


def test_gated_delta_variants_are_bitwise_equal_as_mlx_lm_promises() -> None:
    inputs = gated_delta_inputs(128)
    module = mlx_lm("models.gated_delta", "gated_delta_kernel_unpacked", "gated_delta_kernel_xtree")
    with emulated(strict=False) as metal:
        results = [f(*inputs) for f in (module.gated_delta_kernel, module.gated_delta_kernel_unpacked)]
        results.append(module.gated_delta_kernel_xtree(*inputs))
    assert [r.kernel.removeprefix("gated_delta_step") for r in metal.launches] == ["_packed_btree", "", "_xtree"]
    for y, state in results[1:]:
        assert mx.array_equal(y, results[0][0])
        assert mx.array_equal(state, results[0][1])


@pytest.mark.parametrize("kernel", ["kl_forward", "kl_backward", "js_forward", "js_backward"])
def test_race_in_the_distillation_losses_of_mlx_lm_is_reported(kernel: str) -> None:
    """Maxima in `shared` are overwritten by sums while other simdgroups still read them: a barrier is missing."""
    q, p, row = normal(2, 5000), normal(2, 5000, seed=1), mx.ones(2)
    inputs = {"kl_forward": [q, p], "js_forward": [q, p], "kl_backward": [q, p, row], "js_backward": [q, p, row, row]}
    shapes = {"kl_forward": [(2,)], "js_forward": [(2,), (2,)]}.get(kernel, [q.shape])
    launch = getattr(mlx_lm("tuner.losses"), f"_{kernel}_kernel")
    with emulated(strict=False), pytest.raises(Fault, match=r"RACE .* of threadgroup array shared"):
        launch(
            inputs=inputs[kernel],
            output_shapes=shapes,
            output_dtypes=[mx.float32] * len(shapes),
            template=[("T", mx.float32), ("V", 5000)],
            grid=(1024, 2, 1),
            threadgroup=(1024, 1, 1),
        )
