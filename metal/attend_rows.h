// Dense attention of a large query group: several queries of all query heads of a KV head.
//
// A threadgroup processes up to 128 query rows, eight per SIMD group. The queries and the sums stay in registers. Each
// row of K and V is read from memory once for all query rows of the threadgroup (attend_tiles.h).
#pragma once

#include "attend_tiles.h"

// The eight rows of a SIMD group; `count` rows exist.
struct GroupRows {
  uint first;
  uint count;

  uint row(uint, Spot spot) const { return first + spot.row; }
  bool valid(uint, Spot spot) const { return row(0, spot) < count; }
};

// A part of the keys. The query row of this lane attends the first `seen` keys of the part.
template <int D, typename T>
struct KeyRange {
  const device T* keys;  // `keys` and `values` point to the first key of the part
  const device T* values;
  uint count;
  uint seen;

  FirstRows<D, T> keys_at(uint start) const { return {keys + size_t(start) * D, count - start}; }
  FirstRows<D, T> values_at(uint start) const { return {values + size_t(start) * D, count - start}; }
  bool operator()(uint key) const { return key < seen; }
};

// Attend to one part of the keys with the query rows of one threadgroup, and write out (rows, D) and lse (rows).
template <int D, int ROWS, int KEYS, typename T, typename Query, typename Keys, typename Out>
void attend_part(
    const device Query* queries,  // (rows, D)
    Keys keys,
    GroupRows rows,
    float scale,
    threadgroup T* tile,
    device Out* out,
    device float* lse,
    Place place) {
  const Spot spot = spot_of(place.lane);
  QueryRows<D, 1> query;
  load_queries<D, 1>(queries, rows, query, spot);
#pragma clang loop unroll(full)
  for (int d = 0; d < D / SIDE; ++d) {
    query.at[0][d] *= scale;
  }
  float2 sums[D / SIDE] = {};
  Running running = {-INFINITY, 0.0f};
  for (uint start = 0; start < keys.count; start += KEYS) {
    attend_tile<D, KEYS, ROWS / SIDE>(
        keys.keys_at(start), keys.values_at(start), query, start, keys, LOG2_E, tile, sums, running, place);
  }
  const float total = row_sum(running.sum);
  if (rows.valid(0, spot)) {
    const size_t row = rows.row(0, spot);
    store_row<D>(sums, running.largest, total, out + row * D, lse + row, spot);
  }
}
