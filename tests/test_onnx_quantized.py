"""MLX's quantised weights as the initializers of ONNX Runtime's block-quantised operators."""

import itertools
import re

import ml_dtypes
import mlx.core as mx
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_sparse.onnx_export.quantized import MLX_BITS, Blocks, blocks, dequantised
from onnx import helper, numpy_helper

from mlx_sparse.checks import ArtefactError, ConfigError

EPS = 2.0**-24
BITS = (4, 8)
SIZES = (32, 64, 128)
STORED = list(itertools.product(BITS, SIZES, ("float32", "float16", "bfloat16")))
LOSSLESS = [case for case in STORED if case[0] == 4 or case[2] == "float32"]  # whatever the size of the weights


def numpy(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def weights(N: int, K: int, spread: float = 0.5) -> np.ndarray:
    """Rows of different sizes, like trained ones, with a row and a group of zeros."""
    rng = np.random.default_rng(N * K)
    made = 0.05 * rng.standard_normal((N, K)) * np.exp(spread * rng.standard_normal((N, 1)))
    made[1] = made[2, :32] = 0
    return made


def quantised(values: np.ndarray, bits: int, group_size: int, dtype: str) -> list[np.ndarray]:
    made = mx.quantize(mx.array(values, dtype=getattr(mx, dtype)), group_size=group_size, bits=bits)
    return [numpy(array) for array in made]


def run(node: str, inputs: dict[str, np.ndarray], attributes: dict[str, int], feed: np.ndarray) -> np.ndarray:
    """One node of com.microsoft on stock ONNX Runtime; the fed input comes where the operator has it."""
    names = list(inputs)
    names.insert({"MatMulNBits": 0, "GatherBlockQuantized": 1}[node], "fed")
    graph = helper.make_graph(
        [helper.make_node(node, names, ["out"], domain="com.microsoft", **attributes)],
        node,
        [helper.make_tensor_value_info("fed", helper.np_dtype_to_tensor_dtype(feed.dtype), feed.shape)],
        [helper.make_tensor_value_info("out", helper.np_dtype_to_tensor_dtype(np.dtype(np.float32)), None)],
        [numpy_helper.from_array(array, name) for name, array in inputs.items()],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"fed": feed})[0]


def parts(made: Blocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (N, blocks, block_size), scales and zeros (N, blocks, 1) in float64."""
    codes = made.codes if made.bits == 8 else np.stack((made.codes & 15, made.codes >> 4), -1)
    codes = codes.reshape(*made.scales.shape, made.block_size)
    return codes.astype(float), made.scales[..., None].astype(float), made.zeros[..., None].astype(float)


def rounding(made: Blocks, x: np.ndarray) -> np.ndarray:
    """A float32 sum of K products, in any order, of weights that are rounded from scale * code and scale * zero."""
    codes, scales, zeros = parts(made)
    sizes = (np.abs(scales) * (codes + zeros)).reshape(made.shape)
    return (made.shape[1] + 4) * EPS * (np.abs(x) @ sizes.T)


def summed(x: np.ndarray, block_size: int) -> np.ndarray:
    return x.astype(float).reshape(len(x), -1, block_size).sum(-1)


@pytest.mark.parametrize(("bits", "group_size", "dtype"), LOSSLESS)
@pytest.mark.parametrize("groups", [1, 3, 4])
def test_matmul_is_that_of_the_dequantised_weight(bits, group_size, dtype, groups):
    arrays = quantised(weights(24, groups * group_size), bits, group_size, dtype)
    made = blocks("w", *arrays, group_size=group_size, bits=bits)
    x = np.random.default_rng(0).standard_normal((5, made.shape[1])).astype(np.float32)
    expected = x.astype(float) @ dequantised("w", *arrays, group_size=group_size, bits=bits).astype(float).T
    # The zero points may be off by what rounding a bias to its type explains: twice its half ulp.
    ulps = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    _, scales, zeros = parts(made)
    unit = np.maximum(np.abs(scales) * ulps, 2.0**-25 if dtype == "float16" else 0)
    allowed = rounding(made, x) + np.abs(summed(x, group_size)) @ (2 * unit * zeros)[..., 0].T
    assert (np.abs(run("MatMulNBits", *made.matmul(), x) - expected) <= allowed).all()


@pytest.mark.parametrize(("bits", "group_size", "dtype"), STORED)
def test_offsets_make_any_biases_exact(bits, group_size, dtype):
    weight, scales, biases = quantised(weights(24, 3 * group_size) + 0.1, bits, group_size, dtype)  # far off zero
    made = blocks("w", weight, scales, biases, group_size=group_size, bits=bits, offsets=True)
    exact = dequantised("w", weight, scales, biases, group_size=group_size, bits=bits).astype(float)
    codes, steps, zeros = parts(made)
    rebuilt = (steps * (codes - zeros) + made.offsets[..., None]).reshape(made.shape)
    size = (np.abs(steps) * (codes + zeros) + np.abs(made.offsets[..., None])).reshape(made.shape)
    assert (np.abs(rebuilt - exact) <= 2 * EPS * size).all()  # offset and dequantised weight are rounded once each
    x = np.random.default_rng(0).standard_normal((5, made.shape[1])).astype(np.float32)
    left = summed(x, group_size) @ made.offsets.astype(float).T
    allowed = rounding(made, x) + 2 * EPS * np.abs(x) @ size.T
    assert (np.abs(run("MatMulNBits", *made.matmul(), x) + left - x.astype(float) @ exact.T) <= allowed).all()


@pytest.mark.parametrize(("bits", "group_size"), list(itertools.product(BITS, SIZES)))
def test_gather_reads_rows_of_the_codes_that_matmul_uses(bits, group_size):
    arrays = quantised(weights(24, 3 * group_size), bits, group_size, "float32")
    made = blocks("w", *arrays, group_size=group_size, bits=bits)
    rows = np.array([[0, 1, 23], [5, 5, 2]])
    found = run("GatherBlockQuantized", *made.gather(), rows)
    assert found.shape == (2, 3, 3, group_size)
    codes, scales, zeros = parts(made)
    allowed = 4 * EPS * np.abs(scales) * (codes + zeros)
    exact = dequantised("w", *arrays, group_size=group_size, bits=bits).reshape(allowed.shape)
    assert (np.abs(found - exact[rows]) <= allowed[rows]).all()
    assert made.gather()[0]["data"] is made.matmul()[0]["B"]


@pytest.mark.parametrize("bits", MLX_BITS)
@pytest.mark.parametrize("group_size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dequantised_weights_are_those_of_mlx(bits, group_size, dtype):
    arrays = quantised(weights(24, 2 * group_size), bits, group_size, dtype)
    weight, scales, biases = map(mx.array, arrays)
    wide = [
        a.view(mx.bfloat16).astype(mx.float32) if dtype == "bfloat16" else a.astype(mx.float32)
        for a in (scales, biases)
    ]
    theirs = np.array(mx.dequantize(weight, *wide, group_size=group_size, bits=bits))
    ours = dequantised("w", *arrays, group_size=group_size, bits=bits)
    size = np.repeat(np.abs(np.array(wide[0])) * (2**bits - 1) + np.abs(np.array(wide[1])), group_size, axis=1)
    assert ours.dtype == np.float32
    assert (np.abs(ours - theirs) <= 2 * EPS * size).all()  # MLX rounds the product too


@pytest.mark.parametrize("bits", BITS)
def test_half_of_the_scales_of_mlx_are_negative(bits):
    made = blocks("w", *quantised(weights(24, 64), bits, 32, "float32"), group_size=32, bits=bits)
    assert 0.2 < (made.scales < 0).mean() < 0.8


def test_ml_dtypes_and_bits_of_bfloat16_are_the_same():
    weight, *rest = quantised(weights(8, 64), 4, 32, "bfloat16")
    typed = [array.view(ml_dtypes.bfloat16) for array in rest]
    for function in (dequantised, lambda *a, **k: blocks(*a, **k).matmul()[0]["scales"]):
        np.testing.assert_array_equal(
            function("w", weight, *rest, group_size=32, bits=4), function("w", weight, *typed, group_size=32, bits=4)
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("bits", BITS)
def test_a_scale_of_zero_is_exact(bits, dtype):
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 2**32, (4, 64 * bits // 32), dtype=np.uint32)
    scales, biases = np.zeros((4, 2), dtype), np.array([[0, 0.3], [-7, 0], [0, 0], [1e-6, 1]], dtype)
    made = blocks("w", weight, scales, biases, group_size=32, bits=bits)
    expected = np.repeat(biases.astype(np.float32), 32, axis=1)
    np.testing.assert_array_equal(dequantised("w", weight, scales, biases, group_size=32, bits=bits), expected)
    found = run("GatherBlockQuantized", *made.gather(), np.arange(4))
    np.testing.assert_array_equal(found.reshape(4, 64), expected)
    np.testing.assert_array_equal(run("MatMulNBits", *made.matmul(), np.eye(64, dtype=np.float32)).T, expected)


@given(st.data())
def test_packing_keeps_every_code_and_zero_point(data):
    bits, group_size = data.draw(st.sampled_from(BITS)), data.draw(st.sampled_from(SIZES))
    N, groups, seed = (data.draw(st.integers(low, high)) for low, high in ((1, 5), (1, 5), (0, 2**32 - 1)))
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (N, groups, group_size))
    zeros = rng.integers(0, 2**bits, (N, groups))
    scales = rng.choice([-1, 1], (N, groups)) * 2.0 ** rng.integers(-9, 3, (N, groups))
    shifts = np.arange(0, 32, bits)
    weight = (codes.reshape(N, -1, len(shifts)) << shifts).sum(-1).astype(np.uint32)
    arrays = weight, scales.astype(np.float32), (-scales * zeros).astype(np.float32)
    made = blocks("w", *arrays, group_size=group_size, bits=bits)
    np.testing.assert_array_equal(made.zeros, zeros)
    np.testing.assert_array_equal(parts(made)[0], codes)
    inputs, attributes = made.matmul()
    assert attributes == {"K": groups * group_size, "N": N, "bits": bits, "block_size": group_size}
    packed = inputs["zero_points"].reshape(N, -1)
    unpacked = packed if bits == 8 else np.stack((packed & 15, packed >> 4), -1).reshape(N, -1)[:, :groups]
    np.testing.assert_array_equal(unpacked, zeros)
    exact = ((codes - zeros[..., None]) * scales[..., None]).reshape(N, -1)  # powers of two: nothing is rounded
    np.testing.assert_array_equal(dequantised("w", *arrays, group_size=group_size, bits=bits), exact)
    identity = np.eye(groups * group_size, dtype=np.float32)
    np.testing.assert_array_equal(run("MatMulNBits", inputs, attributes, identity).T, exact)


@pytest.mark.parametrize("slab", [1, 64 * 4])
def test_slabs_cover_every_row(monkeypatch, slab):
    arrays = quantised(weights(25, 64), 4, 32, "float32")
    whole = dequantised("w", *arrays, group_size=32, bits=4)
    monkeypatch.setattr("mlx_sparse.onnx_export.quantized.SLAB", slab)
    np.testing.assert_array_equal(dequantised("w", *arrays, group_size=32, bits=4), whole)


def refused(
    error: type[Exception], *expected: str, bits: int = 4, group_size: int = 32, mode: str = "affine", **changed
):
    """`blocks` refuses the arrays in one line that names the tensor; returns them."""
    good = quantised(weights(8, 64), 4, 32, "float32")
    arrays = dict(zip(("weight", "scales", "biases"), good, strict=True)) | changed
    with pytest.raises(error) as caught:
        blocks("layers.0.mlp", **arrays, bits=bits, group_size=group_size, mode=mode)
    message = str(caught.value)
    assert message.startswith("layers.0.mlp: ")
    assert "\n" not in message
    assert all(re.search(part, message) for part in expected), message
    return arrays


def refused_by_both(error: type[Exception], *expected: str, **changed):
    arrays = refused(error, *expected, **changed)
    how = {"bits": 4, "group_size": 32, "mode": "affine"} | {k: v for k, v in changed.items() if k not in arrays}
    with pytest.raises(error):
        dequantised("layers.0.mlp", **arrays, **how)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *(({"bits": bits}, f"one of 1, 2, 3, 4, 5, 6, 8, got {bits}") for bits in (0, 7, 16, -4, None)),
        *(({"group_size": size}, f"one of 32, 64, 128, got {size}") for size in (16, 256, 0, -32, 64.0)),
        *(({"mode": mode}, f"expected one of affine, got '{mode}'") for mode in ("mxfp4", "mxfp8", "nvfp4", "")),
    ],
)
def test_unknown_quantisations_are_refused(changed, said):
    refused_by_both(ConfigError, said, "mlx_lm.convert --dequantize", **changed)


@pytest.mark.parametrize("bits", sorted(set(MLX_BITS) - set(BITS)))
def test_other_bits_are_refused_and_left_to_dequantised(bits):
    weight, scales, biases = quantised(weights(8, 64), bits, 32, "float32")
    arrays = {"weight": weight, "scales": scales, "biases": biases}
    refused(ConfigError, f"a weight of 4 or 8 bits, got {bits}", "--dtype", bits=bits, **arrays)


GOOD = np.ones((8, 2), np.float32)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weight": np.zeros((8, 8), np.int32)}, "weight of dtype uint32, got int32"),
        ({"weight": np.zeros((8, 8), ">u4")}, "weight of dtype uint32, got >u4"),
        ({"weight": np.zeros((2, 8, 8), np.uint32)}, "weight to be .* 2 axes"),
        ({"weight": np.zeros((0, 8), np.uint32)}, "weight to be .* none empty"),
        ({"weight": [[1, 2]]}, "NumPy array .* got list"),
        ({"biases": None}, "biases to be .* got NoneType"),
        ({"weight": np.zeros((8, 9), np.uint32)}, r"shape \(8, 2\) for a weight of shape \(8, 9\)"),
        ({"weight": np.zeros((7, 8), np.uint32)}, r"shape \(7, 2\)"),
        ({"scales": GOOD[:, :1]}, r"got \(8, 1\) and \(8, 2\)"),
        ({"biases": GOOD.T}, r"got \(8, 2\) and \(2, 8\)"),
        ({"bits": 8}, r"shape \(8, 1\)"),
        ({"scales": GOOD.astype(np.float64)}, "one dtype of float32, float16, bfloat16, got float32 and float64"),
        ({"scales": GOOD.astype(np.float16)}, "one dtype of .* got float16 and float32"),
        ({"scales": GOOD.astype(np.uint8), "biases": GOOD.astype(np.uint8)}, "got uint8"),
        ({"scales": GOOD * np.nan}, "NaN or too large"),
        ({"biases": GOOD * -np.inf}, "NaN or too large"),
        ({"scales": GOOD * np.float32(1e38)}, "NaN or too large"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changed, said):
    refused_by_both(ArtefactError, said, **changed)


def test_a_zero_point_between_two_integers_is_refused_by_name_with_the_worst():
    biases = -8 * GOOD
    biases[3, 1], biases[5, 0] = -8.25, -7.4
    refused(
        ArtefactError,
        "got 7.4 in row 5, group 0: 0.4 steps off",
        "2 of 16 groups",
        "--dtype",
        scales=GOOD,
        biases=biases,
    )


@pytest.mark.parametrize("point", [-1, 16, 1e30])
def test_a_zero_point_that_the_codes_do_not_reach_is_refused(point):
    biases = -8 * GOOD
    biases[2, 1] = -point
    refused(ArtefactError, re.escape(f"got {point:g} in row 2, group 1"), scales=GOOD, biases=biases)


def test_the_tolerance_is_that_of_the_storage_type():
    off = (-8 * (1 + 2.0**-10) * GOOD).astype(np.float16)  # one ulp of float16
    weight = np.zeros((8, 8), np.uint32)
    assert (blocks("w", weight, GOOD.astype(np.float16), off, group_size=32, bits=4).zeros == 8).all()
    refused(ArtefactError, "allowed for float32", weight=weight, scales=GOOD, biases=off.astype(np.float32))
    off[4, 1] += off[4, 1] * np.float16(2.0**-10)
    refused(ArtefactError, "row 4, group 1", "1 of 16", weight=weight, scales=GOOD.astype(np.float16), biases=off)


@pytest.mark.parametrize("group_size", SIZES)
def test_scales_below_the_normal_numbers_are_no_reason_to_refuse(group_size):
    arrays = quantised(weights(24, 256) * 0.001, 4, group_size, "float16")
    made = blocks("w", *arrays, group_size=group_size, bits=4)
    assert (np.abs(made.scales[made.scales != 0]) < np.finfo(np.float16).smallest_normal).mean() > 0.5


@pytest.mark.parametrize("group_size", SIZES)
def test_eight_bits_with_bfloat16_scales_are_refused(group_size):
    """Rounding moves a bias by up to half a step: no zero point is the right one. Offsets serve them."""
    arrays = quantised(weights(24, 256), 8, group_size, "bfloat16")
    with pytest.raises(ArtefactError, match=r"0\.125 allowed for bfloat16"):
        blocks("w", *arrays, group_size=group_size, bits=8)
