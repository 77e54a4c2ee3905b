// In place of MLX's when run: there its specialisations per address space are one and the same.
#pragma once
#include <metal_stdlib>
#if MSL_TYPED
#include_next "mlx/backend/metal/kernels/steel/utils/type_traits.h"
#else
namespace metal {
template <typename T> struct is_empty : bool_constant<__is_empty(T)> {};
template <typename T> constexpr bool is_empty_v = __is_empty(T);
template <typename... T> struct make_void { typedef void type; };
template <typename... T> using void_t = typename make_void<T...>::type;
template <class T> struct is_static : bool_constant<__is_empty(T)> {};
template <typename T> using pointer_element_t = remove_cv_t<__remove_pointer(T)>;
template <typename T> struct pointer_element { using type = pointer_element_t<T>; };
}  // namespace metal
#endif
