// SampleAttention's scores: from what single rows pay to shares of the whole.
#pragma once

#include "matrix.h"

constant constexpr uint SUMMED_BLOCKS = 32;  // per threadgroup

// The log2 of each row's sum over all keys; infinite for rows that are not there, so that their share is nothing.
inline void merge_totals(
    const device float* totals, uint splits, uint rows, threadgroup float* merged, Place place) {
  for (uint row = place.index(); row < rows; row += place.threads()) {
    float largest = -INFINITY;
    for (uint s = 0; s < splits; ++s) {
      largest = max(largest, totals[size_t(s) * rows + row]);
    }
    float sum = 0.0f;
    for (uint s = 0; s < splits; ++s) {
      sum += exp2(totals[size_t(s) * rows + row] - shift_of(largest));
    }
    merged[row] = sum == 0.0f ? INFINITY : log2_sum(largest, sum);
  }
}
