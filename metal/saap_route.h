// SAAP's router: the network of a KV head scores the buckets for the queries of the group (saap.5), (saap.8).
//
// One threadgroup computes both layers for a KV head, so that each weight is read once for the whole group. The outputs
// of both layers, one float32 per unit and query head, are stored in device memory, because with 16 query heads and
// 4,096 buckets they do not fit into threadgroup memory. Their layout is (units, G): the order in which threads write
// and the selection reads.
#pragma once

#include "group_scores.h"

constant constexpr uint INPUT_TILE = 128;  // input units that are staged at once
constant constexpr uint ROUTE_BATCH = 8;   // rows of weights that a lane loads at once
constant constexpr uint MOST_SHARES = 8;

// Inputs of the first layer: components of the queries ...
template <int G, typename Queries>
struct QueryUnits {
  Queries queries;  // (G, units)
  uint units;

  float operator()(uint i) const { return float(queries[i % G * units + i / G]); }
};

// ... and of the second layer: outputs of the first layer.
template <int G>
struct HiddenUnits {
  const device float* hidden;  // (units, G)
  uint units;

  float operator()(uint i) const { return hidden[i]; }
};

struct Linear {
  float operator()(float x) const { return x; }
};

struct Relu {
  float operator()(float x) const { return x > 0.0f || isnan(x) ? x : 0.0f; }  // keeps NaN, which max would drop
};

// WIDTH adjacent weights of a row, converted to float32.
template <int WIDTH>
struct Weights {
  float at[WIDTH];

  template <typename T>
  void load(const device T* row) {
    const vec<T, WIDTH> loaded = *reinterpret_cast<const device vec<T, WIDTH>*>(row);
#pragma clang loop unroll(full)
    for (uint w = 0; w < WIDTH; ++w) {
      at[w] = float(loaded[w]);
    }
  }
};

template <>
struct Weights<1> {
  float at[1];

  template <typename Row>  // pointer in any address space
  void load(Row row) {
    at[0] = float(*row);
  }
};

// Compute one layer in float32: out[unit * G + g] = finish(below_g . weight[:, unit] + bias[unit]). Begins with a
// barrier that waits for the outputs of the layer below.
//
// A lane computes WIDTH adjacent units. If a layer has too few units for all lanes, 2, 4 or 8 lanes of a SIMD group
// share the same units, and each lane reads a part of the weight rows.
template <int G, int WIDTH, typename Below, typename Matrix, typename Bias, typename Finish>
void layer(
    Below below,
    Matrix weight,  // (below.units, units)
    Bias bias,      // (units)
    uint units,     // a multiple of WIDTH
    Finish finish,
    device float* out,
    threadgroup float* tile,  // INPUT_TILE * G
    Place place) {
  uint shares = 1;
  while (shares < MOST_SHARES && 2 * shares * units <= place.threads() * WIDTH) {
    shares *= 2;
  }
  const uint columns = LANES / shares, share = place.lane / columns;
  for (uint first_unit = 0; first_unit < units; first_unit += place.simdgroups * columns * WIDTH) {
    const uint unit = first_unit + (place.simdgroup * columns + place.lane % columns) * WIDTH;
    float sums[G][WIDTH] = {};
    for (uint first = 0; first < below.units; first += INPUT_TILE) {
      const uint rows = min(INPUT_TILE, below.units - first);
      threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
      for (uint i = place.index(); i < rows * G; i += place.threads()) {
        tile[i] = below(first * G + i);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint start = share; start < rows && unit < units; start += ROUTE_BATCH * shares) {
        Weights<WIDTH> loaded[ROUTE_BATCH];
#pragma clang loop unroll(full)
        for (uint r = 0; r < ROUTE_BATCH; ++r) {
          const uint row = start + r * shares;
          if (row < rows) {
            loaded[r].load(weight + size_t(first + row) * units + unit);
          }
        }
#pragma clang loop unroll(full)
        for (uint r = 0; r < ROUTE_BATCH; ++r) {
          const uint row = start + r * shares;
#pragma clang loop unroll(full)
          for (uint g = 0; g < G; ++g) {
            const float x = row < rows ? tile[row * G + g] : 0.0f;
#pragma clang loop unroll(full)
            for (uint w = 0; w < WIDTH; ++w) {
              sums[g][w] += row < rows ? x * loaded[r].at[w] : 0.0f;
            }
          }
        }
      }
    }
#pragma clang loop unroll(full)
    for (uint w = 0; w < WIDTH; ++w) {
      const bool writes = share == 0 && unit < units;
      const float start = writes ? float(bias[unit + w]) : 0.0f;
#pragma clang loop unroll(full)
      for (uint g = 0; g < G; ++g) {
        float sum = sums[g][w];
        for (uint offset = columns; offset < LANES; offset *= 2) {
          sum += simd_shuffle_xor(sum, ushort(offset));
        }
        if (writes) {
          out[size_t(unit + w) * G + g] = finish(sum + start);
        }
      }
    }
  }
}

// Largest logit and 1 / sum of exp(logit - largest) for each query of the group. The second number is 0 if a logit is
// NaN or +inf. Ends with a barrier.
template <int G>
void softmax_statistics(const device float* logits, uint buckets, threadgroup float2* softmax, Place place) {
  for (uint g = place.simdgroup; g < G; g += place.simdgroups) {
    float largest = -INFINITY;
    for (uint c = place.lane; c < buckets; c += LANES) {
      largest = max(largest, logits[size_t(c) * G + g]);
    }
    largest = simd_max(largest);
    float sum = 0.0f;
    for (uint c = place.lane; c < buckets; c += LANES) {
      sum += exp(logits[size_t(c) * G + g] - largest);
    }
    sum = simd_sum(sum);
    if (place.lane == 0) {
      softmax[g] = float2(largest == -INFINITY ? 0.0f : largest, sum > 0.0f ? 1.0f / sum : 0.0f);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
