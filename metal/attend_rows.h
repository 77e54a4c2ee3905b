// Attend many query rows of a KV head at once: those of several queries, of all query heads of its group.
//
// A threadgroup has up to 128 rows, eight per SIMD group, whose queries and sums stay in the lanes' registers. Each row of K
// and V comes from memory once for all of them (attend_tiles.h): those of a range of keys, or those of a list.
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

  void begin(uint, Place) const {}
  FirstRows<D, T> keys_at(uint start) const { return {keys + size_t(start) * D, count - start}; }
  FirstRows<D, T> values_at(uint start) const { return {values + size_t(start) * D, count - start}; }
  bool operator()(uint key) const { return key < seen; }
};

// The rows of the keys that a tile lists.
template <int D, typename T>
struct ListedRows {
  const device T* rows;  // of the head
  const threadgroup int* listed;

  bool has(uint row) const { return listed[row] != EMPTY; }
  const device T* at(uint row) const { return rows + size_t(listed[row]) * D; }
};

// A part of a list, which all rows attend.
template <int D, int KEYS, typename T, typename Entries>
struct KeyList {
  const device T* keys;  // of the head; so are values
  const device T* values;
  Entries entries;
  uint count;
  uint length;              // keys that exist
  threadgroup int* listed;  // KEYS, those of the tile

  void begin(uint start, Place place) const {
    if (place.index() < KEYS) {
      const uint entry = start + place.index();
      const int key = entry < count ? int(entries[entry]) : EMPTY;
      listed[place.index()] = key >= 0 && uint(key) < length ? key : EMPTY;
    }
  }
  ListedRows<D, T> keys_at(uint) const { return {keys, listed}; }
  ListedRows<D, T> values_at(uint) const { return {values, listed}; }
  bool operator()(uint entry) const { return listed[entry % KEYS] != EMPTY; }
};

template <int D, int KEYS, typename T, typename Entries>
KeyList<D, KEYS, T, Entries> key_list(
    const device T* keys, const device T* values, Entries entries, uint count, uint length, threadgroup int* listed) {
  return {keys, values, entries, count, length, listed};
}

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
    // Nobody looks at the list of the tile before: sums are added up without.
    keys.begin(start, place);
    attend_tile<D, KEYS, ROWS / SIDE>(
        keys.keys_at(start), keys.values_at(start), query, start, keys, LOG2_E, tile, sums, running, place);
  }
  const float total = row_sum(running.sum);
  if (rows.valid(0, spot)) {
    const size_t row = rows.row(0, spot);
    store_row<D>(sums, running.largest, total, out + row * D, lse + row, spot);
  }
}
