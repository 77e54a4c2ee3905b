// What operators with caches share: their inputs, checked, and the attention of prompts.
#pragma once

#include <limits>

#include "attention.h"
#include "operators.h"
#include "sample.h"

namespace sparse {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
using std::to_string;

// Sizes of a query (B, Hq, L, D) and of caches that fit it.
void set_sizes(Attention&, const Tensor& query, const Tensor& cache);
void check_range(const Tensor&, int64_t low, int64_t high, const char* meaning);
void check_padding(const Tensor& left_padding);

// What every operator that attends starts from.
Attention attention_of(const Attributes&, const Context&);

inline int64_t longest_of(const Attention& a) { return *std::max_element(a.length, a.length + a.B); }

// Room for the lengths of a call's rows.
struct Lengths {
  Scratch scratch;
  int64_t* all;

  explicit Lengths(int64_t B)
      : scratch(Scratch::kLengths, Scratch::size<int64_t>(B)), all(scratch.take<int64_t>(B)) {}
};

// Whether keys are chosen: by one query over enough keys. Other calls are dense.
bool chooses(const Attributes&, const Attention&);

// Inputs key, value, past_key and past_value, and what they are appended to.
struct Caches {
  Tensor key, value, past_key, past_value, past_length;

  Caches(const Context& context, int first, int past_key_at, int past_value_at, int past_length_at)
      : key(context.input(first, "key", 'T')),
        value(context.input(first + 1, "value", 'T')),
        past_key(context.input(past_key_at, "past_key", 'T')),
        past_value(context.input(past_value_at, "past_value", 'T')),
        past_length(context.input(past_length_at, "past_length", 'i')) {}

  Append append(const Context&) const;
  // Makes the outputs present_key and present_value.
  void make(const Context&, Append&, int key_at, int value_at) const;
};

// The attention over caches to which `append` adds; `length` is room for B.
Attention attention_over(const Attributes&, const Context&, const Caches&, const Append&, const Tensor& query,
                         const Tensor& padding, int64_t* length);

SampleSettings sample_of(const Attributes&);

// The new tokens exactly, or by SampleAttention where there are attributes of it and it has something to leave out.
void attend_prompt(const Attributes&, Attention&, const Pool&);

}  // namespace sparse
