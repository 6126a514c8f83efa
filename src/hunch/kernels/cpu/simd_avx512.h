// AVX-512 with VNNI: 16 output channels per vector.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "config.h"

namespace hunch {

constexpr const char* VECTOR_UNIT = "AVX-512";
constexpr int P = 16;  // output channels per panel: float lanes of a vector
constexpr int RT = 8;  // rows per register tile
constexpr bool KEEPS_SUMS = true;  // integer sums of the activations, for add_group
// An integer sum counted up from the bits of 1.5 * 2^23 reads as the float 1.5 * 2^23 + sum, and
// fma(offset, that, d) is sum * d rounded once, as tile_neon.h has it.
constexpr int32_t MAGIC_BITS = 0x4B400000;
constexpr int32_t SUMS_START = MAGIC_BITS;  // added to the sums of coarse activations
constexpr bool IN_PAIRS = false;
constexpr bool IN_WORDS = false;

typedef __m512 vf;

inline vf zero() { return _mm512_setzero_ps(); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf fma(vf acc, vf a, vf b) { return _mm512_fmadd_ps(a, b, acc); }
inline vf fma(vf acc, vf a, float b) { return _mm512_fmadd_ps(a, set1(b), acc); }
inline vf abs(vf a) { return _mm512_abs_ps(a); }
inline float max_lane(vf a) { return _mm512_reduce_max_ps(a); }
inline vf load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
inline void store_half(uint16_t* p, vf x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
// P codes of 8 bits: whole numbers, or those of kept.h, 2^-8 as large.
inline vf load_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline vf load_fp8(const uint8_t* p) {
    __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16((short)0xBFFF)));
}
// 2P small whole numbers.
inline void load_uint8(const uint8_t* p, vf& first, vf& second) {
    first = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
    second = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(p + 16))));
}
inline void load_int8(const uint8_t* p, vf& first, vf& second) {
    first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
    second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + 16))));
}
// 2^n, exact, for whole n in [-126, 127] that stand in the low bits of x = 1.5 * 2^23 + n.
inline vf pow2(vf x) {
    __m512i n = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
}

// q = x * factor rounded to nearest even, for 32 numbers that stay within int8; returns their sum.
inline int quantise32(const float* x, float factor, int8_t* q) {
    __m512i a = _mm512_cvtps_epi32(mul(load(x), set1(factor)));
    __m512i b = _mm512_cvtps_epi32(mul(load(x + 16), set1(factor)));
    _mm_storeu_si128((__m128i*)q, _mm512_cvtsepi32_epi8(a));
    _mm_storeu_si128((__m128i*)(q + 16), _mm512_cvtsepi32_epi8(b));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}

// The same for 14 bits, q = 64 * high + low.
inline int quantise32_fine(const float* x, float factor, int8_t* high, int8_t* low) {
    __m512i sum = _mm512_setzero_si512();
    HUNCH_UNROLL for (int i = 0; i < 32; i += 16) {
        __m512i q = _mm512_cvtps_epi32(mul(load(x + i), set1(factor)));
        __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(32)), 6);
        __m512i l = _mm512_sub_epi32(q, _mm512_slli_epi32(h, 6));
        _mm_storeu_si128((__m128i*)(high + i), _mm512_cvtsepi32_epi8(h));
        _mm_storeu_si128((__m128i*)(low + i), _mm512_cvtsepi32_epi8(l));
        sum = _mm512_add_epi32(sum, q);
    }
    return _mm512_reduce_add_epi32(sum);
}

inline __m256 add_halves(vf a) {
    __m256 low = _mm512_castps512_ps256(a);
    return _mm256_add_ps(low, _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
}

// Stores the sums over lanes of four vectors.
inline void store_sums(float* p, vf a, vf b, vf c, vf d) {
    __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(add_halves(a), add_halves(b)),
                              _mm256_hadd_ps(add_halves(c), add_halves(d)));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}

// The weights of one group of 32 inputs: quad i holds inputs 4i..4i+3 of each channel. Products are
// of unsigned and signed numbers: weights of more than 4 bits are here plus 128.
struct Weights {
    __m512i quad[8];
};

inline Weights unpack4(const uint8_t* p) {
    Weights w;
    const __m512i low = _mm512_set1_epi8(15);
    HUNCH_UNROLL for (int i = 0; i < 4; i++) {
        __m512i q = _mm512_loadu_si512(p + 64 * i);
        w.quad[i] = _mm512_and_si512(q, low);
        w.quad[i + 4] = _mm512_and_si512(_mm512_srli_epi16(q, 4), low);
    }
    return w;
}

inline __m512i choose_bits(__m512i which, __m512i a, __m512i b) {  // a where `which` has ones
    return _mm512_ternarylogic_epi32(which, a, b, 0xCA);
}

// The nibbles of unpack4, then a byte whose bit i says that quad i is below zero.
inline Weights unpack5(const uint8_t* p) {
    Weights w;
    const __m512i low = _mm512_set1_epi8(15), offset = _mm512_set1_epi8((char)0x80);
    const __m512i signs = _mm512_loadu_si512(p + 256), sixteen = _mm512_set1_epi8(16);
    HUNCH_UNROLL for (int i = 0; i < 4; i++) {
        __m512i q = _mm512_loadu_si512(p + 64 * i);
        w.quad[i] = choose_bits(low, q, offset);
        w.quad[i + 4] = choose_bits(low, _mm512_srli_epi16(q, 4), offset);
    }
    HUNCH_UNROLL for (int i = 0; i < 8; i++) {
        __mmask64 is_below = _mm512_test_epi8_mask(signs, _mm512_set1_epi8((char)(1 << i)));
        w.quad[i] = _mm512_mask_sub_epi8(w.quad[i], is_below, w.quad[i], sixteen);
    }
    return w;
}

// Half a group of 6 bits, times 4: quads 0 to 3.
inline Weights unpack6(const uint8_t* p) {
    Weights w;
    const __m512i low = _mm512_set1_epi8(3), offset = _mm512_set1_epi8((char)0x80);
    __m512i last = _mm512_setzero_si512();
    HUNCH_UNROLL for (int i = 0; i < 3; i++) {
        __m512i q = _mm512_loadu_si512(p + 64 * i);
        w.quad[i] = _mm512_ternarylogic_epi32(low, q, offset, 0xA6);  // (q & ~low) ^ offset
        last = choose_bits(low, q, _mm512_slli_epi16(last, 2));
    }
    w.quad[3] = _mm512_xor_si512(_mm512_slli_epi16(last, 2), offset);
    return w;
}

// 16 levels, and the levels of half a group's nibbles: quads 0 to 3.
struct LevelTable {
    __m512i of;
    explicit LevelTable(const int8_t* p)
        : of(_mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)),
                              _mm512_set1_epi8((char)0x80))) {}
};
inline Weights low_levels(const uint8_t* p, const LevelTable& table) {
    Weights w;
    HUNCH_UNROLL for (int i = 0; i < 4; i++) {
        __m512i q = _mm512_loadu_si512(p + 64 * i);
        w.quad[i] = _mm512_shuffle_epi8(table.of, _mm512_and_si512(q, _mm512_set1_epi8(15)));
    }
    return w;
}
inline Weights high_levels(const uint8_t* p, const LevelTable& table) {
    Weights w;
    HUNCH_UNROLL for (int i = 0; i < 4; i++) {
        __m512i q = _mm512_srli_epi16(_mm512_loadu_si512(p + 64 * i), 4);
        w.quad[i] = _mm512_shuffle_epi8(table.of, _mm512_and_si512(q, _mm512_set1_epi8(15)));
    }
    return w;
}

inline Weights load8(const int8_t* p) {
    Weights w;
    const __m512i offset = _mm512_set1_epi8((char)0x80);
    HUNCH_UNROLL for (int i = 0; i < 8; i++)
        w.quad[i] = _mm512_xor_si512(_mm512_loadu_si512(p + 64 * i), offset);
    return w;
}

// What store8 wrote of unpack4.
inline Weights load4(const int8_t* p) {
    Weights w;
    HUNCH_UNROLL for (int i = 0; i < 8; i++) w.quad[i] = _mm512_loadu_si512(p + 64 * i);
    return w;
}

inline void store8(int8_t* p, const Weights& w) {
    HUNCH_UNROLL for (int i = 0; i < 8; i++) _mm512_storeu_si512(p + 64 * i, w.quad[i]);
}

struct Scale {
    vf d, offset;
    explicit Scale(vf factor) : d(factor), offset(mul(factor, set1(-12582912.0f))) {}
};

// s + w * a, four inputs of each channel. By hand, as compilers load and spread `a` apart.
inline __m512i dot(__m512i s, __m512i w, const int8_t* a) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(s) : "v"(w), "m"(*(const int32_t*)a));
    return s;
}

// For each of R rows, acc += (sum of w * a over the group) * scale * d_a: two roundings, the same
// for every R. Where weights go in plus 128, 128 times the sum of the activations is taken away
// first (of fine ones 2 times: the shift makes it 128).
template <int R, bool IS_4BIT, bool FINE, Span SPAN = Span::WHOLE>
inline void add_group(vf* acc, const Weights& w, const Scale& scale, const int8_t* a,
                      const float* d_a) {
    const int32_t* starts = (const int32_t*)(d_a + 2 * RT) + RT * (int)SPAN;
    constexpr int QUADS = num_quads(SPAN);
    constexpr bool COUNTS = !FINE || IS_4BIT;  // the others outgrow 2^22
    constexpr int32_t START = FINE ? MAGIC_BITS >> 6 : MAGIC_BITS;
    if (SPAN == Span::SECOND) a += 16;
    __m512i s[R];
    HUNCH_UNROLL for (int r = 0; r < R; r++) s[r] = _mm512_set1_epi32(IS_4BIT ? START : starts[r]);
    // Two sums side by side, as one waits for itself: of high and low parts, or of every other quad.
    // From 7 rows on registers run out, which pays for fine activations alone.
    constexpr bool IN_TWO = FINE || R <= 6;
    __m512i t[R];
    HUNCH_UNROLL for (int r = 0; r < R; r++) t[r] = _mm512_setzero_si512();
    HUNCH_UNROLL for (int i = 0; i < QUADS; i++)
        HUNCH_UNROLL for (int r = 0; r < R; r++) {
            __m512i& sum = IN_TWO && !FINE && i % 2 ? t[r] : s[r];
            sum = dot(sum, w.quad[i], a + 32 * r + 4 * i);
            if (FINE) t[r] = dot(t[r], w.quad[i], a + 32 * (RT + r) + 4 * i);
        }
    HUNCH_UNROLL for (int r = 0; r < R; r++) {
        if (FINE) s[r] = _mm512_slli_epi32(s[r], 6);
        if (IN_TWO) s[r] = _mm512_add_epi32(s[r], t[r]);
    }
    HUNCH_UNROLL for (int r = 0; r < R; r++) {
        vf p = COUNTS ? fma(scale.offset, _mm512_castsi512_ps(s[r]), scale.d)
                      : mul(_mm512_cvtepi32_ps(s[r]), scale.d);
        acc[r] = fma(acc[r], p, d_a[r]);
    }
}

}  // namespace hunch
