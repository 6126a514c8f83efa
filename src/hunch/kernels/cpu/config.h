// Constants and hints that every file shares.
#pragma once

#if defined(__clang__)
#define HUNCH_UNROLL _Pragma("unroll")
#define HUNCH_ROLLED _Pragma("nounroll")
#else
#define HUNCH_UNROLL _Pragma("GCC unroll 16")
#define HUNCH_ROLLED _Pragma("GCC unroll 1")
#endif
// Inner loops that just fit the registers: inlined or unrolled, they would spill.
#define HUNCH_NOINLINE __attribute__((noinline))

namespace hunch {

constexpr int GROUP = 32;      // inputs that share a scale, of weights and of activations
constexpr int ROW_CHUNK = 64;  // rows one work item computes

}  // namespace hunch
