// Products of a quantised tile by NEON's dot product (sdot: 4 channels by 4 inputs of one row). Part of
// tile_neon.h.
//
// Registers: v0-7 sums of the rows, v8-15 integer sums, v16-23 weights (then p), v24-27 activations,
// v28 d, v29 m, v30-31 scales of the rows.
#pragma once
#include "tile_eight.h"

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
// Four sums, of four rows (`far` is 64: two rows on) or of both parts of two rows (256).
#define HUNCH_DOT4(s, t, u, v, w, lane)                     \
    HUNCH_DOT2(s, t, w, "24", "25", lane) HUNCH_DOT2(u, v, w, "26", "27", lane)
#define HUNCH_HALF4(s, t, u, v, a, b, c, d, at, far)        \
    "ldr q24, [%[a], #" at "]\n ldr q25, [%[a], #" at " + 32]\n" \
    "ldr q26, [%[a], #" at " + " far "]\n ldr q27, [%[a], #" at " + 32 + " far "]\n" \
    HUNCH_DOT4(s, t, u, v, a, "0") HUNCH_DOT4(s, t, u, v, b, "1") \
    HUNCH_DOT4(s, t, u, v, c, "2") HUNCH_DOT4(s, t, u, v, d, "3")
#define HUNCH_FIRST4(s, t, u, v, at, far) HUNCH_HALF4(s, t, u, v, "16", "17", "18", "19", at, far)
#define HUNCH_SECOND4(s, t, u, v, at, far) HUNCH_FIRST4(s, t, u, v, at " + 16", far)
#define HUNCH_WHOLE4(s, t, u, v, at, far)                   \
    HUNCH_FIRST4(s, t, u, v, at, far)                       \
    HUNCH_HALF4(s, t, u, v, "20", "21", "22", "23", at " + 16", far)
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
#define HUNCH_COARSE4(SPAN, s, t, u, v, at)                 \
    "ldp q" s ", q" t ", [%[constants]]\n ldp q" u ", q" v ", [%[constants]]\n" \
    HUNCH_##SPAN##4(s, t, u, v, at, "64")
#define HUNCH_FINE4(SPAN, s, t, u, v, at)                   \
    "ldp q" s ", q" t ", [%[constants], #64]\n ldp q" u ", q" v ", [%[constants], #64]\n" \
    HUNCH_##SPAN##4(s, t, u, v, at, "64")
#define HUNCH_LARGE4(SPAN, s, t, u, v, at)                  \
    "movi v" s ".4s, #0\n movi v" t ".4s, #0\n movi v" u ".4s, #0\n movi v" v ".4s, #0\n" \
    HUNCH_##SPAN##4(s, t, u, v, at, "64")
#define HUNCH_LOW4(SPAN, s, t, u, v, at) HUNCH_##SPAN##4(s, t, u, v, at " + 256", "64")
#define HUNCH_LOW1(SPAN, s, at) HUNCH_##SPAN##1(s, at " + 256")

// FORM is COARSE, FINE, LARGE or LOW; SPAN is WHOLE, FIRST or SECOND. Four rows side by side are a
// twentieth faster than two and two: a sum waits less for itself.
#define HUNCH_DOTS1(FORM, SPAN) HUNCH_##FORM##1(SPAN, "8", "0")
#define HUNCH_DOTS2(FORM, SPAN) HUNCH_##FORM##2(SPAN, "8", "9", "0")
#define HUNCH_DOTS3(FORM, SPAN) HUNCH_DOTS2(FORM, SPAN) HUNCH_##FORM##1(SPAN, "10", "64")
#define HUNCH_DOTS4(FORM, SPAN) HUNCH_##FORM##4(SPAN, "8", "9", "10", "11", "0")
#define HUNCH_DOTS5(FORM, SPAN) HUNCH_DOTS4(FORM, SPAN) HUNCH_##FORM##1(SPAN, "12", "128")
#define HUNCH_DOTS6(FORM, SPAN) HUNCH_DOTS4(FORM, SPAN) HUNCH_##FORM##2(SPAN, "12", "13", "128")
#define HUNCH_DOTS7(FORM, SPAN) HUNCH_DOTS6(FORM, SPAN) HUNCH_##FORM##1(SPAN, "14", "192")
#define HUNCH_DOTS8(FORM, SPAN) HUNCH_DOTS4(FORM, SPAN) HUNCH_##FORM##4(SPAN, "12", "13", "14", "15", "128")

// EACH(row of the sums, of the integer sums, of p, register of the row's scale, of its sum, lane)
#define HUNCH_EACH1(X) X("0", "8", "16", "30", "24", "0")
#define HUNCH_EACH2(X) HUNCH_EACH1(X) X("1", "9", "17", "30", "24", "1")
#define HUNCH_EACH3(X) HUNCH_EACH2(X) X("2", "10", "18", "30", "24", "2")
#define HUNCH_EACH4(X) HUNCH_EACH3(X) X("3", "11", "19", "30", "24", "3")
#define HUNCH_EACH5(X) HUNCH_EACH4(X) X("4", "12", "20", "31", "25", "0")
#define HUNCH_EACH6(X) HUNCH_EACH5(X) X("5", "13", "21", "31", "25", "1")
#define HUNCH_EACH7(X) HUNCH_EACH6(X) X("6", "14", "22", "31", "25", "2")
#define HUNCH_EACH8(X) HUNCH_EACH7(X) X("7", "15", "23", "31", "25", "3")

#define HUNCH_OFFSET(acc, s, p, d, m, lane) "ldr q" p ", [%[offset]]\n"
#define HUNCH_SCALED(acc, s, p, d, m, lane) "fmla v" p ".4s, v" s ".4s, v28.4s\n"
#define HUNCH_TIMES(acc, s, p, d, m, lane) "fmul v" p ".4s, v" s ".4s, v28.4s\n"
#define HUNCH_ADD(acc, s, p, d, m, lane) "fmla v" acc ".4s, v" p ".4s, v" d ".s[" lane "]\n"
#define HUNCH_MINIMUM(acc, s, p, d, m, lane) "fmla v" acc ".4s, v29.4s, v" m ".s[" lane "]\n"
#define HUNCH_STORE(acc, s, p, d, m, lane) "str q" acc ", [%[out]]\n add %[out], %[out], %[stride]\n"
#define HUNCH_ADD_MINIMA(R) HUNCH_EACH##R(HUNCH_MINIMUM)
#define HUNCH_ADD_NONE(R) ""
#define HUNCH_STORES(R) HUNCH_EACH##R(HUNCH_STORE)

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
#define HUNCH_PARTS1(FORM, SPAN)                                                              \
    HUNCH_BEGIN_##FORM HUNCH_BESIDE_##SPAN "shl v8.4s, v8.4s, #6\n add v8.4s, v8.4s, v9.4s\n"
#define HUNCH_PARTS_MANY(R, FORM, SPAN)                                                       \
    HUNCH_DOTS##R(FORM, SPAN) HUNCH_EACH##R(HUNCH_SHIFT) HUNCH_DOTS##R(LOW, SPAN)
#define HUNCH_BEGIN2_FINE "ldp q8, q9, [%[constants], #64]\n movi v10.4s, #0\n movi v11.4s, #0\n"
#define HUNCH_BEGIN2_LARGE HUNCH_BEGIN_LARGE "movi v10.4s, #0\n movi v11.4s, #0\n"
#define HUNCH_PARTS2(FORM, SPAN)                                                              \
    HUNCH_BEGIN2_##FORM HUNCH_##SPAN##4("8", "9", "10", "11", "0", "256")                     \
    "shl v8.4s, v8.4s, #6\n shl v9.4s, v9.4s, #6\n"                                           \
    "add v8.4s, v8.4s, v10.4s\n add v9.4s, v9.4s, v11.4s\n"
#define HUNCH_PARTS3(FORM, SPAN) HUNCH_PARTS_MANY(3, FORM, SPAN)
#define HUNCH_PARTS4(FORM, SPAN) HUNCH_PARTS_MANY(4, FORM, SPAN)
#define HUNCH_PARTS5(FORM, SPAN) HUNCH_PARTS_MANY(5, FORM, SPAN)
#define HUNCH_PARTS6(FORM, SPAN) HUNCH_PARTS_MANY(6, FORM, SPAN)
#define HUNCH_PARTS7(FORM, SPAN) HUNCH_PARTS_MANY(7, FORM, SPAN)
#define HUNCH_PARTS8(FORM, SPAN) HUNCH_PARTS_MANY(8, FORM, SPAN)

// BEFORE and SCALE make p of the integer sums; MINIMA is MINIMA or NONE.
#define HUNCH_BODY(R, LOAD, DOTS, SCALES, BEFORE, SCALE, MINIMA)                              \
    LOAD DOTS HUNCH_EACH##R(BEFORE)                                                           \
    "ldp q30, q31, [%[a], #" SCALES "]\n ldp q24, q25, [%[a], #" SCALES " + 32]\n"            \
    HUNCH_EACH##R(SCALE) HUNCH_EACH##R(HUNCH_ADD) HUNCH_ADD_##MINIMA(R)

// A layout's coarse and fine tile; the one of K6 adds a group's halves one after the other.
#define HUNCH_COARSE_BODY(R, LOAD, SPAN, MINIMA) HUNCH_BODY##R(LOAD, SPAN, MINIMA)
#define HUNCH_FINE_BODY(R, LOAD, SPAN, MINIMA)                                                \
    HUNCH_BODY(R, HUNCH_LOAD_##LOAD, HUNCH_PARTS##R(FINE, SPAN), "512", HUNCH_OFFSET,         \
               HUNCH_SCALED, MINIMA)
#define HUNCH_LARGE_BODY(R, LOAD, SPAN, MINIMA)                                               \
    HUNCH_BODY(R, HUNCH_LOAD_##LOAD, HUNCH_PARTS##R(LARGE, SPAN), "512", HUNCH_CONVERT,       \
               HUNCH_TIMES, MINIMA)
#define HUNCH_ROWS_BODY(R, LOAD, SPAN, MINIMA)                                                \
    HUNCH_BODY(R, HUNCH_LOAD_##LOAD, HUNCH_DOTS##R(COARSE, SPAN), "256", HUNCH_OFFSET,        \
               HUNCH_SCALED, MINIMA)
#define HUNCH_BODY1(LOAD, SPAN, MINIMA) HUNCH_ROWS_BODY(1, LOAD, SPAN, MINIMA)
#define HUNCH_BODY2(LOAD, SPAN, MINIMA) HUNCH_ROWS_BODY(2, LOAD, SPAN, MINIMA)
#define HUNCH_BODY3(LOAD, SPAN, MINIMA) HUNCH_ROWS_BODY(3, LOAD, SPAN, MINIMA)
#define HUNCH_BODY4(LOAD, SPAN, MINIMA) HUNCH_ROWS_BODY(4, LOAD, SPAN, MINIMA)
#define HUNCH_BODY5(LOAD, SPAN, MINIMA) HUNCH_ROWS_BODY(5, LOAD, SPAN, MINIMA)
#define HUNCH_BODY6(LOAD, SPAN, MINIMA) HUNCH_ROWS_BODY(6, LOAD, SPAN, MINIMA)
#define HUNCH_BODY7(LOAD, SPAN, MINIMA) HUNCH_ROWS_BODY(7, LOAD, SPAN, MINIMA)
#define HUNCH_BODY8(LOAD, SPAN, MINIMA) HUNCH_EIGHT_##SPAN(LOAD, MINIMA)

// What a tile needs beside its sums, and the bytes of a group's scales.
#define HUNCH_TILE_SPACE
#define HUNCH_TILE_OPERANDS
#define HUNCH_SCALES_BYTES "64"
