// Exact causal attention of row blocks over lists of key blocks, on the matrix units.
//
// The structure follows MLX's prefill kernel ("steel"). A threadgroup processes ROWS query rows, eight per SIMD group.
// The queries are staged in threadgroup memory once. KEYS rows of K, then of V, are staged in the same memory for all
// SIMD groups. A lane holds D / 4 sums. Unlike MLX's kernel, this kernel visits only the listed key blocks, up to the
// last query. As in any tiled kernel, a value that is not finite also affects earlier query rows of the same tile.
#pragma once

#include "attend_tiles.h"

// The query rows of one threadgroup: positions [first, first + ROWS). Only positions in [offset, end) exist.
struct RowTile {
  uint first;
  uint offset;  // position of query 0
  uint end;     // number of keys in use

  bool empty(uint rows) const { return first >= end || first + rows <= offset; }
  bool operator()(uint row) const { return first + row >= offset && first + row < end; }
};

template <int D, typename T>
struct TileQueries {
  const device T* queries;  // queries of the head
  RowTile rows;

  bool has(uint row) const { return rows(row); }
  const device T* at(uint row) const { return queries + size_t(rows.first + row - rows.offset) * D; }
};

// Causal mask: true for keys at or before the position of a query row.
struct UpTo {
  uint position;
  bool causal;  // true if the tile has keys after the position of a row of the threadgroup

  bool operator()(uint key) const { return !causal || key <= position; }
};

// Eight staged query rows of one SIMD group.
template <int D, typename T>
struct StagedQuery {
  const threadgroup T* rows;
  Spot spot;

  float2 operator()(int, int d) const { return staged(rows + d * SIDE, padded<T>(D), spot); }
};

// Attend to the key blocks in `list` with the query rows of one threadgroup. The list ends at the first negative entry;
// blocks above the diagonal are ignored.
template <int D, int BLOCK, int ROWS, int KEYS, typename T, typename List>
void attend_list(
    const device T* queries,  // all pointers and `list` belong to one head
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
  const uint end = min(rows.first + ROWS, rows.end);  // end of the keys that the threadgroup attends
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
