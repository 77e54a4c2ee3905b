// C interface of the library, for MLX. mlx_sparse/core/native_call.py declares the same structures for ctypes.
//
// Every function checks the sizes of all buffers, and returns null or the message of an error. The message is valid until
// the next call in the same thread. Calls from several threads may overlap.
#pragma once

#include <cstdint>

extern "C" {

// Contiguous memory. A buffer that a call does not need has no data.
struct SparseBuffer {
  void* data;
  int64_t bytes;
};

// Queries, KV caches and results of a call. Types: 0 float32, 1 float16, 2 bfloat16.
struct SparseAttention {
  int64_t B, Hq, Hkv, L, capacity, length, D, Dv;
  int32_t query_type, type, bias_type;  // of queries and out; of keys and values; of bias
  float scale;
  SparseBuffer queries;       // (B, Hq, L, D) at positions length - L to length - 1
  SparseBuffer keys, values;  // (B, Hkv, capacity, D) and (B, Hkv, capacity, Dv); the first `length` rows are in use
  SparseBuffer left_padding;  // int32 (B), first valid key of each sequence, or no data
  SparseBuffer bias;          // (B, Hq, length), added to the logits if L is 1, or no data
  SparseBuffer out;           // (B, Hq, L, Dv)
  SparseBuffer lse;           // float32 (B, Hq, L)
};

// Parameters of a decode step of SparQ. The scoring keys are `keys_t`, or the other three buffers.
struct SparseSparQ {
  int64_t rank, top_k, local_window, columns, groups;
  SparseBuffer keys_t;                // (B, Hkv, D, columns) in the type of the keys
  SparseBuffer codes, lo, step;       // 4 bits (B, Hkv, D, groups * 64), float16 (B, Hkv, D, groups)
  SparseBuffer center;                // float32 (B, Hkv, D), with `codes`
  SparseBuffer component_weight;      // float32 (B, Hkv, D), or no data
  SparseBuffer value_mean;            // float32 (B, Hkv, Dv) to reallocate, or no data
  SparseBuffer recall;                // float32 (B, Hkv)
};

// Buckets that a decode step of SAAP visits, and its lists: `saap_indices` of mlx_sparse/methods/saap/ops.py.
struct SparseBuckets {
  int64_t B, Hkv, n, buckets, listed, capacity, length, sink_tokens;
  SparseBuffer visited, offsets, key_ids;  // int32 (B, Hkv, n), (B, Hkv, buckets + 1), (B, Hkv, listed)
  SparseBuffer covered, left_padding;      // int32 (B); left_padding may have no data
  SparseBuffer indices, counts;            // int32 (B, Hkv, capacity), (B, Hkv)
};

// Lists of keys or of key blocks.
struct SparseLists {
  int64_t N, block_size;        // block_size is 0 for lists of keys
  SparseBuffer indices, counts;  // int32: see the functions
};

// The version of this interface. It changes with every change of a structure or a function.
int mlx_sparse_abi();

// window: number of last keys that a query attends to; 0 for all keys.
const char* mlx_sparse_dense(const SparseAttention*, int64_t window);
const char* mlx_sparse_sparq(const SparseAttention*, const SparseSparQ*);
// Attends to keys. indices (B, Hkv, N), counts (B, Hkv), or no data if every list has N entries.
const char* mlx_sparse_indices(const SparseAttention*, const SparseLists*);
// Attends to key blocks. indices (B, Hq, R, N), no counts.
const char* mlx_sparse_blocks(const SparseAttention*, const SparseLists*);
// Selects the key blocks of SampleAttention and writes their indices (B, Hq, R, N), where N is the number of key blocks.
const char* mlx_sparse_sample(const SparseAttention*, const SparseLists*, float alpha_column, float alpha_slash,
                              int64_t chunks);
const char* mlx_sparse_buckets(const SparseBuckets*);
}
