// The two inner loops of attention, in floats and (where the CPU computes in them) in half floats.
//
// Both kinds offer: Stored, one number of the cache; Number, one of a query, score or weight; UNIT, a
// code that is read as 1, or 0 where the cache holds no codes; expand, codes to what Plain reads as
// they would be read, where that is dear (EXPANDS); scores, of Q queries with four keys;
// multiply, a query's scores or weights by the scales of codes; soften, weights of a query's scores;
// add_values, weighted sums of up to TILE values. Keys and values are found by their distance `at`
// from the cache's start. Scores are in units of log2: a weight is a power of two.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention.h"
#include "vecmath.h"

namespace hunch {

template <class T>
struct FloatMath {
    typedef T Stored;
    typedef float Number;
    static constexpr float UNIT = std::is_same_v<T, Int8> ? 1 : std::is_same_v<T, Fp8> ? 256 : 0;
    static constexpr bool EXPANDS = false;
    typedef FloatMath Plain;
    static void expand(const T*, int, T*) {}
    static constexpr int QUERIES = P == 8 ? 2 : 4;  // computed at once: AVX2 has few registers

    static void put(const float* x, int count, Number* out) {
        std::memcpy(out, x, count * sizeof(float));
    }

    // out[i * stride + j] = query i . key j, for Q queries and four keys
    template <int Q>
    HUNCH_NOINLINE static void scores(const Number* q, const T* k, const int64_t* at, int size, Number* out,
                       int stride) {
        vf acc[Q][4];
        const T* keys[4] = {k + at[0], k + at[1], k + at[2], k + at[3]};
        HUNCH_UNROLL for (int i = 0; i < Q; i++)
            HUNCH_UNROLL for (int j = 0; j < 4; j++)
                acc[i][j] = mul(load(q + i * size), load_kept(keys[j]));
        HUNCH_ROLLED for (int h = P; h < size; h += P) {
            vf key[4];
            HUNCH_UNROLL for (int j = 0; j < 4; j++) key[j] = load_kept(keys[j] + h);
            HUNCH_UNROLL for (int i = 0; i < Q; i++) {
                vf x = load(q + i * size + h);
                HUNCH_UNROLL for (int j = 0; j < 4; j++) acc[i][j] = fma(acc[i][j], x, key[j]);
            }
        }
        HUNCH_UNROLL for (int i = 0; i < Q; i++)
            store_sums(out + i * stride, acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    }

    static void multiply(Number* x, const float* factors, int count) {
        for (int j = 0; j < count; j += P) store(x + j, mul(load(x + j), load(factors + j)));
    }

    // The first scores become limit * tanh(score / limit).
    static void cap(Number* scores, int count, float limit) {
        vf size = set1(limit);
        for (int j = 0; j < count; j += P)
            store(scores + j, mul(size, tanh(div(load(scores + j), size))));
    }

    // Scores become 2^(score - largest), and zero outside [from, count).
    static void soften(Number* scores, int from, int count, float* largest, float* total) {
        const float lowest = -std::numeric_limits<float>::infinity();
        const int end = (count + 4 * P - 1) / (4 * P) * (4 * P);
        std::fill(scores, scores + from, lowest);
        std::fill(scores + count, scores + end, lowest);
        vf tops[4] = {set1(lowest), set1(lowest), set1(lowest), set1(lowest)};
        for (int j = 0; j < end; j += 4 * P)
            HUNCH_UNROLL for (int i = 0; i < 4; i++) tops[i] = max(tops[i], load(scores + j + i * P));
        const float top = max_lane(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
        vf sum[4] = {zero(), zero(), zero(), zero()};  // side by side: one alone waits for itself
        for (int j = 0; j < end; j += 4 * P)
            HUNCH_UNROLL for (int i = 0; i < 4; i++) {
                vf weight = exp2(sub(load(scores + j + i * P), set1(top)));
                store(scores + j + i * P, weight);
                sum[i] = add(sum[i], weight);
            }
        std::fill(scores, scores + from, 0.0f);
        std::fill(scores + count, scores + TILE, 0.0f);
        *largest = top;
        *total = sum_lanes(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
    }

    // sums[i * size + h] = sum over j of w[i * stride + j] * value j, in an order of j alone
    template <int Q>
    static void add_values(float* sums, const Number* w, int stride, const T* v, const int64_t* at,
                           int count, int size) {
        int h = 0;
        for (; h + 4 * P <= size; h += 4 * P)
            add_part<Q, 4>(sums + h, w, stride, v + h, at, count, size);
        for (; h < size; h += P) add_part<Q, 1>(sums + h, w, stride, v + h, at, count, size);
    }

private:
    template <int Q, int N>
    HUNCH_NOINLINE static void add_part(float* sums, const Number* w, int stride, const T* v, const int64_t* at,
                         int count, int size) {
        vf sum[Q][N];
        HUNCH_UNROLL for (int i = 0; i < Q; i++)
            HUNCH_UNROLL for (int n = 0; n < N; n++) sum[i][n] = zero();
        HUNCH_ROLLED for (int j = 0; j < count; j++) {
            vf value[N];
            HUNCH_UNROLL for (int n = 0; n < N; n++) value[n] = load_kept(v + at[j] + n * P);
            HUNCH_UNROLL for (int i = 0; i < Q; i++)
                HUNCH_UNROLL for (int n = 0; n < N; n++)
                    sum[i][n] = fma(sum[i][n], value[n], w[i * stride + j]);
        }
        HUNCH_UNROLL for (int i = 0; i < Q; i++)
            HUNCH_UNROLL for (int n = 0; n < N; n++) store(sums + i * size + n * P, sum[i][n]);
    }
};

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
// Products and short sums in half floats: twice the numbers per instruction. A score is one chain
// over the head; values are summed over each half of a tile, then both together, then in floats.
template <class T>
struct HalfMath {
    typedef T Stored;
    typedef float16_t Number;
    static constexpr float UNIT = std::is_same_v<T, Int8> ? 128 : std::is_same_v<T, Fp8> ? 256 : 0;
    static constexpr bool EXPANDS = UNIT != 0;
    typedef HalfMath<uint16_t> Plain;
    static void expand(const T* codes, int size, uint16_t* out) {
        for (int h = 0; h < size; h += 8) vst1q_f16((float16_t*)out + h, eight(codes + h));
    }
    static constexpr int QUERIES = 4;

    static void put(const float* x, int count, Number* out) {
        for (int h = 0; h < count; h += 4) store_half((uint16_t*)out + h, load(x + h));
    }

    template <int Q>
    HUNCH_NOINLINE static void scores(const Number* q, const Stored* k, const int64_t* at, int size, Number* out,
                       int stride) {
        float16x8_t acc[Q][4];
        const Stored* keys[4] = {k + at[0], k + at[1], k + at[2], k + at[3]};
        HUNCH_UNROLL for (int i = 0; i < Q; i++)
            HUNCH_UNROLL for (int j = 0; j < 4; j++)
                acc[i][j] = vmulq_f16(vld1q_f16(q + i * size), eight(keys[j]));
        HUNCH_ROLLED for (int h = 8; h < size; h += 8) {
            float16x8_t key[4];
            HUNCH_UNROLL for (int j = 0; j < 4; j++) key[j] = eight(keys[j] + h);
            HUNCH_UNROLL for (int i = 0; i < Q; i++) {
                float16x8_t x = vld1q_f16(q + i * size + h);
                HUNCH_UNROLL for (int j = 0; j < 4; j++) acc[i][j] = vfmaq_f16(acc[i][j], x, key[j]);
            }
        }
        HUNCH_UNROLL for (int i = 0; i < Q; i++) {
            float16x8_t pairs = vpaddq_f16(vpaddq_f16(acc[i][0], acc[i][1]),
                                           vpaddq_f16(acc[i][2], acc[i][3]));
            vst1_f16(out + i * stride, vget_low_f16(vpaddq_f16(pairs, pairs)));
        }
    }

    static void multiply(Number* x, const float* factors, int count) {
        for (int j = 0; j < count; j += 4) {
            uint16_t* at = (uint16_t*)x + j;
            store_half(at, mul(load_half(at), load(factors + j)));
        }
    }

    static void cap(Number* scores, int count, float limit) {
        vf size = set1(limit);
        for (int j = 0; j < count; j += 4) {
            uint16_t* at = (uint16_t*)scores + j;
            store_half(at, mul(size, tanh(div(load_half(at), size))));
        }
    }

    static void soften(Number* scores, int from, int count, float* largest, float* total) {
        const Number lowest = -std::numeric_limits<float>::infinity();
        const int end = (count + 31) / 32 * 32;
        std::fill(scores, scores + from, lowest);
        std::fill(scores + count, scores + end, lowest);
        float16x8_t tops[4], sum[4];
        HUNCH_UNROLL for (int i = 0; i < 4; i++) tops[i] = vdupq_n_f16(lowest), sum[i] = vdupq_n_f16(0);
        for (int j = 0; j < end; j += 32)
            HUNCH_UNROLL for (int i = 0; i < 4; i++)
                tops[i] = vmaxq_f16(tops[i], vld1q_f16(scores + j + 8 * i));
        const Number top = vmaxvq_f16(vmaxq_f16(vmaxq_f16(tops[0], tops[1]), vmaxq_f16(tops[2], tops[3])));
        for (int j = 0; j < end; j += 32)
            HUNCH_UNROLL for (int i = 0; i < 4; i++) {
                Number* at = scores + j + 8 * i;
                float16x8_t weight = exp2(vsubq_f16(vld1q_f16(at), vdupq_n_f16(top)));
                vst1q_f16(at, weight);
                sum[i] = vaddq_f16(sum[i], weight);
            }
        std::fill(scores, scores + from, (Number)0);
        std::fill(scores + count, scores + TILE, (Number)0);
        float16x8_t all = vaddq_f16(vaddq_f16(sum[0], sum[1]), vaddq_f16(sum[2], sum[3]));
        *largest = (float)top;
        *total = sum_lanes(add(vcvt_f32_f16(vget_low_f16(all)), vcvt_high_f32_f16(all)));
    }

    template <int Q>
    static void add_values(float* sums, const Number* w, int stride, const Stored* v,
                           const int64_t* at, int count, int size) {
        int h = 0;
        for (; h + 32 <= size; h += 32)
            add_part<Q, 4>(sums + h, w, stride, v + h, at, count, size);
        for (; h < size; h += 8) add_part<Q, 1>(sums + h, w, stride, v + h, at, count, size);
    }

private:
    // Eight numbers of the cache. Codes are read as fractions, so that no sum leaves a half's range.
    static float16x8_t eight(const uint16_t* p) { return vld1q_f16((const float16_t*)p); }
    static float16x8_t eight(const Int8* p) {
        return vcvtq_n_f16_s16(vmovl_s8(vld1_s8((const int8_t*)p)), 7);
    }
    static float16x8_t eight(const Fp8* p) {
        int16x8_t half = vshlq_n_s16(vmovl_s8(vld1_s8((const int8_t*)p)), 7);
        return vreinterpretq_f16_s16(vandq_s16(half, vdupq_n_s16((int16_t)0xBFFF)));
    }
    // 2^x for x up to 0; below -26 it is 0. The whole part of x stands in the low bits of
    // 1.5 * 2^10 + x; it is applied in two steps, so that small results are rounded, not cut.
    static float16x8_t exp2(float16x8_t x) {
        const float16x8_t magic = vdupq_n_f16(1536);
        x = vmaxq_f16(x, vdupq_n_f16(-26));
        float16x8_t shifted = vaddq_f16(x, magic), r = vsubq_f16(x, vsubq_f16(shifted, magic));
        float16x8_t y = vfmaq_f16(vdupq_n_f16(0.24221096f), r, vdupq_n_f16(0.05500893f));
        y = vfmaq_f16(vdupq_n_f16(0.69328293f), y, r);
        y = vfmaq_f16(vdupq_n_f16(1.0f), y, r);
        float16x8_t normal = vmaxq_f16(shifted, vdupq_n_f16(1536 - 14));
        int16x8_t n = vreinterpretq_s16_f16(normal), rest = vsubq_s16(vreinterpretq_s16_f16(shifted), n);
        return vmulq_f16(vmulq_f16(y, power_of_two(n)), power_of_two(rest));
    }
    static float16x8_t power_of_two(int16x8_t n) {  // of the low bits
        return vreinterpretq_f16_s16(vshlq_n_s16(vaddq_s16(n, vdupq_n_s16(15)), 10));
    }

    template <int Q, int N>
    HUNCH_NOINLINE static void add_part(float* sums, const Number* w, int stride, const Stored* v,
                         const int64_t* at, int count, int size) {
        float16x8_t sum[Q][N], first[Q][N];
        HUNCH_UNROLL for (int i = 0; i < Q; i++)
            HUNCH_UNROLL for (int n = 0; n < N; n++) sum[i][n] = vdupq_n_f16(0);
        const bool is_long = count > TILE / 2;
        int j = 0, end = is_long ? TILE / 2 : count;
        HUNCH_ROLLED for (int half = 0; half <= is_long; half++, end = count) {
            if (half)
                HUNCH_UNROLL for (int i = 0; i < Q; i++)
                    HUNCH_UNROLL for (int n = 0; n < N; n++)
                        first[i][n] = sum[i][n], sum[i][n] = vdupq_n_f16(0);
            HUNCH_ROLLED for (; j < end; j++) {
                float16x8_t value[N];
                HUNCH_UNROLL for (int n = 0; n < N; n++) value[n] = eight(v + at[j] + 8 * n);
                HUNCH_UNROLL for (int i = 0; i < Q; i++)
                    HUNCH_UNROLL for (int n = 0; n < N; n++)
                        sum[i][n] = vfmaq_n_f16(sum[i][n], value[n], w[i * stride + j]);
            }
        }
        HUNCH_UNROLL for (int i = 0; i < Q; i++)
            HUNCH_UNROLL for (int n = 0; n < N; n++) {
                float16x8_t x = is_long ? vaddq_f16(first[i][n], sum[i][n]) : sum[i][n];
                store(sums + i * size + 8 * n, vcvt_f32_f16(vget_low_f16(x)));
                store(sums + i * size + 8 * n + 4, vcvt_high_f32_f16(x));
            }
    }
};
template <class T>
using QuickMath = HalfMath<T>;  // of heads up to MAX_HALF_DIM
#else
template <class T>
using QuickMath = FloatMath<T>;
#endif

}  // namespace hunch
