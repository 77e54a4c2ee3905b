// The inner loops, compiled once per instruction set and element type; everything is float32 after the loads.
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

constexpr int kBlock = 128;        // keys that `attend` takes at a time
constexpr int kScoreBlock = 1024;  // keys that `approximate` takes at a time
constexpr int kGroup = 64;         // keys that are coded together
constexpr int kHeader = 4;         // bytes of lo and step, in front of the codes
constexpr int kRecord = kHeader + kGroup / 2;  // with codes of 4 bits

// Query rows of one KV head on their way over blocks of keys: the running softmax of each.
struct Rows {
  int count;       // of rows
  int D;           //
  const float* q;  // (count, D), times the factor of the logits
  float* output;   // (count, D), weighted values so far, relative to `top`
  float* top;      // (count), largest logit so far
  float* sum;      // (count), of exponentials, relative to `top`
};

// A block of at most kBlock keys: rows `first`, `first` + 1, ... of the planes, or those that `index` lists.
struct Keys {
  const void* keys;    // (C, D) of this head
  const void* values;  // (C, D)
  const int32_t* index;
  int64_t first;
  int count;
  int next;        // keys of the block after this one, for prefetching
  const int* low;  // row i attends to [low[i], high[i]) of the block; null where every row attends to all
  const int* high;
};

// Up to kScoreBlock keys of one chunk of component-major keys.
struct Columns {
  const void* lanes;          // component 0 of the first key
  const void* next;           // the same of the block after this one, for prefetching
  int64_t stride;             // lanes: elements from one component to the next
  const int32_t* components;  // (rank)
  int rank;
  int G;
  int count;     // keys
  int readable;  // keys from the first one to the end of the chunk
};

// Groups of coded keys, each component of them a record: lo and step as float16, then kGroup codes of 4 bits.
struct Codes {
  const uint8_t* records;     // of component 0 of the first group
  int64_t stride;             // bytes from one component to the next
  const int32_t* components;  // (rank)
  int rank;
  int G;
  int groups;     //
  int64_t ahead;  // bytes to what is read next, for prefetching
};

// Everything that is done per element of type T.
struct TypeKernels {
  void (*widen)(float* out, const void* in, int64_t n);
  void (*narrow)(void* out, const float* in, int64_t n);
  // Extends the running softmax; `scores` is room for (count, kBlock).
  void (*attend)(const Rows&, const Keys&, float* scores);
  // The first part of that: scores (count, kBlock) = q . k. The values are fetched into the processor's cache
  // meanwhile.
  void (*score)(const Rows&, const Keys&, float* scores);
  // a (G, stride) = q . k over the components; q is (rank, G) in tiles of 4 heads: tile, component, head of the tile.
  void (*approximate)(const Columns&, const float* q, float* a, int64_t stride);
};

// The inner loops of prefill. Vectors lie along query rows: a tile has one line of `width` numbers per key or per
// component, so that neither logits nor softmax ever sum within a vector.
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

struct Kernels {
  const char* name;
  TypeKernels type[3];  // float, float16, bfloat16
  // Largest of n numbers and the sum of exp(a - largest). With `write`, a becomes exp(a - largest).
  void (*exponentials)(float* a, int n, bool write, float* top, float* sum);
  // The largest bound that at least k of the n keys reach; where exactly k do, any such bound.
  int32_t (*bound_of)(const int32_t* keys, int n, int k);
  // Sums factor[g] a[g][j] over g; what is not <= threshold goes with its index to z and index. Returns how many. Needs
  // room for n, and for one vector more.
  int (*collect)(const float* a, int64_t stride, const float* factor, int G, int n, int32_t first, float threshold,
                 float* z, int32_t* index);
  // a (G, stride) = q . k over the components of coded keys; q as in TypeKernels::approximate, `work` is room for 4 * rank.
  void (*approximate_codes)(const Codes&, const float* q, float* work, float* a, int64_t stride);
  const Tiles* tiles;
};

extern const Kernels kScalar;
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kNeon;

// The fastest kernels that this machine runs and that are not above the limit.
const Kernels& kernels();

// Uses the kernels of that name, or the fastest for null; false where this machine has none of that name.
bool limit_kernels(const char* name);

}  // namespace sparse
