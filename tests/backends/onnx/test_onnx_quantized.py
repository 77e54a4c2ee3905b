"""Check the conversion of MLX's quantized weights to ONNX Runtime's block-quantized operators."""

import itertools

import mlx.core as mx
import numpy as np
import onnxruntime as ort
import pytest
from mlx_sparse.onnx_export.exporter.quantized import Blocks, blocks
from onnx import helper, numpy_helper

from mlx_sparse.checks import ArtefactError

EPS = 2.0**-24
BITS = (4, 8)
SIZES = (32, 64, 128)
STORED = list(itertools.product(BITS, SIZES, ("float32", "float16", "bfloat16")))


def numpy(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def weights(N: int, K: int, spread: float = 0.5) -> np.ndarray:
    """Return rows of different magnitude, as in trained weights, with a row and a group of zeros."""
    rng = np.random.default_rng(N * K)
    made = 0.05 * rng.standard_normal((N, K)) * np.exp(spread * rng.standard_normal((N, 1)))
    made[1] = made[2, :32] = 0
    return made


def quantized(values: np.ndarray, bits: int, group_size: int, dtype: str) -> list[np.ndarray]:
    made = mx.quantize(mx.array(values, dtype=getattr(mx, dtype)), group_size=group_size, bits=bits)
    return [numpy(array) for array in made]


def dequantized(weight, scales, biases, *, group_size: int, bits: int) -> np.ndarray:
    """Return scale * code + bias in float32, computed in float64 and rounded once."""
    codes = np.ascontiguousarray(weight).view(np.uint8)
    codes = codes if bits == 8 else np.stack((codes & 15, codes >> 4), -1)
    wide = [(a.astype(np.uint32) << 16).view(np.float32) if a.dtype == np.uint16 else a for a in (scales, biases)]
    step, bias = (a.astype(float)[..., None] for a in wide)
    return (step * codes.reshape(*scales.shape, group_size) + bias).astype(np.float32).reshape(len(weight), -1)


def run(node: str, inputs: dict[str, np.ndarray], attributes: dict[str, int], feed: np.ndarray) -> np.ndarray:
    """Run one node of com.microsoft on ONNX Runtime; ``feed`` is its data input."""
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
    """Return codes (N, blocks, block_size), scales and zeros (N, blocks, 1) in float64."""
    codes = made.codes if made.bits == 8 else np.stack((made.codes & 15, made.codes >> 4), -1)
    codes = codes.reshape(*made.scales.shape, made.block_size)
    return codes.astype(float), made.scales[..., None].astype(float), made.zeros[..., None].astype(float)


def rounding(made: Blocks, x: np.ndarray) -> np.ndarray:
    """Bound the error of a float32 sum of K products in any order, with weights rounded from scale * (code - zero)."""
    codes, scales, zeros = parts(made)
    sizes = (np.abs(scales) * (codes + zeros)).reshape(made.shape)
    return (made.shape[1] + 4) * EPS * (np.abs(x) @ sizes.T)


def summed(x: np.ndarray, block_size: int) -> np.ndarray:
    return x.astype(float).reshape(len(x), -1, block_size).sum(-1)


def matmul(made: Blocks, x: np.ndarray) -> np.ndarray:
    """Compute the product as a graph does, but add the offsets in float64."""
    halves = [made] if made.bits == 4 else made.halves()
    y = sum(run("MatMulNBits", *half.matmul(), x) for half in halves)
    return y if made.offsets is None else y + summed(x, made.block_size) @ made.offsets.astype(float).T


@pytest.mark.parametrize(("bits", "group_size", "dtype"), STORED)
@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("shift", [0, 0.1])  # far from zero: no zero point is close
def test_matmul_equals_the_dequantized_weight(bits, group_size, dtype, groups, shift):
    arrays = quantized(weights(24, groups * group_size) + shift, bits, group_size, dtype)
    made = blocks("w", *arrays, group_size=group_size, bits=bits)
    x = np.random.default_rng(0).standard_normal((5, made.shape[1])).astype(np.float32)
    exact = dequantized(*arrays, group_size=group_size, bits=bits).astype(float)
    codes, steps, zeros = parts(made)
    left = 0 if made.offsets is None else made.offsets[..., None]
    size = (np.abs(steps) * (codes + zeros) + np.abs(left)).reshape(made.shape)
    # Offset and dequantized weight are rounded once each; an offset of an ulp may be missing.
    allowed = 2 * rounding(made, x) + 4 * EPS * np.abs(x) @ size.T
    assert (np.abs(matmul(made, x) - x.astype(float) @ exact.T) <= allowed).all()


@pytest.mark.parametrize(("bits", "group_size"), list(itertools.product(BITS, SIZES)))
def test_float32_needs_no_offsets_and_half_precision_does(bits, group_size):
    for dtype in ("float32", "float16", "bfloat16"):
        made = blocks("w", *quantized(weights(24, 256), bits, group_size, dtype), group_size=group_size, bits=bits)
        assert (made.offsets is None) == (dtype == "float32")


@pytest.mark.parametrize(("bits", "group_size"), list(itertools.product(BITS, SIZES)))
def test_gather_shares_the_codes_of_matmul(bits, group_size):
    arrays = quantized(weights(24, 3 * group_size), bits, group_size, "float32")
    made = blocks("w", *arrays, group_size=group_size, bits=bits)
    rows = np.array([[0, 1, 23], [5, 5, 2]])
    found = run("GatherBlockQuantized", *made.gather(), rows)
    assert found.shape == (2, 3, 3, group_size)
    codes, scales, zeros = parts(made)
    allowed = 4 * EPS * np.abs(scales) * (codes + zeros)
    exact = dequantized(*arrays, group_size=group_size, bits=bits).reshape(allowed.shape)
    assert (np.abs(found - exact[rows]) <= allowed[rows]).all()
    assert made.gather()[0]["data"] is made.matmul()[0]["B"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("bits", BITS)
def test_a_scale_of_zero_is_exact(bits, dtype):
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 2**32, (4, 64 * bits // 32), dtype=np.uint32)
    scales, biases = np.zeros((4, 2), dtype), np.array([[0, 0.3], [-7, 0], [0, 0], [1e-6, 1]], dtype)
    made = blocks("w", weight, scales, biases, group_size=32, bits=bits)
    expected = np.repeat(biases.astype(np.float32), 32, axis=1)
    np.testing.assert_array_equal(dequantized(weight, scales, biases, group_size=32, bits=bits), expected)
    found = run("GatherBlockQuantized", *made.gather(), np.arange(4))
    np.testing.assert_array_equal(found.reshape(4, 64), expected)
    np.testing.assert_array_equal(run("MatMulNBits", *made.matmul(), np.eye(64, dtype=np.float32)).T, expected)


@pytest.mark.parametrize(("which", "factor"), [("scales", np.nan), ("biases", -np.inf), ("scales", np.float32(1e38))])
def test_weights_that_are_not_finite_are_refused(which, factor):
    good = quantized(weights(8, 64), 4, 32, "float32")
    arrays = dict(zip(("weight", "scales", "biases"), good, strict=True))
    arrays[which] = np.ones_like(arrays[which]) * factor
    with pytest.raises(
        ArtefactError, match=r"^layers\.0\.mlp: expected finite weights, got [^\n]* NaN or too large\.$"
    ):
        blocks("layers.0.mlp", **arrays, group_size=32, bits=4)
