// The operators of domain mlx_sparse, docs/spec/operators.md: attributes and inputs in, checks, and the call.
#pragma once

#include "context.h"

namespace sparse {

constexpr int64_t kSpec = 1;

// Attributes of all operators; each reads those that its signature names.
struct Attributes {
  int64_t rank = 0, top_k = 0, local_window = 0, reallocate = 0, group_reduce = 0, component_score = 0;
  int64_t window = 0, lanes = 0, dense_below = 0, chunks = 0, block_size = 0, dense_prompt_below = 0;
  int64_t probes = 0, sink_tokens = 0, recent_tokens = 0;
  float scale = 0, alpha_column = 0, alpha_slash = 0;
};

// Which attributes a signature has besides `spec`.
enum Has : unsigned {
  kScale = 1,
  kSparQ = 2,
  kWindow = 4,
  kLanes = 8,
  kDenseBelow = 16,
  kSample = 32,
  kDensePrompt = 64,
  kSaap = 128
};

struct Signature {
  const char* name;
  const char* inputs;   // one letter each: T, W, f for float, i for int64, s for int16
  const char* outputs;  // T, f, s, or n for int32
  int shape_of[6];      // the input that has the shape of each output; -1 for none
  unsigned has;
  void (*compute)(const Attributes&, const Context&);
};

constexpr int kOperators = 11;
extern const Signature kSignatures[kOperators];

Attributes read_attributes(const Signature&, const ort::Api*, const ort::KernelInfo*);

}  // namespace sparse
