// The vectors of the instruction set that is compiled for, and the names of what is made with them.
//
// What includes this must not call a function template or an inline function of another header: the linker would keep
// one copy for all instruction sets, perhaps one that this machine cannot run.
#pragma once

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
