// The Metal standard library for clang on the host. ext_vector_type has the layout and swizzles of MSL's vectors.
// With MSL_TYPED, address spaces are distinct types, and the text is only checked and not run.
#pragma once

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 0x1.fffffep127f
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define INT_MAX 0x7fffffff
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 0xffffffffu
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f

#ifndef MSL_PREPROCESS  // the translator's first pass needs only the macros
#include "abi.h"

typedef unsigned char uchar, uint8_t;
typedef unsigned short ushort, uint16_t;
typedef unsigned int uint, uint32_t;
typedef unsigned long ulong, uint64_t, size_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t, ptrdiff_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#if MSL_TYPED
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define MSL_RAW __attribute__((noinline, convergent, no_sanitize("all")))  // no callbacks: explicit calls of the runtime
#define MSL_INLINE inline __attribute__((always_inline, no_sanitize("all")))

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}  // namespace metal
#define MSL_VECTORS(t) typedef metal::vec<t, 2> t##2; typedef metal::vec<t, 3> t##3; typedef metal::vec<t, 4> t##4;
MSL_VECTORS(float) MSL_VECTORS(half) MSL_VECTORS(bfloat) MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(short)
MSL_VECTORS(ushort) MSL_VECTORS(char) MSL_VECTORS(uchar) MSL_VECTORS(bool)
MSL_VECTORS(long) MSL_VECTORS(ulong)

template <class To, class From>
MSL_INLINE constexpr To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type between different sizes");
  return __builtin_bit_cast(To, x);
}

namespace metal {
using ::as_type;
// ---- type traits
template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool b, class A, class B> using conditional_t = typename conditional<b, A, B>::type;
template <class T> using remove_cv_t = __remove_cv(T);
template <class T> using remove_reference_t = __remove_reference_t(T);
template <class T> using remove_const_t = __remove_const(T);
template <class T> struct remove_cv { using type = remove_cv_t<T>; };
template <class T> struct remove_const { using type = remove_const_t<T>; };
template <class T> struct remove_reference { using type = remove_reference_t<T>; };
template <class T> struct remove_addrspace { using type = T; };
#if MSL_TYPED
template <class T> struct remove_addrspace<device T> { using type = T; };
template <class T> struct remove_addrspace<constant T> { using type = T; };
template <class T> struct remove_addrspace<threadgroup T> { using type = T; };
#endif
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;
#define MSL_TRAIT(name, expr) \
  template <class T> constexpr bool name##_v = expr; template <class T> struct name : bool_constant<expr> {};
MSL_TRAIT(is_floating_point, __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat))
MSL_TRAIT(is_integral, __is_integral(T))
MSL_TRAIT(is_arithmetic, is_floating_point_v<T> || __is_integral(T))
MSL_TRAIT(is_signed, is_floating_point_v<T> || __is_signed(T))
MSL_TRAIT(is_unsigned, __is_unsigned(T))
MSL_TRAIT(is_pointer, __is_pointer(T))
template <class A, class B> constexpr bool is_same_v = __is_same(A, B);
template <class A, class B> struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B> constexpr bool is_convertible_v = __is_convertible_to(A, B);
template <class A, class B> struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};
template <class T> T&& declval();

template <class T> struct numeric_limits;
#define MSL_LIMITS(t, lo, hi, den, inf, nan, eps, dig) \
  template <> struct numeric_limits<t> { \
    static constexpr bool is_signed = t(-1) < t(0), is_integer = !is_floating_point_v<t>, has_infinity = !is_integer; \
    static constexpr int digits = dig; \
    static constexpr t min() { return den; } static constexpr t max() { return hi; } \
    static constexpr t lowest() { return lo; } static constexpr t infinity() { return inf; } \
    static constexpr t quiet_NaN() { return nan; } static constexpr t epsilon() { return eps; } \
  };
#define MSL_INT_LIMITS(t) MSL_LIMITS(t, t(t(-1) < t(0) ? 1ul << (8 * sizeof(t) - 1) : 0), t(t(-1) < t(0) ? ~(1ul << (8 * sizeof(t) - 1)) : ~0ul), \
                                     lowest(), 0, 0, 0, 8 * sizeof(t) - (t(-1) < t(0)))
MSL_LIMITS(float, -FLT_MAX, FLT_MAX, FLT_MIN, INFINITY, NAN, FLT_EPSILON, 24)
MSL_LIMITS(half, half(-65504.f), half(65504.f), half(0x1p-14f), half(INFINITY), half(NAN), half(0x1p-10f), 11)
MSL_LIMITS(bfloat, bfloat(-0x1.fep127f), bfloat(0x1.fep127f), bfloat(0x1p-126f), bfloat(INFINITY), bfloat(NAN), bfloat(0x1p-7f), 8)
MSL_INT_LIMITS(bool) MSL_INT_LIMITS(char) MSL_INT_LIMITS(int8_t) MSL_INT_LIMITS(uchar) MSL_INT_LIMITS(short)
MSL_INT_LIMITS(ushort) MSL_INT_LIMITS(int) MSL_INT_LIMITS(uint) MSL_INT_LIMITS(long) MSL_INT_LIMITS(ulong)

// ---- math: half and bfloat are computed in float and rounded once; vectors are computed element by element
#define MSL_EACH1(f) \
  template <class T, int N> MSL_INLINE auto f(vec<T, N> v) { \
    vec<decltype(f(T())), N> r; for (int i = 0; i < N; ++i) r[i] = f(T(v[i])); return r; }
#define MSL_EACH2(f) \
  template <class T, int N> MSL_INLINE vec<T, N> f(vec<T, N> v, vec<T, N> w) { \
    vec<T, N> r; for (int i = 0; i < N; ++i) r[i] = f(T(v[i]), T(w[i])); return r; } \
  template <class T, int N> MSL_INLINE vec<T, N> f(vec<T, N> v, T w) { return f(v, vec<T, N>(w)); }
#define MSL_MATH1(f, R, e) \
  MSL_INLINE R(float) f(float x) { return e; } \
  MSL_INLINE R(half) f(half a) { float x = a; return R(half)(e); } \
  MSL_INLINE R(bfloat) f(bfloat a) { float x = a; return R(bfloat)(e); } \
  MSL_EACH1(f)
#define MSL_MATH2(f, e) \
  MSL_INLINE float f(float x, float y) { return e; } \
  MSL_INLINE half f(half a, half b) { float x = a, y = b; return half(e); } \
  MSL_INLINE bfloat f(bfloat a, bfloat b) { float x = a, y = b; return bfloat(e); } \
  MSL_EACH2(f)
#define MSL_MATH3(f, e) \
  MSL_INLINE float f(float x, float y, float z) { return e; } \
  MSL_INLINE half f(half a, half b, half c) { float x = a, y = b, z = c; return half(e); } \
  MSL_INLINE bfloat f(bfloat a, bfloat b, bfloat c) { float x = a, y = b, z = c; return bfloat(e); } \
  template <class T, int N> MSL_INLINE vec<T, N> f(vec<T, N> u, vec<T, N> v, vec<T, N> w) { \
    vec<T, N> r; for (int i = 0; i < N; ++i) r[i] = f(T(u[i]), T(v[i]), T(w[i])); return r; }
#define MSL_SAME(t) t
#define MSL_BOOL(t) bool
#define MSL_LIBM(name) MSL_MATH1(name, MSL_SAME, __builtin_##name##f(x))
MSL_LIBM(exp) MSL_LIBM(exp2) MSL_LIBM(log) MSL_LIBM(log2) MSL_LIBM(log10) MSL_LIBM(sin) MSL_LIBM(cos) MSL_LIBM(tan)
MSL_LIBM(asin) MSL_LIBM(acos) MSL_LIBM(atan) MSL_LIBM(sinh) MSL_LIBM(cosh) MSL_LIBM(tanh) MSL_LIBM(asinh)
MSL_LIBM(acosh) MSL_LIBM(atanh) MSL_LIBM(sqrt) MSL_LIBM(floor) MSL_LIBM(ceil) MSL_LIBM(trunc) MSL_LIBM(round)
MSL_LIBM(rint) MSL_LIBM(fabs)
MSL_MATH1(exp10, MSL_SAME, __builtin_powf(10, x))
MSL_MATH1(rsqrt, MSL_SAME, 1 / __builtin_sqrtf(x))
MSL_MATH1(sinpi, MSL_SAME, __builtin_sinf(M_PI_F * x))
MSL_MATH1(cospi, MSL_SAME, __builtin_cosf(M_PI_F * x))
MSL_MATH1(fract, MSL_SAME, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f))
MSL_MATH1(saturate, MSL_SAME, __builtin_fminf(__builtin_fmaxf(x, 0), 1))
MSL_MATH1(sign, MSL_SAME, float((x > 0) - (x < 0)))
MSL_MATH1(isnan, MSL_BOOL, x != x)
MSL_MATH1(isinf, MSL_BOOL, __builtin_fabsf(x) == INFINITY)
MSL_MATH1(isfinite, MSL_BOOL, __builtin_fabsf(x) < INFINITY)
MSL_MATH1(signbit, MSL_BOOL, as_type<uint>(x) >> 31 != 0)
MSL_MATH2(fmax, __builtin_fmaxf(x, y)) MSL_MATH2(fmin, __builtin_fminf(x, y)) MSL_MATH2(fmod, __builtin_fmodf(x, y))
MSL_MATH2(pow, __builtin_powf(x, y)) MSL_MATH2(powr, __builtin_powf(x, y)) MSL_MATH2(atan2, __builtin_atan2f(x, y))
MSL_MATH2(copysign, __builtin_copysignf(x, y)) MSL_MATH2(divide, x / y) MSL_MATH2(step, float(y >= x))
MSL_MATH3(fma, __builtin_fmaf(x, y, z))
MSL_MATH3(mix, x + (y - x) * z)
MSL_MATH3(smoothstep, (x = saturate((z - x) / (y - x)), x * x * (3 - 2 * x)))
MSL_INLINE float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
MSL_INLINE half ldexp(half x, int e) { return half(__builtin_ldexpf(x, e)); }


// ---- functions of integers, and functions of floats and integers
template <class T> MSL_INLINE T max(T a, T b) {
  if constexpr (is_floating_point_v<T>) return fmax(a, b); else return a < b ? b : a;
}
template <class T> MSL_INLINE T min(T a, T b) {
  if constexpr (is_floating_point_v<T>) return fmin(a, b); else return b < a ? b : a;
}
template <class T> MSL_INLINE T abs(T a) {
  if constexpr (is_floating_point_v<T>) return fabs(a); else return a < T(0) ? T(-a) : a;
}
template <class T> MSL_INLINE T popcount(T x) { return T(__builtin_popcountl(ulong(x) & (~0ul >> (64 - 8 * sizeof(T))))); }
template <class T> MSL_INLINE T clz(T x) {
  ulong bits = ulong(x) << (64 - 8 * sizeof(T));
  return bits ? T(__builtin_clzl(bits)) : T(8 * sizeof(T));
}
template <class T> MSL_INLINE T ctz(T x) { return x ? T(__builtin_ctzl(ulong(x))) : T(8 * sizeof(T)); }
template <class T> MSL_INLINE T reverse_bits(T x) { return T(__builtin_bitreverse64(ulong(x)) >> (64 - 8 * sizeof(T))); }
template <class T> MSL_INLINE T mulhi(T a, T b) { return T((__int128(a) * b) >> (8 * sizeof(T))); }
template <class T> MSL_INLINE T extract_bits(T x, uint offset, uint bits) {
  return bits ? T(T(x << (8 * sizeof(T) - bits - offset)) >> (8 * sizeof(T) - bits)) : T(0);
}
MSL_EACH2(max) MSL_EACH2(min) MSL_EACH1(abs) MSL_EACH1(popcount) MSL_EACH1(clz) MSL_EACH1(ctz) MSL_EACH1(reverse_bits)
template <class T> MSL_INLINE T max3(T a, T b, T c) { return max(a, max(b, c)); }
template <class T> MSL_INLINE T min3(T a, T b, T c) { return min(a, min(b, c)); }
template <class T> MSL_INLINE T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
template <class T, int N> MSL_INLINE vec<T, N> clamp(vec<T, N> x, T lo, T hi) { return min(max(x, lo), hi); }
template <class T> MSL_INLINE T select(T a, T b, bool c) { return c ? b : a; }
template <class T, class C, int N> MSL_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<C, N> c) {
  for (int i = 0; i < N; ++i) a[i] = c[i] ? b[i] : a[i];
  return a;
}
template <class C, int N> MSL_INLINE bool any(vec<C, N> c) { bool r = false; for (int i = 0; i < N; ++i) r |= c[i] != 0; return r; }
template <class C, int N> MSL_INLINE bool all(vec<C, N> c) { bool r = true; for (int i = 0; i < N; ++i) r &= c[i] != 0; return r; }
MSL_INLINE bool any(bool c) { return c; }
MSL_INLINE bool all(bool c) { return c; }
template <class T, int N> MSL_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T r = a[0] * b[0];
  for (int i = 1; i < N; ++i) r += a[i] * b[i];
  return r;
}
template <class T, int N> MSL_INLINE T length_squared(vec<T, N> a) { return dot(a, a); }
template <class T, int N> MSL_INLINE T length(vec<T, N> a) { return sqrt(dot(a, a)); }
namespace fast { using namespace metal; }     // precision is not modeled: fast equals precise
namespace precise { using namespace metal; }
struct os_log {
  template <class... A> constexpr os_log(A...) {}
  template <class... A> void log_debug(A...) const {}
};

// ---- barriers and simdgroup operations: each lane passes its operand, and the runtime combines the operands of all lanes
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8 };
MSL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
#define MSL_AT msl::site at = msl::site::here()
MSL_RAW inline void threadgroup_barrier(mem_flags f, MSL_AT) { msl_barrier(int(f), at); }
MSL_RAW inline void simdgroup_barrier(mem_flags f, MSL_AT) {
  msl_collective("simdgroup_barrier", nullptr, nullptr, int(f), at);
}
}  // namespace metal

namespace msl {
struct add { template <class T> static T of(T a, T b) { return a + b; } };
struct multiply { template <class T> static T of(T a, T b) { return a * b; } };
struct larger { template <class T> static T of(T a, T b) { return metal::max(a, b); } };
struct smaller { template <class T> static T of(T a, T b) { return metal::min(a, b); } };
struct bit_and { template <class T> static T of(T a, T b) { return a & b; } };
struct bit_or { template <class T> static T of(T a, T b) { return a | b; } };
struct bit_xor { template <class T> static T of(T a, T b) { return a ^ b; } };

template <class T, class Op, unsigned Width>  // lane i with lane i^1, then i^2, i^4, ...: probably Apple's order
MSL_RAW void reduce(void** operands, unsigned active) {
  T value[32];
  for (unsigned i = 0; i < 32; ++i) if (active >> i & 1) value[i] = *static_cast<T*>(operands[i]);
  unsigned have = active;
  for (unsigned k = 1; k < Width; k *= 2)
    for (unsigned i = 0; i < 32; i += 2 * k) {
      bool low = have >> i & 1, high = have >> (i + k) & 1;
      if (high) value[i] = low ? Op::of(value[i], value[i + k]) : value[i + k];
      have |= unsigned(high) << i;
    }
  for (unsigned i = 0; i < 32; ++i) if (active >> i & 1) *static_cast<T*>(operands[i]) = value[i & ~(Width - 1)];
}
template <class T, class Op, bool Inclusive>
MSL_RAW void scan(void** operands, unsigned active) {
  T sum = T(__is_same(Op, multiply));
  for (unsigned i = 0; i < 32; ++i) {
    if (!(active >> i & 1)) continue;
    T mine = *static_cast<T*>(operands[i]), next = Op::of(sum, mine);
    *static_cast<T*>(operands[i]) = Inclusive ? next : sum;
    sum = next;
  }
}
template <class T> struct parcel { T value, fill; unsigned from; };  // from is a lane, or 32 + the lane whose fill is used
template <class T>
MSL_RAW void deliver(void** operands, unsigned active) {
  T out[32];
  for (unsigned i = 0; i < 32; ++i) {
    if (!(active >> i & 1)) continue;
    unsigned from = static_cast<parcel<T>*>(operands[i])->from;
    if (from >= 64 || !(active >> (from & 31) & 1)) return msl_inactive(i, from < 64 ? from & 31 : from - 64);
    auto* source = static_cast<parcel<T>*>(operands[from & 31]);
    out[i] = from < 32 ? source->value : source->fill;
  }
  for (unsigned i = 0; i < 32; ++i) if (active >> i & 1) static_cast<parcel<T>*>(operands[i])->value = out[i];
}
template <class T>
MSL_INLINE T together(const char* what, T x, combine_t combine, site at) {
  msl_collective(what, &x, combine, 0, at);
  return x;
}
template <class T>
MSL_INLINE T fetch(const char* what, T x, T fill, unsigned from, site at) {
  parcel<T> p = {x, fill, from};
  msl_collective(what, &p, deliver<T>, 0, at);
  return p.value;
}
}  // namespace msl

namespace metal {
#define MSL_REDUCE(f, Op) \
  template <class T> MSL_RAW T simd_##f(T x, MSL_AT) { return msl::together("simd_" #f, x, msl::reduce<T, msl::Op, 32>, at); } \
  template <class T> MSL_RAW T quad_##f(T x, MSL_AT) { return msl::together("quad_" #f, x, msl::reduce<T, msl::Op, 4>, at); }
MSL_REDUCE(sum, add) MSL_REDUCE(product, multiply) MSL_REDUCE(max, larger) MSL_REDUCE(min, smaller)
MSL_REDUCE(and, bit_and) MSL_REDUCE(or, bit_or) MSL_REDUCE(xor, bit_xor)
#define MSL_SCAN(f, Op, inclusive) \
  template <class T> MSL_RAW T simd_prefix_##f(T x, MSL_AT) { \
    return msl::together("simd_prefix_" #f, x, msl::scan<T, msl::Op, inclusive>, at); }
MSL_SCAN(inclusive_sum, add, true) MSL_SCAN(exclusive_sum, add, false)
MSL_SCAN(inclusive_product, multiply, true) MSL_SCAN(exclusive_product, multiply, false)
#define MSL_FETCH(f, n, from) \
  template <class T> MSL_RAW T f(T x, n, MSL_AT) { unsigned lane = msl_lane(); return msl::fetch(#f, x, x, from, at); }
MSL_FETCH(simd_shuffle, ushort to, to < 32 ? to : 64u + to)
MSL_FETCH(simd_shuffle_xor, ushort mask, (lane ^ mask) < 32 ? lane ^ mask : 64u + (lane ^ mask))
MSL_FETCH(simd_shuffle_down, ushort by, lane + by < 32 ? lane + by : lane)
MSL_FETCH(simd_shuffle_up, ushort by, lane >= by ? lane - by : lane)
MSL_FETCH(simd_shuffle_rotate_down, ushort by, (lane + by) % 32)
MSL_FETCH(simd_shuffle_rotate_up, ushort by, (lane - by) % 32)
MSL_FETCH(simd_broadcast, ushort to, to < 32 ? to : 64u + to)
MSL_FETCH(quad_shuffle, ushort to, (lane & ~3u) + (to & 3))
MSL_FETCH(quad_shuffle_xor, ushort mask, lane ^ (mask & 3))
MSL_FETCH(quad_broadcast, ushort to, (lane & ~3u) + (to & 3))
template <class T> MSL_RAW T simd_shuffle_and_fill_down(T x, T fill, ushort by, MSL_AT) {
  return msl::fetch("simd_shuffle_and_fill_down", x, fill, msl_lane() + by, at);
}
template <class T> MSL_RAW T simd_shuffle_and_fill_up(T x, T fill, ushort by, MSL_AT) {
  unsigned lane = msl_lane();
  return msl::fetch("simd_shuffle_and_fill_up", x, fill, lane >= by ? lane - by : 64 + lane - by, at);
}
struct simd_vote {
  typedef ulong vote_t;
  vote_t bits;
  explicit constexpr simd_vote(vote_t b = 0) : bits(b) {}
  explicit constexpr operator vote_t() const { return bits; }
  bool any() const { return bits != 0; }
  bool all() const { return bits == 0xffffffff; }
};
MSL_RAW inline simd_vote simd_ballot(bool x, MSL_AT) {
  return simd_vote(msl::together("simd_ballot", ulong(x) << msl_lane(), msl::reduce<ulong, msl::bit_or, 32>, at));
}
MSL_RAW inline simd_vote simd_active_threads_mask(MSL_AT) { return simd_ballot(true, at); }
MSL_RAW inline bool simd_any(bool x, MSL_AT) { return msl::together("simd_any", x, msl::reduce<bool, msl::bit_or, 32>, at); }
MSL_RAW inline bool simd_all(bool x, MSL_AT) { return msl::together("simd_all", x, msl::reduce<bool, msl::bit_and, 32>, at); }
MSL_RAW inline bool simd_is_first(MSL_AT) { return ulong(simd_ballot(true, at)) << (63 - msl_lane()) == 1ul << 63; }
template <class T> MSL_RAW T simd_broadcast_first(T x, MSL_AT) {
  return simd_broadcast(x, ctz(uint(ulong(simd_ballot(true, at)))), at);
}

// ---- 8x8 matrices: each lane has two adjacent elements of a row, at the positions that MLX's kernels expect
template <class T, int R = 8, int C = 8>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8 && is_floating_point_v<T>, "only 8x8 of float, half and bfloat exist");
  vec<T, 2> elements;
  simdgroup_matrix() {}
  explicit simdgroup_matrix(T diagonal) {
    for (int j = 0; j < 2; ++j) elements[j] = row() == column() + j ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
  static int row(unsigned lane = msl_lane()) { return (lane / 4 & 4) + lane / 2 % 4; }
  static int column(unsigned lane = msl_lane()) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;
template <class T, int R, int C>
MSL_RAW simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, R, C> m;
  m.elements = vec<T, 2>(x);
  return m;
}
}  // namespace metal

namespace msl {
template <class D, class A, class B, class C> struct product {
  metal::simdgroup_matrix<D> d; metal::simdgroup_matrix<A> a; metal::simdgroup_matrix<B> b; metal::simdgroup_matrix<C> c;
};
template <class M, class P> MSL_RAW void unpack(M P::*member, void** operands, float (&out)[8][8]) {
  for (unsigned i = 0; i < 32; ++i)
    for (int j = 0; j < 2; ++j) out[M::row(i)][M::column(i) + j] = float((static_cast<P*>(operands[i])->*member).elements[j]);
}
template <class D, class P>
MSL_RAW void matrix_product(void** operands, unsigned active) {
  if (~active) return msl_inactive(__builtin_ctz(active), __builtin_ctz(~active));
  float a[8][8], b[8][8], c[8][8];
  unpack(&P::a, operands, a);
  unpack(&P::b, operands, b);
  unpack(&P::c, operands, c);
  for (unsigned i = 0; i < 32; ++i)
    for (int j = 0; j < 2; ++j) {
      int row = decltype(P::d)::row(i), column = decltype(P::d)::column(i) + j;
      float sum = c[row][column];
      for (int k = 0; k < 8; ++k) sum += a[row][k] * b[k][column];
      static_cast<P*>(operands[i])->d.elements[j] = D(sum);
    }
}
}  // namespace msl

namespace metal {
template <class D, class A, class B, class C>
MSL_RAW void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b,
                                           simdgroup_matrix<C> c, MSL_AT) {
  msl::product<D, A, B, C> p = {d, a, b, c};
  msl_collective("simdgroup_multiply_accumulate", &p, msl::matrix_product<D, msl::product<D, A, B, C>>, 0, at);
  d = p.d;
}
template <class D, class A, class B>
MSL_RAW void simdgroup_multiply(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b, MSL_AT) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), at);
}
#if MSL_TYPED
#define MSL_TOUCH(p, direction, atomic) (void)at  // 0 read, 1 write, 2 both
#else
#define MSL_TOUCH(p, direction, atomic) msl_access(p, sizeof(*(p)), direction, atomic, at)
#endif
#define MSL_TRANSFER(f, m_type, direction, transfer) \
  template <class T, class P> \
  MSL_RAW void f(m_type m, P p, ulong stride = 8, ulong2 origin = 0, bool transpose = false, MSL_AT) { \
    msl_collective(#f, nullptr, nullptr, 0, at); \
    for (int j = 0; j < 2; ++j) { \
      ulong row = m.row(), column = m.column() + j; \
      auto q = p + (origin.y + (transpose ? column : row)) * stride + origin.x + (transpose ? row : column); \
      MSL_TOUCH(q, direction, 0); \
      transfer; \
    } \
  }
MSL_TRANSFER(simdgroup_load, simdgroup_matrix<T>&, 0, m.elements[j] = *q)
MSL_TRANSFER(simdgroup_store, simdgroup_matrix<T>, 1, *q = m.elements[j])

// ---- atomics: one operating-system thread runs everything, so plain code that notifies the runtime is atomic
enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
template <class P> using atomic_value_t = remove_cv_t<remove_reference_t<decltype(0 ? declval<P>()->value : declval<P>()->value)>>;
template <class P> MSL_RAW auto atomic_load_explicit(P p, memory_order, MSL_AT) {
  MSL_TOUCH(&p->value, 0, 1);
  auto x = p->value;
  return x;
}
template <class P, class T> MSL_RAW void atomic_store_explicit(P p, T x, memory_order, MSL_AT) {
  MSL_TOUCH(&p->value, 1, 1);
  p->value = x;
}
#define MSL_ATOMIC(f, e) \
  template <class P, class T> MSL_RAW auto atomic_##f##_explicit(P p, T operand, memory_order, MSL_AT) { \
    MSL_TOUCH(&p->value, 2, 1); \
    auto old = p->value; \
    decltype(old) x = operand; \
    p->value = e; \
    return old; \
  }
MSL_ATOMIC(exchange, x) MSL_ATOMIC(fetch_add, old + x) MSL_ATOMIC(fetch_sub, old - x) MSL_ATOMIC(fetch_and, old & x)
MSL_ATOMIC(fetch_or, old | x) MSL_ATOMIC(fetch_xor, old ^ x) MSL_ATOMIC(fetch_max, max(old, x))
MSL_ATOMIC(fetch_min, min(old, x))
template <class P, class E, class T>
MSL_RAW bool atomic_compare_exchange_weak_explicit(P p, E expected, T desired, memory_order, memory_order, MSL_AT) {
  MSL_TOUCH(&p->value, 2, 1);
  bool same = p->value == *expected;
  if (same) p->value = desired;
  else *expected = p->value;
  return same;
}
}  // namespace metal

// ---- functions that translated text calls
namespace msl {
template <class V> struct scalar_of { using type = V; static constexpr int count = 1; };
template <class T, int N> struct scalar_of<T __attribute__((ext_vector_type(N)))> { using type = T; static constexpr int count = N; };
template <class T> struct scalar_of<metal::atomic<T>> : scalar_of<T> {};
template <class T, int N> struct scalar_of<T[N]> : scalar_of<T> {};

template <class V, class X> MSL_INLINE constexpr void put(V& v, int& at, X x) {
  if constexpr (scalar_of<X>::count == 1) v[at++] = static_cast<typename scalar_of<V>::type>(x);
  else for (int i = 0; i < scalar_of<X>::count; ++i) v[at++] = static_cast<typename scalar_of<V>::type>(x[i]);
}
template <class V, class... X> MSL_INLINE constexpr V make(X... x) {  // float4(a, b.xyz), float4(int4), ...
  static_assert((... + scalar_of<X>::count) == scalar_of<V>::count || (sizeof...(X) == 1 && (... && (scalar_of<X>::count == 1))),
                "a vector is made of as many scalars as it holds, or of one");
  V v = {};
  int at = 0;
  (put(v, at, x), ...);
  if (at == 1) for (int i = 1; i < scalar_of<V>::count; ++i) v[i] = v[0];
  return v;
}
template <class V> MSL_INLINE constexpr V make() { return V{}; }

template <class T> constexpr int granule = __is_class(T) ? alignof(T) : sizeof(typename scalar_of<T>::type);
template <class T> constexpr parameter describe(const char* name, int index, bool constant_space, bool optional) {
  using pointee = __remove_pointer(__remove_reference_t(T));
  using scalar = typename scalar_of<__remove_cv(pointee)>::type;
  char code = __is_class(scalar) ? 's' : __is_same(scalar, float) ? 'f' : __is_same(scalar, half) ? 'h'
      : __is_same(scalar, bfloat) ? 'b' : __is_same(scalar, bool) ? '?' : __is_signed(scalar) ? 'i' : 'u';
  return {name, index, constant_space || __is_const(pointee), optional, int(sizeof(scalar)), code};
}
template <class T> MSL_INLINE T given(char* const& p) {
  if constexpr (__is_pointer(T)) return reinterpret_cast<T>(p);
  else return reinterpret_cast<T>(*p);
}
template <class T> MSL_INLINE T given(const unsigned (&v)[3]) {
  if constexpr (scalar_of<T>::count == 1) return T(v[0]);
  else { T r; for (int i = 0; i < scalar_of<T>::count; ++i) r[i] = v[i]; return r; }
}
template <int I, class A, class... B> struct nth : nth<I - 1, B...> {};
template <class A, class... B> struct nth<0, A, B...> { using type = A; };
template <class F> struct argument;
template <class... A> struct argument<void(A...)> { template <int I> using type = typename nth<I, A...>::type; };
}  // namespace msl
#endif
