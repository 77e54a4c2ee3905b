// Many query rows and many keys, multiplied as matrices are: for a group of more rows than a thread has sums of. A
// threadgroup stages keys and queries part by part, so that each key is read once; each SIMD group has MANY_ROWS of the rows.
#pragma once

#include "threadgroup.h"

constant constexpr uint MANY_ROWS = 8;                  // of a SIMD group
constant constexpr uint MANY_KEYS = 4;                  // consecutive ones of a lane
constant constexpr uint MANY_TILE = MANY_KEYS * LANES;  // keys at a time
constant constexpr uint MANY_PART = 16;                 // components staged together
static_assert(MANY_PART == MAX_SIMDGROUPS, "a part of the keys has room for a score of each SIMD group");

// What a pass over the keys makes, one of these or the first and the last.
constant constexpr int STATISTICS = 1;    // of each row over a tile: largest logit, sum of exp(logit - largest)
constant constexpr int SOFTMAX_SUMS = 2;  // one score per key (sparq.5)
constant constexpr int LOGIT_SUMS = 4;
constant constexpr int LOGITS = 8;  // of each row

// Where the keys of a threadgroup are staged, and the queries: MANY_PART components of each.
struct ManyShared {
  threadgroup float4* keys;       // (MANY_PART, LANES)
  threadgroup float4* queries;    // (MANY_PART, simdgroups, 2)
  const threadgroup int* chosen;  // components, where not all are taken
};

// Products of `rank` components for MANY_TILE keys from `first` on: of each row of this SIMD group those of the lane's keys.
template <typename Keys>
void many_products(
    Keys keys,
    uint first,
    uint rank,
    const device float* picked,  // (rank, simdgroups * MANY_ROWS)
    thread float4 (&logits)[MANY_ROWS],
    ManyShared shared,
    Place place) {
  const uint vectors = place.simdgroups * MANY_ROWS / 4;
  auto given = reinterpret_cast<const device float4*>(picked);
  for (uint start = 0; start < rank; start += MANY_PART) {
    const uint count = min(MANY_PART, rank - start);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    keys.stage(first, start, count, shared, place);
    for (uint i = place.index(); i < count * vectors; i += place.threads()) {
      shared.queries[i] = given[start * vectors + i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint c = 0; c < count; ++c) {
      const float4 key = shared.keys[c * LANES + place.lane];
      const threadgroup float4* q = shared.queries + c * vectors + place.simdgroup * (MANY_ROWS / 4);
#pragma clang loop unroll(full)
      for (uint g = 0; g < MANY_ROWS; ++g) {
        logits[g] += q[g / 4][g % 4] * key;
      }
    }
  }
}

// Largest logit and sum of exp(logit - largest) of what a lane has seen of a row; see tile_statistics for NaN and infinity.
struct RowStatistics {
  float largest;
  float sum;

  void add(float4 logits) {
    const float before = largest;
#pragma clang loop unroll(full)
    for (uint v = 0; v < MANY_KEYS; ++v) {
      largest = max(largest, logits[v]);
    }
    sum = before == largest ? sum : sum * exp(before - largest);
#pragma clang loop unroll(full)
    for (uint v = 0; v < MANY_KEYS; ++v) {
      sum += logits[v] == -INFINITY ? 0.0f : exp(logits[v] - largest);
    }
  }

  float2 of_all_lanes() const {
    const float all = simd_max(largest);
    return float2(all, simd_sum(largest == all || sum == 0.0f ? sum : sum * exp(largest - all)));
  }
};

// Keys first .. stop - 1, of which the valid ones start at `valid`; key j is column j + shift of the result.
struct ManyTile {
  uint first, stop;
  uint valid;
  uint shift;
};

// One score for each of MANY_TILE keys: the sum of what the SIMD groups have of them.
inline void store_sums(
    float4 own, uint first, ManyTile tile, device float* scores, threadgroup float4* partial, Place place) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  partial[place.simdgroup * LANES + place.lane] = own;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const threadgroup float* parts = reinterpret_cast<const threadgroup float*>(partial);
  for (uint k = place.index(); k < MANY_TILE && first + k < tile.stop; k += place.threads()) {
    float score = 0.0f;
    for (uint s = 0; s < place.simdgroups; ++s) {
      score += parts[s * MANY_TILE + k];
    }
    scores[tile.shift + first + k] = score;
  }
}

// A pass over a tile of keys, all of one kind; the rows that there are not have queries of 0.
template <int G, int MAKES, typename Keys, typename Finish>
void many_pass(
    Keys keys,
    ManyTile tile,
    uint rank,
    const device float* picked,          // (rank, simdgroups * MANY_ROWS)
    Finish finish,                       // makes logits of products
    const threadgroup float2* softmax,   // (G) for SOFTMAX_SUMS
    device float* made,                  // (S), or of LOGITS (S, G)
    device float* tile_statistics,       // (G, 2)
    ManyShared shared,
    Place place) {
  const uint first_row = place.simdgroup * MANY_ROWS;
  RowStatistics statistics[MANY_ROWS];
#pragma clang loop unroll(full)
  for (uint g = 0; g < MANY_ROWS; ++g) {
    statistics[g] = {-INFINITY, 0.0f};
  }
  for (uint first = tile.first; first < tile.stop; first += MANY_TILE) {  // uniform
    float4 logits[MANY_ROWS] = {};
    many_products(keys, first, rank, picked, logits, shared, place);
    const uint own = first + place.lane * MANY_KEYS;
    const uint4 at = own + uint4(0, 1, 2, 3);
    const bool4 exists = at >= tile.valid && at < tile.stop;
    float4 scores = 0.0f;
#pragma clang loop unroll(full)
    for (uint g = 0; g < MANY_ROWS; ++g) {
      const uint row = first_row + g;
      const float4 logit = select(float4(-INFINITY), finish(logits[g], row, own), exists);
      if (MAKES & STATISTICS) {
        statistics[g].add(logit);
      }
      if ((MAKES & SOFTMAX_SUMS) != 0 && row < G) {
        scores += exp(logit - softmax[row].x) * softmax[row].y;
      } else if ((MAKES & LOGIT_SUMS) != 0 && row < G) {
        scores += logit;
      } else if ((MAKES & LOGITS) != 0 && row < G) {
#pragma clang loop unroll(full)
        for (uint v = 0; v < MANY_KEYS; ++v) {
          if (own + v < tile.stop) {
            made[size_t(tile.shift + own + v) * G + row] = logit[v];
          }
        }
      }
    }
    if (MAKES & (SOFTMAX_SUMS | LOGIT_SUMS)) {
      store_sums(scores, first, tile, made, shared.keys, place);
    }
  }
  if (MAKES & STATISTICS) {
#pragma clang loop unroll(full)
    for (uint g = 0; g < MANY_ROWS; ++g) {
      const float2 all = statistics[g].of_all_lanes();
      if (place.lane == 0 && first_row + g < G) {
        reinterpret_cast<device float2*>(tile_statistics)[first_row + g] = all;
      }
    }
  }
}
