// The operators on plain pointers, with arguments that have been checked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "kernels.h"
#include "runtime.h"

namespace sparse {

// What else is written for the tokens that a head appends, after their keys and values.
struct Follow {
  virtual void head(int64_t b, int64_t h) const = 0;

 protected:
  ~Follow() = default;
};

// Appends tokens to the caches of one node; a past and its present may be the same memory.
struct Append {
  Type type;
  int64_t Hkv, L, C, D;
  const void *key, *value;  // (B, Hkv, L, D)
  const void *past_key, *past_value;
  void *present_key, *present_value;  // (B, Hkv, C, D)
  const int64_t* past_length;         // (B)
  // SparQAttention has two more caches; null elsewhere.
  const void* past_key_t = nullptr;
  void* present_key_t = nullptr;  // (B, Hkv, C / lanes, D, lanes)
  int64_t lanes = 0;
  const float* past_sums = nullptr;
  float* present_sums = nullptr;  // (B, Hkv, 3, D)
  const int64_t* first = nullptr;
  const TypeKernels* kernels = nullptr;
  const Follow* follow = nullptr;

  void head(int64_t b, int64_t h) const;
  const char* plane(const void* cache, int64_t b, int64_t h) const {
    return static_cast<const char*>(cache) + (b * Hkv + h) * C * D * size_of(type);
  }
  // Rows `first` to `first` + count - 1 of a plane in float32.
  void read(float* out, const char* plane, int64_t first, int64_t count) const {
    kernels->widen(out, plane + first * D * size_of(type), count * D);
  }
};

// The keys of these caches in few bits, and what SparQ needs to know of all keys: docs/spec/sparq.md, (sparq.17) to
// (sparq.20), (sparq.22), and docs/spec/operators.md, SparQCoded.
struct CodedKeys final : Follow {
  const Append& append;
  const int64_t* first;  // (B)
  bool spreads;  // whether anybody asks for the spread
  const uint8_t* past = nullptr;  // (B, Hkv D, groups, record); a past and its present may be the same memory
  uint8_t* present = nullptr;
  const float* past_summary = nullptr;
  float* summary = nullptr;  // (B, 3 Hkv, D): sums of values, centre, spread

  CodedKeys(const Append& append, const int64_t* first, bool spreads)
      : append(append), first(first), spreads(spreads) {}
  void head(int64_t b, int64_t h) const override;
  int64_t groups() const { return groups_of(append.C); }
  int64_t plane() const { return append.D * groups() * kRecord; }
  static int64_t groups_of(int64_t C) { return (C + kGroup - 1) / kGroup; }
};

// Queries, and the caches that they attend to.
struct Attention {
  const Kernels* kernels;
  Type type;
  int64_t B, Hq, Hkv, L, C, D;
  const void* query;  // (B, Hq, L, D)
  const void *keys, *values;
  void* output;
  const int64_t *first, *length;  // (B): valid keys are first <= j < length; query i of L sits at length - L + i
  float scale;
  int64_t window = 0;
  const Append* append = nullptr;  // to be done first

  int64_t G() const { return Hq / Hkv; }
  const TypeKernels& typed() const { return kernels->type[type]; }
  const char* plane(const void* cache, int64_t b, int64_t h) const {
    return static_cast<const char*>(cache) + (b * Hkv + h) * C * D * size_of(type);
  }
  void read(float* out, const char* plane, int64_t first, int64_t count) const {
    typed().widen(out, plane + first * D * size_of(type), count * D);
  }
  // Query or output of the first head of KV head h.
  int64_t group_offset(int64_t b, int64_t h) const { return (b * Hq + h * G()) * L * D * size_of(type); }
};

// What SparQ needs besides, docs/spec/sparq.md.
struct SparQ {
  int64_t rank, top_k, local_window;
  bool reallocate, by_key;
  const void* keys_t;    // (B, Hkv, chunks, D, lanes)
  int64_t lanes, plane;  // plane: elements of one head
  // Or the keys are coded.
  const uint8_t* codes = nullptr;  // (B, Hkv D, groups, record)
  int64_t groups = 0;
  const float* summary = nullptr;  // (B, 3 Hkv, D)
  // The mean value and the deviation are given (B, Hkv, D), or made of the sums (B, Hkv, 3, D).
  const float *value_mean = nullptr, *deviation = nullptr, *sums = nullptr;
  int32_t* indices = nullptr;  // (B, Hkv, slots) or null
  int64_t slots = 0;
};

void attend_densely(const Attention&, const Pool&);
// Appends the new keys of a head, lists the keys that its one query attends to, ascending, and says how many these are.
using Choose = std::function<int64_t(int64_t b, int64_t h, int32_t* listed)>;
// Attention over what is chosen, at most `room` keys. All heads choose, then each list is shared out: lists may differ in
// length.
void attend_lists(const Attention&, int64_t room, const Choose&, const Pool&);
void attend_sparsely(const Attention&, const SparQ&, const Pool&);

// Mean value (sparq.9) and deviation of (sparq.1) of `valid` tokens from their sums (3, D).
void sums_to_statistics(const float* sums, int64_t valid, int64_t D, float* mean, float* deviation);

// Does the appending in a run of its own.
void append_all(const Append&, int64_t B, const Pool&);

// Keys low <= j < high.
struct Span {
  int64_t low, high;
};

// Rows for the running softmax of `count` queries, empty; query rows are widened by load_queries.
Rows take_rows(Scratch&, int64_t count, int64_t D);
size_t rows_bytes(int64_t count, int64_t D);

// The rows of queries i0 to i0 + n - 1 of a group, head by head.
void load_queries(const Attention&, const Rows&, int64_t b, int64_t h, int64_t i0, int64_t n);

// Divides by the sums and writes the rows of queries i0 to i0 + n - 1; a query without a key gives 0.
void store_rows(const Attention&, const Rows&, int64_t b, int64_t h, int64_t i0, int64_t n);

// Adds the parts of a head into the first, exactly as if they had been one.
void merge(const Rows* parts, int64_t count);

// Parts that `heads` of work are cut into, so that every worker has some, of at least `least` of `length` keys each.
inline int64_t parts_for(int64_t heads, int64_t length, int64_t least, int64_t tasks_per_worker) {
  if (heads % workers() == 0) return 1;
  const int64_t wanted = (tasks_per_worker * workers() + heads - 1) / std::max<int64_t>(heads, 1);
  return std::max<int64_t>(1, std::min(wanted, length / least));
}

}  // namespace sparse
