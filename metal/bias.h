// Biases that are added to the logits of a query group (sparq.25).
#pragma once

#include <metal_limits>
#include <metal_stdlib>

using namespace metal;

// Return true if a number of a bias hides its key from its query head (sparq.26).
template <typename T>
bool is_hidden(T number) {
  return number <= numeric_limits<T>::lowest();
}

// Bias of the query heads of a group. If PRESENT is false, there is no bias, and the numbers are never read.
template <bool PRESENT, int G, typename Numbers>
struct GroupBias {
  Numbers numbers;  // (G, length) of the KV head
  uint length;
  uint first;  // first query head of this threadgroup

  // Return true if key j is hidden from all heads of the group. Most calls read one number.
  bool hides(uint j) const {
    bool hidden = PRESENT;
    for (uint g = 0; hidden && g < G; ++g) {
      hidden = is_hidden(numbers[size_t(g) * length + j]);
    }
    return hidden;
  }

  // Add the bias to the logit of key j and head `first + g`.
  float add(float logit, uint j, uint g) const {
    if (!PRESENT) {
      return logit;
    }
    const auto number = numbers[size_t(first + g) * length + j];
    return is_hidden(number) ? -INFINITY : logit + float(number);
  }
};

template <bool PRESENT, int G, typename Numbers>
GroupBias<PRESENT, G, Numbers> group_bias(Numbers numbers, size_t row, uint length, uint first) {
  return {numbers + (PRESENT ? row * G * length : 0), length, first};
}
