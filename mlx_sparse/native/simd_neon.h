// NEON of 64-bit Arm.
#pragma once

#include <arm_neon.h>

#include "kernels.h"

namespace {

using namespace sparse;

using F = float32x4_t;
constexpr int W = 4;
constexpr int kTileKeys = 4;
constexpr int kTileVectors = 4;
constexpr int kTileComponents = 4;  // rows of component-major keys per product
constexpr int kCodeVectors = 4;     // vectors of codes per product, a multiple of two that divides a group
constexpr int kStripRows = 6;       // lines of a product in registers
constexpr int kStripVectors = 4;

inline F zero() { return vdupq_n_f32(0); }
inline F set1(float x) { return vdupq_n_f32(x); }
inline F load(const float* p) { return vld1q_f32(p); }
inline F load(const Half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
inline F load(const BFloat16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
inline float half_at(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, 2);
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0);
}
inline uint32x4_t wide_bytes(const uint8_t* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, 4);
  return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
}
// Returns the low and the high half bytes of W bytes.
inline void nibbles(const uint8_t* p, F& low, F& high) {
  const uint32x4_t wide = wide_bytes(p);
  low = vcvtq_f32_u32(vandq_u32(wide, vdupq_n_u32(15))), high = vcvtq_f32_u32(vshrq_n_u32(wide, 4));
}
// Interleaves the numbers of a and b.
inline void interleave(F& a, F& b) {
  const F left = vzip1q_f32(a, b);
  b = vzip2q_f32(a, b), a = left;
}
inline void store(float* p, F x) { vst1q_f32(p, x); }
inline void store(Half* p, F x) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
inline void store(BFloat16* p, F x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), high = vshrq_n_u32(bits, 16);
  const uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
  const uint32x4_t sum = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t nan = vorrq_u32(high, vdupq_n_u32(0x40));
  vst1_u16(&p->bits, vmovn_u32(vbslq_u32(vceqq_f32(x, x), vshrq_n_u32(sum, 16), nan)));
}
inline F add(F a, F b) { return vaddq_f32(a, b); }
inline F mul(F a, F b) { return vmulq_f32(a, b); }
inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F max(F a, F b) { return vmaxnmq_f32(a, b); }
inline float sum(F a) { return vaddvq_f32(a); }
inline float largest(F a) { return vmaxnmvq_f32(a); }
inline void sum4(F a, F b, F c, F d, float* out) { vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d))); }
// exp(x) for x <= 0; 0 below the smallest normal number; NaN stays. 2^n (1 + ...) with |rest| <= ln 2 / 2.
inline F exp(F x) {
  const uint32x4_t tiny = vcltq_f32(x, set1(-87.3365f));
  const F n = vrndnq_f32(mul(x, set1(1.44269504f)));
  const F r = vfmsq_f32(vfmsq_f32(x, n, set1(0.693359375f)), n, set1(-2.12194440e-4f));
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(fma(p, r, set1(1.0f)), r, set1(1.0f));
  const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
  const F scaled = mul(p, vreinterpretq_f32_s32(power));
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(scaled), tiny));
}
// Writes the numbers of the first `lanes` that are not <= threshold, and their indices. Returns their number.
inline int compress_above(F z, float threshold, int lanes, int32_t first, float* out, int32_t* index) {
  const uint32x4_t above = vmvnq_u32(vcleq_f32(z, set1(threshold)));
  if (!vmaxvq_u32(above)) return 0;
  float numbers[W];
  uint32_t is_above[W];
  vst1q_f32(numbers, z), vst1q_u32(is_above, above);
  int n = 0;
  for (int lane = 0; lane < lanes; lane++) {
    if (is_above[lane]) out[n] = numbers[lane], index[n++] = first + lane;
  }
  return n;
}

}  // namespace
