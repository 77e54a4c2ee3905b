// Sizes and reductions that all kernels share. A threadgroup consists of full SIMD groups of 32 lanes.
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
