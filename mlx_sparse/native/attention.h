// The operators as functions on plain pointers. All arguments are validated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "kernels.h"
#include "runtime.h"

namespace sparse {

// Callback for each head, after its new keys and values were appended, to update further caches.
struct HeadCallback {
  virtual void head(int64_t b, int64_t h) const = 0;

 protected:
  ~HeadCallback() = default;
};

// Appends tokens to the caches of one node. A past and its present may be the same memory.
struct Append {
  Type type;
  int64_t Hkv, L, C, D;
  const void *key, *value;  // (B, Hkv, L, D)
  const void *past_key, *past_value;
  void *present_key, *present_value;  // (B, Hkv, C, D)
  const int64_t* past_length;         // (B)
  // Two more caches of SparQAttention, computed from all keys if `all`. A null `present_key_t` means no update.
  const void* past_key_t = nullptr;
  void* present_key_t = nullptr;  // (B, Hkv, C / lanes, D, lanes)
  int64_t lanes = 0;
  bool all = false;
  const float* past_sums = nullptr;
  float* present_sums = nullptr;  // (B, Hkv, 3, D)
  const int64_t* first = nullptr;
  const TypeKernels* kernels = nullptr;
  const HeadCallback* callback = nullptr;

  void head(int64_t b, int64_t h) const;
  const char* plane(const void* cache, int64_t b, int64_t h) const {
    return static_cast<const char*>(cache) + (b * Hkv + h) * C * D * size_of(type);
  }
  // Converts rows `first` to `first` + count - 1 of a plane to float32.
  void read(float* out, const char* plane, int64_t first, int64_t count) const {
    kernels->widen(out, plane + first * D * size_of(type), count * D);
  }
};

// Int4 scoring keys of the caches, and their summary: docs/spec/sparq.md, (sparq.17) to (sparq.20), (sparq.22), and
// docs/spec/operators.md, SparQCoded.
struct CodedKeys final : HeadCallback {
  const Append& append;
  const int64_t* first;  // (B)
  bool spreads;  // true if the spread is needed
  const uint8_t* past = nullptr;  // (B, Hkv D, groups, record); a past and its present may be the same memory
  uint8_t* present = nullptr;
  const float* past_summary = nullptr;
  float* summary = nullptr;  // (B, 3 Hkv, D): sums of values, center, spread

  CodedKeys(const Append& append, const int64_t* first, bool spreads)
      : append(append), first(first), spreads(spreads) {}
  void head(int64_t b, int64_t h) const override;
  int64_t groups() const { return groups_of(append.C); }
  int64_t plane() const { return append.D * groups() * kRecord; }
  static int64_t groups_of(int64_t C) { return (C + kGroup - 1) / kGroup; }
};

// Queries and the caches that they attend to.
struct Attention {
  const Kernels* kernels;
  Type type;        // of the caches
  Type query_type;  // of the queries and outputs
  int64_t B, Hq, Hkv, L, C, D, Dv;
  const void* query;   // (B, Hq, L, D)
  const void* keys;    // (B, Hkv, C, D)
  const void* values;  // (B, Hkv, C, Dv)
  void* output;        // (B, Hq, L, Dv)
  float* lse = nullptr;  // (B, Hq, L), log-sum-exp of the attended logits, or null
  const int64_t *first, *length;  // (B): valid keys are first <= j < length; position of query i: length - L + i
  float scale;
  int64_t window = 0;
  Bias bias = {};  // for L = 1: (B, Hq, length)
  const Append* append = nullptr;  // runs before attention

  int64_t G() const { return Hq / Hkv; }
  const TypeKernels& typed() const { return kernels->type[type]; }
  // Row j of KV head h in the keys or values. `width` is D for keys and Dv for values.
  const char* row(const void* cache, int64_t width, int64_t b, int64_t h, int64_t j) const {
    return static_cast<const char*>(cache) + ((b * Hkv + h) * C + j) * width * size_of(type);
  }
  // Offset in bytes of the queries of the group of KV head h (`width` D), or of their outputs (Dv).
  int64_t group_offset(int64_t width, int64_t b, int64_t h) const {
    return (b * Hq + h * G()) * L * width * size_of(query_type);
  }
  // The bias of the group of KV head h.
  Bias group_bias(int64_t b, int64_t h) const {
    Bias of = bias;
    const int64_t offset = (b * Hq + h * G()) * bias.stride * size_of(bias.type);
    if (bias.data) of.data = static_cast<const char*>(bias.data) + offset;
    return of;
  }
  // Converts `count` numbers of the bias of a query head to float32, from key `first` on.
  void read_bias(float* out, int64_t b, int64_t head, int64_t first, int64_t count) const {
    const int64_t offset = ((b * Hq + head) * bias.stride + first) * size_of(bias.type);
    kernels->type[bias.type].widen(out, static_cast<const char*>(bias.data) + offset, count);
  }
  // Returns true if the bias hides a key from every query head of KV head h (sparq.26).
  bool hidden(int64_t b, int64_t h, int64_t key) const {
    float number;
    for (int64_t g = 0; bias.data && g < G(); g++) {
      read_bias(&number, b, h * G() + g, key, 1);
      if (!(number <= bias.lowest)) return false;
    }
    return bias.data;
  }
  const TypeKernels& query_kernels() const { return kernels->type[query_type]; }
};

// Int4 scoring keys. Exported files store a record per component and group, which is lo, step and the codes. MLX has an
// array for each.
struct CodePlanes {
  const uint8_t *codes = nullptr, *lo = nullptr, *step = nullptr;
  int64_t groups = 0;      // number of groups from one component to the next
  int code_size, range_size;  // bytes from one group to the next

  static CodePlanes of_records(const uint8_t* records, int64_t groups) {
    return {records + kHeader, records, records + kHeader / 2, groups, kRecord, kRecord};
  }
};

// Further inputs and outputs of SparQ, docs/spec/sparq.md.
struct SparQ {
  int64_t rank, top_k, local_window;
  bool reallocate, by_key;
  const void* keys_t;    // (B, Hkv, chunks, D, lanes)
  int64_t lanes, plane;  // plane: number of elements per head
  CodePlanes codes;  // int4 scoring keys in place of keys_t; `codes.codes` may be null
  // Mean value (B, Hkv, Dv), deviation and center (B, Hkv, D), or a summary (B, 3 Hkv, D) or running statistics
  // (B, Hkv, 3, D) from which they are computed. With the last two, Dv is D.
  const float *value_mean = nullptr, *deviation = nullptr, *center = nullptr;
  const float *summary = nullptr, *sums = nullptr;
  float* recall = nullptr;  // (B, Hkv), estimated attention recall (sparq.24), or null
  int32_t* indices = nullptr;  // (B, Hkv, slots) or null
  int64_t slots = 0;
};

void attend_densely(const Attention&, const Pool&);
// Appends the new keys of a head and lists the keys that its query attends to, ascending. Returns their number.
using SelectKeys = std::function<int64_t(int64_t b, int64_t h, int32_t* listed)>;
// Attends to the listed keys, at most `room` keys per head. All heads first list their keys. Then each list is divided
// among the workers, because lists may differ in length.
void attend_lists(const Attention&, int64_t room, const SelectKeys&, const Pool&);
void attend_sparsely(const Attention&, const SparQ&, const Pool&);
// Attends to the key blocks that are listed for each row block, in any order. `lists` is (B, Hq, R, N); a number that is
// not a causal block is an empty slot. Row block r has the queries at positions r size to (r + 1) size - 1.
void attend_blocks(const Attention&, const int32_t* lists, int64_t N, int64_t size, const Pool&);

// Computes the mean value (sparq.9) and the deviation of (sparq.1) of `valid` tokens from their sums (3, D).
void sums_to_statistics(const float* sums, int64_t valid, int64_t D, float* mean, float* deviation);

// Appends to all heads in a separate parallel run.
void append_all(const Append&, int64_t B, const Pool&);

// A range of keys low <= j < high.
struct Span {
  int64_t low, high;
};

// Allocates empty rows for the running softmax of `count` queries. load_queries converts the query rows.
Rows take_rows(Scratch&, int64_t count, const Attention&);
size_t rows_bytes(int64_t count, const Attention&);

// Attends to keys [low, high) of a head, or to the keys that these entries of `listed` name. Every row attends to all of
// these keys. `scores` needs space for kBlock numbers per row.
void attend_keys(const Attention&, const Rows&, int64_t b, int64_t h, Span keys, float* scores,
                 const int32_t* listed = nullptr);

// Log-sum-exp of a row of a running softmax.
float lse_of(float top, float sum);

// Loads the rows of queries i0 to i0 + n - 1 of a group, head by head.
void load_queries(const Attention&, const Rows&, int64_t b, int64_t h, int64_t i0, int64_t n);

// Divides the outputs by the sums and writes the rows of queries i0 to i0 + n - 1. Without keys an output is 0.
void store_rows(const Attention&, const Rows&, int64_t b, int64_t h, int64_t i0, int64_t n);

// Merges the splits of a head exactly into the first split.
void merge(const Rows* parts, int64_t count);

// Returns the number of splits per head that keeps all workers busy, with at least `least` of `length` keys per split.
inline int64_t parts_for(int64_t heads, int64_t length, int64_t least, int64_t tasks_per_worker) {
  if (heads % workers() == 0) return 1;
  const int64_t wanted = (tasks_per_worker * workers() + heads - 1) / std::max<int64_t>(heads, 1);
  return std::max<int64_t>(1, std::min(wanted, length / least));
}

}  // namespace sparse
