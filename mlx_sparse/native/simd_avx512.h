// AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace {

using namespace sparse;

using F = __m512;
constexpr int W = 16;
constexpr int kTileKeys = 4;
constexpr int kTileVectors = 4;
constexpr int kTileComponents = 8;  // rows of component-major keys per product
constexpr int kCodeVectors = 4;     // vectors of codes per product, a multiple of two that divides a group
constexpr int kStripRows = 6;       // lines of a product in registers
constexpr int kStripVectors = 4;

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F load(const BFloat16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline float half_at(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, 2);
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
// Returns the low and the high half bytes of W bytes. A permutation uses only the lowest four bits of an index.
inline void nibbles(const uint8_t* p, F& low, F& high) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  const F numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  low = _mm512_permutexvar_ps(wide, numbers);
  high = _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), numbers);
}
// Interleaves the numbers of a and b.
inline void interleave(F& a, F& b) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const F both = _mm512_permutex2var_ps(a, first, b);
  b = _mm512_permutex2var_ps(a, second, b), a = both;
}
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void store(Half* p, F x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(BFloat16* p, F x) {
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), is_nan, nan);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(rounded));
}
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(b, a); }  // a if either is NaN
inline float sum(F a) { return _mm512_reduce_add_ps(a); }
inline float largest(F a) { return _mm512_reduce_max_ps(a); }
inline void sum4(F a, F b, F c, F d, float* out) {
  const F ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const F cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const F all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
// exp(x) for x <= 0; 0 below the smallest normal number; NaN stays. 2^n (1 + ...) with |rest| <= ln 2 / 2.
inline F exp(F x) {
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, set1(-87.3365f), _CMP_LT_OQ);
  const F n = _mm512_roundscale_ps(mul(x, set1(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const F r = _mm512_fnmadd_ps(n, set1(-2.12194440e-4f), _mm512_fnmadd_ps(n, set1(0.693359375f), x));
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(fma(p, r, set1(1.0f)), r, set1(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_knot(tiny), p, n);
}
// Writes the numbers of the first `lanes` that are not <= threshold, and their indices. Returns their number.
inline int compress_above(F z, float threshold, int lanes, int32_t first, float* out, int32_t* index) {
  const __mmask16 inside = __mmask16((1u << lanes) - 1);
  const __mmask16 above = _mm512_mask_cmp_ps_mask(inside, z, set1(threshold), _CMP_NLE_UQ);
  if (!above) return 0;
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // Compressed in a register: compressing stores are slow on some machines.
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps(above, z));
  _mm512_storeu_si512(index, _mm512_maskz_compress_epi32(above, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
  return __builtin_popcount(above);
}

}  // namespace
