// Selection of the query components for scoring.
#pragma once

#include "threadgroup.h"

// Number of vectors of four numbers that have room for D numbers.
constexpr uint vectors_of(uint D) { return (D + 3) / 4; }

// Return the rank of component d: the number of components with larger scores. Ties go to the lower component.
inline uint larger_components(const threadgroup uint* component, uint d, uint D) {
  const uint own = component[d];
  uint larger = 0;
  for (uint e = 0; e < D; e += 4) {
    const uint4 other = reinterpret_cast<const threadgroup uint4*>(component)[e / 4];
#pragma clang loop unroll(full)
    for (uint c = 0; c < 4; ++c) {
      larger += other[c] > own || (other[c] == own && e + c < d) ? 1 : 0;
    }
  }
  return larger;
}
