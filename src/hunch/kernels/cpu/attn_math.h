// The two inner loops of attention, in floats and (where the CPU computes in them) in half floats.
//
// Keys and values are found by their distance `at` from the cache's start. Scores are in units of
// log2: a weight is a power of two.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention.h"
#include "vecmath.h"

namespace hunch {

// Vectors of floats.
struct FloatLanes {
    typedef float Number;
    typedef vf V;
    static constexpr int WIDTH = P;
    static constexpr int QUERIES = P == 8 ? 2 : 4;  // computed at once: AVX2 has few registers
    static constexpr float INT8_UNIT = 1;
    static constexpr bool EXPANDS = false, IN_HALVES = false;

    static V get(const Number* p) { return load(p); }
    static void put(Number* p, V x) { store(p, x); }
    static V all(Number x) { return set1(x); }
    template <class T>
    static V kept(const T* p) { return load_kept(p); }
    static V times(V a, V b) { return mul(a, b); }
    static V plus(V a, V b) { return add(a, b); }
    static V minus(V a, V b) { return sub(a, b); }
    static V larger(V a, V b) { return max(a, b); }
    static V power(V x) { return exp2(x); }
    template <class B>
    static V added(V sum, V a, B b) { return fma(sum, a, b); }
    static Number largest(V x) { return max_lane(x); }
    static float total(V x) { return sum_lanes(x); }
    static void put_totals(Number* p, V a, V b, V c, V d) { store_sums(p, a, b, c, d); }
    static void put_floats(float* p, V x) { store(p, x); }
    // P numbers as floats.
    static vf wide(const Number* p) { return load(p); }
    static void put_wide(Number* p, vf x) { store(p, x); }
};

// What attention computes with numbers of the cache that are T.
template <class T, class L>
struct Math {
    typedef T Stored;                   // one number of the cache
    typedef typename L::Number Number;  // one of a query, score or weight
    typedef typename L::V V;
    static constexpr int QUERIES = L::QUERIES;
    // A code that is read as 1, or 0 where the cache holds no codes.
    static constexpr float UNIT = std::is_same_v<T, Int8> ? L::INT8_UNIT : std::is_same_v<T, Fp8> ? 256 : 0;
    // Where it is dear to read codes, they are expanded first, to what Plain reads.
    static constexpr bool EXPANDS = L::EXPANDS && UNIT != 0;
    typedef Math<std::conditional_t<EXPANDS, uint16_t, T>, L> Plain;
    static void expand(const T* codes, int size, typename Plain::Stored* out) {
        if constexpr (EXPANDS)
            for (int h = 0; h < size; h += L::WIDTH) L::put((Number*)out + h, L::kept(codes + h));
    }

    static void put(const float* x, int count, Number* out) {
        for (int h = 0; h < count; h += P) L::put_wide(out + h, load(x + h));
    }

    // out[i * stride + j] = query i . key j, for Q queries and four keys
    template <int Q>
    HUNCH_NOINLINE static void scores(const Number* q, const T* k, const int64_t* at, int size, Number* out,
                       int stride) {
        V acc[Q][4];
        const T* keys[4] = {k + at[0], k + at[1], k + at[2], k + at[3]};
        HUNCH_UNROLL for (int i = 0; i < Q; i++)
            HUNCH_UNROLL for (int j = 0; j < 4; j++)
                acc[i][j] = L::times(L::get(q + i * size), L::kept(keys[j]));
        HUNCH_ROLLED for (int h = L::WIDTH; h < size; h += L::WIDTH) {
            V key[4];
            HUNCH_UNROLL for (int j = 0; j < 4; j++) key[j] = L::kept(keys[j] + h);
            HUNCH_UNROLL for (int i = 0; i < Q; i++) {
                V x = L::get(q + i * size + h);
                HUNCH_UNROLL for (int j = 0; j < 4; j++) acc[i][j] = L::added(acc[i][j], x, key[j]);
            }
        }
        HUNCH_UNROLL for (int i = 0; i < Q; i++)
            L::put_totals(out + i * stride, acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    }

    // A query's scores or weights by the scales of codes.
    static void multiply(Number* x, const float* factors, int count) {
        for (int j = 0; j < count; j += P) L::put_wide(x + j, mul(L::wide(x + j), load(factors + j)));
    }

    // The first scores become limit * tanh(score / limit).
    static void cap(Number* scores, int count, float limit) {
        vf size = set1(limit);
        for (int j = 0; j < count; j += P)
            L::put_wide(scores + j, mul(size, tanh(div(L::wide(scores + j), size))));
    }

    // Scores become 2^(score - largest), and zero outside [from, count).
    static void soften(Number* scores, int from, int count, float* largest, float* total) {
        constexpr int STEP = 4 * L::WIDTH;
        const Number lowest = -std::numeric_limits<float>::infinity();
        const int end = (count + STEP - 1) / STEP * STEP;
        std::fill(scores, scores + from, lowest);
        std::fill(scores + count, scores + end, lowest);
        V tops[4], sum[4];  // side by side: one alone waits for itself
        HUNCH_UNROLL for (int i = 0; i < 4; i++) tops[i] = L::all(lowest), sum[i] = L::all(0);
        for (int j = 0; j < end; j += STEP)
            HUNCH_UNROLL for (int i = 0; i < 4; i++)
                tops[i] = L::larger(tops[i], L::get(scores + j + i * L::WIDTH));
        const Number top = L::largest(L::larger(L::larger(tops[0], tops[1]), L::larger(tops[2], tops[3])));
        for (int j = 0; j < end; j += STEP)
            HUNCH_UNROLL for (int i = 0; i < 4; i++) {
                Number* at = scores + j + i * L::WIDTH;
                V weight = L::power(L::minus(L::get(at), L::all(top)));
                L::put(at, weight);
                sum[i] = L::plus(sum[i], weight);
            }
        std::fill(scores, scores + from, (Number)0);
        std::fill(scores + count, scores + TILE, (Number)0);
        *largest = (float)top;
        *total = L::total(L::plus(L::plus(sum[0], sum[1]), L::plus(sum[2], sum[3])));
    }

    // sums[i * size + h] = sum over up to TILE j of w[i * stride + j] * value j, in an order of j alone
    template <int Q>
    static void add_values(float* sums, const Number* w, int stride, const T* v, const int64_t* at,
                           int count, int size) {
        int h = 0;
        for (; h + 4 * L::WIDTH <= size; h += 4 * L::WIDTH)
            add_part<Q, 4>(sums + h, w, stride, v + h, at, count, size);
        for (; h < size; h += L::WIDTH) add_part<Q, 1>(sums + h, w, stride, v + h, at, count, size);
    }

private:
    template <int Q, int N>
    HUNCH_NOINLINE static void add_part(float* sums, const Number* w, int stride, const T* v, const int64_t* at,
                         int count, int size) {
        V sum[Q][N], first[Q][N];
        HUNCH_UNROLL for (int i = 0; i < Q; i++)
            HUNCH_UNROLL for (int n = 0; n < N; n++) sum[i][n] = L::all(0);
        const bool is_long = L::IN_HALVES && count > TILE / 2;
        int j = 0, end = is_long ? TILE / 2 : count;
        HUNCH_ROLLED for (int half = 0; half <= is_long; half++, end = count) {
            if (half)
                HUNCH_UNROLL for (int i = 0; i < Q; i++)
                    HUNCH_UNROLL for (int n = 0; n < N; n++)
                        first[i][n] = sum[i][n], sum[i][n] = L::all(0);
            HUNCH_ROLLED for (; j < end; j++) {
                V value[N];
                HUNCH_UNROLL for (int n = 0; n < N; n++) value[n] = L::kept(v + at[j] + n * L::WIDTH);
                HUNCH_UNROLL for (int i = 0; i < Q; i++)
                    HUNCH_UNROLL for (int n = 0; n < N; n++)
                        sum[i][n] = L::added(sum[i][n], value[n], w[i * stride + j]);
            }
        }
        HUNCH_UNROLL for (int i = 0; i < Q; i++)
            HUNCH_UNROLL for (int n = 0; n < N; n++) {
                V x = is_long ? L::plus(first[i][n], sum[i][n]) : sum[i][n];
                L::put_floats(sums + i * size + n * L::WIDTH, x);
            }
    }
};

template <class T>
using FloatMath = Math<T, FloatLanes>;

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
// Products and short sums in half floats: twice the numbers per instruction. A score is one chain
// over the head; values are summed over each half of a tile, then both together, then in floats.
struct HalfLanes {
    typedef float16_t Number;
    typedef float16x8_t V;
    static constexpr int WIDTH = 8, QUERIES = 4;
    static constexpr float INT8_UNIT = 128;
    static constexpr bool EXPANDS = true, IN_HALVES = true;

    static V get(const Number* p) { return vld1q_f16(p); }
    static void put(Number* p, V x) { vst1q_f16(p, x); }
    static V all(Number x) { return vdupq_n_f16(x); }
    // Codes are read as fractions, so that no sum leaves a half's range.
    static V kept(const uint16_t* p) { return vld1q_f16((const float16_t*)p); }
    static V kept(const Int8* p) { return vcvtq_n_f16_s16(vmovl_s8(vld1_s8((const int8_t*)p)), 7); }
    static V kept(const Fp8* p) {
        int16x8_t half = vshlq_n_s16(vmovl_s8(vld1_s8((const int8_t*)p)), 7);
        return vreinterpretq_f16_s16(vandq_s16(half, vdupq_n_s16((int16_t)0xBFFF)));
    }
    static V times(V a, V b) { return vmulq_f16(a, b); }
    static V plus(V a, V b) { return vaddq_f16(a, b); }
    static V minus(V a, V b) { return vsubq_f16(a, b); }
    static V larger(V a, V b) { return vmaxq_f16(a, b); }
    static V added(V sum, V a, V b) { return vfmaq_f16(sum, a, b); }
    static V added(V sum, V a, Number b) { return vfmaq_n_f16(sum, a, b); }
    static Number largest(V x) { return vmaxvq_f16(x); }
    static float total(V x) { return sum_lanes(add(vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x))); }
    static void put_totals(Number* p, V a, V b, V c, V d) {
        V pairs = vpaddq_f16(vpaddq_f16(a, b), vpaddq_f16(c, d));
        vst1_f16(p, vget_low_f16(vpaddq_f16(pairs, pairs)));
    }
    static void put_floats(float* p, V x) {
        store(p, vcvt_f32_f16(vget_low_f16(x)));
        store(p + 4, vcvt_high_f32_f16(x));
    }
    static vf wide(const Number* p) { return load_half((const uint16_t*)p); }
    static void put_wide(Number* p, vf x) { store_half((uint16_t*)p, x); }
    // 2^x for x up to 0; below -26 it is 0. The whole part of x stands in the low bits of
    // 1.5 * 2^10 + x; it is applied in two steps, so that small results are rounded, not cut.
    static V power(V x) {
        const V magic = vdupq_n_f16(1536);
        x = vmaxq_f16(x, vdupq_n_f16(-26));
        V shifted = vaddq_f16(x, magic), r = vsubq_f16(x, vsubq_f16(shifted, magic));
        V y = vfmaq_f16(vdupq_n_f16(0.24221096f), r, vdupq_n_f16(0.05500893f));
        y = vfmaq_f16(vdupq_n_f16(0.69328293f), y, r);
        y = vfmaq_f16(vdupq_n_f16(1.0f), y, r);
        V normal = vmaxq_f16(shifted, vdupq_n_f16(1536 - 14));
        int16x8_t n = vreinterpretq_s16_f16(normal), rest = vsubq_s16(vreinterpretq_s16_f16(shifted), n);
        return vmulq_f16(vmulq_f16(y, power_of_two(n)), power_of_two(rest));
    }
    static V power_of_two(int16x8_t n) {  // of the low bits
        return vreinterpretq_f16_s16(vshlq_n_s16(vaddq_s16(n, vdupq_n_s16(15)), 10));
    }
};
template <class T>
using QuickMath = Math<T, HalfLanes>;  // of heads up to MAX_HALF_DIM
#else
template <class T>
using QuickMath = FloatMath<T>;
#endif

}  // namespace hunch
