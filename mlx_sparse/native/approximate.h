// Scores of component-major keys and of int4 scoring keys. kernels.cc includes this file for each instruction set.
#pragma once

#include "lanes.h"

namespace {

// Component-major rows that are added together, with the rows that follow for prefetching.
template <class T>
struct Run {
  const T *row[kTileComponents], *next[kTileComponents];
};

// Computes a (R, count) += q (N, R) . N rows of keys; = in place of += with `start`. A few rows are read at a time, in
// long runs. Short runs over all rows would reach half of the bandwidth.
template <int R, int N, class T>
inline void add_components(const Columns& columns, const Run<T>& run, const float* q, float* a, int64_t stride,
                           bool start) {
  constexpr int kAhead = 16 * kLine / int(sizeof(T));  // elements
  F query[N][R];
  for (int n = 0; n < N; n++) {
    for (int r = 0; r < R; r++) query[n][r] = set1(q[n * R + r]);
  }
  for (int j = 0; j < columns.count; j += W) {
    if (j % (kLine / int(sizeof(T))) == 0) {
      const int ahead = j + kAhead - columns.count;
      for (int n = 0; n < N; n++) __builtin_prefetch(ahead < 0 ? run.row[n] + j + kAhead : run.next[n] + ahead, 0, 2);
    }
    const int part = columns.readable - j < W ? columns.readable - j : W;
    F total[R];
    for (int r = 0; r < R; r++) total[r] = start ? zero() : load(a + r * stride + j);
    for (int n = 0; n < N; n++) {
      const F key = load_part(run.row[n] + j, part);
      for (int r = 0; r < R; r++) total[r] = fma(query[n][r], key, total[r]);
    }
    for (int r = 0; r < R; r++) store(a + r * stride + j, total[r]);
  }
}

template <int R, class T>
void approximate_rows(const Columns& columns, const float* q, float* a, int64_t stride) {
  const T *here = static_cast<const T*>(columns.lanes), *after = static_cast<const T*>(columns.next);
  const auto row = [&](int i) {
    if (i < columns.rank) return here + columns.components[i] * columns.stride;
    return after + columns.components[i % columns.rank] * columns.stride;
  };
  for (int i = 0; i < columns.rank;) {
    const bool full = i + kTileComponents <= columns.rank;
    const int N = full ? kTileComponents : 1;
    Run<T> run;
    for (int n = 0; n < N; n++) run.row[n] = row(i + n), run.next[n] = row(i + N + n);
    if (full) {
      add_components<R, kTileComponents>(columns, run, q + i * R, a, stride, i == 0);
    } else {
      add_components<R, 1>(columns, run, q + i * R, a, stride, i == 0);
    }
    i += N;
  }
}

template <class T>
void approximate(const Columns& columns, const float* q, float* a, int64_t stride) {
  for (int g = 0; g < columns.G; g += 4) {
    const int R = columns.G - g < 4 ? columns.G - g : 4;
    if (R == 4) approximate_rows<4, T>(columns, q, a, stride);
    if (R == 3) approximate_rows<3, T>(columns, q, a, stride);
    if (R == 2) approximate_rows<2, T>(columns, q, a, stride);
    if (R == 1) approximate_rows<1, T>(columns, q, a, stride);
    q += int64_t(R) * columns.rank;
    a += R * stride;
  }
}

// Loads pairs of vectors of codes: first of even keys, then of odd keys.
inline void load_codes(const uint8_t* p, F* codes) {
  for (int v = 0; v < kCodeVectors; v += 2) nibbles(p + v / 2 * W, codes[v], codes[v + 1]);
}

// Scores of a group: the sum of q lo, equal for all keys, plus the sum of (q step) code. No key is dequantized.
template <int R>
void approximate_records(const Codes& codes, const float* q, float* work, float* a, int64_t stride) {
  for (int n = 0; n < codes.groups; n++, a += kGroup) {
    const uint8_t* group = codes.codes + int64_t(n) * codes.code_size;
    const int64_t range = int64_t(n) * codes.range_size;
    float base[R] = {};
    for (int j = 0; j < kGroup; j += kCodeVectors * W) {
      F total[R][kCodeVectors];
      for (int r = 0; r < R; r++) {
        for (int v = 0; v < kCodeVectors; v++) total[r][v] = zero();
      }
      for (int i = 0; i < codes.rank; i++) {
        const uint8_t* record = group + codes.components[i] * codes.code_stride;
        if (j == 0) {  // prefetch during the products of the first keys, which hide the latency
          __builtin_prefetch(record + codes.ahead, 0, 2);
          const int64_t at = range + codes.components[i] * codes.range_stride;
          const float lo = half_at(codes.lo + at), step = half_at(codes.step + at);
          for (int r = 0; r < R; r++) base[r] += q[i * R + r] * lo;
          for (int r = 0; r < R; r++) work[i * R + r] = q[i * R + r] * step;
        }
        F code[kCodeVectors];
        load_codes(record + j / 2, code);
        for (int r = 0; r < R; r++) {
          const F query = set1(work[i * R + r]);
          for (int v = 0; v < kCodeVectors; v++) total[r][v] = fma(query, code[v], total[r][v]);
        }
      }
      for (int r = 0; r < R; r++) {
        for (int v = 0; v < kCodeVectors; v++) total[r][v] = add(total[r][v], set1(base[r]));
      }
      for (int r = 0; r < R; r++) {
        for (int v = 0; v < kCodeVectors; v += 2) {
          interleave(total[r][v], total[r][v + 1]);
          store(a + r * stride + j + v * W, total[r][v]);
          store(a + r * stride + j + (v + 1) * W, total[r][v + 1]);
        }
      }
    }
  }
}

void approximate_codes(const Codes& codes, const float* q, float* work, float* a, int64_t stride) {
  for (int g = 0; g < codes.G; g += 4) {
    const int R = codes.G - g < 4 ? codes.G - g : 4;
    if (R == 4) approximate_records<4>(codes, q, work, a, stride);
    if (R == 3) approximate_records<3>(codes, q, work, a, stride);
    if (R == 2) approximate_records<2>(codes, q, work, a, stride);
    if (R == 1) approximate_records<1>(codes, q, work, a, stride);
    q += int64_t(R) * codes.rank;
    a += R * stride;
  }
}

}  // namespace
