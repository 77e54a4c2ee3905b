// Packed rows: their numbers, and their products with queries. Included by kernels.cc, for each instruction set anew.
#pragma once

#include "lanes.h"

namespace {

// Two vectors of components of a row, from number i of its codes on; rounded to T, and not fused before: of float32 it is
// what others compute.
template <class T, int kBits>
inline void unpack_two(const uint8_t* codes, int i, F scale, F bias, F* out) {
  if (kBits == 8) {
    out[0] = bytes(codes + i), out[1] = bytes(codes + i + W);
  } else {
    nibbles(codes + i / 2, out[0], out[1]);
    interleave(out[0], out[1]);
  }
  for (int n = 0; n < 2; n++) out[n] = rounded(add(mul(out[n], scale), bias), static_cast<const T*>(nullptr));
}

template <class T, int kBits>
inline void unpack_row(float* out, const uint8_t* codes, const PackedRows& packed) {
  const T* ranges = reinterpret_cast<const T*>(codes + packed.D * kBits / 8);
  for (int d = 0; d < packed.D; d += packed.group, ranges += 2) {
    const F scale = set1(number_at(ranges)), bias = set1(number_at(ranges + 1));
    for (int i = d; i < d + packed.group; i += 2 * W) {
      F numbers[2];
      unpack_two<T, kBits>(codes, i, scale, bias, numbers);
      store(out + i, numbers[0]), store(out + i + W, numbers[1]);
    }
  }
}

inline const uint8_t* row_of(const PackedRows& packed, int i) {
  return packed.rows + (packed.index ? packed.index[i] : packed.first + i) * packed.stride;
}

template <class T>
void unpack(float* out, const PackedRows& packed) {
  for (int i = 0; i < packed.count; i++, out += packed.D) {
    if (packed.index && i + kRowsAhead < packed.count) prefetch(row_of(packed, i + kRowsAhead), packed.stride);
    if (packed.bits == 8) {
      unpack_row<T, 8>(out, row_of(packed, i), packed);
    } else {
      unpack_row<T, 4>(out, row_of(packed, i), packed);
    }
  }
}

// Dot products of R query rows with kTileKeys packed rows.
template <int R, class T, int kBits>
inline void packed_dots(const float* q, const uint8_t* const* rows, const PackedRows& packed, float* a,
                        int64_t stride) {
  const int D = packed.D;
  F total[R][kTileKeys];
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < kTileKeys; c++) total[r][c] = zero();
  }
  for (int d = 0, at = D * kBits / 8; d < D; d += packed.group, at += 2 * int(sizeof(T))) {
    F scale[kTileKeys], bias[kTileKeys];
    for (int c = 0; c < kTileKeys; c++) {
      const T* range = reinterpret_cast<const T*>(rows[c] + at);
      scale[c] = set1(number_at(range)), bias[c] = set1(number_at(range + 1));
    }
    for (int i = d; i < d + packed.group; i += 2 * W) {
      for (int c = 0; c < kTileKeys; c++) {
        F key[2];
        unpack_two<T, kBits>(rows[c], i, scale[c], bias[c], key);
        for (int r = 0; r < R; r++) {
          total[r][c] = fma(load(q + int64_t(r) * D + i), key[0], total[r][c]);
          total[r][c] = fma(load(q + int64_t(r) * D + i + W), key[1], total[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < R; r++) {
    if constexpr (kTileKeys == 4) {
      sum4(total[r][0], total[r][1], total[r][2], total[r][3], a + r * stride);
    } else {
      for (int c = 0; c < kTileKeys; c++) a[r * stride + c] = sum(total[r][c]);
    }
  }
}

template <class T, int kBits>
void score_bits(const PackedRows& packed, const float* q, int G, float* a, int64_t stride) {
  constexpr int kAhead = 8 * kLine;  // bytes
  for (int j = 0; j < packed.count; j += kTileKeys) {
    const uint8_t* rows[kTileKeys];
    for (int c = 0; c < kTileKeys; c++) {  // past the end the last row again; its score is not looked at
      rows[c] = row_of(packed, j + c < packed.count ? j + c : packed.count - 1);
      prefetch(rows[c] + kAhead, packed.stride);
    }
    int g = 0;
    for (; g + 4 <= G; g += 4) {
      packed_dots<4, T, kBits>(q + int64_t(g) * packed.D, rows, packed, a + g * stride + j, stride);
    }
    const float* rest = q + int64_t(g) * packed.D;
    float* last = a + g * stride + j;
    if (G - g == 3) packed_dots<3, T, kBits>(rest, rows, packed, last, stride);
    if (G - g == 2) packed_dots<2, T, kBits>(rest, rows, packed, last, stride);
    if (G - g == 1) packed_dots<1, T, kBits>(rest, rows, packed, last, stride);
  }
}

template <class T>
void score_packed(const PackedRows& packed, const float* q, int G, float* a, int64_t stride) {
  if (packed.bits == 8) return score_bits<T, 8>(packed, q, G, a, stride);
  score_bits<T, 4>(packed, q, G, a, stride);
}

}  // namespace
