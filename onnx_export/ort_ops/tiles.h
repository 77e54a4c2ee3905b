// The inner loops of prompts, compiled once per instruction set. Vectors lie along query rows: a tile has one line of
// `width` numbers per key or per component, so that neither logits nor softmax ever sum within a vector.
#pragma once

#include <cstdint>

namespace sparse {

constexpr int kTileLanes = 16;  // a width is a multiple of it

struct Tiles {
  // c (m, width) = a (m, k) b (k, width), or += with `add`. Element (i, t) of a is at a[i * row + t * column].
  void (*multiply)(const float* a, int64_t row, int64_t column, const float* b, float* c, int m, int k, int width,
                   bool add);
  // The running softmax of each row over n more logits (n, width), which become exp(logit - top). What was summed
  // before is to be multiplied by `faded`.
  void (*weigh)(float* logits, int n, int width, float* top, float* sum, float* faded);
  // c (m, width) *= factor (width).
  void (*scale)(float* c, int m, int width, const float* factor);
  // Of each row's logits (n, width) the largest, and the sums of exp(logit - largest) where `near` (n, width) is 1 and
  // where it is 0.
  void (*masses)(const float* logits, const float* near, int n, int width, float* top, float* inside, float* outside);
  // a and b (width) times exp(top - most) * inverse.
  void (*share)(const float* top, const float* most, const float* inverse, int width, float* a, float* b);
};

extern const Tiles kScalarTiles;
extern const Tiles kAvx2Tiles;
extern const Tiles kAvx512Tiles;
extern const Tiles kNeonTiles;

}  // namespace sparse
