#include "select.h"

#include <algorithm>
#include <cstring>

namespace sparse {

namespace {

// Orders as the numbers do, NaN last; equal numbers give equal keys.
uint32_t key_of(float x) {
  if (x != x) return 0xffffffff;
  x += 0.0f;  // -0 becomes 0
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

}  // namespace

void largest(const float* numbers, int64_t n, int64_t count, int32_t* indices, uint64_t* work) {
  for (int64_t i = 0; i < n; i++) work[i] = uint64_t(key_of(numbers[i])) << 32 | uint32_t(~i);
  std::nth_element(work, work + count - 1, work + n, [](uint64_t a, uint64_t b) { return a > b; });
  for (int64_t i = 0; i < count; i++) indices[i] = int32_t(~uint32_t(work[i]));
  std::sort(indices, indices + count);
}

void Reservoir::prune() {
  if (size_ <= k_) return;
  if (k_ == 0) {
    size_ = 0;
    return;
  }
  for (int64_t i = 0; i < size_; i++) work_[i] = key_of(z_[i]);
  std::nth_element(work_, work_ + k_ - 1, work_ + size_, [](uint32_t a, uint32_t b) { return a > b; });
  const uint32_t last = work_[k_ - 1];
  int64_t ties = k_ - std::count_if(work_, work_ + k_, [last](uint32_t key) { return key > last; });
  int64_t kept = 0;
  for (int64_t i = 0; i < size_; i++) {
    const uint32_t key = key_of(z_[i]);
    if (key < last || (key == last && ties-- <= 0)) continue;
    if (key == last) threshold_ = z_[i];
    z_[kept] = z_[i], index_[kept] = index_[i], kept++;
  }
  size_ = kept;
}

}  // namespace sparse
