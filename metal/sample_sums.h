// SampleAttention's scores, second launch: normalize the sums of each row to shares of the attention mass.
#pragma once

#include "matrix.h"

constant constexpr uint SUMMED_BLOCKS = 32;  // key blocks per threadgroup

// Return the log2 of the sum of a row over all keys; +inf for rows that do not exist, so that their share is 0.
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
