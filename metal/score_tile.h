// The keys that one threadgroup scores.
#pragma once

#include "threadgroup.h"

constant constexpr uint GROUP_KEYS = 64;  // keys that share lo and step
constant constexpr uint SCORE_TILE = 1024;  // coded keys of one threadgroup

// The valid keys of one threadgroup: a tile of the keys in full groups, or, for the last threadgroup along x, the tail.
struct ScoreTile {
  uint index;
  bool is_tail;
  uint padding;
  uint first, stop;  // of the valid keys
  uint stride;       // of a row of scores
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
