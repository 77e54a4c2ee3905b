// SparQ's second launch: sum the softmax over the group and list the best keys.
#pragma once

#include "group_scores.h"
#include "sparq_softmax.h"

// Return the first key of a local window with the last `wanted` keys that the bias does not hide, or of all these keys if
// there are fewer. Call this function with all threads. The caller adds a barrier before it uses `partial` again.
template <typename Bias>
uint visible_window(Window window, Bias bias, uint wanted, threadgroup uint3* partial, Place place) {
  uint start = window.length;
  uint end = window.length;  // keys from `end` on are counted
  for (uint round = 0; wanted > 0 && end > window.padding; ++round) {
    const uint left = end - window.padding, key = end - 1 - place.index();
    const uint visible = place.index() < left && !bias.hides(key) ? 1 : 0;
    threadgroup uint3* side = partial + (round & 1) * MAX_SIMDGROUPS;
    const uint in_simdgroup = simd_sum(visible);
    if (place.lane == 0) {
      side[place.simdgroup] = uint3(in_simdgroup);
    }
    const uint later_in_simdgroup = simd_prefix_exclusive_sum(visible);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint counted = of_simdgroup(side, place, uint3(0)).x;
    const uint later = later_in_simdgroup + simd_sum(place.lane < place.simdgroup ? counted : 0);
    start = visible == 1 && later < wanted ? key : start;
    wanted -= min(wanted, simd_sum(counted));
    end -= min(left, place.threads());
  }
  start = simd_min(start);
  if (place.lane == 0) {
    partial[2 * MAX_SIMDGROUPS + place.simdgroup] = uint3(start);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_min(of_simdgroup(partial + 2 * MAX_SIMDGROUPS, place, uint3(start)).x);
}
