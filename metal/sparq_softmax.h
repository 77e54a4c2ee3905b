// Merge of the tiles' statistics into the softmax of each query of a group.
#pragma once

#include "threadgroup.h"

// Largest logit (.x) and 1 / sum of exp(logit - largest) (.y) over all tiles for each query of the group. Tiles have
// separate statistics for each HEADS queries. The softmax
// of (sparq.4) is exp(logit - .x) * .y. If no key is valid or a logit is NaN or +inf, .y is 0. Keys with a NaN or +inf
// logit then get softmax NaN, and all other keys get 0. The caller adds a barrier.
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
