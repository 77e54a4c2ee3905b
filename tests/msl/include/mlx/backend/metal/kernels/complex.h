// In place of MLX's, whose constructors per address space clang does not know. Arithmetic on complex numbers is left out.
#pragma once
#include <metal_stdlib>
template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T re = 0, T im = 0) : real(re), imag(im) {}
};
typedef complex_t<float> complex64_t;
