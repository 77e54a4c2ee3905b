// SAAP on plain pointers, docs/spec/saap.md.
#pragma once

#include "attention.h"

namespace sparse {

// Assigns new keys to buckets, (saap.1) of docs/spec/saap.md. A past and its present may be the same memory.
struct Assign final : HeadCallback {
  const Kernels* kernels;
  Type type, weights;  // types of the keys and of the centroids
  int64_t Hkv, L, C, D, buckets;
  const void* key;        // (B, Hkv, L, D) before RoPE
  const void* centroids;  // (Hkv, buckets, D)
  const int16_t* past_ids;
  int16_t* present_ids;  // (B, Hkv, C)
  const int64_t* past_length;

  void head(int64_t b, int64_t h) const override;
};

// Further inputs of SAAP, docs/spec/saap.md.
struct Saap {
  int64_t probes, sink_tokens, recent_tokens, buckets;
  int64_t hidden;            // 0: no hidden layer
  Type weights;              // type of the networks
  const void* query_before;  // (B, Hq, 1, D)
  const int16_t* ids;        // (B, Hkv, C)
  const void *hidden_weight, *hidden_bias, *out_weight, *out_bias;
};

// Runs a decode step. The query network selects the buckets.
void attend_buckets(const Attention&, const Saap&, const Pool&);

// Lists of a decode step over keys in bucket order: `saap_indices` of mlx_sparse/methods/saap/ops.py.
struct BucketLists {
  int64_t B, Hkv, n, buckets, listed, capacity, length, sink_tokens;
  const int32_t* visited;   // (B, Hkv, n); numbers that are not a bucket are empty slots
  const int32_t* offsets;   // (B, Hkv, buckets + 1)
  const int32_t* key_ids;   // (B, Hkv, listed)
  const int64_t *first, *covered;  // (B)
  int32_t* indices;         // (B, Hkv, capacity)
  int32_t* counts;          // (B, Hkv)
};
void list_buckets(const BucketLists&);

}  // namespace sparse
