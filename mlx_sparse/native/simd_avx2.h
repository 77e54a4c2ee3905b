// AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace {

using namespace sparse;

using F = __m256;
constexpr int W = 8;
constexpr int kTileKeys = 2;
constexpr int kTileVectors = 2;
constexpr int kTileComponents = 4;  // rows of component-major keys per product
constexpr int kCodeVectors = 2;     // vectors of codes per product, a multiple of two that divides a group
constexpr int kStripRows = 6;       // lines of a product in registers
constexpr int kStripVectors = 2;

inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline F load(const BFloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline float half_at(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, 2);
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
inline __m256i wide_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
// Returns the low and the high half bytes of W bytes.
inline void nibbles(const uint8_t* p, F& low, F& high) {
  const __m256i wide = wide_bytes(p);
  low = _mm256_cvtepi32_ps(_mm256_and_si256(wide, _mm256_set1_epi32(15)));
  high = _mm256_cvtepi32_ps(_mm256_srli_epi32(wide, 4));
}
// Interleaves the numbers of a and b.
inline void interleave(F& a, F& b) {
  const F left = _mm256_unpacklo_ps(a, b), right = _mm256_unpackhi_ps(a, b);
  a = _mm256_permute2f128_ps(left, right, 0x20), b = _mm256_permute2f128_ps(left, right, 0x31);
}
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline void store(Half* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(BFloat16* p, F x) {
  const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), nan, is_nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(b, a); }  // a if either is NaN
inline float sum(F a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest(F a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
// exp(x) for x <= 0; 0 below the smallest normal number; NaN stays. 2^n (1 + ...) with |rest| <= ln 2 / 2.
inline F exp(F x) {
  const F tiny = _mm256_cmp_ps(x, set1(-87.3365f), _CMP_LT_OQ);
  const F n = _mm256_round_ps(mul(x, set1(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const F r = _mm256_fnmadd_ps(n, set1(-2.12194440e-4f), _mm256_fnmadd_ps(n, set1(0.693359375f), x));
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(fma(p, r, set1(1.0f)), r, set1(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(tiny, mul(p, _mm256_castsi256_ps(power)));
}
// Writes the numbers of the first `lanes` that are not <= threshold, and their indices. Returns their number.
inline int compress_above(F z, float threshold, int lanes, int32_t first, float* out, int32_t* index) {
  unsigned above = _mm256_movemask_ps(_mm256_cmp_ps(z, set1(threshold), _CMP_NLE_UQ)) & ((1u << lanes) - 1);
  if (!above) return 0;
  alignas(32) float numbers[W];
  _mm256_store_ps(numbers, z);
  int n = 0;
  for (; above; above &= above - 1, n++) {
    const int lane = __builtin_ctz(above);
    out[n] = numbers[lane], index[n] = first + lane;
  }
  return n;
}

}  // namespace
