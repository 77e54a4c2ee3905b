// SparQ's first launch for a quantized KV cache: logits of all keys from all components, without dequantizing the keys.
#pragma once

#include "rows.h"
#include "sparq_tiles.h"

constant constexpr uint UNIT = 32;  // components that a lane reads at once: BITS words that share a scale

// Number of lanes that share a row of d components, a power of 2.
constexpr uint unit_lanes(uint d) {
  uint lanes = 1;
  while (lanes * UNIT < d) {
    lanes *= 2;
  }
  return lanes;
}

// Number of lanes that share a row, and number of rows that a lane loads at once.
template <int D, int G, uint KEYS>
struct UnitLayout {
  enum : uint { units = D / UNIT, lanes = unit_lanes(D), batch = G <= 4 ? KEYS : G <= 8 ? KEYS / 2 : KEYS / 4 };
};

// Copy the queries to threadgroup memory, ordered so that lanes that share a row read adjacent numbers, and compute the
// sum of each unit. Ends with a barrier.
template <int D, int G, typename Queries>
void load_units(
    Queries queries,       // (G, D)
    threadgroup float* q,  // (G, UNIT / 4, D / UNIT, 4)
    threadgroup float* totals,  // (G, D / UNIT)
    Place place) {
  constexpr uint units = D / UNIT;
  for (uint i = place.index(); i < G * D; i += place.threads()) {
    const uint d = i % D;
    q[((i / D * (UNIT / 4) + d % UNIT / 4) * units + d / UNIT) * 4 + d % 4] = float(queries[i]);
  }
  for (uint i = place.index(); i < G * units; i += place.threads()) {
    float total = 0.0f;
    for (uint e = 0; e < UNIT; ++e) {
      total += float(queries[i * UNIT + e]);
    }
    totals[i] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Logits (quantized.2) of KEYS consecutive keys per thread. Lanes that share rows process the keys of each of these
// lanes in turn, and the lane that owns the keys receives the sums.
template <int D, int G, uint KEYS, uint BITS, uint GROUP, typename Codes, typename Scales>
void row_logits(
    PackedRows<D, BITS, GROUP, Codes, Scales> rows,
    uint first,  // first key of this thread
    uint stop,   // end of the keys to score
    const threadgroup float4* q,
    const threadgroup float* totals,
    thread float (&logits)[KEYS][G],
    Place place) {
  typedef UnitLayout<D, G, KEYS> N;
  const uint unit = place.lane % N::lanes;
  for (uint turn = 0; turn < N::lanes; ++turn) {
#pragma clang loop unroll(full)
    for (uint b = 0; b < KEYS; b += N::batch) {
      const uint next = first + (turn - unit) * KEYS + b;
      float sums[N::batch][G] = {};
      if (unit < N::units) {
        uint words[N::batch][BITS];
#pragma clang loop unroll(full)
        for (uint u = 0; u < N::batch; ++u) {
#pragma clang loop unroll(full)
          for (uint w = 0; w < BITS; ++w) {
            words[u][w] = next + u < stop ? rows.codes[(size_t(next + u) * N::units + unit) * BITS + w] : 0;
          }
        }
#pragma clang loop unroll(full)
        for (uint c = 0; c < UNIT / 4; ++c) {
          float4 code[N::batch];
#pragma clang loop unroll(full)
          for (uint u = 0; u < N::batch; ++u) {
            code[u] = unpacked_codes<BITS>(words[u], c);
          }
#pragma clang loop unroll(full)
          for (uint g = 0; g < G; ++g) {
            const float4 part = q[(g * (UNIT / 4) + c) * N::units + unit];
#pragma clang loop unroll(full)
            for (uint u = 0; u < N::batch; ++u) {
              sums[u][g] += dot(part, code[u]);
            }
          }
        }
#pragma clang loop unroll(full)
        for (uint u = 0; u < N::batch; ++u) {
          const bool exists = next + u < stop;
          const size_t group = size_t(next + u) * (D / GROUP) + unit * UNIT / GROUP;
          const float scale = exists ? float(rows.scales[group]) : 0.0f;
          const float bias = exists ? float(rows.biases[group]) : 0.0f;
#pragma clang loop unroll(full)
          for (uint g = 0; g < G; ++g) {
            sums[u][g] = scale * sums[u][g] + bias * totals[g * N::units + unit];
          }
        }
      }
#pragma clang loop unroll(full)
      for (uint u = 0; u < N::batch; ++u) {
#pragma clang loop unroll(full)
        for (uint g = 0; g < G; ++g) {
          float sum = sums[u][g];
          for (uint offset = N::lanes / 2; offset > 0; offset /= 2) {
            sum += simd_shuffle_xor(sum, ushort(offset));
          }
          logits[b + u][g] = turn == unit ? sum : logits[b + u][g];
        }
      }
    }
  }
}
