// SampleAttention's scores: attention mass of the sampled rows of a region on each key block and each offset bin.
//
// K is read once, but a row can only be normalized after all its keys are processed. The kernel therefore stores two
// float32 per row and key block, each the log2 of a sum of exp2(score). The first covers the near keys, whose index in
// the key block is at most the row's index in the row block; their offset bin is (row block - key block). The second
// covers the far keys of the block, whose bin is smaller by one. sample_sums.metal then normalizes and sums the rows.
#pragma once

#include "matrix.h"

// Running sums of one row over the keys that one lane has processed.
struct RowSums {
  float largest;
  float near;  // sum over near keys: index in the key block at most the row's index in the row block
  float far;
};

// Sampled rows that one SIMD group processes.
struct SampleRows {
  uint first;   // index of the first row in the sample
  uint count;   // number of rows in the sample
  uint offset;  // position of row 0 of the sample

  uint row(uint f, Spot spot) const { return first + f * SIDE + spot.row; }
  bool valid(uint f, Spot spot) const { return row(f, spot) < count; }
  uint position(uint f, Spot spot) const { return offset + row(f, spot); }
};

// Add the keys [start, start + KEYS) of a tile to the sums of this lane's rows.
template <int BLOCK, int FRAGMENTS, int KEYS>
void add_keys(
    thread float2 (&scores)[FRAGMENTS][KEYS / SIDE],
    uint start,
    float scale,
    SampleRows rows,
    thread RowSums (&sums)[FRAGMENTS],
    Spot spot) {
#pragma clang loop unroll(full)
  for (int f = 0; f < FRAGMENTS; ++f) {
    const uint position = rows.position(f, spot);
    const bool valid = rows.valid(f, spot);
    float largest = sums[f].largest;
#pragma clang loop unroll(full)
    for (int n = 0; n < KEYS / SIDE; ++n) {
#pragma clang loop unroll(full)
      for (uint e = 0; e < 2; ++e) {
        const bool visible = valid && start + n * SIDE + spot.column + e <= position;
        scores[f][n][e] = visible ? scores[f][n][e] * scale : -INFINITY;
        largest = max(largest, scores[f][n][e]);
      }
    }
    const float shift = shift_of(largest), factor = exp2(sums[f].largest - shift);
    sums[f].largest = largest;
    sums[f].near *= factor;
    sums[f].far *= factor;
#pragma clang loop unroll(full)
    for (int n = 0; n < KEYS / SIDE; ++n) {
#pragma clang loop unroll(full)
      for (uint e = 0; e < 2; ++e) {
        const float weight = exp2(scores[f][n][e] - shift);
        const bool is_near = (start + n * SIDE + spot.column + e) % BLOCK <= position % BLOCK;
        sums[f].near += is_near ? weight : 0.0f;
        sums[f].far += is_near ? 0.0f : weight;
      }
    }
  }
}

// Score the key blocks [first, stop) for the rows of one threadgroup: write partials[block][row] and totals[row].
template <int D, int BLOCK, int FRAGMENTS, int SIMDGROUPS, int KEYS, typename T>
void score_blocks(
    const device T* queries,   // queries of the sample
    const device T* keys,      // keys of the head
    uint length,
    uint first,
    uint stop,
    float scale,
    SampleRows rows,
    uint end,                  // position after the last row of the threadgroup; 0 without rows
    uint padded_rows,
    device float2* partials,   // partials of the sample
    device float* totals,      // totals of the sample and split
    threadgroup T* tile,
    Place place) {
  const Spot spot = spot_of(place.lane);
  QueryRows<D, FRAGMENTS> query;
  load_queries<D, FRAGMENTS>(queries, rows, query, spot);
  RowSums total[FRAGMENTS];
#pragma clang loop unroll(full)
  for (int f = 0; f < FRAGMENTS; ++f) {
    total[f] = {-INFINITY, 0.0f, 0.0f};
  }
  for (uint block = first; block < stop; ++block) {
    RowSums sums[FRAGMENTS];
#pragma clang loop unroll(full)
    for (int f = 0; f < FRAGMENTS; ++f) {
      sums[f] = {-INFINITY, 0.0f, 0.0f};
    }
    for (uint start = block * BLOCK; start < (block + 1) * BLOCK && start < end; start += KEYS) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_columns<D, KEYS, SIMDGROUPS>(FirstRows<D, T>{keys + size_t(start) * D, length - start}, tile, place);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float2 scores[FRAGMENTS][KEYS / SIDE] = {};
      multiply_keys<D, FRAGMENTS, KEYS>(query, tile, scores, spot);
      add_keys<BLOCK, FRAGMENTS, KEYS>(scores, start, scale, rows, sums, spot);
    }
#pragma clang loop unroll(full)
    for (int f = 0; f < FRAGMENTS; ++f) {
      const float largest = row_max(sums[f].largest), shift = shift_of(largest);
      const float factor = exp2(sums[f].largest - shift);
      const float near = row_sum(sums[f].near * factor), far = row_sum(sums[f].far * factor);
      if (spot.column == 0) {
        partials[size_t(block) * padded_rows + rows.row(f, spot)] =
            float2(log2_sum(largest, near), log2_sum(largest, far));
      }
      const float both = max(total[f].largest, largest);
      total[f].near = total[f].near * exp2(total[f].largest - shift_of(both)) + (near + far) * exp2(largest - shift_of(both));
      total[f].largest = both;
    }
  }
#pragma clang loop unroll(full)
  for (int f = 0; f < FRAGMENTS; ++f) {
    if (spot.column == 0) {
      totals[rows.row(f, spot)] = log2_sum(total[f].largest, total[f].near);
    }
  }
}

// Second launch: normalize the sums of each row to shares of the attention mass.

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
