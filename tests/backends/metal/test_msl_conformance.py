"""Test that MLX's own kernels, read from the installed wheel, give correct results in the harness."""

from collections.abc import Callable, Iterable

import pytest
from foreign_kernels import KERNELS, ForeignKernel, block_sort, sdpa, second_pass, softmax, steel_attention
from msl import Fault
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
    """Count the reads of each key byte in the first pass: G = 8 in the plain variant, G / HPT = 2 in the other."""
    plain = sdpa("sdpa_vector_2pass_1", "half", (32, 4), 1000, 128, 0)
    frugal = sdpa("sdpa_vector_2pass_1_gqa", "half", (32, 4), 1000, 128, 0)
    keys = plain.buffers["keys"].nbytes
    assert [k.run().reads["keys"].lane / keys for k in (plain, frugal)] == [8, 2]


def merge() -> ForeignKernel:
    first = sdpa("sdpa_vector_2pass_1", "half", (2, 1), 100, 64, 0)
    first.run()
    return second_pass(first)


# Kernel, and the numbers of the barriers that it needs. The matrix-unit kernel has eight more barriers without effect
# in the harness: mem_none (a hint to the scheduler), before the first use, or in a branch that is compiled out.
BARRIERS: dict[str, tuple[Callable[[], ForeignKernel], Iterable[int]]] = {
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
