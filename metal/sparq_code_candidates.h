// SparQ's second launch for 8-bit logits: sum the softmax over the group and list the best keys.
#pragma once

#include "sparq_candidates.h"
#include "sparq_codes.h"

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
