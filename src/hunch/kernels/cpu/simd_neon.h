// NEON with dot product: 4 output channels per vector.
#pragma once
#include <arm_neon.h>
#include <cstdint>
#include <cstring>

#include "config.h"

namespace hunch {

constexpr int P = 4;   // output channels per panel: float lanes of a vector
constexpr int RT = 8;  // rows per register tile

typedef float32x4_t vf;

inline vf zero() { return vdupq_n_f32(0.0f); }
inline vf set1(float x) { return vdupq_n_f32(x); }
inline vf load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, vf x) { vst1q_f32(p, x); }
inline vf add(vf a, vf b) { return vaddq_f32(a, b); }
inline vf sub(vf a, vf b) { return vsubq_f32(a, b); }
inline vf mul(vf a, vf b) { return vmulq_f32(a, b); }
inline vf max(vf a, vf b) { return vmaxq_f32(a, b); }
inline vf min(vf a, vf b) { return vminq_f32(a, b); }
inline vf fma(vf acc, vf a, vf b) { return vfmaq_f32(acc, a, b); }
inline vf fma(vf acc, vf a, float b) { return vfmaq_n_f32(acc, a, b); }
inline vf abs(vf a) { return vabsq_f32(a); }
inline float max_lane(vf a) { return vmaxvq_f32(a); }
inline vf load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline void store_half(uint16_t* p, vf x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
// 2^n, exact, for whole n in [-126, 127] that stand in the low bits of x = 1.5 * 2^23 + n.
inline vf pow2(vf x) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vreinterpretq_s32_f32(x), vdupq_n_s32(127)), 23));
}
inline vf div(vf a, vf b) { return vdivq_f32(a, b); }
// q = x * factor rounded to nearest even, for 32 numbers that stay within int8; returns their sum.
// The low byte of 1.5 * 2^23 + x is x: no conversion.
inline int quantise32(const float* x, float factor, int8_t* q) {
    int16x8_t h[4];
    HUNCH_UNROLL for (int i = 0; i < 4; i++) {
        vf a = vfmaq_n_f32(vdupq_n_f32(12582912.0f), load(x + 8 * i), factor);
        vf b = vfmaq_n_f32(vdupq_n_f32(12582912.0f), load(x + 8 * i + 4), factor);
        h[i] = vuzp1q_s16(vreinterpretq_s16_f32(a), vreinterpretq_s16_f32(b));
    }
    int8x16_t low = vuzp1q_s8(vreinterpretq_s8_s16(h[0]), vreinterpretq_s8_s16(h[1]));
    int8x16_t high = vuzp1q_s8(vreinterpretq_s8_s16(h[2]), vreinterpretq_s8_s16(h[3]));
    vst1q_s8(q, low);
    vst1q_s8(q + 16, high);
    int8x16_t ones = vdupq_n_s8(1);
    return vaddvq_s32(vdotq_s32(vdotq_s32(vdupq_n_s32(0), low, ones), high, ones));
}

// Stores the sums over lanes of four vectors.
inline void store_sums(float* p, vf a, vf b, vf c, vf d) {
    vst1q_f32(p, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

// The weights of one group of 32 inputs: quad i holds inputs 4i..4i+3 of each channel.
struct Weights {
    int8x16_t quad[8];
};

inline Weights unpack4(const uint8_t* p) {
    Weights w;
    for (int i = 0; i < 4; i++) {
        uint8x16_t q = vld1q_u8(p + 16 * i);
        w.quad[i] = vreinterpretq_s8_u8(vandq_u8(q, vdupq_n_u8(15)));
        w.quad[i + 4] = vreinterpretq_s8_u8(vshrq_n_u8(q, 4));
    }
    return w;
}

inline Weights load8(const int8_t* p) {
    Weights w;
    for (int i = 0; i < 8; i++) w.quad[i] = vld1q_s8(p + 16 * i);
    return w;
}

inline void store8(int8_t* p, const Weights& w) {
    for (int i = 0; i < 8; i++) vst1q_s8(p + 16 * i, w.quad[i]);
}

// An integer sum s counted up from the bits of 1.5 * 2^23 reads as the float 1.5 * 2^23 + s, and
// fma(-1.5 * 2^23 * d, that, d) is then s * d rounded once: no conversion, no subtraction.
constexpr float MAGIC = 12582912.0f;
alignas(16) constexpr int32_t MAGIC_BITS[8] = {0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000,
                                               0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000};

// The scale of a group: the factor, and (twice, for paired loads) what takes MAGIC away again.
struct Scale {
    vf d;
    alignas(16) float offset[8];
    explicit Scale(vf factor) : d(factor) {
        vf x = vmulq_n_f32(d, -MAGIC);  // exact: a factor has 11 bits
        store(offset, x);
        store(offset + 4, x);
    }
};

// Loads what the compiler would copy: a copy takes an arithmetic slot, a load does not.
template <class V, class T>
inline void load_fresh(V& a, V& b, const T* p) {
    asm volatile("ldp %q0, %q1, [%2]" : "=w"(a), "=w"(b) : "r"(p), "m"(*(const T(*)[8])p));
}
template <class V, class T>
inline void load_fresh(V& a, const T* p) {
    asm volatile("ldr %q0, %1" : "=w"(a) : "m"(*(const T(*)[4])p));
}
template <int R, class V, class T>
inline void load_fresh_all(V* x, const T* p) {
    HUNCH_UNROLL for (int r = 0; r + 1 < R; r += 2) load_fresh(x[r], x[r + 1], p);
    if constexpr (R % 2) load_fresh(x[R - 1], p);
}

// s += w * a over the group, for B rows in turn: their sums do not wait for each other.
template <int B>
inline void dot_rows(int32x4_t* s, const Weights& w, const int8_t* a) {
    int8x16_t x[B], y[B];
    HUNCH_UNROLL for (int r = 0; r < B; r++) x[r] = vld1q_s8(a + 32 * r), y[r] = vld1q_s8(a + 32 * r + 16);
    HUNCH_UNROLL for (int r = 0; r < B; r++) s[r] = vdotq_laneq_s32(s[r], w.quad[0], x[r], 0);
    HUNCH_UNROLL for (int r = 0; r < B; r++) s[r] = vdotq_laneq_s32(s[r], w.quad[1], x[r], 1);
    HUNCH_UNROLL for (int r = 0; r < B; r++) s[r] = vdotq_laneq_s32(s[r], w.quad[2], x[r], 2);
    HUNCH_UNROLL for (int r = 0; r < B; r++) s[r] = vdotq_laneq_s32(s[r], w.quad[3], x[r], 3);
    HUNCH_UNROLL for (int r = 0; r < B; r++) s[r] = vdotq_laneq_s32(s[r], w.quad[4], y[r], 0);
    HUNCH_UNROLL for (int r = 0; r < B; r++) s[r] = vdotq_laneq_s32(s[r], w.quad[5], y[r], 1);
    HUNCH_UNROLL for (int r = 0; r < B; r++) s[r] = vdotq_laneq_s32(s[r], w.quad[6], y[r], 2);
    HUNCH_UNROLL for (int r = 0; r < B; r++) s[r] = vdotq_laneq_s32(s[r], w.quad[7], y[r], 3);
}

// acc[r] += a[r] * s[r]
template <int R>
inline void fma_rows(vf* acc, const vf* a, const float* s) {
    if constexpr (R >= 4) {
        vf x = load(s);
        acc[0] = vfmaq_laneq_f32(acc[0], a[0], x, 0);
        acc[1] = vfmaq_laneq_f32(acc[1], a[1], x, 1);
        acc[2] = vfmaq_laneq_f32(acc[2], a[2], x, 2);
        acc[3] = vfmaq_laneq_f32(acc[3], a[3], x, 3);
        if constexpr (R > 4) fma_rows<R - 4>(acc + 4, a + 4, s + 4);
    } else {
        HUNCH_UNROLL for (int r = 0; r < R; r++) acc[r] = fma(acc[r], a[r], s[r]);
    }
}

// For each of R rows, acc += (sum of w * a over the group) * scale * d_a: two roundings, the same
// for every R. All integer work comes first: changing between the two kinds stalls the pipes.
template <int R, bool IS_4BIT>
inline void add_group(vf* acc, const Weights& w, const Scale& scale, const int8_t* a,
                      const float* d_a) {
    int32x4_t s[R];
    vf p[R];
    load_fresh_all<R>(s, MAGIC_BITS);
    HUNCH_UNROLL for (int r = 0; r + 1 < R; r += 2) dot_rows<2>(s + r, w, a + 32 * r);
    if constexpr (R % 2) dot_rows<1>(s + R - 1, w, a + 32 * (R - 1));
    load_fresh_all<R>(p, scale.offset);
    HUNCH_UNROLL for (int r = 0; r < R; r++)
        p[r] = vfmaq_f32(p[r], vreinterpretq_f32_s32(s[r]), scale.d);
    fma_rows<R>(acc, p, d_a);
}

// acc[r] += m * sums[r]
template <int R>
inline void add_minimum(vf* acc, vf m, const float* sums) {
    const vf same[8] = {m, m, m, m, m, m, m, m};
    fma_rows<R>(acc, same, sums);
}

}  // namespace hunch
