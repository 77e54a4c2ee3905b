// Sizes, reductions and the division of a list that kernels share. A threadgroup consists of full SIMD groups of 32 lanes.
#pragma once

#include <metal_stdlib>

using namespace metal;

constant constexpr uint LANES = 32;
constant constexpr uint MAX_SIMDGROUPS = 16;  // 512 threads: the limit for a kernel with many registers
static_assert(MAX_SIMDGROUPS <= LANES, "of_simdgroup needs one lane per SIMD group");

// Position of a thread in its threadgroup.
struct Place {
  uint lane;       // index in the SIMD group
  uint simdgroup;  // index of the SIMD group in the threadgroup
  uint simdgroups;

  uint index() const { return simdgroup * LANES + lane; }
  uint threads() const { return simdgroups * LANES; }
};

// Load partial[lane], one value per SIMD group of the threadgroup; lanes beyond the number of SIMD groups receive
// `otherwise`. Every SIMD group can call this function after a barrier.
template <typename T>
T of_simdgroup(const threadgroup T* partial, Place place, T otherwise) {
  return place.lane < place.simdgroups ? partial[place.lane] : otherwise;
}

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
