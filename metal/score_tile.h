// Division of int4 scoring keys among threadgroups, and the codes of 8-bit logits.
#pragma once

#include "threadgroup.h"

// An 8-bit logit is the distance from the largest logit of the tile, in sixteenths of a nat.
constant constexpr uint NO_WEIGHT = 254;   // -inf, or too far below the largest logit
constant constexpr uint NO_SOFTMAX = 255;  // NaN or +inf: see merge_statistics

constant constexpr uint GROUP_KEYS = 64;  // keys that share lo and step
constant constexpr uint SCORE_TILE = 1024;  // int4 keys per threadgroup

// Valid keys that one threadgroup scores: a tile of keys in full groups, or the tail for the last threadgroup along x.
struct ScoreTile {
  uint index;
  bool is_tail;
  uint padding;
  uint first, stop;  // range of valid keys, counted from the first valid key
  uint stride;       // number of keys that the score buffer has room for
};

inline ScoreTile make_score_tile(uint index, uint tiles, int length, int left_padding) {
  const uint padding = uint(clamp(left_padding, 0, length));
  const uint S = uint(length) - padding;
  const uint coded = S / GROUP_KEYS * GROUP_KEYS;
  const bool is_tail = index + 1 == tiles;
  const uint first = is_tail ? coded : index * SCORE_TILE;
  const uint stop = is_tail ? S : min(first + SCORE_TILE, coded);
  return {index, is_tail, padding, first, stop, (uint(length) + 7) / 8 * 8};
}
