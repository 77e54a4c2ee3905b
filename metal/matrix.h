// 8x8 matrices in registers, and tiles of keys and values that a threadgroup stages once for all its SIMD groups.
//
// A lane holds two adjacent elements of one row of a matrix. Each row is held by four lanes, whose numbers differ in
// bits 0 and 3. MLX's attention kernels rely on the same layout. Products and sums are float32 for all tile types.
#pragma once

#include <metal_simdgroup_matrix>

#include "threadgroup.h"

constant constexpr int SIDE = 8;
constant constexpr float LOG2_E = 1.44269504088896340736f;

// Position of a lane's two elements in a matrix.
struct Spot {
  uint row;
  uint column;
};

inline Spot spot_of(uint lane) { return {(lane / 4 & 4) + lane / 2 % 4, (lane / 4 & 2) * 2 + lane % 2 * 2}; }

// sum += a * b
inline void multiply_add(thread float2& sum, float2 a, float2 b) {
  simdgroup_float8x8 left, right, old, result;
  reinterpret_cast<thread float2&>(left.thread_elements()) = a;
  reinterpret_cast<thread float2&>(right.thread_elements()) = b;
  reinterpret_cast<thread float2&>(old.thread_elements()) = sum;
  simdgroup_multiply_accumulate(result, left, right, old);
  sum = reinterpret_cast<thread float2&>(result.thread_elements());
}

// Prevent the compiler from moving later loads before this point, which would need more registers. MLX's kernel has the
// same barrier. It does not synchronize memory.
inline void settle() { simdgroup_barrier(mem_flags::mem_none); }

// Return the maximum or the sum over a row to all lanes of the row.
inline float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}

inline float row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

// Return the number to subtract from scores before exp2: the largest score, or 0 without keys (-inf - -inf is NaN).
inline float shift_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// Return log2 of a sum of exp2(score), given the sum of exp2(score - shift_of(largest)).
inline float log2_sum(float largest, float sum) { return sum == 0.0f ? -INFINITY : shift_of(largest) + log2(sum); }
inline float natural(float logarithm) { return logarithm / LOG2_E; }

// Stride between rows of a tile, in elements. Padding of 16 bytes puts adjacent rows into different memory banks.
template <typename T>
constexpr int padded(int length) {
  return length + 16 / int(sizeof(T));
}

// Threadgroup memory for a number of elements, aligned for the widest load.
template <typename T>
constexpr int vectors(int elements) {
  return elements * int(sizeof(T)) / int(sizeof(float4));
}

// Consecutive rows that begin at `rows`.
template <int D, typename T>
struct FirstRows {
  const device T* rows;
  uint count;

  bool has(uint row) const { return row < count; }
  const device T* at(uint row) const { return rows + size_t(row) * D; }
};

// Stage ROWS rows of D components transposed: tile[d * padded(ROWS) + row]; zeros for rows that do not exist. A SIMD
// group stages eight rows and four chunks of four components at a time.
template <int D, int ROWS, int SIMDGROUPS, typename T, typename Rows>
void stage_columns(Rows rows, threadgroup T* tile, Place place) {
  const uint row_at = place.lane / 4, chunk_at = place.lane % 4;
#pragma clang loop unroll(full)
  for (uint first = 0; first < D / 16 * (ROWS / 8); first += SIMDGROUPS) {
    const uint unit = first + place.simdgroup;
    if (unit < D / 16 * (ROWS / 8)) {
      const uint row = unit / (D / 16) * 8 + row_at, d = (unit % (D / 16) * 4 + chunk_at) * 4;
      const vec<T, 4> loaded =
          rows.has(row) ? *reinterpret_cast<const device vec<T, 4>*>(rows.at(row) + d) : vec<T, 4>(T(0));
#pragma clang loop unroll(full)
      for (uint i = 0; i < 4; ++i) {
        tile[(d + i) * padded<T>(ROWS) + row] = loaded[i];
      }
    }
  }
}

// Stage rows without transposing: tile[row * padded(D) + d].
template <int D, int ROWS, int SIMDGROUPS, typename T, typename Rows>
void stage_rows(Rows rows, threadgroup T* tile, Place place) {
#pragma clang loop unroll(full)
  for (uint first = 0; first < ROWS * (D / 4); first += SIMDGROUPS * LANES) {
    const uint i = first + place.index();
    if (i < ROWS * (D / 4)) {
      const uint row = i / (D / 4), d = i % (D / 4) * 4;
      *reinterpret_cast<threadgroup vec<T, 4>*>(tile + row * padded<T>(D) + d) =
          rows.has(row) ? *reinterpret_cast<const device vec<T, 4>*>(rows.at(row) + d) : vec<T, 4>(T(0));
    }
  }
}

// Load this lane's two elements of a staged matrix, given the address of the upper left corner of the matrix.
template <typename T>
float2 staged(const threadgroup T* corner, int stride, Spot spot) {
  return float2(*reinterpret_cast<const threadgroup vec<T, 2>*>(corner + spot.row * stride + spot.column));
}

// scores[f][n] += q[f] . k for eight query rows and eight keys per matrix, with keys that were staged transposed.
template <int D, int FRAGMENTS, int KEYS, typename T, typename Query>
void multiply_keys(
    const thread Query& query, const threadgroup T* keys, thread float2 (&scores)[FRAGMENTS][KEYS / SIDE], Spot spot) {
#pragma clang loop unroll(full)
  for (int d = 0; d < D / SIDE; ++d) {
    settle();
    float2 q[FRAGMENTS];
#pragma clang loop unroll(full)
    for (int f = 0; f < FRAGMENTS; ++f) {
      q[f] = query(f, d);
    }
#pragma clang loop unroll(full)
    for (int n = 0; n < KEYS / SIDE; ++n) {
      const float2 k = staged(keys + d * SIDE * padded<T>(KEYS) + n * SIDE, padded<T>(KEYS), spot);
#pragma clang loop unroll(full)
      for (int f = 0; f < FRAGMENTS; ++f) {
        multiply_add(scores[f][n], q[f], k);
      }
    }
  }
}

// Load eight rows of the queries for each fragment into registers.
template <int D, int FRAGMENTS>
struct QueryRows {
  float2 at[FRAGMENTS][D / SIDE];

  float2 operator()(int f, int d) const { return at[f][d]; }
};

template <int D, int FRAGMENTS, typename T, typename Rows>
void load_queries(const device T* queries, Rows rows, thread QueryRows<D, FRAGMENTS>& loaded, Spot spot) {
#pragma clang loop unroll(full)
  for (int f = 0; f < FRAGMENTS; ++f) {
#pragma clang loop unroll(full)
    for (int d = 0; d < D / SIDE; ++d) {
      const size_t at = size_t(rows.row(f, spot)) * D + d * SIDE + spot.column;
      loaded.at[f][d] = rows.valid(f, spot) ? float2(*reinterpret_cast<const device vec<T, 2>*>(queries + at))
                                              : float2(0.0f);
    }
  }
}
