// Vectors of one number, for all machines.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels.h"

namespace {

using namespace sparse;

using F = float;
constexpr int W = 1;
constexpr int kTileKeys = 4;        // dot products per row and step
constexpr int kTileVectors = 4;     // output vectors per row and step
constexpr int kTileComponents = 4;  // rows of component-major keys per product
constexpr int kCodeVectors = 4;     // vectors of codes per product, a multiple of two that divides a group
constexpr int kStripRows = 4;       // lines of a product in registers
constexpr int kStripVectors = 4;

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline F zero() { return 0; }
inline F set1(float x) { return x; }
inline F load(const float* p) { return *p; }
inline F load(const BFloat16* p) { return from_bits(uint32_t(p->bits) << 16); }
inline F load(const Half* p) {
  const uint32_t sign = uint32_t(p->bits & 0x8000) << 16, rest = uint32_t(p->bits & 0x7fff) << 13;
  if (rest >= 0x7c00u << 13) return from_bits(sign | 0x7f800000 | (rest & 0x007fffff));  // inf and NaN
  return from_bits(sign | bits_of(from_bits(rest) * 0x1p112f));  // 2^112 moves the exponent, for subnormals too
}
inline float half_at(const uint8_t* p) {
  Half half;
  std::memcpy(&half, p, 2);
  return load(&half);
}
// Returns the low and the high half bytes of W bytes.
inline void nibbles(const uint8_t* p, F& low, F& high) { low = float(*p & 15), high = float(*p >> 4); }
// Interleaves the numbers of a and b.
inline void interleave(F&, F&) {}
inline void store(float* p, F x) { *p = x; }
inline void store(BFloat16* p, F x) {
  const uint32_t bits = bits_of(x);
  p->bits = uint16_t(x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void store(Half* p, F x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // 65520 and larger
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 rounds to multiples of 2^-24
    half = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0x0fff + (magnitude >> 13 & 1)) >> 13;
  }
  p->bits = uint16_t(sign | half);
}
inline F add(F a, F b) { return a + b; }
inline F mul(F a, F b) { return a * b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F max(F a, F b) { return b > a ? b : a; }
inline float sum(F a) { return a; }
inline float largest(F a) { return a; }
inline void sum4(F a, F b, F c, F d, float* out) { out[0] = a, out[1] = b, out[2] = c, out[3] = d; }
inline F exp(F x) { return x < -87.3365f ? 0 : std::exp(x); }
inline int compress_above(F z, float threshold, int lanes, int32_t first, float* out, int32_t* index) {
  (void)lanes;
  *out = z, *index = first;
  return !(z <= threshold);
}

}  // namespace
