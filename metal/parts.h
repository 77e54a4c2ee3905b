// Partition of a list of keys, or of all keys, among threadgroups.
#pragma once

#include <metal_stdlib>

using namespace metal;

constant constexpr uint ATTEND_TILE = 128;

// The range of list entries (or keys) that one of `splits` threadgroups attends. A part consists of whole tiles; only
// the last part with entries may end with a smaller tile. The parts after that part are empty.
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
