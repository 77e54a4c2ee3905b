// The softmax of each query of a group, from what tiles of keys left of it.
#pragma once

#include "threadgroup.h"

// Largest logit and 1 / sum of exp(logit - largest) over all tiles for each query of the group: the softmax of (sparq.4)
// is exp(logit - .x) * .y. 0 for .y without a valid key, and where a logit is NaN or +inf: a head without a softmax ranks
// nothing but those keys, which become NaN. A barrier has to follow.
template <int G, typename Statistics>
void merge_statistics(Statistics tiles, uint count, threadgroup float2* merged, Place place) {
  for (uint g = place.simdgroup; g < G; g += place.simdgroups) {
    float largest = -INFINITY;
    for (uint t = place.lane; t < count; t += LANES) {
      largest = max(largest, tiles[(t * G + g) * 2]);
    }
    largest = simd_max(largest);
    float sum = 0.0f;
    for (uint t = place.lane; t < count; t += LANES) {
      const float part = tiles[(t * G + g) * 2 + 1];
      sum += part == 0.0f ? 0.0f : part * exp(tiles[(t * G + g) * 2] - largest);
    }
    sum = simd_sum(sum);
    if (place.lane == 0) {
      merged[g] = float2(largest == -INFINITY ? 0.0f : largest, sum > 0.0f ? 1.0f / sum : 0.0f);
    }
  }
}
