// SparQ's first launch: approximate logits of all keys from the selected components.
#pragma once

#include "sparq_tiles.h"

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

constant constexpr uint SCORE_KEYS = 4;  // consecutive keys per thread

// Select the `rank` components with the largest sum of |q| over the group, times `weight` if WEIGHTED (sparq.1),
// (sparq.2), and gather these components of the threadgroup's HEADS queries. Every threadgroup repeats the selection,
// which costs little compared with scoring the keys. Ends with a barrier.
// component: D sums as unsigned bits, which sort like the sums, because no sum is negative; NaN counts as +inf. Zeros
// follow up to a multiple of 4.
// chosen: D entries. q_r: D rows of HEADS queries, of which `rank` rows are written.
template <int D, int G, int HEADS, bool WEIGHTED, typename Queries, typename Weights>
void choose_components(
    Queries queries,  // (G, D)
    Weights weight,   // (D)
    uint first_head,
    uint rank,
    threadgroup uint* component,
    threadgroup int* chosen,
    threadgroup float* q_r,
    Place place) {
  for (uint d = place.index(); d < D; d += place.threads()) {
    float sum = 0.0f;
#pragma clang loop unroll_count(G < 16 ? G : 16)
    for (uint g = 0; g < G; ++g) {
      sum += abs(float(queries[g * D + d]));
    }
    component[d] = min(as_type<uint>(WEIGHTED ? sum * weight[d] : sum), as_type<uint>(INFINITY));
  }
  for (uint d = D + place.index(); d < vectors_of(D) * 4; d += place.threads()) {
    component[d] = 0;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint d = place.index(); d < D; d += place.threads()) {
    const uint larger = larger_components(component, d, uint(D));
    if (larger < rank) {
      chosen[larger] = int(d);
#pragma clang loop unroll(full)
      for (uint g = 0; g < HEADS; ++g) {
        q_r[larger * HEADS + g] = float(queries[(first_head + g) * D + d]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Factor c / t_g of (sparq.3) for each of G queries. Ends with a barrier.
template <int D, int G, bool WEIGHTED, typename Queries>
void coverage_factors(
    Queries queries, uint rank, float scale, const threadgroup float* q_r, threadgroup float* factor, Place place) {
  for (uint g = place.simdgroup; g < G; g += place.simdgroups) {
    float total = 0.0f;
    float covered = 0.0f;
    if (!WEIGHTED) {
      for (uint d = place.lane; d < D; d += LANES) {
        total += abs(float(queries[g * D + d]));
      }
      for (uint i = place.lane; i < rank; i += LANES) {
        covered += abs(q_r[i * G + g]);
      }
      total = simd_sum(total);
      covered = simd_sum(covered);
    }
    if (place.lane == 0) {
      factor[g] = covered > 0.0f ? scale * rsqrt(covered / total) : scale;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Logits (sparq.3) of SCORE_KEYS keys, in one pass over `rank` rows of component-major keys. If ALIGNED, rows begin at
// multiples of SCORE_KEYS and a thread loads its keys at once; unused columns after the last key may then be read.
template <int G, bool ALIGNED, typename T>
void approximate_logits(
    const device T* keys_t,  // (D, capacity), at the thread's first key
    size_t capacity,
    uint rank,
    uint keys,  // number of keys of this thread, at most SCORE_KEYS
    const threadgroup int* chosen,
    const threadgroup float* q_r,
    thread float (&logits)[SCORE_KEYS][G]) {
#pragma clang loop unroll_count(8)
  for (uint i = 0; i < rank; ++i) {
    const device T* row = keys_t + size_t(chosen[i]) * capacity;
    float key[SCORE_KEYS];
    if (ALIGNED) {
      const vec<T, 4> loaded = *reinterpret_cast<const device vec<T, 4>*>(row);
#pragma clang loop unroll(full)
      for (uint v = 0; v < SCORE_KEYS; ++v) {
        key[v] = float(loaded[v]);
      }
    } else {
#pragma clang loop unroll(full)
      for (uint v = 0; v < SCORE_KEYS; ++v) {
        key[v] = v < keys ? float(row[v]) : 0.0f;
      }
    }
#pragma clang loop unroll(full)
    for (uint g = 0; g < G; ++g) {
      const float q = q_r[i * G + g];
#pragma clang loop unroll(full)
      for (uint v = 0; v < SCORE_KEYS; ++v) {
        logits[v][g] += q * key[v];
      }
    }
  }
}
