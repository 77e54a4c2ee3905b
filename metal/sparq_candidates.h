// SparQ's second launch: sum the softmax over the group and list the best keys.
#pragma once

#include "group_scores.h"
#include "score_tile.h"

// Largest logit (.x) and 1 / sum of exp(logit - largest) (.y) over all tiles for each query of the group. Tiles have
// separate statistics for each HEADS queries. The softmax of (sparq.4) is exp(logit - .x) * .y. If no key is valid or a
// logit is NaN or +inf, .y is 0. Keys with a NaN or +inf logit then get softmax NaN, and all other keys get 0. The
// caller adds a barrier.
template <int G, int HEADS, typename Statistics>
void merge_statistics(Statistics tiles, uint count, threadgroup float2* merged, Place place) {
  for (uint g = place.simdgroup; g < G; g += place.simdgroups) {
    const auto own = tiles + (size_t(g / HEADS) * count * HEADS + g % HEADS) * 2;
    float largest = -INFINITY;
    for (uint t = place.lane; t < count; t += LANES) {
      largest = max(largest, own[t * HEADS * 2]);
    }
    largest = simd_max(largest);
    float sum = 0.0f;
    for (uint t = place.lane; t < count; t += LANES) {
      const float part = own[t * HEADS * 2 + 1];
      sum += part == 0.0f ? 0.0f : part * exp(own[t * HEADS * 2] - largest);
    }
    sum = simd_sum(sum);
    if (place.lane == 0) {
      merged[g] = float2(largest == -INFINITY ? 0.0f : largest, sum > 0.0f ? 1.0f / sum : 0.0f);
    }
  }
}

// Return the first key of a local window with the last `wanted` keys that the bias does not hide, or of all these keys if
// there are fewer. Call this function with all threads. The caller adds a barrier before it uses `partial` again.
template <typename Bias>
uint visible_window(Window window, Bias bias, uint wanted, threadgroup uint3* partial, Place place) {
  uint start = window.length;
  uint end = window.length;  // keys from `end` on are counted
  for (uint round = 0; wanted > 0 && end > window.padding; ++round) {
    const uint left = end - window.padding, key = end - 1 - place.index();
    const uint visible = place.index() < left && !bias.hides(key) ? 1 : 0;
    threadgroup uint3* side = partial + (round & 1) * MAX_SIMDGROUPS;
    const uint in_simdgroup = simd_sum(visible);
    if (place.lane == 0) {
      side[place.simdgroup] = uint3(in_simdgroup);
    }
    const uint later_in_simdgroup = simd_prefix_exclusive_sum(visible);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint counted = of_simdgroup(side, place, uint3(0)).x;
    const uint later = later_in_simdgroup + simd_sum(place.lane < place.simdgroup ? counted : 0);
    start = visible == 1 && later < wanted ? key : start;
    wanted -= min(wanted, simd_sum(counted));
    end -= min(left, place.threads());
  }
  start = simd_min(start);
  if (place.lane == 0) {
    partial[2 * MAX_SIMDGROUPS + place.simdgroup] = uint3(start);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_min(of_simdgroup(partial + 2 * MAX_SIMDGROUPS, place, uint3(start)).x);
}

// Score source for top-k selection: sum of the softmaxes of a group (sparq.5), computed from 8-bit logits.
template <int G, int HEADS, typename Scores, typename Statistics, typename Bias>
struct NarrowedScores {
  Scores scores;  // (G / HEADS, stride, HEADS) of the KV head
  uint stride;
  Statistics tiles;  // (G / HEADS, score_tiles, HEADS, 2) of the KV head
  uint score_tiles;  // the last is that of the tail
  const threadgroup float2* softmax;
  Bias bias;
  Window window;
  uint first;  // index of the key that is item 0

  uint bits(uint item) const {
    const uint j = first + item;
    if (j < window.padding || bias.hides(j)) {
      return NEVER;
    }
    const uint place = j - window.padding;
    const uint coded = (window.length - window.padding) / GROUP_KEYS * GROUP_KEYS;
    const uint tile = place < coded ? place / SCORE_TILE : score_tiles - 1;
    float score = 0.0f;
    for (uint first_head = 0; first_head < G; first_head += HEADS) {
      const auto own = scores + size_t(first_head) * stride + size_t(j) * HEADS;
      const auto largest = tiles + (size_t(first_head) * score_tiles + tile * HEADS) * 2;
#pragma clang loop unroll(full)
      for (uint g = 0; g < HEADS; ++g) {
        const uint below = uint(own[g]);
        const float2 total = softmax[first_head + g];
        if (below == NO_SOFTMAX) {
          score = NAN;
        } else if (below < NO_WEIGHT && total.y > 0.0f) {
          score += exp(largest[g * 2] - float(below) / 16.0f - total.x) * total.y;
        }
      }
    }
    return j < window.local ? ordered_bits(score) : local_bits<G>(score);
  }
  int index(uint item) const { return int(first + item); }
};
