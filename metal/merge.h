// Exact merge of the attention results of the parts of a split list. This is the second launch after attend.h.
#pragma once

#include <metal_stdlib>

using namespace metal;

// Return the log-sum-exp over all parts; -inf if no part has a key.
template <typename Lse>
float merged_lse(Lse lse, uint splits, uint stride) {
  float largest = -INFINITY;
  for (uint s = 0; s < splits; ++s) {
    largest = max(largest, lse[s * stride]);
  }
  float total = 0.0f;
  for (uint s = 0; s < splits; ++s) {
    total += largest == -INFINITY ? 0.0f : exp(lse[s * stride] - largest);
  }
  return total == 0.0f ? -INFINITY : largest + log(total);  // NaN propagates
}

// Return one component of the merged output. The weight of each part is exp(lse of the part - merged lse).
template <typename Parts, typename Lse>
float merged_component(Parts parts, Lse lse, float total, uint splits, uint parts_stride, uint lse_stride) {
  float sum = 0.0f;
  for (uint s = 0; s < splits; ++s) {
    if (lse[s * lse_stride] != -INFINITY) {
      sum += exp(lse[s * lse_stride] - total) * parts[s * parts_stride];
    }
  }
  return sum;
}
