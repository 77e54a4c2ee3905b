// Attend to lists of key blocks: exact causal attention of row blocks on the matrix units.
//
// Built as MLX's own prefill kernel ("steel"): a threadgroup takes ROWS query rows, eight per SIMD group, with the queries
// staged once and KEYS rows of K, then of V, staged in turn in the same threadgroup memory for all SIMD groups; a lane
// keeps D / 4 sums. What differs is which tiles there are: those of the listed blocks, up to the last row of the
// threadgroup. As with any tiled kernel a value that is not finite spoils rows of its own tile above it.
#pragma once

#include "attend_tiles.h"

// The query rows of one threadgroup: positions [first, first + ROWS), of which those in [offset, end) exist.
struct RowTile {
  uint first;
  uint offset;  // position of query 0
  uint end;     // keys that exist

  bool empty(uint rows) const { return first >= end || first + rows <= offset; }
  bool operator()(uint row) const { return first + row >= offset && first + row < end; }
};

template <int D, typename T>
struct TileQueries {
  const device T* queries;  // of the head
  RowTile rows;

  bool has(uint row) const { return rows(row); }
  const device T* at(uint row) const { return queries + size_t(rows.first + row - rows.offset) * D; }
};

// The keys up to a row's own position.
struct UpTo {
  uint position;
  bool causal;  // whether some row of the threadgroup lies before some key of the tile

  bool operator()(uint key) const { return !causal || key <= position; }
};

// Eight staged query rows of one SIMD group.
template <int D, typename T>
struct StagedQuery {
  const threadgroup T* rows;
  Spot spot;

  float2 operator()(int, int d) const { return staged(rows + d * SIDE, padded<T>(D), spot); }
};

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
  stage_rows<D, ROWS, simdgroups>(TileQueries<D, T>{queries, rows}, query_tile, place);
  const StagedQuery<D, T> query = {query_tile + place.simdgroup * SIDE * padded<T>(D), spot};
  for (uint n = 0; n < entries && list[n] >= 0; ++n) {
    const uint block = uint(list[n]);
    if (block > rows.first / BLOCK) {
      continue;
    }
    for (uint start = block * BLOCK; start < min((block + 1) * BLOCK, end); start += KEYS) {
      const uint count = rows.end - start;
      const UpTo visible = {position, start + KEYS > rows.first};
      attend_tile<D, KEYS, simdgroups>(
          FirstRows<D, T>{keys + size_t(start) * D, count}, FirstRows<D, T>{values + size_t(start) * D, count}, query,
          start, visible, scale, tile, sums, running, place);
    }
  }
}
