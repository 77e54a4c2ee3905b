// SparQ's first step over keys in few bits.
#pragma once

#include "rows.h"
#include "sparq_codes.h"
#include "sparq_scores.h"

// The valid keys of one threadgroup: a tile of those in full groups, or, the last along x, of the tail.
struct ScoreTile {
  uint index;
  bool is_tail;
  uint padding;
  uint first, stop;  // of the valid keys
  uint stride;       // of a row of scores
};

inline ScoreTile make_score_tile(uint index, uint tiles, int length, int left_padding) {
  const uint padding = uint(clamp(left_padding, 0, length));
  const uint S = uint(length) - padding;
  const uint coded = S / GROUP_KEYS * GROUP_KEYS;
  const bool is_tail = index + 1 == tiles;
  const uint first = is_tail ? coded : index * SCORE_TILE;
  const uint stop = is_tail ? S : min(first + SCORE_TILE, coded);
  return {index, is_tail, padding, first, stop, (uint(length) + 7) / 8 * 8};
}

// (sparq.21) without its factor for KEYS consecutive coded keys: one pass over `rank` rows of codes, each a load of
// KEYS * BITS / 8 bytes. No key is decoded: q lo is summed once for all keys, q step times code for each.
template <int G, uint KEYS, uint BITS, typename Word, typename Halves>
void coded_logits(
    const device uint* codes,  // (D, words)
    size_t words,
    Halves lo,  // (D, groups)
    Halves step,
    size_t groups,
    uint first,  // key, a multiple of KEYS
    uint rank,
    const threadgroup int* chosen,
    const threadgroup float* q_r,
    thread float (&logits)[KEYS][G]) {
  constexpr uint MASK = (1u << BITS) - 1;
  constexpr uint PER_WORD = sizeof(Word) * 8 / BITS;
  float base[G] = {};
#pragma clang loop unroll_count(4)
  for (uint i = 0; i < rank; ++i) {
    const size_t row = size_t(chosen[i]);
    const device Word* packed = reinterpret_cast<const device Word*>(codes + row * words) + first / PER_WORD;
    float code[KEYS];
#pragma clang loop unroll(full)
    for (uint v = 0; v < KEYS; ++v) {
      code[v] = float((uint(packed[v / PER_WORD]) >> (v % PER_WORD * BITS)) & MASK);
    }
    const size_t range = row * groups + first / GROUP_KEYS;
    const float least = float(lo[range]);
    const float width = float(step[range]);
#pragma clang loop unroll(full)
    for (uint g = 0; g < G; ++g) {
      const float q = q_r[i * G + g];
      base[g] += q * least;
      const float scaled = q * width;
#pragma clang loop unroll(full)
      for (uint v = 0; v < KEYS; ++v) {
        logits[v][g] += scaled * code[v];
      }
    }
  }
#pragma clang loop unroll(full)
  for (uint v = 0; v < KEYS; ++v) {
#pragma clang loop unroll(full)
    for (uint g = 0; g < G; ++g) {
      logits[v][g] += base[g];
    }
  }
}

// (sparq.21) without its factor for row j, a key of the tail.
template <int G, typename Rows, typename Centre>
void tail_logits(
    Rows rows,  // of keys: rows.h
    uint j,
    Centre centre,  // (D)
    uint rank,
    const threadgroup int* chosen,
    const threadgroup float* q_r,
    thread float (&logits)[G]) {
  for (uint i = 0; i < rank; ++i) {
    const float x = rows.component(j, uint(chosen[i])) - centre[chosen[i]];
#pragma clang loop unroll(full)
    for (uint g = 0; g < G; ++g) {
      logits[g] += q_r[i * G + g] * x;
    }
  }
}

inline uint narrowed(float logit, float largest) {
  if (isnan(logit) || logit == INFINITY) {
    return NO_SOFTMAX;
  }
  const float below = (largest - logit) * 16.0f;  // +inf where there is none
  return below < float(NO_WEIGHT) - 0.5f ? uint(rint(below)) : NO_WEIGHT;
}

// The scores of a thread's keys, `count` of them, as logits or narrowed. All KEYS are written 16 or 4 bytes at a time where
// they are aligned so.
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
        packed |= narrowed(logits[(i + b) / G][(i + b) % G], largest[(i + b) % G]) << (8 * b);
      }
      reinterpret_cast<device uint*>(scores)[i / 4] = packed;
    }
    return;
  }
  for (uint i = 0; i < count * G; ++i) {
    scores[i] = uchar(narrowed(logits[i / G][i % G], largest[i % G]));
  }
}

// Scores of an invalid key.
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

// Statistics and scores of a tile, of which this thread has `written` from valid key `first` on, and those of its columns
// before the first valid key.
template <int G, uint KEYS, typename Score>
void store_tile(
    const thread float (&logits)[KEYS][G],
    uint first,
    uint written,
    ScoreTile tile,
    threadgroup float* partial,  // as for tile_statistics
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
