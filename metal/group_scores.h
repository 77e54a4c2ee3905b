// One score per item for all queries of a group. SparQ and SAAP select by it.
#pragma once

#include "top_k_select.h"

// Source of a row: sum of the softmaxes of a group (sparq.5).
template <int G, typename Logits>
struct GroupScores {
  Logits logits;  // (S, G), at the row
  const threadgroup float2* softmax;
  Window window;
  uint first;  // key of item 0

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
