// Products of a quantised tile by NEON's matrix instruction (smmla: 2 rows by 2 channels, 8 inputs of
// each). Part of tile_neon.h; weights and activations stand in pairs (IN_PAIRS).
//
// The sums of two rows and four channels are two vectors: channels 0 and 1 of either row, then 2 and 3.
// They stay so until the end, so that nothing is put in order within the loop; d, m and -MAGIC * d
// are doubled instead, and the rows' scales stand in memory twice. An odd last row has a neighbour that is
// computed and not stored. One row alone puts its integer sums in order and goes on as tile_dot.h does.
//
// Registers: v0-7 sums of the rows, v8-15 integer sums, v16-23 weights (then p), v24-27 activations
// (then the rows' scales), v28-29 d, v30-31 m. One row alone: v28 d, v29 m.
#pragma once

// The integer sums (s, t) of two rows over a group or a half of it; their activations are at `at`.
#define HUNCH_PAIR(s, t, a, w, u)                           \
    "smmla v" s ".4s, v" a ".16b, v" w ".16b\n"             \
    "smmla v" t ".4s, v" a ".16b, v" u ".16b\n"
#define HUNCH_HALF(s, t, at)                                \
    "ldp q24, q25, [%[a], #" at "]\n"                       \
    HUNCH_PAIR(s, t, "24", "16", "17") HUNCH_PAIR(s, t, "25", "18", "19")
#define HUNCH_FIRST(s, t, at) HUNCH_HALF(s, t, at)
#define HUNCH_SECOND(s, t, at) HUNCH_HALF(s, t, at " + 32")
#define HUNCH_WHOLE(s, t, at)                               \
    "ldp q24, q25, [%[a], #" at "]\n ldp q26, q27, [%[a], #" at " + 32]\n" \
    HUNCH_PAIR(s, t, "24", "16", "17") HUNCH_PAIR(s, t, "25", "18", "19") \
    HUNCH_PAIR(s, t, "26", "20", "21") HUNCH_PAIR(s, t, "27", "22", "23")

// As in tile_dot.h: what sums of coarse activations, of fine ones and of fine ones with large weights
// begin with; the low parts of fine ones are added to what is there.
#define HUNCH_COARSE(SPAN, s, t, at) "ldp q" s ", q" t ", [%[constants]]\n" HUNCH_##SPAN(s, t, at)
#define HUNCH_FINE(SPAN, s, t, at) "ldp q" s ", q" t ", [%[constants], #64]\n" HUNCH_##SPAN(s, t, at)
#define HUNCH_LARGE(SPAN, s, t, at) "movi v" s ".4s, #0\n movi v" t ".4s, #0\n" HUNCH_##SPAN(s, t, at)
#define HUNCH_LOW(SPAN, s, t, at) HUNCH_##SPAN(s, t, at " + 256")

// A macro whose name ends in a number of rows is that of the next even number, but for one row alone.
#define HUNCH_IN_ORDER "zip1 v8.2d, v8.2d, v9.2d\n"
#define HUNCH_DOTS1(FORM, SPAN) HUNCH_DOTS2(FORM, SPAN) HUNCH_IN_ORDER
#define HUNCH_DOTS2(FORM, SPAN) HUNCH_##FORM(SPAN, "8", "9", "0")
#define HUNCH_DOTS3 HUNCH_DOTS4
#define HUNCH_DOTS4(FORM, SPAN) HUNCH_DOTS2(FORM, SPAN) HUNCH_##FORM(SPAN, "10", "11", "64")
#define HUNCH_DOTS5 HUNCH_DOTS6
#define HUNCH_DOTS6(FORM, SPAN) HUNCH_DOTS4(FORM, SPAN) HUNCH_##FORM(SPAN, "12", "13", "128")
#define HUNCH_DOTS7 HUNCH_DOTS8
#define HUNCH_DOTS8(FORM, SPAN) HUNCH_DOTS6(FORM, SPAN) HUNCH_##FORM(SPAN, "14", "15", "192")

// EACH(vector of the sums, of the integer sums, of p, of d, of the rows' scales, of m)
#define HUNCH_EACH1(X) X("0", "8", "16", "28", "24.s[0]", "29")
#define HUNCH_EACH2(X)                                      \
    X("0", "8", "16", "28", "24.4s", "30") X("1", "9", "17", "29", "24.4s", "31")
#define HUNCH_EACH3 HUNCH_EACH4
#define HUNCH_EACH4(X)                                      \
    HUNCH_EACH2(X) X("2", "10", "18", "28", "25.4s", "30") X("3", "11", "19", "29", "25.4s", "31")
#define HUNCH_EACH5 HUNCH_EACH6
#define HUNCH_EACH6(X)                                      \
    HUNCH_EACH4(X) X("4", "12", "20", "28", "26.4s", "30") X("5", "13", "21", "29", "26.4s", "31")
#define HUNCH_EACH7 HUNCH_EACH8
#define HUNCH_EACH8(X)                                      \
    HUNCH_EACH6(X) X("6", "14", "22", "28", "27.4s", "30") X("7", "15", "23", "29", "27.4s", "31")

#define HUNCH_SCALED(acc, s, p, d, a, m) "fmla v" p ".4s, v" s ".4s, v" d ".4s\n"
#define HUNCH_TIMES(acc, s, p, d, a, m) "fmul v" p ".4s, v" s ".4s, v" d ".4s\n"
#define HUNCH_ADD(acc, s, p, d, a, m) "fmla v" acc ".4s, v" p ".4s, v" a "\n"
#define HUNCH_MINIMUM(acc, s, p, d, a, m) "fmla v" acc ".4s, v" m ".4s, v" a "\n"

// High parts, shifted, then low ones.
#define HUNCH_PARTS1(FORM, SPAN)                            \
    HUNCH_DOTS2(FORM, SPAN) HUNCH_EACH2(HUNCH_SHIFT) HUNCH_DOTS2(LOW, SPAN) HUNCH_IN_ORDER
#define HUNCH_PARTS2(FORM, SPAN)                            \
    HUNCH_DOTS2(FORM, SPAN) HUNCH_EACH2(HUNCH_SHIFT) HUNCH_DOTS2(LOW, SPAN)
#define HUNCH_PARTS3 HUNCH_PARTS4
#define HUNCH_PARTS4(FORM, SPAN)                            \
    HUNCH_DOTS4(FORM, SPAN) HUNCH_EACH4(HUNCH_SHIFT) HUNCH_DOTS4(LOW, SPAN)
#define HUNCH_PARTS5 HUNCH_PARTS6
#define HUNCH_PARTS6(FORM, SPAN)                            \
    HUNCH_DOTS6(FORM, SPAN) HUNCH_EACH6(HUNCH_SHIFT) HUNCH_DOTS6(LOW, SPAN)
#define HUNCH_PARTS7 HUNCH_PARTS8
#define HUNCH_PARTS8(FORM, SPAN)                            \
    HUNCH_DOTS8(FORM, SPAN) HUNCH_EACH8(HUNCH_SHIFT) HUNCH_DOTS8(LOW, SPAN)

// What a layout loaded, doubled for pairs. -MAGIC * d goes to memory: it is loaded for every pair.
#define HUNCH_DOUBLE_MINIMA "dup v30.2d, v29.d[0]\n dup v31.2d, v29.d[1]\n"
#define HUNCH_DOUBLE_NONE ""
#define HUNCH_DOUBLE_SCALE "dup v29.2d, v28.d[1]\n dup v28.2d, v28.d[0]\n"
#define HUNCH_DOUBLE_OFFSET                                 \
    "ldr q24, [%[offset]]\n dup v25.2d, v24.d[1]\n dup v24.2d, v24.d[0]\n" \
    "stp q24, q25, [%[doubled]]\n"
#define HUNCH_DOUBLED1(X) ""
#define HUNCH_DOUBLED2(X) X
#define HUNCH_DOUBLED3(X) X
#define HUNCH_DOUBLED4(X) X
#define HUNCH_DOUBLED5(X) X
#define HUNCH_DOUBLED6(X) X
#define HUNCH_DOUBLED7(X) X
#define HUNCH_DOUBLED8(X) X
#define HUNCH_OFFSETS1 "ldr q16, [%[offset]]\n"
#define HUNCH_OFFSETS2 "ldp q16, q17, [%[doubled]]\n"
#define HUNCH_OFFSETS3 HUNCH_OFFSETS4
#define HUNCH_OFFSETS4 HUNCH_OFFSETS2 "ldp q18, q19, [%[doubled]]\n"
#define HUNCH_OFFSETS5 HUNCH_OFFSETS6
#define HUNCH_OFFSETS6 HUNCH_OFFSETS4 "ldp q20, q21, [%[doubled]]\n"
#define HUNCH_OFFSETS7 HUNCH_OFFSETS8
#define HUNCH_OFFSETS8 HUNCH_OFFSETS6 "ldp q22, q23, [%[doubled]]\n"

// The rows' scales, or d times their sums.
#define HUNCH_ROWS1(at) "ldr q24, [%[a], #" at "]\n"
#define HUNCH_ROWS2 HUNCH_ROWS1
#define HUNCH_ROWS3 HUNCH_ROWS4
#define HUNCH_ROWS4(at) "ldp q24, q25, [%[a], #" at "]\n"
#define HUNCH_ROWS5 HUNCH_ROWS6
#define HUNCH_ROWS6(at) HUNCH_ROWS4(at) "ldr q26, [%[a], #" at " + 32]\n"
#define HUNCH_ROWS7 HUNCH_ROWS8
#define HUNCH_ROWS8(at) HUNCH_ROWS4(at) "ldp q26, q27, [%[a], #" at " + 32]\n"
#define HUNCH_ADD_MINIMA(R, SCALES) HUNCH_ROWS##R(SCALES " + 64") HUNCH_EACH##R(HUNCH_MINIMUM)
#define HUNCH_ADD_NONE(R, SCALES) ""

// A layout's coarse and fine tile; the one of K6 adds a group's halves one after the other.
#define HUNCH_SCALE_ROWS(R, SCALES, SCALE, MINIMA)          \
    HUNCH_EACH##R(SCALE) HUNCH_ROWS##R(SCALES) HUNCH_EACH##R(HUNCH_ADD) HUNCH_ADD_##MINIMA(R, SCALES)
#define HUNCH_COARSE_BODY(R, LOAD, SPAN, MINIMA)            \
    HUNCH_LOAD_##LOAD HUNCH_DOUBLED##R(HUNCH_DOUBLE_##MINIMA HUNCH_DOUBLE_SCALE HUNCH_DOUBLE_OFFSET) \
    HUNCH_DOTS##R(COARSE, SPAN) HUNCH_OFFSETS##R HUNCH_SCALE_ROWS(R, "256", HUNCH_SCALED, MINIMA)
#define HUNCH_FINE_BODY(R, LOAD, SPAN, MINIMA)              \
    HUNCH_LOAD_##LOAD HUNCH_DOUBLED##R(HUNCH_DOUBLE_##MINIMA HUNCH_DOUBLE_SCALE HUNCH_DOUBLE_OFFSET) \
    HUNCH_PARTS##R(FINE, SPAN) HUNCH_OFFSETS##R HUNCH_SCALE_ROWS(R, "512", HUNCH_SCALED, MINIMA)
#define HUNCH_LARGE_BODY(R, LOAD, SPAN, MINIMA)             \
    HUNCH_LOAD_##LOAD HUNCH_DOUBLED##R(HUNCH_DOUBLE_##MINIMA HUNCH_DOUBLE_SCALE) \
    HUNCH_PARTS##R(LARGE, SPAN) HUNCH_EACH##R(HUNCH_CONVERT) \
    HUNCH_SCALE_ROWS(R, "512", HUNCH_TIMES, MINIMA)

#define HUNCH_STORE(zip, s, t)                              \
    zip " v16.2d, v" s ".2d, v" t ".2d\n str q16, [%[out]]\n add %[out], %[out], %[stride]\n"
#define HUNCH_STORES1 "str q0, [%[out]]\n"
#define HUNCH_STORES2 HUNCH_STORE("zip1", "0", "1") HUNCH_STORE("zip2", "0", "1")
#define HUNCH_STORES3 HUNCH_STORES2 HUNCH_STORE("zip1", "2", "3")
#define HUNCH_STORES4 HUNCH_STORES3 HUNCH_STORE("zip2", "2", "3")
#define HUNCH_STORES5 HUNCH_STORES4 HUNCH_STORE("zip1", "4", "5")
#define HUNCH_STORES6 HUNCH_STORES5 HUNCH_STORE("zip2", "4", "5")
#define HUNCH_STORES7 HUNCH_STORES6 HUNCH_STORE("zip1", "6", "7")
#define HUNCH_STORES8 HUNCH_STORES7 HUNCH_STORE("zip2", "6", "7")
#define HUNCH_STORES(R) HUNCH_STORES##R

// What a tile needs beside its sums, and the bytes of a group's scales.
#define HUNCH_TILE_SPACE alignas(16) float doubled[8];
#define HUNCH_TILE_OPERANDS , [doubled] "r"(doubled)
#define HUNCH_SCALES_BYTES "128"
