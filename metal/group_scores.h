// Scores for the selection in SparQ and SAAP: one score per item, summed over the queries of a group.
#pragma once

#include "bias.h"
#include "top_k_select.h"

// Bits of a key in the local window: above the bits of every score, and in the 23 lower bits the score as a share of G.
// `selected_share` reads the shares, so that the estimated recall needs no second look at the logits.
constant constexpr uint LOCAL = 0xFF800001;  // score 0; NaN and +inf in a score have the bits below
constant constexpr float LOCAL_SHARES = 8388605.0f;
constant constexpr uint ALWAYS = 0xFFFFFFFF;  // NaN in the local window

// a < b if and only if ordered_bits(a) < ordered_bits(b). NaN counts as +inf.
inline uint ordered_bits(float score) {
  if (score == -INFINITY) {
    return NEVER;
  }
  const uint bits = as_type<uint>(score == 0.0f ? 0.0f : isnan(score) ? INFINITY : score);  // -0 equals 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The valid keys of a row, and the keys that are always selected.
struct Window {
  uint padding;  // first valid key
  uint local;    // first key of the local window
  uint length;   // number of keys
};

inline Window make_window(int length, int padding, int local_window) {
  return {uint(max(padding, 0)), uint(max(length - local_window, 0)), uint(length)};
}

template <int G>
uint local_bits(float score) {
  return isnan(score) ? ALWAYS : LOCAL + uint(rint(min(score / G, 1.0f) * LOCAL_SHARES));
}

// Share of the approximate softmax mass of a group on the selected keys (sparq.24), from their bits. All lanes of a
// SIMD group call this function and receive the result.
template <int G>
float selected_share(const threadgroup uint* bits, uint count, uint lane) {
  float share = 0.0f;
  for (uint slot = lane; slot < count; slot += LANES) {
    const uint key = bits[slot];
    if (key >= LOCAL) {
      share += key == ALWAYS ? NAN : float(key - LOCAL) / LOCAL_SHARES;
    } else if (key != NEVER) {
      share += key == LOCAL - 1 ? NAN : as_type<float>(key & 0x7FFFFFFFu) / G;
    }
  }
  return simd_sum(share);
}

// Score source for top-k selection: sum of the softmaxes of a group (sparq.5).
template <int G, int HEADS, typename Logits, typename Bias>
struct GroupScores {
  Logits logits;  // (G / HEADS, stride, HEADS) of the KV head
  uint stride;
  const threadgroup float2* softmax;
  Bias bias;
  Window window;
  uint first;  // index of the key that is item 0

  uint bits(uint item) const {
    const uint j = first + item;
    if (j < window.padding || bias.hides(j)) {
      return NEVER;
    }
    float score = 0.0f;
    for (uint first_head = 0; first_head < G; first_head += HEADS) {
      const auto own = logits + size_t(first_head) * stride + size_t(j) * HEADS;
#pragma clang loop unroll_count(HEADS < 16 ? HEADS : 16)
      for (uint g = 0; g < HEADS; ++g) {
        const float2 total = softmax[first_head + g];
        score += exp(own[g] - total.x) * total.y;
      }
    }
    return j < window.local ? ordered_bits(score) : local_bits<G>(score);
  }
  int index(uint item) const { return int(first + item); }
};
