// SparQ's first step for a group of many query rows, of which a thread's registers hold no logits of all: those of a call
// with several queries. Rows and keys of a threadgroup are multiplied as matrices are, so that each key is read once.
//
// A logit of each row and key, written and read, would be more bytes than the codes it came from. So the keys are read
// twice: for the softmax of each row, then for one score a key. Bytes a key and KV head at rank 32, of R rows:
//
//                       logits of every row        keys twice, one score     fewer from
//   keys_t, 16 bits     64 + 8 R                   2 * 64 + 8                R = 10
//   codes of 8 bits     34 + 2 R                   2 * 34 + 8                R = 22
//   codes of 4 bits     18 + 2 R                   2 * 18 + 8                R = 14
//
// At 64 rows those are 576, 162 and 146 against 136, 76 and 44. It costs the products a second time.
#pragma once

#include "many_rows.h"
#include "rows.h"
#include "score_tile.h"
#include "sparq_softmax.h"

// Component-major keys: `first` is a column.
template <typename T>
struct ColumnKeys {
  const device T* keys_t;  // (D, capacity)
  size_t capacity;
  uint padding;  // first valid column
  uint stop;

  void stage(uint first, uint start, uint count, ManyShared shared, Place place) const {
    threadgroup float* staged = reinterpret_cast<threadgroup float*>(shared.keys);
    for (uint i = place.index(); i < count * MANY_TILE; i += place.threads()) {
      const uint j = first + i % MANY_TILE;
      const size_t row = size_t(shared.chosen[start + i / MANY_TILE]) * capacity;
      staged[i] = j >= padding && j < stop ? float(keys_t[row + j]) : 0.0f;
    }
  }
};

template <typename T>
ColumnKeys<T> column_keys(const device T* keys_t, size_t capacity, uint padding, uint stop) {
  return {keys_t, capacity, padding, stop};
}

// Keys in few bits (sparq.21): `first` is a valid key, a multiple of MANY_TILE.
template <uint BITS, typename Halves>
struct CodedKeys {
  const device uint* codes;  // (D, words)
  size_t words;
  Halves lo;  // (D, groups)
  Halves step;
  size_t groups;
  uint stop;  // a multiple of GROUP_KEYS

  void stage(uint first, uint start, uint count, ManyShared shared, Place place) const {
    constexpr uint MASK = (1u << BITS) - 1;
    constexpr uint VECTORS = 8 / BITS;  // of four keys in a word
    constexpr uint ACROSS = LANES / VECTORS;
    for (uint i = place.index(); i < count * ACROSS; i += place.threads()) {
      const uint key = first + i % ACROSS * VECTORS * 4;
      uint word = 0;
      float least = 0.0f, width = 0.0f;
      if (key < stop) {
        const size_t row = size_t(shared.chosen[start + i / ACROSS]);
        word = codes[row * words + key / (VECTORS * 4)];
        least = float(lo[row * groups + key / GROUP_KEYS]);
        width = float(step[row * groups + key / GROUP_KEYS]);
      }
#pragma clang loop unroll(full)
      for (uint v = 0; v < VECTORS; ++v) {
        const uint part = word >> (v * 4 * BITS);
        const uint4 code = uint4(part, part >> BITS, part >> (2 * BITS), part >> (3 * BITS)) & MASK;
        shared.keys[i * VECTORS + v] = least + width * float4(code);
      }
    }
  }
};

template <uint BITS, typename Halves>
CodedKeys<BITS, Halves> coded_keys(
    const device uint* codes, size_t words, Halves lo, Halves step, size_t groups, uint stop) {
  return {codes, words, lo, step, groups, stop};
}

// Keys of the tail, less `centre`: `first` is a valid key.
template <typename Rows, typename Centre>
struct TailKeys {
  Rows rows;      // rows.h
  Centre centre;  // (D)
  uint stop;

  void stage(uint first, uint start, uint count, ManyShared shared, Place place) const {
    threadgroup float* staged = reinterpret_cast<threadgroup float*>(shared.keys);
    for (uint i = place.index(); i < count * MANY_TILE; i += place.threads()) {
      const uint j = first + i % MANY_TILE;
      const uint d = uint(shared.chosen[start + i / MANY_TILE]);
      staged[i] = j < stop ? rows.component(j, d) - centre[d] : 0.0f;
    }
  }
};

template <typename Rows, typename Centre>
TailKeys<Rows, Centre> tail_keys(Rows rows, Centre centre, uint stop) {
  return {rows, centre, stop};
}

// Keys of packed rows, all components in their order: `first` is a column.
template <typename Rows>
struct RowKeys {
  Rows rows;     // rows.h
  uint padding;  // first valid column
  uint stop;

  void stage(uint first, uint start, uint count, ManyShared shared, Place place) const {
    threadgroup float* staged = reinterpret_cast<threadgroup float*>(shared.keys);
    const uint chunks = count / 4;
    for (uint i = place.index(); i < chunks * MANY_TILE; i += place.threads()) {
      const uint chunk = i % chunks, key = i / chunks;
      const uint j = first + key;
      const float4 part = j >= padding && j < stop ? rows.read(j, start / 4 + chunk) : float4(0.0f);
#pragma clang loop unroll(full)
      for (uint c = 0; c < 4; ++c) {
        staged[(chunk * 4 + c) * MANY_TILE + key] = part[c];
      }
    }
  }
};

template <typename Rows>
RowKeys<Rows> row_keys(Rows rows, uint padding, uint stop) {
  return {rows, padding, stop};
}

// c / t_g of (sparq.3).
struct Scaled {
  const device float* factors;  // of each row

  float4 operator()(float4 products, uint row, uint) const { return products * factors[row]; }
};

// What the rest of a pass needs: the chosen components and, of SOFTMAX_SUMS, the softmax of each row. many_products begins
// with a barrier.
template <int G, int MAKES, typename Chosen, typename Statistics>
void begin_pass(
    Chosen chosen,
    uint rank,
    Statistics statistics,  // (tiles, G, 2)
    uint tiles,
    threadgroup int* best,
    threadgroup float2* softmax,
    Place place) {
  for (uint i = place.index(); i < rank; i += place.threads()) {
    best[i] = chosen[i];
  }
  if (MAKES == SOFTMAX_SUMS) {
    merge_statistics<G>(statistics, tiles, softmax, place);
  }
}

// Where the result of a pass begins, for a row of S keys and a tile of `tiles`.
template <int G, int MAKES>
device float* made_at(device float* made, size_t row, uint S, uint tile, uint tiles) {
  return made + (MAKES == STATISTICS ? (row * tiles + tile) * G * 2 : row * S * (MAKES == LOGITS ? G : 1));
}

// What a pass makes of a tile's columns before the first valid key.
template <int G, int MAKES>
void make_none(device float* made, ScoreTile tile, Place place) {
  constexpr uint each = MAKES == STATISTICS ? 0 : MAKES == LOGITS ? G : 1;
  const uint first = tile.index * SCORE_TILE, stop = min(tile.padding, first + SCORE_TILE);
  for (uint i = first * each + place.index(); i < stop * each; i += place.threads()) {
    made[i] = -INFINITY;
  }
}
