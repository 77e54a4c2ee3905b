// The operators of domain mlx_sparse, docs/spec/operators.md: attributes and inputs in, checks, and the call.
#pragma once

#include "context.h"

namespace sparse {

constexpr int64_t kSpec = 1;

// Attributes of all operators; each reads those that its signature names.
struct Attributes {
  int64_t rank = 0, top_k = 0, local_window = 0, reallocate = 0, group_reduce = 0, component_score = 0;
  int64_t window = 0, lanes = 0, dense_below = 0;
  float scale = 0;
};

struct Signature {
  const char* name;
  const char* inputs;                      // one letter each: T, f for float, i for int64
  const char* outputs;                     // T, f, or n for int32
  int shape_of[5];                         // the input that has the shape of each output; -1 for none
  bool sparq, attends, windowed, chunked;  // which attributes it has
  void (*compute)(const Attributes&, const Context&);
};

constexpr int kOperators = 5;
extern const Signature kSignatures[kOperators];

Attributes read_attributes(const Signature&, const ort::Api*, const ort::KernelInfo*);

}  // namespace sparse
