"""Test Metal's standard library in the harness. One kernel evaluates each expression in 32 lanes."""

import numpy as np
import pytest
from msl import Kernel

L = np.arange(32)  # the lane; in the kernel: uint lane, float x, int i
INF = float("inf")

EXPRESSIONS = {
    # SIMD reductions and scans
    "simd_sum(x)": 496,
    "simd_product(lane == 3 ? 5.0f : 1.0f)": 5,
    "simd_max(i)": 15,
    "simd_min(i)": -16,
    "simd_and(lane | 8)": 8,
    "simd_or(lane)": 31,
    "simd_xor(lane == 7 ? 9u : 0u)": 9,
    "simd_prefix_inclusive_sum(x)": L * (L + 1) / 2,
    "simd_prefix_exclusive_sum(lane)": L * (L - 1) / 2,
    "simd_all(lane < 32)": 1,
    "simd_any(lane == 40)": 0,
    "popcount(uint(ulong(simd_ballot(lane < 4))))": 4,
    "quad_sum(x)": L // 4 * 16 + 6,
    # Shuffles
    "simd_broadcast(x, 5)": 5,
    "simd_broadcast_first(x + 2.0f)": 2,
    "simd_shuffle(x, ushort(31 - lane))": 31 - L,
    "simd_shuffle_xor(lane, 5)": L ^ 5,
    "simd_shuffle_down(x, 2)": np.where(L < 30, L + 2, L),
    "simd_shuffle_up(x, 2)": np.where(L < 2, L, L - 2),
    "simd_shuffle_and_fill_down(x, -1.0f - x, 2)": np.where(L < 30, L + 2, -1 - (L - 30)),
    "simd_shuffle_and_fill_up(x, -1.0f - x, 2)": np.where(L < 2, -1 - (L + 30), L - 2),
    "simd_shuffle_rotate_down(x, 3)": (L + 3) % 32,
    "simd_shuffle_rotate_up(x, 3)": (L - 3) % 32,
    "simd_shuffle(float2(x, -x), ushort(3)).y": -3,
    "simd_is_first()": L == 0,
    # Bits and integers
    "popcount(lane)": [int(n).bit_count() for n in L],
    "clz(lane)": [32 - int(n).bit_length() for n in L],
    "ctz(lane | 32u)": [(int(n | 32) & -int(n | 32)).bit_length() - 1 for n in L],
    "reverse_bits(1u) >> 31": 1,
    "extract_bits(0xabcdu, 4u, 8u)": 0xBC,
    "mulhi(0x80000000u, 6u)": 3,
    "abs(i)": abs(L - 16),
    "min(lane, 7u)": np.minimum(L, 7),
    "clamp(i, -3, 4)": np.clip(L - 16, -3, 4),
    "as_type<uint>(1.0f) >> 16": 0x3F80,
    "as_type<half>(ushort(0x3c00))": 1,
    "as_type<float>(0x40000000u)": 2,
    "int(-1.7f)": -1,
    "uchar(lane + 250)": (L + 250) % 256,
    "short(40000)": 40000 - 65536,
    "size_t(lane) * 4294967296ul >> 30": L * 4,
    # Floats
    "max(x, NAN)": L,
    "min(NAN, x)": L,
    "fma(x, 2.0f, 1.0f)": 2 * L + 1,
    "mix(0.0f, x, 0.25f)": L / 4,
    "saturate(x - 3.0f)": np.clip(L - 3, 0, 1),
    "sign(x - 3.0f)": np.sign(L - 3),
    "step(3.0f, x)": L >= 3,
    "fract(1.75f)": 0.75,
    "rint(2.5f)": 2,
    "round(2.5f)": 3,
    "trunc(-2.5f)": -2,
    "fmod(-7.0f, 4.0f)": -3,
    "ldexp(3.0f, 4)": 48,
    "copysign(3.0f, -0.0f)": -3,
    "exp2(x - 16.0f)": 2.0 ** (L - 16),
    "metal::fast::exp2(3.0f)": 8,
    "metal::precise::sqrt(x * x)": L,
    "rsqrt(0.25f)": 2,
    "log2(8.0f)": 3,
    "exp(-INFINITY)": 0,
    "powr(2.0f, 5.0f)": 32,
    "select(1.0f, 2.0f, lane > 3)": np.where(L > 3, 2, 1),
    "isnan(x / x)": L == 0,
    "isinf(-INFINITY)": 1,
    "numeric_limits<half>::max()": 65504,
    "numeric_limits<float>::infinity()": INF,
    # Half and bfloat round every operation, to nearest, ties to even
    "(half(1000.0f) + half(0.3f)) - half(1000.0f)": 0.5,
    "half(65519.0f)": 65504,
    "half(65520.0f)": INF,
    "half(2049.0f)": 2048,
    "bfloat(257.0f)": 256,
    "bfloat(259.0f)": 260,
    "(bfloat(256.0f) + bfloat(1.0f)) - bfloat(256.0f)": 0,
    "float(bfloat(1.0f)) + 0.001f": np.float32(1) + np.float32(0.001),
    "1.0h + x": L + 1,
    # Vectors
    "float4(1.0f, float2(2.0f, 3.0f), x).w": L,
    "float4(x).zyx.y": L,
    "dot(float4(1.0f, 2.0f, 3.0f, 4.0f), float4(x))": 10 * L,
    "length(float2(3.0f, 4.0f))": 5,
    "float4(uchar4(1, 2, 3, 255)).w": 255,
    "int2(float2(-1.5f, 2.5f)).x": -1,
    "vec<half, 2>(x, 1.0f).x": L,
    "any(float2(x, 1.0f) > 30.0f)": L > 30,
    "all(float2(x, 31.0f) > 30.0f)": L > 30,
    "max(float2(x, 3.0f), float2(5.0f)).x": np.maximum(L, 5),
    "sizeof(float3) + 100 * sizeof(half3)": 16 + 800,
}


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    lines = "\n".join(f"out[{n} * 32 + lane] = float({e});" for n, e in enumerate(EXPRESSIONS))
    head = "kernel void k(device float* out, uint lane [[thread_index_in_simdgroup]]) {"
    source = f"{head}\nfloat x = lane;\nint i = int(lane) - 16;\n{lines}\n}}"
    out = np.empty((len(EXPRESSIONS), 32), np.float32)
    Kernel(source, "k")({"out": out}, grid=(32, 1, 1), threadgroup=(32, 1, 1))
    return dict(zip(EXPRESSIONS, out, strict=True))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expression_has_the_specified_value(expression: str, values: dict[str, np.ndarray]) -> None:
    expected = np.broadcast_to(np.asarray(EXPRESSIONS[expression], np.float32), 32)
    assert values[expression].tolist() == expected.tolist()
