// Exact selection of the largest numbers without sorting. NaN counts as +inf; ties go to the lower index.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace sparse {

// Returns an integer key in the order of the numbers, with NaN as +inf. Equal numbers have equal keys.
inline int32_t key_of(float x) {
  x += 0.0f;  // -0 becomes 0
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  const int32_t key = bits ^ (bits >> 31 & 0x7fffffff);
  return x != x ? 0x7f800000 : key;
}

// Writes the indices of the `count` largest of n numbers, ascending. `work` needs space for n.
void largest(const Kernels&, const float* numbers, int64_t n, int64_t count, int32_t* indices, int32_t* work);

// The k largest numbers of a stream of (number, index) with ascending indices. The caller writes numbers above
// `threshold()` at `end_z()` and `end_index()` and then calls `added()`. There is always space for kSlack more numbers.
class Reservoir {
 public:
  static constexpr int64_t kSlack = 256 + 16;
  static int64_t capacity(int64_t k) { return 4 * k + 1024 + kSlack; }

  // z, index and work need space for capacity(k).
  Reservoir(const Kernels& kernels, int64_t k, float* z, int32_t* index, int32_t* work)
      : kernels_(kernels), k_(k), z_(z), index_(index), work_(work) {}

  float threshold() const { return threshold_; }
  float* end_z() { return z_ + size_; }
  int32_t* end_index() { return index_ + size_; }
  void added(int64_t count) {
    size_ += count;
    if (size_ + kSlack > capacity(k_)) prune();
  }
  void add(const float* z, const int32_t* index, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      if (z[i] <= threshold_) continue;
      *end_z() = z[i], *end_index() = index[i];
      added(1);
    }
  }
  // Keeps the k largest numbers, or all if there are fewer, in the order of their indices.
  void prune();
  int64_t size() const { return size_; }
  const int32_t* indices() const { return index_; }
  const float* numbers() const { return z_; }

 private:
  const Kernels& kernels_;
  int64_t k_, size_ = 0;
  float* z_;
  int32_t* index_;
  int32_t* work_;
  float threshold_ = -__builtin_inff();
};

}  // namespace sparse
