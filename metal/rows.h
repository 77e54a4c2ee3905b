// Readers for the key or value rows of one head in a cache. They read chunks of four components.
//
// A kernel whose body reads an input with ROWS has two variants. The variant NAME has the inputs
// keys, values (B, Hkv, capacity, D) T, and a row has ROW = D * T bytes.
//
// The variant NAME_packed reads a quantized KV cache (quantized.1). The launcher defines PACKED_ROWS and adds the
// template parameters ROW_BITS, ROW_GROUP. Each input of rows becomes three inputs:
// keys (B, Hkv, capacity, D * ROW_BITS / 32) uint; keys_scales, keys_biases (B, Hkv, capacity, D / ROW_GROUP) T.
// A row has ROW = D * ROW_BITS // 8 + 2 * D // ROW_GROUP * T bytes, and each part is at least one memory line, so
// scattered rows move more bytes. A row is dequantized in registers once for all heads of a threadgroup.
#pragma once

#include "threadgroup.h"

// Rows (S, D) that are not quantized.
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

// Load a chunk of four codes of BITS bits each, lowest bits first. With 2, 4 or 8 bits, a chunk does not cross a word
// boundary.
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

// Rows (S, D) quantized by `mx.quantize`: GROUP components share a scale and a bias. The pointer types are template
// parameters, because MLX selects the address space of a buffer by its size.
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

// Return the reader of the rows of `input` for a KV head, whose first row is `first`.
#ifdef PACKED_ROWS
#define ROWS(input, first) packed_rows<D, ROW_BITS, ROW_GROUP>(input, input##_scales, input##_biases, first)
#else
#define ROWS(input, first) plain_rows<D>(input, first)
#endif
