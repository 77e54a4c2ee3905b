// SparQ's second launch for 8-bit logits: sum the softmax over the group and list the best keys.
#pragma once

#include "sparq_candidates.h"
#include "sparq_codes.h"

// Score source for top-k selection: sum of the softmaxes of a group (sparq.5), computed from 8-bit logits.
template <int G, typename Scores, typename Statistics>
struct NarrowedScores {
  Scores scores;  // (S, G) of the KV head
  Statistics tiles;  // (tiles, G, 2) of the KV head
  uint last;  // index of the tail's tile
  const threadgroup float2* softmax;
  Window window;
  uint first;  // index of the key that is item 0

  uint bits(uint item) const {
    const uint j = first + item;
    if (j < window.padding) {
      return NEVER;
    }
    const uint place = j - window.padding;
    const uint coded = (window.length - window.padding) / GROUP_KEYS * GROUP_KEYS;
    const uint tile = place < coded ? place / SCORE_TILE : last;
    float score = 0.0f;
#pragma clang loop unroll(full)
    for (uint g = 0; g < G; ++g) {
      const uint below = uint(scores[size_t(j) * G + g]);
      if (below == NO_SOFTMAX) {
        score = NAN;
      } else if (below < NO_WEIGHT && softmax[g].y > 0.0f) {
        score += exp(tiles[(tile * G + g) * 2] - float(below) / 16.0f - softmax[g].x) * softmax[g].y;
      }
    }
    return j < window.local ? ordered_bits(score) : local_bits<G>(score);
  }
  int index(uint item) const { return int(first + item); }
};
