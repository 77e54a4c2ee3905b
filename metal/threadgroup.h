// Sizes and reductions that all kernels share. Threadgroups are whole SIMD groups of 32 lanes.
#pragma once

#include <metal_stdlib>

using namespace metal;

constant constexpr uint LANES = 32;
constant constexpr uint MAX_SIMDGROUPS = 16;  // 512 threads: what a pipeline with many registers still allows
static_assert(MAX_SIMDGROUPS <= LANES, "of_simdgroup gives each a lane");

// Where a thread stands in its threadgroup.
struct Place {
  uint lane;       // in its SIMD group
  uint simdgroup;  // in the threadgroup
  uint simdgroups;

  uint index() const { return simdgroup * LANES + lane; }
  uint threads() const { return simdgroups * LANES; }
};

// One value per lane, the lanes of SIMD groups that do not exist hold `otherwise`: what a row of `partial` looks like
// to every SIMD group after a barrier.
template <typename T>
T of_simdgroup(const threadgroup T* partial, Place place, T otherwise) {
  return place.lane < place.simdgroups ? partial[place.lane] : otherwise;
}
