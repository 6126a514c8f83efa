// The tiles of a quantised product for NEON, by hand: compilers copy and spill where every slot
// of the two arithmetic pipes counts. Each computes what tile_generic.h spells out, with
//   p = fma(-MAGIC * d, MAGIC + sum of w * a, d);  acc = fma(acc, p, d_a);  acc = fma(acc, m, sum_a)
//
// This file has what does not depend on how the products are computed; that is in tile_dot.h or, where
// the CPU has matrix instructions, in tile_i8mm.h. Both give the same bits. All integer work of a group
// comes before its float work: changing between the two kinds stalls the pipes. Values that are needed
// often are loaded again, because a load takes no arithmetic slot and a copy does.
#pragma once
#include <cstdint>

#include "gemm.h"
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "tile_i8mm.h"
#else
#include "tile_dot.h"
#endif

namespace hunch {

// An integer sum s counted up from the bits of 1.5 * 2^23 reads as the float 1.5 * 2^23 + s, and
// fma(-1.5 * 2^23 * d, that, d) is then s * d rounded once: no conversion, no subtraction.
constexpr float MAGIC = 12582912.0f;

struct TileConstants {
    int32_t magic[8];
    float minus_magic[4];
    uint8_t low_nibbles[16];
    int32_t fine_magic[8];  // magic / 64: high parts are multiplied by 64 when they are summed
    uint8_t high_bits[16];  // the numbers of K6
    uint8_t bit[8][16];     // bit i, of INT5's signs
};
#define HUNCH_16(x) {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
alignas(16) constexpr TileConstants TILE_CONSTANTS = {
    {0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000},
    {-MAGIC, -MAGIC, -MAGIC, -MAGIC},
    HUNCH_16(15),
    {0x12D0000, 0x12D0000, 0x12D0000, 0x12D0000, 0x12D0000, 0x12D0000, 0x12D0000, 0x12D0000},
    HUNCH_16(0xFC),
    {HUNCH_16(1), HUNCH_16(2), HUNCH_16(4), HUNCH_16(8), HUNCH_16(16), HUNCH_16(32), HUNCH_16(64),
     HUNCH_16(128)}};

// Steps that EACH of the product's file takes for every vector.
#define HUNCH_CLEAR(acc, s, p, d, m, lane) "movi v" acc ".4s, #0\n"
#define HUNCH_SHIFT(acc, s, p, d, m, lane) "shl v" s ".4s, v" s ".4s, #6\n"
#define HUNCH_CONVERT(acc, s, p, d, m, lane) "scvtf v" s ".4s, v" s ".4s\n"

// How each layout brings its weights to v16-23, d to v28, m to v29 and -MAGIC * d to `offset`.
#define HUNCH_LOAD_UNPACKED                                 \
    "ldp q16, q17, [%[w]]\n ldp q18, q19, [%[w], #32]\n"    \
    "ldp q20, q21, [%[w], #64]\n ldp q22, q23, [%[w], #96]\n" \
    "ldp q28, q29, [%[w], #128]\n add %[offset], %[w], #160\n" \
    "add %[w], %[w], #176\n"
#define HUNCH_LOAD_INT4                                     \
    "ldp d28, d29, [%[w]]\n ldp q30, q31, [%[constants], #32]\n" \
    "ldp q24, q25, [%[w], #16]\n ldp q26, q27, [%[w], #48]\n" \
    "fcvtl v28.4s, v28.4h\n fcvtl v29.4s, v29.4h\n"         \
    "and v16.16b, v24.16b, v31.16b\n ushr v20.16b, v24.16b, #4\n" \
    "and v17.16b, v25.16b, v31.16b\n ushr v21.16b, v25.16b, #4\n" \
    "and v18.16b, v26.16b, v31.16b\n ushr v22.16b, v26.16b, #4\n" \
    "and v19.16b, v27.16b, v31.16b\n ushr v23.16b, v27.16b, #4\n" \
    "fmul v30.4s, v28.4s, v30.4s\n str q30, [%[offset]]\n"  \
    "prfm pldl1keep, [%[w], #1280]\n prfm pldl1keep, [%[w], #1344]\n" \
    "add %[w], %[w], #80\n"
#define HUNCH_LOAD_INT8                                     \
    "ldr d28, [%[w]], #8\n ldr q30, [%[constants], #32]\n"  \
    "ldp q16, q17, [%[w]]\n ldp q18, q19, [%[w], #32]\n"    \
    "ldp q20, q21, [%[w], #64]\n ldp q22, q23, [%[w], #96]\n" \
    "fcvtl v28.4s, v28.4h\n fmul v30.4s, v28.4s, v30.4s\n str q30, [%[offset]]\n" \
    "prfm pldl1keep, [%[w], #1280]\n prfm pldl1keep, [%[w], #1344]\n" \
    "prfm pldl1keep, [%[w], #1408]\n add %[w], %[w], #128\n"

// 20 bytes of a channel, nibbles and signs, to numbers of 5 bits: a byte's high half repeats its sign.
#define HUNCH_FIVE_BITS                                     \
    "ldr q31, [%[w], #64]\n ldr q29, [%[constants], #48]\n" \
    "ldp q16, q17, [%[constants], #112]\n ldp q18, q19, [%[constants], #144]\n" \
    "ldp q20, q21, [%[constants], #176]\n ldp q22, q23, [%[constants], #208]\n" \
    "ldp q24, q25, [%[w]]\n ldp q26, q27, [%[w], #32]\n"    \
    "cmtst v16.16b, v16.16b, v31.16b\n cmtst v20.16b, v20.16b, v31.16b\n" \
    "cmtst v17.16b, v17.16b, v31.16b\n cmtst v21.16b, v21.16b, v31.16b\n" \
    "cmtst v18.16b, v18.16b, v31.16b\n cmtst v22.16b, v22.16b, v31.16b\n" \
    "cmtst v19.16b, v19.16b, v31.16b\n cmtst v23.16b, v23.16b, v31.16b\n" \
    "bit v16.16b, v24.16b, v29.16b\n sri v20.16b, v24.16b, #4\n" \
    "bit v17.16b, v25.16b, v29.16b\n sri v21.16b, v25.16b, #4\n" \
    "bit v18.16b, v26.16b, v29.16b\n sri v22.16b, v26.16b, #4\n" \
    "bit v19.16b, v27.16b, v29.16b\n sri v23.16b, v27.16b, #4\n" \
    "prfm pldl1keep, [%[w], #1280]\n prfm pldl1keep, [%[w], #1344]\n" \
    "add %[w], %[w], #80\n"
#define HUNCH_LOAD_INT5                                     \
    "ldr d28, [%[w]], #8\n ldr q30, [%[constants], #32]\n" HUNCH_FIVE_BITS \
    "fcvtl v28.4s, v28.4h\n fmul v30.4s, v28.4s, v30.4s\n str q30, [%[offset]]\n"
// K formats find their scales at `offset`, expanded: -MAGIC * d, d and (not K6) m.
#define HUNCH_LOAD_K5                                       \
    HUNCH_FIVE_BITS "add %[offset], %[offset], #48\n ldp q28, q29, [%[offset], #16]\n"
#define HUNCH_LOAD_K4                                       \
    "ldr q31, [%[constants], #48]\n add %[offset], %[offset], #48\n" \
    "ldp q24, q25, [%[w]]\n ldp q26, q27, [%[w], #32]\n"    \
    "ldp q28, q29, [%[offset], #16]\n"                      \
    "and v16.16b, v24.16b, v31.16b\n ushr v20.16b, v24.16b, #4\n" \
    "and v17.16b, v25.16b, v31.16b\n ushr v21.16b, v25.16b, #4\n" \
    "and v18.16b, v26.16b, v31.16b\n ushr v22.16b, v26.16b, #4\n" \
    "and v19.16b, v27.16b, v31.16b\n ushr v23.16b, v27.16b, #4\n" \
    "prfm pldl1keep, [%[w], #1280]\n add %[w], %[w], #64\n"
// Half a group: the high bits of three quads are their numbers, the low ones make the fourth.
#define HUNCH_LOAD_K6                                       \
    "ldr q31, [%[constants], #96]\n ldp q24, q25, [%[w]]\n" \
    "ldr q26, [%[w], #32]\n ldr q19, [%[w], #32]\n"         \
    "add %[offset], %[offset], #32\n ldr q28, [%[offset], #16]\n" \
    "sli v19.16b, v25.16b, #2\n and v16.16b, v24.16b, v31.16b\n" \
    "sli v19.16b, v24.16b, #4\n and v17.16b, v25.16b, v31.16b\n" \
    "shl v19.16b, v19.16b, #2\n and v18.16b, v26.16b, v31.16b\n" \
    "prfm pldl1keep, [%[w], #1280]\n add %[w], %[w], #48\n"

// Half a group of TABLE: a table's numbers by the low nibbles of four vectors, then by the high ones.
// The table stands behind the half's -MAGIC * d and d.
#define HUNCH_LOAD_TABLE                                    \
    "add %[offset], %[offset], #48\n ldp q24, q25, [%[w]]\n" \
    "ldp q26, q27, [%[w], #32]\n ldr q30, [%[offset], #32]\n"
#define HUNCH_LOOK_UP                                       \
    "ldr q28, [%[offset], #16]\n"                          \
    "tbl v16.16b, {v30.16b}, v16.16b\n tbl v17.16b, {v30.16b}, v17.16b\n" \
    "tbl v18.16b, {v30.16b}, v18.16b\n tbl v19.16b, {v30.16b}, v19.16b\n"
#define HUNCH_LOAD_LOW_LEVELS                               \
    "ldr q31, [%[constants], #48]\n" HUNCH_LOAD_TABLE      \
    "and v16.16b, v24.16b, v31.16b\n and v17.16b, v25.16b, v31.16b\n" \
    "and v18.16b, v26.16b, v31.16b\n and v19.16b, v27.16b, v31.16b\n" \
    HUNCH_LOOK_UP
#define HUNCH_LOAD_HIGH_LEVELS                              \
    HUNCH_LOAD_TABLE                                        \
    "ushr v16.16b, v24.16b, #4\n ushr v17.16b, v25.16b, #4\n" \
    "ushr v18.16b, v26.16b, #4\n ushr v19.16b, v27.16b, #4\n" \
    HUNCH_LOOK_UP "prfm pldl1keep, [%[w], #1280]\n add %[w], %[w], #64\n"

// A tile: clears the sums, then BODY for every group. SCALES is where a group's scales begin.
#define HUNCH_TILE(R, BODY, SCALES)                                                           \
    HUNCH_TILE_SPACE                                                                          \
    asm volatile(HUNCH_EACH##R(HUNCH_CLEAR) "1:\n" BODY                                       \
                 "add %[a], %[a], #" SCALES " + " HUNCH_SCALES_BYTES "\n"                     \
                 "subs %w[count], %w[count], #1\n b.ne 1b\n" HUNCH_STORES(R)                  \
                 : [w] "+r"(w), [a] "+r"(a), [out] "+r"(out), [count] "+r"(num_groups),       \
                   [offset] "+r"(offset)                                                      \
                 : [constants] "r"(&TILE_CONSTANTS), [stride] "r"((int64_t)stride * 4)        \
                   HUNCH_TILE_OPERANDS                                                        \
                 : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", \
                   "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19",      \
                   "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29",      \
                   "v30", "v31")

static_assert(P == 4 && RT == 8, "the offsets above");
static_assert(tile_group_bytes(false) == (IN_PAIRS ? 384 : 320), "the offsets above");
static_assert(tile_group_bytes(true) == (IN_PAIRS ? 640 : 576), "the offsets above");

// Where -MAGIC * d is kept: in a place of its own, in the panel, or before the expanded scales (the
// tile steps to the next group first).
#define HUNCH_OWN_OFFSET alignas(16) float scratch[4]; float* offset = scratch
#define HUNCH_PANEL_OFFSET const uint8_t* offset = w
#define HUNCH_K_OFFSET const float* offset = scales - 12
#define HUNCH_K6_OFFSET const float* offset = scales - 8

#define HUNCH_ARGUMENTS const uint8_t *w, int num_groups, const uint8_t *a, float *out, int stride
#define HUNCH_K_ARGUMENTS \
    const uint8_t *w, const float *scales, int num_groups, const uint8_t *a, float *out, int stride
#define HUNCH_PANEL(NAME, ARGUMENTS, R, OFFSET, COARSE_TILE, FINE_TILE)                       \
    template <>                                                                               \
    inline void NAME<R, false>(ARGUMENTS) {                                                   \
        OFFSET;                                                                               \
        HUNCH_TILE(R, COARSE_TILE, "256");                                                    \
    }                                                                                         \
    template <>                                                                               \
    inline void NAME<R, true>(ARGUMENTS) {                                                    \
        OFFSET;                                                                               \
        HUNCH_TILE(R, FINE_TILE, "512");                                                      \
    }
#define HUNCH_PLAIN(NAME, R, OFFSET, LOAD, LARGEST, MINIMA)                                   \
    HUNCH_PANEL(NAME, HUNCH_ARGUMENTS, R, OFFSET, HUNCH_COARSE_BODY(R, LOAD, WHOLE, MINIMA),  \
                HUNCH_##LARGEST##_BODY(R, LOAD, WHOLE, MINIMA))
#define HUNCH_K(NAME, R, LOAD)                                                                \
    HUNCH_PANEL(NAME, HUNCH_K_ARGUMENTS, R, HUNCH_K_OFFSET,                                   \
                HUNCH_COARSE_BODY(R, LOAD, WHOLE, MINIMA),                                    \
                HUNCH_FINE_BODY(R, LOAD, WHOLE, MINIMA))
#define HUNCH_K6(R)                                                                           \
    HUNCH_PANEL(tile_k6_panel, HUNCH_K_ARGUMENTS, R, HUNCH_K6_OFFSET,                         \
                HUNCH_COARSE_BODY(R, K6, FIRST, NONE)                                         \
                HUNCH_COARSE_BODY(R, K6, SECOND, NONE),                                       \
                HUNCH_LARGE_BODY(R, K6, FIRST, NONE)                                          \
                HUNCH_LARGE_BODY(R, K6, SECOND, NONE))
#define HUNCH_LEVELS(R)                                                                       \
    HUNCH_PANEL(tile_levels_panel, HUNCH_K_ARGUMENTS, R, HUNCH_K_OFFSET,                      \
                HUNCH_COARSE_BODY(R, LOW_LEVELS, FIRST, NONE)                                 \
                HUNCH_COARSE_BODY(R, HIGH_LEVELS, SECOND, NONE),                              \
                HUNCH_LARGE_BODY(R, LOW_LEVELS, FIRST, NONE)                                  \
                HUNCH_LARGE_BODY(R, HIGH_LEVELS, SECOND, NONE))

template <int R, bool FINE> void tile_int4_panel(HUNCH_ARGUMENTS);
template <int R, bool FINE> void tile_unpacked_panel(HUNCH_ARGUMENTS);
template <int R, bool FINE> void tile_int5_panel(HUNCH_ARGUMENTS);
template <int R, bool FINE> void tile_int8_panel(HUNCH_ARGUMENTS);
template <int R, bool FINE> void tile_k4_panel(HUNCH_K_ARGUMENTS);
template <int R, bool FINE> void tile_k5_panel(HUNCH_K_ARGUMENTS);
template <int R, bool FINE> void tile_k6_panel(HUNCH_K_ARGUMENTS);
template <int R, bool FINE> void tile_levels_panel(HUNCH_K_ARGUMENTS);

#define HUNCH_TILES(R)                                                                        \
    HUNCH_PLAIN(tile_int4_panel, R, HUNCH_OWN_OFFSET, INT4, FINE, MINIMA)                     \
    HUNCH_PLAIN(tile_unpacked_panel, R, HUNCH_PANEL_OFFSET, UNPACKED, FINE, MINIMA)           \
    HUNCH_PLAIN(tile_int5_panel, R, HUNCH_OWN_OFFSET, INT5, FINE, NONE)                       \
    HUNCH_PLAIN(tile_int8_panel, R, HUNCH_OWN_OFFSET, INT8, LARGE, NONE)                      \
    HUNCH_K(tile_k4_panel, R, K4)                                                             \
    HUNCH_K(tile_k5_panel, R, K5)                                                             \
    HUNCH_K6(R)                                                                               \
    HUNCH_LEVELS(R)

HUNCH_TILES(1) HUNCH_TILES(2) HUNCH_TILES(3) HUNCH_TILES(4)
HUNCH_TILES(5) HUNCH_TILES(6) HUNCH_TILES(7) HUNCH_TILES(8)

}  // namespace hunch
