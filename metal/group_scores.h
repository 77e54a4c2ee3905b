// Scores for the selection in SparQ and SAAP: one score per item, summed over the queries of a group.
#pragma once

#include "top_k_select.h"

// Score source for top-k selection: sum of the softmaxes of a group (sparq.5).
template <int G, typename Logits>
struct GroupScores {
  Logits logits;  // (S, G) of the KV head
  const threadgroup float2* softmax;
  Window window;
  uint first;  // index of the key that is item 0

  uint bits(uint item) const {
    const uint j = first + item;
    uint decided;
    if (window.decides(j, decided)) {
      return decided;
    }
    float score = 0.0f;
#pragma clang loop unroll_count(G < 16 ? G : 16)
    for (uint g = 0; g < G; ++g) {
      const float logit = logits[size_t(j) * G + g];
      score += exp(logit - softmax[g].x) * softmax[g].y;
    }
    return ordered_bits(score);
  }
  int index(uint item) const { return int(first + item); }
};
