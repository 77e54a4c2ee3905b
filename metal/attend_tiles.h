// Softmax attention over tiles of keys and values on the matrix units. A threadgroup stages KEYS rows of K, then of V,
// in the same threadgroup memory for all its SIMD groups. Each SIMD group has eight query rows.
#pragma once

#include "matrix.h"

// Number of staged elements: keys first, then values.
template <typename T>
constexpr int tile_size(int d, int keys) {
  return d * padded<T>(keys) > keys * padded<T>(d) ? d * padded<T>(keys) : keys * padded<T>(d);
}

// Running softmax state of this lane's row. The sum covers only the elements that this lane holds.
struct Running {
  float largest;
  float sum;
};

// Convert the scores of a tile of keys to weights with the new maximum. Return the factor that rescales earlier sums.
template <int KEYS, typename Visible>
float weigh_tile(
    thread float2 (&scores)[KEYS / SIDE],
    uint start,
    Visible visible,  // true if this lane's row attends key `start + n` of the tile
    float scale,
    thread Running& running,
    Spot spot) {
  float largest = -INFINITY;
#pragma clang loop unroll(full)
  for (int n = 0; n < KEYS / SIDE; ++n) {
#pragma clang loop unroll(full)
    for (uint e = 0; e < 2; ++e) {
      largest = max(largest, visible(start + n * SIDE + spot.column + e) ? scores[n][e] * scale : -INFINITY);
    }
  }
  largest = max(running.largest, row_max(largest));
  const float shift = shift_of(largest), factor = fast::exp2(running.largest - shift);
  running.largest = largest;
  running.sum *= factor;
#pragma clang loop unroll(full)
  for (int n = 0; n < KEYS / SIDE; ++n) {
#pragma clang loop unroll(full)
    for (uint e = 0; e < 2; ++e) {
      // The fma rounds only once, after the subtraction, where the result is small.
      const float weight = fast::exp2(fma(scores[n][e], scale, -shift));
      scores[n][e] = visible(start + n * SIDE + spot.column + e) ? weight : 0.0f;
      running.sum += scores[n][e];
    }
  }
  return factor;
}

// sums[d] += weights of a tile times the staged values.
template <int D, int KEYS, typename T>
void add_values(
    thread float2 (&weights)[KEYS / SIDE], const threadgroup T* values, thread float2 (&sums)[D / SIDE], Spot spot) {
#pragma clang loop unroll(full)
  for (int d = 0; d < D / SIDE; ++d) {
    settle();
#pragma clang loop unroll(full)
    for (int n = 0; n < KEYS / SIDE; ++n) {
      multiply_add(sums[d], weights[n], staged(values + n * SIDE * padded<T>(D) + d * SIDE, padded<T>(D), spot));
    }
  }
}

// Attend to one tile of keys; `keys` and `values` return the rows of the tile. Begins with a barrier, because other
// threads may still read the previous tile.
template <int D, int KEYS, int SIMDGROUPS, typename T, typename Rows, typename Query, typename Visible>
void attend_tile(
    Rows keys,
    Rows values,
    const thread Query& query,
    uint start,
    Visible visible,
    float scale,
    threadgroup T* tile,
    thread float2 (&sums)[D / SIDE],
    thread Running& running,
    Place place) {
  const Spot spot = spot_of(place.lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  stage_columns<D, KEYS, SIMDGROUPS>(keys, tile, place);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float2 scores[1][KEYS / SIDE] = {};
  multiply_keys<D, 1, KEYS>(query, tile, scores, spot);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  stage_rows<D, KEYS, SIMDGROUPS>(values, tile, place);
  const float factor = weigh_tile<KEYS>(scores[0], start, visible, scale, running, spot);
#pragma clang loop unroll(full)
  for (int d = 0; d < D / SIDE; ++d) {
    sums[d] *= factor;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  add_values<D, KEYS>(scores[0], tile, sums, spot);
}

// Store this lane's part of the normalized output row, and the log-sum-exp of the row; 0 and -inf without a key.
template <int D, typename Out>
void store_row(
    thread float2 (&sums)[D / SIDE],
    float largest,
    float total,        // sum over the whole row
    device Out* out,    // (D), output of the row
    device float* lse,  // log-sum-exp of the row
    Spot spot) {
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
#pragma clang loop unroll(full)
  for (int d = 0; d < D / SIDE; ++d) {
    *reinterpret_cast<device vec<Out, 2>*>(out + size_t(d) * SIDE + spot.column) =
        vec<Out, 2>(Out(sums[d].x * factor), Out(sums[d].y * factor));
  }
  if (spot.column == 0) {
    *lse = natural(log2_sum(largest, total));
  }
}
