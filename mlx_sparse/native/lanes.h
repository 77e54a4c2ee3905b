// Vector helpers of the current instruction set: partial loads and stores, type conversions, prefetching.
//
// A file that includes this header must not call a function template or an inline function of another header. The
// linker keeps one copy for all instruction sets, which may contain instructions that this machine lacks.
#pragma once

#include "kernels.h"

#if defined(SPARSE_AVX512)
#include "simd_avx512.h"
#define SPARSE_SIMD kAvx512
#define SPARSE_TILES kAvx512Tiles
#define SPARSE_NAME "avx512"
#elif defined(SPARSE_AVX2)
#include "simd_avx2.h"
#define SPARSE_SIMD kAvx2
#define SPARSE_TILES kAvx2Tiles
#define SPARSE_NAME "avx2"
#elif defined(SPARSE_NEON)
#include "simd_neon.h"
#define SPARSE_SIMD kNeon
#define SPARSE_TILES kNeonTiles
#define SPARSE_NAME "neon"
#else
#include "simd_scalar.h"
#define SPARSE_SIMD kScalar
#define SPARSE_TILES kScalarTiles
#define SPARSE_NAME "scalar"
#endif

namespace {

constexpr int kLine = 64;  // bytes
constexpr int kRowsAhead = 8;

// Loads the first n numbers, 0 < n <= W, and zeros after them.
template <class T>
inline F load_part(const T* p, int n) {
  if (n >= W) return load(p);
  T part[W] = {};
  for (int i = 0; i < n; i++) part[i] = p[i];
  return load(part);
}

template <class T>
inline void store_part(T* p, F x, int n) {
  if (n >= W) return store(p, x);
  T part[W];
  store(part, x);
  for (int i = 0; i < n; i++) p[i] = part[i];
}

template <class T>
void widen(float* out, const void* in, int64_t n) {
  const T* from = static_cast<const T*>(in);
  for (int64_t i = 0; i < n; i += W) {
    const int part = n - i < W ? int(n - i) : W;
    store_part(out + i, load_part(from + i, part), part);
  }
}

template <class T>
void narrow(void* out, const float* in, int64_t n) {
  T* to = static_cast<T*>(out);
  for (int64_t i = 0; i < n; i += W) {
    const int part = n - i < W ? int(n - i) : W;
    store_part(to + i, load_part(in + i, part), part);
  }
}

inline void prefetch(const void* p, int64_t bytes) {
  const char* line = static_cast<const char*>(p);
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(line + i);
}

}  // namespace
