// Outputs of SparQ's first launch: the scores of all keys, and the softmax statistics of each tile of keys.
#pragma once

#include "bias.h"
#include "score_tile.h"

// Largest logit and sum of exp(logit - largest) of a tile for each query of the group; -inf and 0 without a valid key.
// The sum is NaN if a logit is NaN or +inf.
// largest: output, the same in all threads. partial: scratch memory, 2 * MAX_SIMDGROUPS floats per query.
template <int G, uint KEYS>
void tile_statistics(
    const thread float (&logits)[KEYS][G],
    thread float (&largest)[G],
    threadgroup float* partial,
    device float2* statistics,
    Place place) {
#pragma clang loop unroll(full)
  for (uint g = 0; g < G; ++g) {
    float own = -INFINITY;  // max ignores NaN
#pragma clang loop unroll(full)
    for (uint v = 0; v < KEYS; ++v) {
      own = max(own, logits[v][g]);
    }
    own = simd_max(own);
    if (place.lane == 0) {
      partial[g * MAX_SIMDGROUPS + place.simdgroup] = own;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* sums = partial + G * MAX_SIMDGROUPS;
#pragma clang loop unroll(full)
  for (uint g = 0; g < G; ++g) {
    largest[g] = simd_max(of_simdgroup(partial + g * MAX_SIMDGROUPS, place, -INFINITY));
    float sum = 0.0f;
#pragma clang loop unroll(full)
    for (uint v = 0; v < KEYS; ++v) {
      sum += logits[v][g] == -INFINITY ? 0.0f : exp(logits[v][g] - largest[g]);
    }
    sum = simd_sum(sum);
    if (place.lane == 0) {
      sums[g * MAX_SIMDGROUPS + place.simdgroup] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (place.simdgroup == 0) {
#pragma clang loop unroll(full)
    for (uint g = 0; g < G; ++g) {
      const float sum = simd_sum(of_simdgroup(sums + g * MAX_SIMDGROUPS, place, 0.0f));
      if (place.lane == 0) {
        statistics[g] = float2(largest[g], sum);
      }
    }
  }
}

inline uint to_eight_bits(float logit, float largest) {
  if (isnan(logit) || logit == INFINITY) {
    return NO_SOFTMAX;
  }
  const float below = (largest - logit) * 16.0f;  // +inf if the logit is -inf
  return below < float(NO_WEIGHT) - 0.5f ? uint(rint(below)) : NO_WEIGHT;
}

// Write the scores of a thread's `count` keys as float32 or 8-bit logits. If `count` is KEYS and the address is
// aligned, 16 or 4 bytes are written at a time.
template <int G, uint KEYS>
void store_scores(
    device float* scores,
    const thread float (&logits)[KEYS][G],
    const thread float (&)[G],
    uint count,
    bool aligned) {
  if (aligned && count == KEYS) {
#pragma clang loop unroll(full)
    for (uint i = 0; i < KEYS * G; i += 4) {
      reinterpret_cast<device float4*>(scores)[i / 4] = float4(
          logits[i / G][i % G], logits[(i + 1) / G][(i + 1) % G], logits[(i + 2) / G][(i + 2) % G],
          logits[(i + 3) / G][(i + 3) % G]);
    }
    return;
  }
  for (uint i = 0; i < count * G; ++i) {
    scores[i] = logits[i / G][i % G];
  }
}

template <int G, uint KEYS>
void store_scores(
    device uchar* scores,
    const thread float (&logits)[KEYS][G],
    const thread float (&largest)[G],
    uint count,
    bool aligned) {
  if (aligned && count == KEYS) {
#pragma clang loop unroll(full)
    for (uint i = 0; i < KEYS * G; i += 4) {
      uint packed = 0;
#pragma clang loop unroll(full)
      for (uint b = 0; b < 4; ++b) {
        packed |= to_eight_bits(logits[(i + b) / G][(i + b) % G], largest[(i + b) % G]) << (8 * b);
      }
      reinterpret_cast<device uint*>(scores)[i / 4] = packed;
    }
    return;
  }
  for (uint i = 0; i < count * G; ++i) {
    scores[i] = uchar(to_eight_bits(logits[i / G][i % G], largest[i % G]));
  }
}

// Write the scores of an invalid key.
template <int G>
void store_none(device float* scores) {
#pragma clang loop unroll(full)
  for (uint g = 0; g < G; ++g) {
    scores[g] = -INFINITY;
  }
}

template <int G>
void store_none(device uchar* scores) {
#pragma clang loop unroll(full)
  for (uint g = 0; g < G; ++g) {
    scores[g] = uchar(NO_WEIGHT);
  }
}

// Write the statistics and scores of a tile. This thread writes the scores of `written` keys, beginning with valid key
// `first`, and a part of the columns before the first valid key.
template <int G, uint KEYS, typename Score>
void store_tile(
    const thread float (&logits)[KEYS][G],
    uint first,
    uint written,
    ScoreTile tile,
    threadgroup float* partial,  // scratch memory: see tile_statistics
    device Score* scores,        // (stride, G)
    device float* statistics,    // (G, 2)
    Place place) {
  float largest[G];
  tile_statistics(logits, largest, partial, reinterpret_cast<device float2*>(statistics), place);
  store_scores(scores + size_t(tile.padding + first) * G, logits, largest, written, tile.padding * G % 4 == 0);
  const uint stop = min(tile.padding, (tile.index + 1) * SCORE_TILE);
  for (uint j = tile.index * SCORE_TILE + place.index(); j < stop; j += place.threads()) {
    store_none<G>(scores + size_t(j) * G);
  }
}
