#include "select.h"

namespace sparse {

namespace {

// Test for n numbers, in order, if each number is among the `count` largest.
class Membership {
 public:
  Membership(const Kernels& kernels, const float* numbers, int64_t n, int64_t count, int32_t* work) {
    for (int64_t i = 0; i < n; i++) work[i] = key_of(numbers[i]);
    bound_ = kernels.bound_of(work, int(n), int(count));
    int64_t above = 0, reach = 0;
    for (int64_t i = 0; i < n; i++) above += work[i] > bound_, reach += work[i] >= bound_;
    ties_ = reach == count ? reach : count - above;  // number of keys equal to the bound that are selected
  }
  bool next(int32_t key) { return key > bound_ || (key == bound_ && ties_-- > 0); }
  int32_t bound() const { return bound_; }

 private:
  int32_t bound_;
  int64_t ties_;
};

}  // namespace

void largest(const Kernels& kernels, const float* numbers, int64_t n, int64_t count, int32_t* indices, int32_t* work) {
  Membership membership(kernels, numbers, n, count, work);
  for (int64_t i = 0; i < n; i++) {
    if (membership.next(work[i])) *indices++ = int32_t(i);
  }
}

void Reservoir::prune() {
  if (size_ <= k_) return;
  if (k_ == 0) {
    size_ = 0;
    return;
  }
  Membership membership(kernels_, z_, size_, k_, work_);
  int64_t kept = 0;
  float least = 0;
  int32_t least_key = 0x7fffffff;
  for (int64_t i = 0; i < size_; i++) {
    const int32_t key = work_[i];
    const bool keep = membership.next(key);
    if (keep && key <= least_key) least_key = key, least = z_[i];
    z_[kept] = z_[i], index_[kept] = index_[i], kept += keep;
  }
  size_ = kept;
  threshold_ = least;
}

}  // namespace sparse
