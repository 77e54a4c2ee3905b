// SparQ's first launch for int4 scoring keys: approximate logits of all keys.
#pragma once

#include "rows.h"
#include "sparq_scores.h"

// Unscaled logits (sparq.21) of KEYS consecutive int4 keys, in one pass over `rank` rows of codes with KEYS / 2 bytes
// each. Keys are not dequantized: q * lo is summed once for all keys, and q * step * code for each key.
template <int G, uint KEYS, typename Word, typename Halves>
void coded_logits(
    const device uint* codes,  // (D, words)
    size_t words,
    Halves lo,  // (D, groups)
    Halves step,
    size_t groups,
    uint first,  // index of the first key, a multiple of KEYS
    uint rank,
    const threadgroup int* chosen,
    const threadgroup float* q_r,
    thread float (&logits)[KEYS][G]) {
  constexpr uint PER_WORD = sizeof(Word) * 2;
  float base[G] = {};
#pragma clang loop unroll_count(4)
  for (uint i = 0; i < rank; ++i) {
    const size_t row = size_t(chosen[i]);
    const device Word* packed = reinterpret_cast<const device Word*>(codes + row * words) + first / PER_WORD;
    float code[KEYS];
#pragma clang loop unroll(full)
    for (uint v = 0; v < KEYS; ++v) {
      code[v] = float((uint(packed[v / PER_WORD]) >> (v % PER_WORD * 4)) & 15);
    }
    const size_t range = row * groups + first / GROUP_KEYS;
    const float least = float(lo[range]);
    const float width = float(step[range]);
#pragma clang loop unroll(full)
    for (uint g = 0; g < G; ++g) {
      const float q = q_r[i * G + g];
      base[g] += q * least;
      const float scaled = q * width;
#pragma clang loop unroll(full)
      for (uint v = 0; v < KEYS; ++v) {
        logits[v][g] += scaled * code[v];
      }
    }
  }
#pragma clang loop unroll(full)
  for (uint v = 0; v < KEYS; ++v) {
#pragma clang loop unroll(full)
    for (uint g = 0; g < G; ++g) {
      logits[v][g] += base[g];
    }
  }
}

// Unscaled logits (sparq.21) of key j, which belongs to the tail.
template <int G, typename Rows, typename Center>
void tail_logits(
    Rows rows,  // key rows: see rows.h
    uint j,
    Center center,  // (D)
    uint rank,
    const threadgroup int* chosen,
    const threadgroup float* q_r,
    thread float (&logits)[G]) {
  for (uint i = 0; i < rank; ++i) {
    const float x = rows.component(j, uint(chosen[i])) - center[chosen[i]];
#pragma clang loop unroll(full)
    for (uint g = 0; g < G; ++g) {
      logits[g] += q_r[i * G + g] * x;
    }
  }
}
