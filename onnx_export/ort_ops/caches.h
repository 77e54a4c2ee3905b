// Validated inputs and prefill attention, for all operators with caches.
#pragma once

#include <limits>

#include "attention.h"
#include "operators.h"
#include "sample.h"

namespace sparse {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
using std::to_string;

// Sets the sizes of a query (B, Hq, L, D) and checks that the cache fits.
void set_sizes(Attention&, const Tensor& query, const Tensor& cache);
void check_range(const Tensor&, int64_t low, int64_t high, const char* meaning);
void check_padding(const Tensor& left_padding);

// Returns the attributes and kernels that every attention operator needs.
Attention attention_of(const Attributes&, const Context&);

inline int64_t longest_of(const Attention& a) { return *std::max_element(a.length, a.length + a.B); }

// Memory for the row lengths of a call.
struct Lengths {
  Scratch scratch;
  int64_t* all;

  explicit Lengths(int64_t B)
      : scratch(Scratch::kLengths, Scratch::size<int64_t>(B)), all(scratch.take<int64_t>(B)) {}
};

// Returns true for a sparse decode step: one query over `dense_below` keys or more.
bool chooses(const Attributes&, const Attention&);

// Inputs key, value, past_key, past_value and past_length, and the append operation.
struct Caches {
  Tensor key, value, past_key, past_value, past_length;

  Caches(const Context& context, int first, int past_key_at, int past_value_at, int past_length_at)
      : key(context.input(first, "key", 'T')),
        value(context.input(first + 1, "value", 'T')),
        past_key(context.input(past_key_at, "past_key", 'T')),
        past_value(context.input(past_value_at, "past_value", 'T')),
        past_length(context.input(past_length_at, "past_length", 'i')) {}

  Append append(const Context&) const;
  // Allocates the outputs present_key and present_value.
  void make(const Context&, Append&, int key_at, int value_at) const;
};

// A call of an operator that appends to caches and attends: its caches, and its attention with the output 0. The inputs
// query and key are at 0 and 1, and left_padding is after past_length. The attention refers to the other members.
struct CachedCall {
  const Caches caches;
  Append append;
  const Lengths lengths;
  Attention a;

  CachedCall(const Attributes&, const Context&, int past_key_at, int past_value_at, int past_length_at);
  CachedCall(const CachedCall&) = delete;
  // Allocates the outputs present_key and present_value, and attends to them.
  void make(const Context&, int key_at, int value_at);
};

SampleSettings sample_of(const Attributes&);

// Attends with the new tokens: by SampleAttention if the node has its attributes and the call can be sampled, otherwise
// densely.
void attend_prompt(const Attributes&, Attention&, const Pool&);

}  // namespace sparse
