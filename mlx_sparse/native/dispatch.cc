#include "kernels.h"

#include <atomic>
#include <cstring>

#if defined(SPARSE_X86)
#include <cpuid.h>
#endif

namespace sparse {

namespace {

#if defined(SPARSE_X86)
bool has_avx2() {
  unsigned a, b, c, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && c >> 29 & 1;
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

bool usable(const Kernels& kernels) {
#if defined(SPARSE_X86)
  if (&kernels == &kAvx512) return has_avx512();
  if (&kernels == &kAvx2) return has_avx2();
#endif
  (void)kernels;
  return true;
}

// In order of speed, the fastest first.
const Kernels* const kAll[] = {
#if defined(SPARSE_X86)
    &kAvx512,
    &kAvx2,
#elif defined(SPARSE_ARM)
    &kNeon,
#endif
    &kScalar,
};

const Kernels* best() {
  for (const Kernels* each : kAll) {
    if (usable(*each)) return each;
  }
  return &kScalar;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* now = chosen.load(std::memory_order_acquire);
  if (!now) chosen.store(now = best(), std::memory_order_release);
  return *now;
}

bool limit_kernels(const char* name) {
  for (const Kernels* each : kAll) {
    if (name && (std::strcmp(name, each->name) || !usable(*each))) continue;
    chosen.store(name ? each : best(), std::memory_order_release);
    return true;
  }
  return false;
}

}  // namespace sparse
