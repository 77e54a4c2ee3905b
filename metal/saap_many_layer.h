// SAAP's router for many query rows: what passes over keys are, over the weights of a layer.
#pragma once

#include "many_rows.h"

// Weights of a layer: a unit is a column.
template <typename Matrix>
struct UnitWeights {
  Matrix weight;  // (I, units)
  uint units;
  uint stop;

  void stage(uint first, uint start, uint count, ManyShared shared, Place place) const {
    threadgroup float* staged = reinterpret_cast<threadgroup float*>(shared.keys);
    for (uint i = place.index(); i < count * MANY_TILE; i += place.threads()) {
      const uint unit = first + i % MANY_TILE;
      staged[i] = unit < stop ? float(weight[size_t(start + i / MANY_TILE) * units + unit]) : 0.0f;
    }
  }
};

template <typename Matrix>
UnitWeights<Matrix> unit_weights(Matrix weight, uint units, uint stop) {
  return {weight, units, stop};
}

// Adds the bias of each unit and, of a hidden layer, keeps what is positive or NaN.
template <bool RELU, typename Bias>
struct WithBias {
  Bias bias;  // (units)
  uint stop;

  float4 operator()(float4 products, uint, uint unit) const {
    float4 sums;
#pragma clang loop unroll(full)
    for (uint v = 0; v < MANY_KEYS; ++v) {
      const float sum = products[v] + (unit + v < stop ? float(bias[unit + v]) : 0.0f);
      sums[v] = !RELU || sum > 0.0f || isnan(sum) ? sum : 0.0f;
    }
    return sums;
  }
};

template <bool RELU, typename Bias>
WithBias<RELU, Bias> with_bias(Bias bias, uint stop) {
  return {bias, stop};
}
