// Attend to lists of key blocks: exact causal attention of row blocks on the matrix units.
//
// Built as MLX's own prefill kernel ("steel"): a threadgroup takes ROWS query rows, eight per SIMD group, with the queries
// staged once and KEYS rows of K, then of V, staged in turn in the same threadgroup memory for all SIMD groups; a lane
// keeps D / 4 sums. What differs is which tiles there are: those of the listed blocks, up to the last row of the
// threadgroup. As with any tiled kernel a value that is not finite spoils rows of its own tile above it.
#pragma once

#include "matrix.h"

// Elements of the staged keys, then values.
template <typename T>
constexpr int tile_size(int d, int keys) {
  return d * padded<T>(keys) > keys * padded<T>(d) ? d * padded<T>(keys) : keys * padded<T>(d);
}

// The query rows of one threadgroup: positions [first, first + ROWS), of which those in [offset, end) exist.
struct RowTile {
  uint first;
  uint offset;  // position of query 0
  uint end;     // keys that exist

  bool empty(uint rows) const { return first >= end || first + rows <= offset; }
  bool operator()(uint row) const { return first + row >= offset && first + row < end; }
};

// Softmax of this lane's row over the tiles seen so far; the sum is of this lane's elements only.
struct Running {
  float largest;
  float sum;
};

// Scores of a tile of keys become weights under the new maximum; returns the factor for the sums so far.
template <int KEYS>
float weigh_tile(
    thread float2 (&scores)[KEYS / SIDE],
    uint start,
    uint position,  // of this lane's row
    bool causal,    // whether some row of the threadgroup lies before some key
    float scale,
    thread Running& running,
    Spot spot) {
  float largest = -INFINITY;
#pragma clang loop unroll(full)
  for (int n = 0; n < KEYS / SIDE; ++n) {
#pragma clang loop unroll(full)
    for (uint e = 0; e < 2; ++e) {
      const bool visible = !causal || start + n * SIDE + spot.column + e <= position;
      scores[n][e] = visible ? scores[n][e] * scale : -INFINITY;
      largest = max(largest, scores[n][e]);
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
      scores[n][e] = fast::exp2(scores[n][e] - shift);
      running.sum += scores[n][e];
    }
  }
  return factor;
}

// Eight staged query rows of one SIMD group.
template <int D, typename T>
struct StagedQuery {
  const threadgroup T* rows;
  Spot spot;

  float2 operator()(int, int d) const { return staged(rows + d * SIDE, padded<T>(D), spot); }
};

// sums[d] += weights of a tile times its staged values.
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

// The rows of one threadgroup over `list`, up to its first negative entry; entries above the diagonal do not count.
template <int D, int BLOCK, int ROWS, int KEYS, typename T, typename List>
void attend_list(
    const device T* queries,  // of the head; so is what follows
    const device T* keys,
    const device T* values,
    List list,
    uint entries,
    float scale,
    RowTile rows,
    threadgroup T* query_tile,
    threadgroup T* tile,
    thread float2 (&sums)[D / SIDE],
    thread Running& running,
    Place place) {
  enum : int { simdgroups = ROWS / SIDE };
  const Spot spot = spot_of(place.lane);
  const uint position = rows.first + place.simdgroup * SIDE + spot.row;
  const uint end = min(rows.first + ROWS, rows.end);  // keys that some row of the threadgroup sees
  stage_rows<D, ROWS, simdgroups>(
      queries + (long(rows.first) - long(rows.offset)) * D, rows, query_tile, place);
  const StagedQuery<D, T> query = {query_tile + place.simdgroup * SIDE * padded<T>(D), spot};
  for (uint n = 0; n < entries && list[n] >= 0; ++n) {
    const uint block = uint(list[n]);
    if (block > rows.first / BLOCK) {
      continue;
    }
    for (uint start = block * BLOCK; start < min((block + 1) * BLOCK, end); start += KEYS) {
      const uint count = rows.end - start;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_columns<D, KEYS, simdgroups>(keys + size_t(start) * D, count, tile, place);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float2 scores[1][KEYS / SIDE] = {};
      multiply_keys<D, 1, KEYS>(query, tile, scores, spot);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_rows<D, KEYS, simdgroups>(values + size_t(start) * D, FirstRows{count}, tile, place);
      const bool causal = start + KEYS > rows.first;
      const float factor = weigh_tile<KEYS>(scores[0], start, position, causal, scale, running, spot);
#pragma clang loop unroll(full)
      for (int d = 0; d < D / SIDE; ++d) {
        sums[d] *= factor;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      add_values<D, KEYS>(scores[0], tile, sums, spot);
    }
  }
}
