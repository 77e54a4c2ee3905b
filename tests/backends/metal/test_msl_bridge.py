"""Test the replacement of `mx.fast.metal_kernel`: text, launch and memory equal what MLX passes to a GPU."""

import mlx.core as mx
import pytest
from fixtures_msl import gpu_or_harness
from msl import Fault, Metal, emulated
from msl.bridge import capture

SCALE = {
    "name": "scale",
    "input_names": ["x", "factor"],
    "output_names": ["out"],
    "header": "template <typename T> T times(T a, T b) { return a * b; }\n",
    "source": "uint i = thread_position_in_grid.x;\nout[i] = times(x[i], factor);",
}


def scale(x: mx.array, factor: float, **how: object) -> mx.array:
    kernel = mx.fast.metal_kernel(**SCALE)
    shapes = {"output_shapes": [x.shape], "output_dtypes": [x.dtype], "grid": (x.size, 1, 1)}
    return kernel(inputs=[x, mx.array(factor, x.dtype)], threadgroup=(256, 1, 1), **shapes, **how)[0]


def test_export_of_a_custom_kernel_has_the_arguments_that_the_bridge_reads() -> None:
    """Test MLX's export format of custom kernels. If another version of MLX fails this test, adapt `capture`."""
    kernel = mx.fast.metal_kernel(name="pin", input_names=["x"], output_names=["out"], source="// x_shape, x_ndim")
    call = {"grid": (5, 6, 7), "threadgroup": (8, 2, 1), "output_shapes": [(3, 4)], "output_dtypes": [mx.bfloat16]}
    launch = capture(lambda x: kernel(inputs=[x], **call), [mx.zeros((9, 2))])
    assert launch.host_name in launch.text
    assert "const device float* x [[buffer(0)]]" in launch.text
    assert (launch.grid, launch.threadgroup) == ((5, 6, 7), (5, 2, 1))
    assert launch.parameters == [(True, False, True)]
    assert launch.row_contiguous is True
    assert launch.outputs == [((3, 4), mx.bfloat16)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("n", [3, 100])
def test_kernel_computes(dtype: mx.Dtype, n: int, metal: Metal) -> None:
    x = mx.arange(n).astype(dtype)
    out = scale(x, 0.5)
    assert out.dtype == dtype
    assert mx.array_equal(out, x * mx.array(0.5, dtype))
    if metal.emulated:
        assert metal.last("scale").reads["x"].lane == x.nbytes


def test_mlx_looks_as_on_a_mac_inside_the_context_only() -> None:
    outside = mx.fast.metal_kernel, mx.metal.is_available(), mx.default_device()
    with emulated():
        assert mx.metal.is_available()
        assert mx.default_device() == mx.gpu
        kernel = mx.fast.metal_kernel(**SCALE)
    assert (mx.fast.metal_kernel, mx.metal.is_available(), mx.default_device()) == outside
    if not mx.metal.is_available():
        with pytest.raises(RuntimeError, match="Metal"):
            mx.eval(
                kernel(
                    inputs=[mx.ones(8), 2.0],
                    output_shapes=[(8,)],
                    output_dtypes=[mx.float32],
                    grid=(8, 1, 1),
                    threadgroup=(8, 1, 1),
                )
            )


def test_launches_are_recorded_in_order_and_can_be_cleared() -> None:
    with emulated() as metal:
        scale(mx.ones(100), 2.0)
        scale(mx.ones(64), 2.0)
        assert [report.grid for report in metal.launches] == [(100, 1, 1), (64, 1, 1)]
        assert metal.last("scale").threadgroup == (64, 1, 1)  # MLX clamps the threadgroup to the grid
        metal.clear()
        assert metal.launches == []


def small(source: str, x: mx.array, *, n: int | None = None, init: float | None = None, **options: object) -> mx.array:
    """Run one kernel with input x and an output of n elements, or of the shape of x if n is None."""
    kernel = mx.fast.metal_kernel(name="small", input_names=["x"], output_names=["out"], source=source, **options)
    shape = x.shape if n is None else (n,)
    grid = (*reversed(x.shape), 1, 1)[:3]
    how = {"output_shapes": [shape], "output_dtypes": [x.dtype], "grid": grid, "threadgroup": (32, 1, 1)}
    return kernel(inputs=[x], init_value=init, **how)[0]


@pytest.mark.parametrize("contiguous", [True, False])
def test_strides_describe_the_memory_of_the_input(contiguous: bool) -> None:
    x = mx.arange(60, dtype=mx.int32).reshape(3, 4, 5).transpose(2, 0, 1)[::2]
    source = """
        uint3 p = thread_position_in_grid;
        uint n = (p.z * x_shape[1] + p.y) * x_shape[2] + p.x;
        out[n] = x[size_t(p.z * x_strides[0] + p.y * x_strides[1] + p.x * x_strides[2])] + x_ndim;
    """
    with emulated() as metal:
        metal.line = 32
        out = small(source, x, ensure_row_contiguous=contiguous)
    assert mx.array_equal(out, x + 3)
    assert metal.last("small").reads["x"].dispatch == (160 if contiguous else 256)  # 36 packed ints, or spread over 60


def test_init_value_and_atomic_outputs() -> None:
    source = "atomic_fetch_add_explicit(&out[x[thread_position_in_grid.x]], 1, memory_order_relaxed);"
    with emulated():
        assert small(source, mx.arange(64) % 3, n=4, init=10, atomic_outputs=True).tolist() == [32, 31, 31, 10]


def test_outputs_of_any_type_and_of_no_dimension() -> None:
    source = "flag[0] = x[0] < x[1];\nlast[0] = x[1];"
    with emulated():
        kernel = mx.fast.metal_kernel(name="two", input_names=["x"], output_names=["flag", "last"], source=source)
        how = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_dtypes": [mx.bool_, mx.bfloat16]}
        flag, last = kernel(inputs=[mx.array([3.0, 4.0]).astype(mx.bfloat16)], output_shapes=[(1,), ()], **how)
    assert (flag.tolist(), flag.dtype) == ([True], mx.bool_)
    assert (last.item(), last.shape, last.dtype) == (4.0, (), mx.bfloat16)


def test_output_starts_as_never_written() -> None:
    with emulated(), pytest.raises(Fault, match=r"UNINITIALISED read .* buffer out"):
        small("out[thread_position_in_grid.x] += x[thread_position_in_grid.x];", mx.ones(32))


FIRST = "inline float first(const device float* p) { return p[0]; }\n"


def test_helper_that_takes_a_device_pointer_is_refused_for_a_small_input() -> None:
    """Test an input of fewer than 8 elements, which MLX passes in `constant` memory."""
    source = "out[thread_position_in_grid.x] = first(x);"
    with emulated():
        assert small(source, mx.ones(8), header=FIRST).tolist() == [1.0] * 8
        with pytest.raises(AssertionError, match=r"first.* at body:1"):
            small(source, mx.ones(7), header=FIRST)


def test_lint_of_the_generated_text_is_raised_when_launched() -> None:
    with emulated(), pytest.raises(AssertionError, match=r"^LINT float literal without suffix: 0\.5 at body:1$"):
        small("out[thread_position_in_grid.x] = 0.5 * x[thread_position_in_grid.x];", mx.ones(8))


def test_texts_can_be_replaced_for_mutation_tests() -> None:
    with emulated() as metal:
        scale(mx.ones(8), 2.0)
        text = metal.texts["scale"]
        metal.replaced[text] = text.replace("a * b", "a + b")
        assert scale(mx.ones(8), 2.0).tolist() == [3.0] * 8


def test_the_harness_never_replaces_a_required_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setenv("MLX_SPARSE_REQUIRE", "ort,metal")
    with pytest.raises(pytest.fail.Exception, match="names metal, which is missing"), gpu_or_harness():
        pass
