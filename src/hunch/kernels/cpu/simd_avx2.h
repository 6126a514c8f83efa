// AVX2 with FMA and F16C: 8 output channels per vector. AVX-VNNI is used where it is there.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "config.h"

namespace hunch {

constexpr const char* VECTOR_UNIT = "AVX2";
constexpr int P = 8;   // output channels per panel: float lanes of a vector
#if defined(__AVXVNNI__)
constexpr int RT = 4;  // rows per register tile
constexpr bool KEEPS_SUMS = true;  // integer sums of the activations, for add_group
constexpr bool IN_WORDS = false;
#else
constexpr int RT = 8;
constexpr bool KEEPS_SUMS = false;
constexpr bool IN_WORDS = true;  // fine activations stand as int16 too
#endif
constexpr int32_t SUMS_START = 0;
constexpr bool IN_PAIRS = false;

typedef __m256 vf;

inline vf zero() { return _mm256_setzero_ps(); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf fma(vf acc, vf a, vf b) { return _mm256_fmadd_ps(a, b, acc); }
inline vf fma(vf acc, vf a, float b) { return _mm256_fmadd_ps(a, set1(b), acc); }
inline vf abs(vf a) { return _mm256_andnot_ps(set1(-0.0f), a); }
inline float max_lane(vf a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline vf load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store_half(uint16_t* p, vf x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, 0)); }
// P codes of 8 bits: whole numbers, or those of kept.h, 2^-8 as large.
inline vf load_int8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline vf load_fp8(const uint8_t* p) {
    __m128i half = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(half, _mm_set1_epi16((short)0xBFFF)));
}
// 2P small whole numbers.
inline void load_uint8(const uint8_t* p, vf& first, vf& second) {
    __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    first = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    second = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
}
inline void load_int8(const uint8_t* p, vf& first, vf& second) {
    __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    first = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    second = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
}
// 2^n, exact, for whole n in [-126, 127] that stand in the low bits of x = 1.5 * 2^23 + n.
inline vf pow2(vf x) {
    __m256i n = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}

// q = x * factor rounded to nearest even, for 32 numbers that stay within int8; returns their sum.
inline int quantise32(const float* x, float factor, int8_t* q) {
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8) {
        __m256i v = _mm256_cvtps_epi32(mul(load(x + i), set1(factor)));
        sum = _mm256_add_epi32(sum, v);
        __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        _mm_storel_epi64((__m128i*)(q + i), _mm_packs_epi16(h, h));
    }
    int lanes[8], total = 0;
    _mm256_storeu_si256((__m256i*)lanes, sum);
    for (int lane : lanes) total += lane;
    return total;
}

// The same for 14 bits, q = 64 * high + low.
inline int quantise32_fine(const float* x, float factor, int8_t* high, int8_t* low) {
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8) {
        __m256i v = _mm256_cvtps_epi32(mul(load(x + i), set1(factor)));
        sum = _mm256_add_epi32(sum, v);
        __m128i q = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        __m128i h = _mm_srai_epi16(_mm_add_epi16(q, _mm_set1_epi16(32)), 6);
        __m128i l = _mm_sub_epi16(q, _mm_slli_epi16(h, 6));
        _mm_storel_epi64((__m128i*)(high + i), _mm_packs_epi16(h, h));
        _mm_storel_epi64((__m128i*)(low + i), _mm_packs_epi16(l, l));
    }
    int lanes[8], total = 0;
    _mm256_storeu_si256((__m256i*)lanes, sum);
    for (int lane : lanes) total += lane;
    return total;
}

// Stores the sums over lanes of four vectors.
inline void store_sums(float* p, vf a, vf b, vf c, vf d) {
    vf x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}

// The weights of one group of 32 inputs: quad i holds inputs 4i..4i+3 of each channel.
struct Weights {
    __m256i quad[8];
};

inline Weights unpack4(const uint8_t* p) {
    Weights w;
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < 4; i++) {
        __m256i q = _mm256_loadu_si256((const __m256i*)(p + 32 * i));
        w.quad[i] = _mm256_and_si256(q, low);
        w.quad[i + 4] = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
    }
    return w;
}

// The nibbles of unpack4, then a byte whose bit i says that quad i is below zero.
inline Weights unpack5(const uint8_t* p) {
    Weights w = unpack4(p);
    const __m256i signs = _mm256_loadu_si256((const __m256i*)(p + 128));
    for (int i = 0; i < 8; i++) {
        const __m256i bit = _mm256_set1_epi8((char)(1 << i));
        __m256i is_below = _mm256_cmpeq_epi8(_mm256_and_si256(signs, bit), bit);
        w.quad[i] = _mm256_or_si256(w.quad[i], _mm256_and_si256(is_below, _mm256_set1_epi8((char)0xF0)));
    }
    return w;
}

// Half a group of 6 bits, times 4: quads 0 to 3.
inline Weights unpack6(const uint8_t* p) {
    Weights w;
    const __m256i high = _mm256_set1_epi8((char)0xFC), low = _mm256_set1_epi8(3);
    __m256i last = _mm256_setzero_si256();
    for (int i = 0; i < 3; i++) {
        __m256i q = _mm256_loadu_si256((const __m256i*)(p + 32 * i));
        w.quad[i] = _mm256_and_si256(q, high);
        last = _mm256_or_si256(_mm256_slli_epi16(last, 2), _mm256_and_si256(q, low));
    }
    w.quad[3] = _mm256_slli_epi16(last, 2);
    return w;
}

// 16 levels, and the levels of half a group's nibbles: quads 0 to 3.
struct LevelTable {
    __m256i of;
    explicit LevelTable(const int8_t* p)
        : of(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p))) {}
};
inline Weights low_levels(const uint8_t* p, const LevelTable& table) {
    Weights w;
    for (int i = 0; i < 4; i++) {
        __m256i q = _mm256_loadu_si256((const __m256i*)(p + 32 * i));
        w.quad[i] = _mm256_shuffle_epi8(table.of, _mm256_and_si256(q, _mm256_set1_epi8(15)));
    }
    return w;
}
inline Weights high_levels(const uint8_t* p, const LevelTable& table) {
    Weights w;
    for (int i = 0; i < 4; i++) {
        __m256i q = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)(p + 32 * i)), 4);
        w.quad[i] = _mm256_shuffle_epi8(table.of, _mm256_and_si256(q, _mm256_set1_epi8(15)));
    }
    return w;
}

inline Weights load8(const int8_t* p) {
    Weights w;
    for (int i = 0; i < 8; i++) w.quad[i] = _mm256_loadu_si256((const __m256i*)(p + 32 * i));
    return w;
}

// What store8 wrote of unpack4.
inline Weights load4(const int8_t* p) { return load8(p); }

inline void store8(int8_t* p, const Weights& w) {
    for (int i = 0; i < 8; i++) _mm256_storeu_si256((__m256i*)(p + 32 * i), w.quad[i]);
}

struct Scale {
    vf d;
    explicit Scale(vf factor) : d(factor) {}
};

inline __m256i four_inputs(const int8_t* a) {
    int32_t word;
    std::memcpy(&word, a, 4);
    return _mm256_set1_epi32(word);
}

#if defined(__AVXVNNI__)
// s + the sum of w * a over the group, exact. Products are of unsigned and signed numbers: weights of 8
// bits go in plus 128.
template <bool IS_4BIT, int QUADS>
inline __m256i add_dots(__m256i start, const Weights& w, const int8_t* a) {
    const __m256i offset = _mm256_set1_epi8(IS_4BIT ? 0 : (char)0x80);
    HUNCH_UNROLL for (int i = 0; i < QUADS; i++)
        start = _mm256_dpbusd_avx_epi32(start, _mm256_xor_si256(w.quad[i], offset), four_inputs(a + 4 * i));
    return start;
}

// The sums of w * q over the group for each of R rows, exact; the low parts of fine activations follow
// all high ones.
template <int R, bool IS_4BIT, bool FINE, Span SPAN>
inline void dot_rows(__m256i* sums, const Weights& w, const int8_t* a, const float* d_a) {
    constexpr int QUADS = num_quads(SPAN);
    if (SPAN == Span::SECOND) a += 16;
    HUNCH_UNROLL for (int r = 0; r < R; r++) {
        // 128 times the sum of the activations is taken away first; the shift below makes 2 of it 128.
        const int32_t start = IS_4BIT ? 0 : ((const int32_t*)d_a)[2 * RT + RT * (int)SPAN + r];
        __m256i s = add_dots<IS_4BIT, QUADS>(_mm256_set1_epi32(start), w, a + 32 * r);
        if (FINE) s = add_dots<IS_4BIT, QUADS>(_mm256_slli_epi32(s, 6), w, a + 32 * (RT + r));
        sums[r] = s;
    }
}
#else
// Of several rows the next product belongs to the sum before it. Compilers would compute all products
// first, for which there are too few registers.
template <int R>
inline void in_order(__m256i& sum) {
    if (R > 1) asm("" : "+x"(sum));
}

// The sums of w * a over the group for each of R rows, exact.
template <int R, bool IS_4BIT, int QUADS>
inline void dot_bytes(__m256i* sums, const Weights& w, const int8_t* a) {
    const __m256i ones = _mm256_set1_epi16(1);
    HUNCH_UNROLL for (int r = 0; r < R; r++) sums[r] = _mm256_setzero_si256();
    HUNCH_UNROLL for (int i = 0; i < QUADS; i++) {
        const __m256i v = IS_4BIT ? w.quad[i] : _mm256_abs_epi8(w.quad[i]);
        HUNCH_UNROLL for (int r = 0; r < R; r++) {
            const __m256i x = four_inputs(a + 32 * r + 4 * i);
            if (IS_4BIT) {  // eight sums of pairs still fit 16 bits
                in_order<R>(sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(v, x)));
            } else {
                const __m256i pairs = _mm256_maddubs_epi16(v, _mm256_sign_epi8(x, w.quad[i]));
                in_order<R>(sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs, ones)));
            }
        }
    }
    HUNCH_UNROLL for (int r = 0; IS_4BIT && r < R; r++) sums[r] = _mm256_madd_epi16(sums[r], ones);
}

// The same for fine activations as whole numbers: products are added in pairs, four channels to a vector.
template <int R, int QUADS>
inline void dot_words(__m256i* sums, const Weights& w, const int16_t* a) {
    __m256i upper[R], lower[R];
    HUNCH_UNROLL for (int r = 0; r < R; r++) upper[r] = lower[r] = _mm256_setzero_si256();
    HUNCH_UNROLL for (int i = 0; i < QUADS; i++) {
        const __m256i first = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(w.quad[i]));
        const __m256i second = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(w.quad[i], 1));
        HUNCH_UNROLL for (int r = 0; r < R; r++) {
            int64_t four;
            std::memcpy(&four, a + 32 * r + 4 * i, 8);
            const __m256i x = _mm256_set1_epi64x(four);
            in_order<R>(upper[r] = _mm256_add_epi32(upper[r], _mm256_madd_epi16(first, x)));
            in_order<R>(lower[r] = _mm256_add_epi32(lower[r], _mm256_madd_epi16(second, x)));
        }
    }
    HUNCH_UNROLL for (int r = 0; r < R; r++)
        sums[r] = _mm256_permute4x64_epi64(_mm256_hadd_epi32(upper[r], lower[r]), 0xD8);
}

template <int R, bool IS_4BIT, bool FINE, Span SPAN>
inline void dot_rows(__m256i* sums, const Weights& w, const int8_t* a, const float*) {
    constexpr int QUADS = num_quads(SPAN);
    const int first = SPAN == Span::SECOND ? 16 : 0;
    if constexpr (FINE && !IS_4BIT) {
        dot_words<R, QUADS>(sums, w, (const int16_t*)(a + 2 * RT * 32) + first);
        return;
    }
    dot_bytes<R, IS_4BIT, QUADS>(sums, w, a + first);
    if constexpr (FINE) {
        __m256i low[R];
        dot_bytes<R, IS_4BIT, QUADS>(low, w, a + 32 * RT + first);
        HUNCH_UNROLL for (int r = 0; r < R; r++)
            sums[r] = _mm256_add_epi32(_mm256_slli_epi32(sums[r], 6), low[r]);
    }
}
#endif

// For each of R rows, acc += (sum of w * a over the group) * scale * d_a: two roundings, the same
// for every R.
template <int R, bool IS_4BIT, bool FINE, Span SPAN = Span::WHOLE>
inline void add_group(vf* acc, const Weights& w, const Scale& scale, const int8_t* a,
                      const float* d_a) {
    __m256i sums[R];
    dot_rows<R, IS_4BIT, FINE, SPAN>(sums, w, a, d_a);
    HUNCH_UNROLL for (int r = 0; r < R; r++)
        acc[r] = fma(acc[r], mul(_mm256_cvtepi32_ps(sums[r]), scale.d), d_a[r]);
}

}  // namespace hunch
