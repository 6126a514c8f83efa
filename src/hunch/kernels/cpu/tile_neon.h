// The tiles of a quantised product for NEON, by hand: compilers copy and spill where every slot
// of the two arithmetic pipes counts. Each computes what tile_generic.h spells out, with
//   p = fma(-MAGIC * d, MAGIC + sum of w * a, d);  acc = fma(acc, p, d_a);  acc = fma(acc, m, sum_a)
//
// Registers: v0-7 sums of the rows, v8-15 integer sums, v16-23 weights (then p), v24-27 activations,
// v28 d, v29 m, v30-31 scales of the rows. All integer work of a group comes before its float work:
// changing between the two kinds stalls the pipes. Values that are needed often are loaded again,
// because a load takes no arithmetic slot and a copy does.
#pragma once
#include <cstdint>

#include "gemm.h"

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

// Two rows' integer sums (s, t) over a group or a half of it; `at` is where the first row's
// activations are.
#define HUNCH_DOT2(s, t, w, x, y, lane)                     \
    "sdot v" s ".4s, v" w ".16b, v" x ".4b[" lane "]\n"     \
    "sdot v" t ".4s, v" w ".16b, v" y ".4b[" lane "]\n"
#define HUNCH_HALF2(s, t, at)                               \
    "ldr q24, [%[a], #" at "]\n ldr q26, [%[a], #" at " + 32]\n" \
    HUNCH_DOT2(s, t, "16", "24", "26", "0") HUNCH_DOT2(s, t, "17", "24", "26", "1") \
    HUNCH_DOT2(s, t, "18", "24", "26", "2") HUNCH_DOT2(s, t, "19", "24", "26", "3")
#define HUNCH_FIRST2(s, t, at) HUNCH_HALF2(s, t, at)
#define HUNCH_SECOND2(s, t, at) HUNCH_HALF2(s, t, at " + 16")
#define HUNCH_WHOLE2(s, t, at)                            \
    "ldp q24, q25, [%[a], #" at "]\n"                       \
    "ldp q26, q27, [%[a], #" at " + 32]\n"                  \
    HUNCH_DOT2(s, t, "16", "24", "26", "0") HUNCH_DOT2(s, t, "17", "24", "26", "1") \
    HUNCH_DOT2(s, t, "18", "24", "26", "2") HUNCH_DOT2(s, t, "19", "24", "26", "3") \
    HUNCH_DOT2(s, t, "20", "25", "27", "0") HUNCH_DOT2(s, t, "21", "25", "27", "1") \
    HUNCH_DOT2(s, t, "22", "25", "27", "2") HUNCH_DOT2(s, t, "23", "25", "27", "3")
#define HUNCH_DOT1(s, w, x, lane) "sdot v" s ".4s, v" w ".16b, v" x ".4b[" lane "]\n"
#define HUNCH_HALF1(s, at)                                  \
    "ldr q24, [%[a], #" at "]\n"                            \
    HUNCH_DOT1(s, "16", "24", "0") HUNCH_DOT1(s, "17", "24", "1") \
    HUNCH_DOT1(s, "18", "24", "2") HUNCH_DOT1(s, "19", "24", "3")
#define HUNCH_FIRST1(s, at) HUNCH_HALF1(s, at)
#define HUNCH_SECOND1(s, at) HUNCH_HALF1(s, at " + 16")
#define HUNCH_WHOLE1(s, at)                               \
    "ldp q24, q25, [%[a], #" at "]\n"                       \
    HUNCH_DOT1(s, "16", "24", "0") HUNCH_DOT1(s, "17", "24", "1") \
    HUNCH_DOT1(s, "18", "24", "2") HUNCH_DOT1(s, "19", "24", "3") \
    HUNCH_DOT1(s, "20", "25", "0") HUNCH_DOT1(s, "21", "25", "1") \
    HUNCH_DOT1(s, "22", "25", "2") HUNCH_DOT1(s, "23", "25", "3")
// Sums of coarse activations count up from `magic`. Fine ones: the high parts of all rows, shifted,
// then the low ones, so that no row waits for its shift; with weights of 8 bits they outgrow MAGIC,
// start at zero and are converted.
#define HUNCH_COARSE2(SPAN, s, t, at) "ldp q" s ", q" t ", [%[constants]]\n" HUNCH_##SPAN##2(s, t, at)
#define HUNCH_COARSE1(SPAN, s, at) "ldr q" s ", [%[constants]]\n" HUNCH_##SPAN##1(s, at)
#define HUNCH_FINE2(SPAN, s, t, at) "ldp q" s ", q" t ", [%[constants], #64]\n" HUNCH_##SPAN##2(s, t, at)
#define HUNCH_FINE1(SPAN, s, at) "ldr q" s ", [%[constants], #64]\n" HUNCH_##SPAN##1(s, at)
#define HUNCH_LARGE2(SPAN, s, t, at) "movi v" s ".4s, #0\n movi v" t ".4s, #0\n" HUNCH_##SPAN##2(s, t, at)
#define HUNCH_LARGE1(SPAN, s, at) "movi v" s ".4s, #0\n" HUNCH_##SPAN##1(s, at)
#define HUNCH_LOW2(SPAN, s, t, at) HUNCH_##SPAN##2(s, t, at " + 256")
#define HUNCH_LOW1(SPAN, s, at) HUNCH_##SPAN##1(s, at " + 256")

// KIND is COARSE, FINE, LARGE or LOW; SPAN is WHOLE, FIRST or SECOND.
#define HUNCH_DOTS1(KIND, SPAN) HUNCH_##KIND##1(SPAN, "8", "0")
#define HUNCH_DOTS2(KIND, SPAN) HUNCH_##KIND##2(SPAN, "8", "9", "0")
#define HUNCH_DOTS3(KIND, SPAN) HUNCH_DOTS2(KIND, SPAN) HUNCH_##KIND##1(SPAN, "10", "64")
#define HUNCH_DOTS4(KIND, SPAN) HUNCH_DOTS2(KIND, SPAN) HUNCH_##KIND##2(SPAN, "10", "11", "64")
#define HUNCH_DOTS5(KIND, SPAN) HUNCH_DOTS4(KIND, SPAN) HUNCH_##KIND##1(SPAN, "12", "128")
#define HUNCH_DOTS6(KIND, SPAN) HUNCH_DOTS4(KIND, SPAN) HUNCH_##KIND##2(SPAN, "12", "13", "128")
#define HUNCH_DOTS7(KIND, SPAN) HUNCH_DOTS6(KIND, SPAN) HUNCH_##KIND##1(SPAN, "14", "192")
#define HUNCH_DOTS8(KIND, SPAN) HUNCH_DOTS6(KIND, SPAN) HUNCH_##KIND##2(SPAN, "14", "15", "192")

// EACH(row of the sums, of the integer sums, of p, register of the row's scale, of its sum, lane)
#define HUNCH_EACH1(X) X("0", "8", "16", "30", "24", "0")
#define HUNCH_EACH2(X) HUNCH_EACH1(X) X("1", "9", "17", "30", "24", "1")
#define HUNCH_EACH3(X) HUNCH_EACH2(X) X("2", "10", "18", "30", "24", "2")
#define HUNCH_EACH4(X) HUNCH_EACH3(X) X("3", "11", "19", "30", "24", "3")
#define HUNCH_EACH5(X) HUNCH_EACH4(X) X("4", "12", "20", "31", "25", "0")
#define HUNCH_EACH6(X) HUNCH_EACH5(X) X("5", "13", "21", "31", "25", "1")
#define HUNCH_EACH7(X) HUNCH_EACH6(X) X("6", "14", "22", "31", "25", "2")
#define HUNCH_EACH8(X) HUNCH_EACH7(X) X("7", "15", "23", "31", "25", "3")

#define HUNCH_CLEAR(acc, s, p, d, m, lane) "movi v" acc ".4s, #0\n"
#define HUNCH_SHIFT(acc, s, p, d, m, lane) "shl v" s ".4s, v" s ".4s, #6\n"
#define HUNCH_OFFSET(acc, s, p, d, m, lane) "ldr q" p ", [%[offset]]\n"
#define HUNCH_CONVERT(acc, s, p, d, m, lane) "scvtf v" s ".4s, v" s ".4s\n"
#define HUNCH_SCALED(acc, s, p, d, m, lane) "fmla v" p ".4s, v" s ".4s, v28.4s\n"
#define HUNCH_TIMES(acc, s, p, d, m, lane) "fmul v" p ".4s, v" s ".4s, v28.4s\n"
#define HUNCH_ADD(acc, s, p, d, m, lane) "fmla v" acc ".4s, v" p ".4s, v" d ".s[" lane "]\n"
#define HUNCH_MINIMUM(acc, s, p, d, m, lane) "fmla v" acc ".4s, v29.4s, v" m ".s[" lane "]\n"
#define HUNCH_NOTHING(acc, s, p, d, m, lane) ""
#define HUNCH_STORE(acc, s, p, d, m, lane) "str q" acc ", [%[out]]\n add %[out], %[out], %[stride]\n"

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
    "ldp q8, q9, [%[constants], #112]\n ldp q10, q11, [%[constants], #144]\n" \
    "ldp q20, q21, [%[constants], #176]\n ldp q22, q23, [%[constants], #208]\n" \
    "ldp q16, q17, [%[w]]\n ldp q18, q19, [%[w], #32]\n"    \
    "ldp q24, q25, [%[w]]\n ldp q26, q27, [%[w], #32]\n"    \
    "cmtst v8.16b, v8.16b, v31.16b\n cmtst v20.16b, v20.16b, v31.16b\n" \
    "cmtst v9.16b, v9.16b, v31.16b\n cmtst v21.16b, v21.16b, v31.16b\n" \
    "cmtst v10.16b, v10.16b, v31.16b\n cmtst v22.16b, v22.16b, v31.16b\n" \
    "cmtst v11.16b, v11.16b, v31.16b\n cmtst v23.16b, v23.16b, v31.16b\n" \
    "bif v16.16b, v8.16b, v29.16b\n sri v20.16b, v24.16b, #4\n" \
    "bif v17.16b, v9.16b, v29.16b\n sri v21.16b, v25.16b, #4\n" \
    "bif v18.16b, v10.16b, v29.16b\n sri v22.16b, v26.16b, #4\n" \
    "bif v19.16b, v11.16b, v29.16b\n sri v23.16b, v27.16b, #4\n" \
    "prfm pldl1keep, [%[w], #1280]\n prfm pldl1keep, [%[w], #1344]\n" \
    "add %[w], %[w], #80\n"
#define HUNCH_LOAD_INT5                                     \
    "ldr d28, [%[w]], #8\n ldr q30, [%[constants], #32]\n" HUNCH_FIVE_BITS \
    "fcvtl v28.4s, v28.4h\n fmul v30.4s, v28.4s, v30.4s\n str q30, [%[offset]]\n"
// K kinds find their scales at `offset`, expanded: -MAGIC * d, d and (not K6) m.
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

// A tile: clears the sums, then BODY for every group. SCALES is where a group's scales begin.
#define HUNCH_TILE(R, BODY, SCALES)                                                           \
    asm volatile(HUNCH_EACH##R(HUNCH_CLEAR) "1:\n" BODY "add %[a], %[a], #" SCALES " + 64\n"  \
                 "subs %w[count], %w[count], #1\n b.ne 1b\n" HUNCH_EACH##R(HUNCH_STORE)       \
                 : [w] "+r"(w), [a] "+r"(a), [out] "+r"(out), [count] "+r"(num_groups),       \
                   [offset] "+r"(offset)                                                      \
                 : [constants] "r"(&TILE_CONSTANTS), [stride] "r"((int64_t)stride * 4)        \
                 : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", \
                   "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19",      \
                   "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29",      \
                   "v30", "v31")
// BEFORE and SCALE make p of the integer sums; MINIMUM is HUNCH_MINIMUM or HUNCH_NOTHING.
#define HUNCH_BODY(R, LOAD, DOTS, SCALES, BEFORE, SCALE, MINIMUM)                             \
    LOAD DOTS HUNCH_EACH##R(BEFORE)                                                           \
    "ldp q30, q31, [%[a], #" SCALES "]\n ldp q24, q25, [%[a], #" SCALES " + 32]\n"            \
    HUNCH_EACH##R(SCALE) HUNCH_EACH##R(HUNCH_ADD) HUNCH_EACH##R(MINIMUM)

// One row alone sums both parts side by side: one sum after the other would wait for itself.
#define HUNCH_BEGIN_FINE "ldr q8, [%[constants], #64]\n movi v9.4s, #0\n"
#define HUNCH_BEGIN_LARGE "movi v8.4s, #0\n movi v9.4s, #0\n"
#define HUNCH_BESIDE_WHOLE                                                                    \
    "ldp q24, q25, [%[a]]\n ldp q26, q27, [%[a], #256]\n"                                     \
    HUNCH_DOT2("8", "9", "16", "24", "26", "0") HUNCH_DOT2("8", "9", "17", "24", "26", "1")   \
    HUNCH_DOT2("8", "9", "18", "24", "26", "2") HUNCH_DOT2("8", "9", "19", "24", "26", "3")   \
    HUNCH_DOT2("8", "9", "20", "25", "27", "0") HUNCH_DOT2("8", "9", "21", "25", "27", "1")   \
    HUNCH_DOT2("8", "9", "22", "25", "27", "2") HUNCH_DOT2("8", "9", "23", "25", "27", "3")
#define HUNCH_BESIDE_HALF(at)                                                                 \
    "ldr q24, [%[a], #" at "]\n ldr q26, [%[a], #" at " + 256]\n"                             \
    HUNCH_DOT2("8", "9", "16", "24", "26", "0") HUNCH_DOT2("8", "9", "17", "24", "26", "1")   \
    HUNCH_DOT2("8", "9", "18", "24", "26", "2") HUNCH_DOT2("8", "9", "19", "24", "26", "3")
#define HUNCH_BESIDE_FIRST HUNCH_BESIDE_HALF("0")
#define HUNCH_BESIDE_SECOND HUNCH_BESIDE_HALF("16")
#define HUNCH_PARTS1(KIND, SPAN)                                                              \
    HUNCH_BEGIN_##KIND HUNCH_BESIDE_##SPAN "shl v8.4s, v8.4s, #6\n add v8.4s, v8.4s, v9.4s\n"
#define HUNCH_PARTS_MANY(R, KIND, SPAN)                                                       \
    HUNCH_DOTS##R(KIND, SPAN) HUNCH_EACH##R(HUNCH_SHIFT) HUNCH_DOTS##R(LOW, SPAN)
#define HUNCH_FOUR(w, lane)                                                                   \
    HUNCH_DOT2("8", "9", w, "24", "25", lane) HUNCH_DOT2("10", "11", w, "26", "27", lane)
#define HUNCH_FOUR_HALF(a, b, c, d, at)                                                       \
    "ldr q24, [%[a], #" at "]\n ldr q25, [%[a], #" at " + 32]\n"                              \
    "ldr q26, [%[a], #" at " + 256]\n ldr q27, [%[a], #" at " + 288]\n"                       \
    HUNCH_FOUR(a, "0") HUNCH_FOUR(b, "1") HUNCH_FOUR(c, "2") HUNCH_FOUR(d, "3")
#define HUNCH_FOUR_FIRST HUNCH_FOUR_HALF("16", "17", "18", "19", "0")
#define HUNCH_FOUR_SECOND HUNCH_FOUR_HALF("16", "17", "18", "19", "16")
#define HUNCH_FOUR_WHOLE HUNCH_FOUR_FIRST HUNCH_FOUR_HALF("20", "21", "22", "23", "16")
#define HUNCH_BEGIN2_FINE "ldp q8, q9, [%[constants], #64]\n movi v10.4s, #0\n movi v11.4s, #0\n"
#define HUNCH_BEGIN2_LARGE HUNCH_BEGIN_LARGE "movi v10.4s, #0\n movi v11.4s, #0\n"
#define HUNCH_PARTS2(KIND, SPAN)                                                              \
    HUNCH_BEGIN2_##KIND HUNCH_FOUR_##SPAN "shl v8.4s, v8.4s, #6\n shl v9.4s, v9.4s, #6\n"     \
    "add v8.4s, v8.4s, v10.4s\n add v9.4s, v9.4s, v11.4s\n"
#define HUNCH_PARTS3(KIND, SPAN) HUNCH_PARTS_MANY(3, KIND, SPAN)
#define HUNCH_PARTS4(KIND, SPAN) HUNCH_PARTS_MANY(4, KIND, SPAN)
#define HUNCH_PARTS5(KIND, SPAN) HUNCH_PARTS_MANY(5, KIND, SPAN)
#define HUNCH_PARTS6(KIND, SPAN) HUNCH_PARTS_MANY(6, KIND, SPAN)
#define HUNCH_PARTS7(KIND, SPAN) HUNCH_PARTS_MANY(7, KIND, SPAN)
#define HUNCH_PARTS8(KIND, SPAN) HUNCH_PARTS_MANY(8, KIND, SPAN)

// A layout's coarse and fine tile; the one of K6 adds a group's halves one after the other.
#define HUNCH_COARSE_BODY(R, LOAD, SPAN, MINIMUM)                                             \
    HUNCH_BODY(R, LOAD, HUNCH_DOTS##R(COARSE, SPAN), "256", HUNCH_OFFSET, HUNCH_SCALED, MINIMUM)
#define HUNCH_FINE_BODY(R, LOAD, SPAN, MINIMUM)                                               \
    HUNCH_BODY(R, LOAD, HUNCH_PARTS##R(FINE, SPAN), "512", HUNCH_OFFSET, HUNCH_SCALED, MINIMUM)
#define HUNCH_LARGE_BODY(R, LOAD, SPAN, MINIMUM)                                              \
    HUNCH_BODY(R, LOAD, HUNCH_PARTS##R(LARGE, SPAN), "512", HUNCH_CONVERT, HUNCH_TIMES, MINIMUM)

static_assert(P == 4 && RT == 8, "the offsets above");
static_assert(tile_group_bytes(false) == 320 && tile_group_bytes(true) == 576, "the offsets above");

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
#define HUNCH_PLAIN(NAME, R, OFFSET, LOAD, LARGEST, MINIMUM)                                  \
    HUNCH_PANEL(NAME, HUNCH_ARGUMENTS, R, OFFSET, HUNCH_COARSE_BODY(R, LOAD, WHOLE, MINIMUM), \
                HUNCH_##LARGEST##_BODY(R, LOAD, WHOLE, MINIMUM))
#define HUNCH_K(NAME, R, LOAD)                                                                \
    HUNCH_PANEL(NAME, HUNCH_K_ARGUMENTS, R, HUNCH_K_OFFSET,                                   \
                HUNCH_COARSE_BODY(R, LOAD, WHOLE, HUNCH_MINIMUM),                             \
                HUNCH_FINE_BODY(R, LOAD, WHOLE, HUNCH_MINIMUM))
#define HUNCH_K6(R)                                                                           \
    HUNCH_PANEL(tile_k6_panel, HUNCH_K_ARGUMENTS, R, HUNCH_K6_OFFSET,                         \
                HUNCH_COARSE_BODY(R, HUNCH_LOAD_K6, FIRST, HUNCH_NOTHING)                     \
                HUNCH_COARSE_BODY(R, HUNCH_LOAD_K6, SECOND, HUNCH_NOTHING),                   \
                HUNCH_LARGE_BODY(R, HUNCH_LOAD_K6, FIRST, HUNCH_NOTHING)                      \
                HUNCH_LARGE_BODY(R, HUNCH_LOAD_K6, SECOND, HUNCH_NOTHING))

template <int R, bool FINE> void tile_int4_panel(HUNCH_ARGUMENTS);
template <int R, bool FINE> void tile_unpacked_panel(HUNCH_ARGUMENTS);
template <int R, bool FINE> void tile_int5_panel(HUNCH_ARGUMENTS);
template <int R, bool FINE> void tile_int8_panel(HUNCH_ARGUMENTS);
template <int R, bool FINE> void tile_k4_panel(HUNCH_K_ARGUMENTS);
template <int R, bool FINE> void tile_k5_panel(HUNCH_K_ARGUMENTS);
template <int R, bool FINE> void tile_k6_panel(HUNCH_K_ARGUMENTS);

#define HUNCH_TILES(R)                                                                        \
    HUNCH_PLAIN(tile_int4_panel, R, HUNCH_OWN_OFFSET, HUNCH_LOAD_INT4, FINE, HUNCH_MINIMUM)   \
    HUNCH_PLAIN(tile_unpacked_panel, R, HUNCH_PANEL_OFFSET, HUNCH_LOAD_UNPACKED, FINE,        \
                HUNCH_MINIMUM)                                                                \
    HUNCH_PLAIN(tile_int5_panel, R, HUNCH_OWN_OFFSET, HUNCH_LOAD_INT5, FINE, HUNCH_NOTHING)   \
    HUNCH_PLAIN(tile_int8_panel, R, HUNCH_OWN_OFFSET, HUNCH_LOAD_INT8, LARGE, HUNCH_NOTHING)  \
    HUNCH_K(tile_k4_panel, R, HUNCH_LOAD_K4)                                                  \
    HUNCH_K(tile_k5_panel, R, HUNCH_LOAD_K5)                                                  \
    HUNCH_K6(R)

HUNCH_TILES(1) HUNCH_TILES(2) HUNCH_TILES(3) HUNCH_TILES(4)
HUNCH_TILES(5) HUNCH_TILES(6) HUNCH_TILES(7) HUNCH_TILES(8)

}  // namespace hunch
