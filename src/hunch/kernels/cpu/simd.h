// The widest vector unit the compiler was told about.
//
// Every variant offers the same names: its own (VECTOR_UNIT), P lanes of float (vf), RT rows per tile,
// Weights (a group of 32 inputs of P channels), and what tile_generic.h needs (on NEON, tile_neon.h takes its place).
#pragma once

#if defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_plain.h"
#endif
