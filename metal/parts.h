// Partition of a list of keys, or of all keys, among threadgroups.
#pragma once

#include <metal_stdlib>

using namespace metal;

constant constexpr uint ATTEND_TILE = 128;

// The entries of a list, or the keys, that one of `splits` threadgroups attends: whole tiles, except for the last part.
// The last parts may be empty.
struct Part {
  uint first;
  uint count;
};

inline Part make_part(uint entries, uint splits, uint split) {
  const uint tiles = (entries + ATTEND_TILE - 1) / ATTEND_TILE;
  const uint size = (tiles + splits - 1) / splits * ATTEND_TILE;
  const uint first = min(split * size, entries);
  return {first, min(size, entries - first)};
}
