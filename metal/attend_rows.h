// Attend densely with many query rows of a KV head at once: several queries of all query heads of its group.
//
// A threadgroup has up to 128 rows, eight per SIMD group, whose queries and sums stay in the lanes' registers. Each row of K
// and V comes from memory once for all of them (attend_tiles.h).
#pragma once

#include "attend_tiles.h"
#include "parts.h"

// The eight rows of a SIMD group, of `count` that the group has.
struct GroupRows {
  uint first;
  uint count;

  uint row(uint, Spot spot) const { return first + spot.row; }
  bool valid(uint, Spot spot) const { return row(0, spot) < count; }
};

// A part of all keys, of which this lane's row attends the first `seen`.
template <int D, typename T>
struct KeyRange {
  const device T* keys;  // from the part's first on; so are values
  const device T* values;
  uint count;
  uint seen;

  FirstRows<D, T> keys_at(uint start) const { return {keys + size_t(start) * D, count - start}; }
  FirstRows<D, T> values_at(uint start) const { return {values + size_t(start) * D, count - start}; }
  bool operator()(uint key) const { return key < seen; }
};

// The rows of one threadgroup over one part: out (rows, D) and lse (rows) of the part.
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
