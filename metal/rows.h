// Rows of keys or values of one head in a cache, read in chunks of four components.
#pragma once

#include "threadgroup.h"

// (S, D) numbers.
template <int D, typename T>
struct PlainRows {
  const device T* rows;

  float4 read(uint j, uint chunk) const {
    return float4(reinterpret_cast<const device vec<T, 4>*>(rows + size_t(j) * D)[chunk]);
  }
  float component(uint j, uint d) const { return float(rows[size_t(j) * D + d]); }
};

template <int D, typename T>
PlainRows<D, T> plain_rows(const device T* rows, size_t first) {
  return {rows + first * D};
}

// Load a chunk of codes of BITS bits each, lowest bits first in `words`. With 2, 4 or 8 bits a chunk is within one
// word.
template <uint BITS, typename Words>
float4 unpacked_codes(Words words, uint chunk) {
  const uint bit = chunk * 4 * BITS;
  const uint shift = bit % 32;
  uint codes = words[bit / 32] >> shift;
  if (32 % (4 * BITS) != 0 && shift + 4 * BITS > 32) {
    codes |= words[bit / 32 + 1] << (32 - shift);
  }
  constexpr uint MASK = (1u << BITS) - 1;
  return float4(uint4(codes, codes >> BITS, codes >> (2 * BITS), codes >> (3 * BITS)) & MASK);
}

// Quantized rows (S, D), packed by `mx.quantize`: GROUP components share a scale and a bias. The pointers may have any
// address space, because MLX selects it by the size of a buffer.
template <int D, uint BITS, uint GROUP, typename Codes, typename Scales>
struct PackedRows {
  enum : uint { words = D * BITS / 32, groups = D / GROUP };

  Codes codes;    // (S, words)
  Scales scales;  // (S, groups)
  Scales biases;

  // (quantized.1)
  float4 read(uint j, uint chunk) const {
    const size_t group = size_t(j) * groups + chunk * 4 / GROUP;
    auto scale = scales[group];
    const float4 row = float(scale) * unpacked_codes<BITS>(codes + size_t(j) * words, chunk) + float(biases[group]);
    return float4(vec<decltype(scale), 4>(row));
  }
  float component(uint j, uint d) const { return read(j, d / 4)[d % 4]; }
};

template <int D, uint BITS, uint GROUP, typename Codes, typename Scales>
PackedRows<D, BITS, GROUP, Codes, Scales> packed_rows(Codes codes, Scales scales, Scales biases, size_t first) {
  return {codes + first * (D * BITS / 32), scales + first * (D / GROUP), biases + first * (D / GROUP)};
}
