// The tile of eight rows in 8 bits by dot products. Part of tile_dot.h, whose registers it keeps.
//
// It computes what HUNCH_ROWS_BODY does and differs in the order: loads stand one by one between the
// products. Eight loads in a row leave the two pipes of a Neoverse N1 without work (decision 023).
#pragma once

#define HUNCH_CONSTANT(q, at) "ldr q" q ", [%[constants], #" at "]\n"
#define HUNCH_WEIGHTS(q, at) "ldr q" q ", [%[w], #" at "]\n"
#define HUNCH_ROW(q, at) "ldr q" q ", [%[a], #" at "]\n"
#define HUNCH_MAGIC(q) HUNCH_CONSTANT(q, "0")
#define HUNCH_P(q) "ldr q" q ", [%[offset]]\n"
#define HUNCH_AHEAD(at) "prfm pldl1keep, [%[w], #" at "]\n"

// Four rows by the vector w, and what is loaded behind each product.
#define HUNCH_QUAD(s, t, u, v, w, lane, A, B, C, D)                                           \
    HUNCH_DOT1(s, w, "24", lane) A HUNCH_DOT1(t, w, "25", lane) B                             \
    HUNCH_DOT1(u, w, "26", lane) C HUNCH_DOT1(v, w, "27", lane) D
#define HUNCH_UPPER(w, lane, A, B, C, D) HUNCH_QUAD("8", "9", "10", "11", w, lane, A, B, C, D)
#define HUNCH_LOWER(w, lane, A, B, C, D) HUNCH_QUAD("12", "13", "14", "15", w, lane, A, B, C, D)

// All products of a group. v16, the sums and the activations of the upper rows' first half are there;
// W1 to W7 load what is not of v17 to v23.
#define HUNCH_EIGHT_DOTS(W1, W2, W3, W4, W5, W6, W7)                                          \
    HUNCH_UPPER("16", "0", W1, "", "", "") HUNCH_UPPER("17", "1", W2, "", "", "")             \
    HUNCH_UPPER("18", "2", W3, "", W4, "")                                                    \
    HUNCH_UPPER("19", "3", HUNCH_ROW("24", "16"), HUNCH_ROW("25", "48"), HUNCH_ROW("26", "80"), \
                HUNCH_ROW("27", "112"))                                                       \
    HUNCH_UPPER("20", "0", W5, "", "", "") HUNCH_UPPER("21", "1", W6, "", "", "")             \
    HUNCH_UPPER("22", "2", W7, HUNCH_MAGIC("12"), HUNCH_MAGIC("13"), HUNCH_MAGIC("14"))       \
    HUNCH_UPPER("23", "3", HUNCH_ROW("24", "128"), HUNCH_ROW("25", "160"),                    \
                HUNCH_ROW("26", "192"), HUNCH_ROW("27", "224") HUNCH_MAGIC("15"))             \
    HUNCH_LOWER("16", "0", "", "", "", "") HUNCH_LOWER("17", "1", "", "", "", "")             \
    HUNCH_LOWER("18", "2", "", "", "", "")                                                    \
    HUNCH_LOWER("19", "3", HUNCH_ROW("24", "144"), HUNCH_ROW("25", "176"),                    \
                HUNCH_ROW("26", "208"), HUNCH_ROW("27", "240"))                               \
    HUNCH_LOWER("20", "0", "", "", "", "") HUNCH_LOWER("21", "1", "", "", "", "")             \
    HUNCH_LOWER("22", "2", "", "", "", "")                                                    \
    HUNCH_LOWER("23", "3", HUNCH_P("16"), HUNCH_P("17"), HUNCH_P("18"), HUNCH_P("19"))

#define HUNCH_SCALE(p, s) "fmla v" p ".4s, v" s ".4s, v28.4s\n"
#define HUNCH_EIGHT_SUMS                                                                      \
    HUNCH_SCALE("16", "8") HUNCH_P("20") HUNCH_SCALE("17", "9") HUNCH_P("21")                 \
    HUNCH_SCALE("18", "10") HUNCH_P("22") HUNCH_SCALE("19", "11") HUNCH_P("23")               \
    HUNCH_SCALE("20", "12") HUNCH_ROW("30", "256") HUNCH_SCALE("21", "13")                    \
    HUNCH_ROW("31", "272") HUNCH_SCALE("22", "14") HUNCH_SCALE("23", "15")                    \
    HUNCH_EACH8(HUNCH_ADD)
#define HUNCH_EIGHT_MINIMA HUNCH_ROW("24", "288") HUNCH_ROW("25", "304") HUNCH_ADD_MINIMA(8)
#define HUNCH_EIGHT_NONE ""

// What stands before the products. Layouts that have no order of their own take the one of fewer rows.
#define HUNCH_EIGHT_FIRST_ROWS                                                                \
    "ldp q8, q9, [%[constants]]\n ldp q10, q11, [%[constants]]\n" HUNCH_ROW("24", "0")        \
    HUNCH_ROW("25", "32") HUNCH_ROW("26", "64") HUNCH_ROW("27", "96")
#define HUNCH_EIGHT_LOADED(LOAD) LOAD HUNCH_EIGHT_FIRST_ROWS HUNCH_EIGHT_DOTS("", "", "", "", "", "", "")
#define HUNCH_EIGHT_INT4 HUNCH_EIGHT_LOADED(HUNCH_LOAD_INT4)
#define HUNCH_EIGHT_UNPACKED HUNCH_EIGHT_LOADED(HUNCH_LOAD_UNPACKED)
#define HUNCH_EIGHT_K4 HUNCH_EIGHT_LOADED(HUNCH_LOAD_K4)
#define HUNCH_EIGHT_K5 HUNCH_EIGHT_LOADED(HUNCH_LOAD_K5)
#define HUNCH_EIGHT_INT8                                                                      \
    "ldr d28, [%[w]], #8\n" HUNCH_CONSTANT("30", "32") HUNCH_WEIGHTS("16", "0")               \
    HUNCH_ROW("24", "0") "fcvtl v28.4s, v28.4h\n" HUNCH_MAGIC("8") HUNCH_ROW("25", "32")      \
    "fmul v30.4s, v28.4s, v30.4s\n" HUNCH_MAGIC("9") HUNCH_ROW("26", "64")                    \
    "str q30, [%[offset]]\n" HUNCH_MAGIC("10") HUNCH_ROW("27", "96") HUNCH_MAGIC("11")        \
    HUNCH_EIGHT_DOTS(HUNCH_WEIGHTS("17", "16"), HUNCH_WEIGHTS("18", "32"),                    \
                     HUNCH_WEIGHTS("19", "48"), HUNCH_WEIGHTS("20", "64"),                    \
                     HUNCH_WEIGHTS("21", "80") HUNCH_AHEAD("3840"),                           \
                     HUNCH_WEIGHTS("22", "96") HUNCH_AHEAD("3904"),                           \
                     HUNCH_WEIGHTS("23", "112") HUNCH_AHEAD("3968"))                          \
    "add %[w], %[w], #128\n"

// The sign of a number as 8 bits, then its low four.
#define HUNCH_SIGN(w) "cmtst v" w ".16b, v" w ".16b, v31.16b\n"
#define HUNCH_LOW_HALF(w, n) "bit v" w ".16b, v" n ".16b, v29.16b\n"
#define HUNCH_HIGH_HALF(w, n) "sri v" w ".16b, v" n ".16b, #4\n"
#define HUNCH_EIGHT_INT5                                                                      \
    HUNCH_CONSTANT("29", "48") "ldr d28, [%[w]], #8\n" HUNCH_WEIGHTS("31", "64")              \
    HUNCH_CONSTANT("16", "112") HUNCH_SIGN("16") HUNCH_CONSTANT("17", "128")                  \
    HUNCH_CONSTANT("20", "176") HUNCH_SIGN("20") HUNCH_CONSTANT("18", "144")                  \
    HUNCH_CONSTANT("21", "192") HUNCH_SIGN("17") HUNCH_CONSTANT("19", "160") HUNCH_SIGN("21") \
    HUNCH_CONSTANT("22", "208") HUNCH_SIGN("18") HUNCH_CONSTANT("23", "224") HUNCH_SIGN("22") \
    HUNCH_WEIGHTS("24", "0") HUNCH_SIGN("19") HUNCH_WEIGHTS("25", "16") HUNCH_SIGN("23")      \
    HUNCH_LOW_HALF("16", "24") HUNCH_WEIGHTS("26", "32") HUNCH_HIGH_HALF("20", "24")          \
    HUNCH_LOW_HALF("17", "25") HUNCH_WEIGHTS("27", "48") HUNCH_HIGH_HALF("21", "25")          \
    HUNCH_LOW_HALF("18", "26") HUNCH_HIGH_HALF("22", "26") HUNCH_CONSTANT("30", "32")         \
    HUNCH_LOW_HALF("19", "27") HUNCH_ROW("24", "0") HUNCH_HIGH_HALF("23", "27")               \
    HUNCH_MAGIC("8") "fcvtl v28.4s, v28.4h\n" HUNCH_MAGIC("9") "fmul v30.4s, v28.4s, v30.4s\n" \
    HUNCH_MAGIC("10") "str q30, [%[offset]]\n" HUNCH_MAGIC("11") HUNCH_ROW("25", "32")        \
    HUNCH_ROW("26", "64") HUNCH_ROW("27", "96")                                               \
    HUNCH_EIGHT_DOTS(HUNCH_AHEAD("3840"), HUNCH_AHEAD("3904"), "", "", "", "", "")            \
    "add %[w], %[w], #80\n"

// K6, whose halves have scales of their own: both halves of the upper rows, then those of the lower ones.
#define HUNCH_SECOND_P(q) "ldr q" q ", [%[offset], #32]\n"
#define HUNCH_SECOND_SCALE(p, s) "fmla v" p ".4s, v" s ".4s, v29.4s\n"
#define HUNCH_HALF_K6(a, b, c, d, at)                                                         \
    HUNCH_WEIGHTS(d, at " + 32") HUNCH_WEIGHTS("25", at " + 16") HUNCH_WEIGHTS("24", at)      \
    "sli v" d ".16b, v25.16b, #2\n" HUNCH_WEIGHTS("26", at " + 32")                           \
    "and v" a ".16b, v24.16b, v31.16b\n sli v" d ".16b, v24.16b, #4\n"                        \
    "and v" b ".16b, v25.16b, v31.16b\n shl v" d ".16b, v" d ".16b, #2\n"                     \
    "and v" c ".16b, v26.16b, v31.16b\n"
#define HUNCH_FOUR_K6(r, s, t, u, at, SCALES, A, B, C, D)                                     \
    HUNCH_UPPER("16", "0", HUNCH_MAGIC("12"), "", HUNCH_MAGIC("13"), "")                      \
    HUNCH_UPPER("17", "1", HUNCH_MAGIC("14"), "", HUNCH_MAGIC("15"), "")                      \
    HUNCH_UPPER("18", "2", "", "", "", "")                                                    \
    HUNCH_UPPER("19", "3", HUNCH_ROW("24", at " + 16"), HUNCH_ROW("25", at " + 48"),          \
                HUNCH_ROW("26", at " + 80"), HUNCH_ROW("27", at " + 112"))                    \
    HUNCH_LOWER("20", "0", "", "", "", "") HUNCH_LOWER("21", "1", "", "", "", "")             \
    HUNCH_LOWER("22", "2", "", "", HUNCH_ROW("30", SCALES), "")                               \
    HUNCH_LOWER("23", "3", HUNCH_P("24"), HUNCH_P("25"), HUNCH_P("26"), HUNCH_P("27"))        \
    HUNCH_SCALE("24", "8") HUNCH_SECOND_P("8") HUNCH_SCALE("25", "9") HUNCH_SECOND_P("9")     \
    HUNCH_SCALE("26", "10") HUNCH_SECOND_P("10") HUNCH_SCALE("27", "11") HUNCH_SECOND_P("11") \
    HUNCH_SECOND_SCALE("8", "12") HUNCH_SECOND_SCALE("9", "13")                               \
    HUNCH_SECOND_SCALE("10", "14") HUNCH_SECOND_SCALE("11", "15")                             \
    HUNCH_ADD(r, "", "24", "30", "", "0") HUNCH_ADD(s, "", "25", "30", "", "1")               \
    HUNCH_ADD(t, "", "26", "30", "", "2") HUNCH_ADD(u, "", "27", "30", "", "3")               \
    HUNCH_ADD(r, "", "8", "30", "", "0") A HUNCH_ADD(s, "", "9", "30", "", "1") B             \
    HUNCH_ADD(t, "", "10", "30", "", "2") C HUNCH_ADD(u, "", "11", "30", "", "3") D
#define HUNCH_EIGHT_K6                                                                        \
    "add %[offset], %[offset], #32\n" HUNCH_CONSTANT("31", "96")                              \
    HUNCH_HALF_K6("16", "17", "18", "19", "0") HUNCH_MAGIC("8") HUNCH_MAGIC("9")              \
    HUNCH_HALF_K6("20", "21", "22", "23", "48") HUNCH_ROW("24", "0") HUNCH_ROW("25", "32")    \
    HUNCH_ROW("26", "64") HUNCH_ROW("27", "96") HUNCH_MAGIC("10") HUNCH_MAGIC("11")           \
    "ldr q28, [%[offset], #16]\n ldr q29, [%[offset], #48]\n"                                 \
    HUNCH_FOUR_K6("0", "1", "2", "3", "0", "256", HUNCH_MAGIC("8") HUNCH_ROW("24", "128"),    \
                  HUNCH_MAGIC("9") HUNCH_ROW("25", "160"),                                    \
                  HUNCH_MAGIC("10") HUNCH_ROW("26", "192"),                                   \
                  HUNCH_MAGIC("11") HUNCH_ROW("27", "224"))                                   \
    HUNCH_FOUR_K6("4", "5", "6", "7", "128", "272", HUNCH_AHEAD("3840"), HUNCH_AHEAD("3904"), \
                  "", "")                                                                     \
    "add %[w], %[w], #96\n add %[offset], %[offset], #32\n"

// TABLE, whose halves have scales of their own too: one half of all rows, then the other.
#define HUNCH_EIGHT_LOW_LEVELS                                                                \
    HUNCH_ROWS_BODY(8, LOW_LEVELS, FIRST, NONE) HUNCH_ROWS_BODY(8, HIGH_LEVELS, SECOND, NONE)
#define HUNCH_EIGHT_HIGH_LEVELS

#define HUNCH_EIGHT_WHOLE(LOAD, MINIMA) HUNCH_EIGHT_##LOAD HUNCH_EIGHT_SUMS HUNCH_EIGHT_##MINIMA
#define HUNCH_EIGHT_FIRST(LOAD, MINIMA) HUNCH_EIGHT_##LOAD  // both halves
#define HUNCH_EIGHT_SECOND(LOAD, MINIMA)
