// Inner loops, compiled once per instruction set and element type. Everything after the loads is float32.
#pragma once

#include <cstdint>

namespace sparse {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

enum Type { kTypeFloat, kTypeHalf, kTypeBFloat16 };

inline int64_t size_of(Type type) { return type == kTypeFloat ? 4 : 2; }

constexpr int kBlock = 128;        // keys per call of `attend`
constexpr int kScoreBlock = 1024;  // keys per call of `approximate`
constexpr int kGroup = 64;         // keys per quantization group
constexpr int kHeader = 4;         // bytes of lo and step before the codes
constexpr int kRecord = kHeader + kGroup / 2;  // bytes of a record with 4-bit codes

// Running softmax of query rows of one KV head over blocks of keys.
struct Rows {
  int count;       // number of rows
  int D, Dv;       // head dims of keys and values
  const float* q;  // (count, D), queries times the factor of the logits
  float* output;   // (count, Dv), weighted sum of values so far, relative to `top`
  float* top;      // (count), largest logit so far
  float* sum;      // (count), sum of exponentials, relative to `top`
};

// Additive bias of the logits of one query: `stride` numbers per head. A head never attends to a key whose bias is at most
// `lowest`: docs/spec/sparq.md, (sparq.25).
struct Bias {
  const void* data = nullptr;  // null: no bias
  Type type = kTypeFloat;
  int64_t stride = 0;
  float lowest = 0;
};

// A block of at most kBlock keys: rows `first`, `first` + 1, ... of the planes, or the rows that `index` lists.
struct Keys {
  const void* keys;    // (C, D) of this head
  const void* values;  // (C, Dv)
  const int32_t* index;
  int64_t first;
  int count;
  int next;        // number of keys of the next block, for prefetching
  const int* low;  // row i attends to [low[i], high[i]) of the block; null if every row attends to all keys
  const int* high;
  const Bias* bias = nullptr;  // of the heads of this group, or null
};

// Up to kScoreBlock keys of one chunk of component-major keys.
struct Columns {
  const void* lanes;          // component 0 of the first key
  const void* next;           // component 0 of the first key of the next block, for prefetching
  int64_t stride;             // number of elements from one component to the next
  const int32_t* components;  // (rank)
  int rank;
  int G;
  int count;     // number of keys
  int readable;  // number of keys from the first key to the end of the chunk
};

// Groups of int4 scoring keys. Each component of a group has kGroup 4-bit codes, and lo and step as float16.
struct Codes {
  const uint8_t *codes, *lo, *step;  // of component 0 of the first group
  int64_t code_stride, range_stride;  // number of bytes from one component to the next
  int code_size, range_size;          // number of bytes from one group to the next
  const int32_t* components;  // (rank)
  int rank;
  int G;
  int groups;
  int64_t ahead;  // distance in bytes to the next read, for prefetching
};

// Kernels for one element type.
struct TypeKernels {
  void (*widen)(float* out, const void* in, int64_t n);
  void (*narrow)(void* out, const float* in, int64_t n);
  // Updates the running softmax. `scores` needs space for (count, kBlock).
  void (*attend)(const Rows&, const Keys&, float* scores);
  // The first part of `attend`: computes scores (count, kBlock) = q . k and prefetches the values.
  void (*score)(const Rows&, const Keys&, float* scores);
  // Computes a (G, stride) = q . k over the components. Layout of q: tile of 4 heads, component, head of the tile.
  void (*approximate)(const Columns&, const float* q, float* a, int64_t stride);
};

// Inner loops of prefill. The elements of a vector are query rows: a tile has one line of `width` numbers per key or
// per component, so that no sum is within a vector.
constexpr int kTileLanes = 16;  // widths are multiples of this

struct Tiles {
  // Computes c (m, width) = a (m, k) b (k, width), or += with `add`. Element (i, t) of a is at a[i * row + t * column].
  void (*multiply)(const float* a, int64_t row, int64_t column, const float* b, float* c, int m, int k, int width,
                   bool add);
  // Updates the running softmax of each row with n more logits (n, width), which become exp(logit - top). Multiply the
  // earlier sums by `faded`.
  void (*weigh)(float* logits, int n, int width, float* top, float* sum, float* faded);
  // Computes c (m, width) *= factor (width).
  void (*scale)(float* c, int m, int width, const float* factor);
  // For each row, computes the largest of the logits (n, width), and the sums of exp(logit - largest) over entries with
  // `near` (n, width) equal to 1 and equal to 0.
  void (*masses)(const float* logits, const float* near, int n, int width, float* top, float* inside, float* outside);
  // Multiplies a (width) and b (width) by exp(top - most) * inverse.
  void (*share)(const float* top, const float* most, const float* inverse, int width, float* a, float* b);
};

extern const Tiles kScalarTiles;
extern const Tiles kAvx2Tiles;
extern const Tiles kAvx512Tiles;
extern const Tiles kNeonTiles;

struct Kernels {
  const char* name;
  TypeKernels type[3];  // float, float16, bfloat16
  // Computes the largest of n numbers and the sum of exp(a - largest). With `write`, a becomes exp(a - largest).
  void (*exponentials)(float* a, int n, bool write, float* top, float* sum);
  // Returns the largest bound that at least k of the n keys reach, or any bound that exactly k keys reach.
  int32_t (*bound_of)(const int32_t* keys, int n, int k);
  // Sums factor[g] a[g][j] over g. Sums that are not <= threshold are written to z, with their index in `index`.
  // Returns their number. z and index need space for n and one more vector.
  int (*collect)(const float* a, int64_t stride, const float* factor, int G, int n, int32_t first, float threshold,
                 float* z, int32_t* index);
  // Computes a (G, stride) = q . k over the components of int4 scoring keys. The layout of q is the layout in
  // TypeKernels::approximate. `work` needs space for 4 * rank.
  void (*approximate_codes)(const Codes&, const float* q, float* work, float* a, int64_t stride);
  const Tiles* tiles;
};

extern const Kernels kScalar;
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kNeon;

// Returns the fastest kernels that this machine supports and limit_kernels allows.
const Kernels& kernels();

// Selects the kernels by name, or the fastest for null. Returns false if this machine does not support them.
bool limit_kernels(const char* name);

}  // namespace sparse
