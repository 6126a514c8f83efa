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

// The inputs of a group that a product takes: K6 has a scale for each half.
enum class Span { WHOLE, FIRST, SECOND };
constexpr int num_quads(Span span) { return span == Span::WHOLE ? 8 : 4; }

constexpr int GROUP = 32;      // inputs that share a scale, of weights and of activations
constexpr int ROW_CHUNK = 64;  // rows one work item computes

}  // namespace hunch
