// NEON with dot product: 4 output channels per vector.
#pragma once
#include <arm_neon.h>
#include <cstdint>
#include <cstring>

#include "config.h"

namespace hunch {

constexpr int P = 4;   // output channels per panel: float lanes of a vector
constexpr int RT = 8;  // rows per register tile
constexpr bool KEEPS_SUMS = false;
constexpr int32_t SUMS_START = 0;
// Whether weights stand as 2 channels by 8 inputs and activations as 2 rows by 8 inputs, as the
// matrix instructions of i8mm multiply them.
constexpr bool IN_WORDS = false;
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool IN_PAIRS = true;
constexpr const char* VECTOR_UNIT = "NEON with i8mm";
#else
constexpr bool IN_PAIRS = false;
constexpr const char* VECTOR_UNIT = "NEON";
#endif

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
// P codes of 8 bits: whole numbers, or those of kept.h, 2^-8 as large.
inline int16x4_t four_bytes(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word))));
}
inline vf load_int8(const int8_t* p) { return vcvtq_f32_s32(vmovl_s16(four_bytes(p))); }
inline vf load_fp8(const uint8_t* p) {
    int16x4_t half = vand_s16(vshl_n_s16(four_bytes(p), 7), vdup_n_s16((int16_t)0xBFFF));
    return vcvt_f32_f16(vreinterpret_f16_s16(half));
}
// 2P small whole numbers.
inline void load_uint8(const uint8_t* p, vf& first, vf& second) {
    uint16x8_t wide = vmovl_u8(vld1_u8(p));
    first = vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
    second = vcvtq_f32_u32(vmovl_high_u16(wide));
}
inline void load_int8(const uint8_t* p, vf& first, vf& second) {
    int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    first = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    second = vcvtq_f32_s32(vmovl_high_s16(wide));
}
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

// The same for 14 bits, q = 64 * high + low.
inline int quantise32_fine(const float* x, float factor, int8_t* high, int8_t* low) {
    int8x16_t h[2], l[2];
    int sum = 0;
    HUNCH_UNROLL for (int i = 0; i < 2; i++) {
        int16x8_t part[2], rest[2];
        HUNCH_UNROLL for (int j = 0; j < 2; j++) {
            const float* at = x + 16 * i + 8 * j;
            vf a = vfmaq_n_f32(vdupq_n_f32(12582912.0f), load(at), factor);
            vf b = vfmaq_n_f32(vdupq_n_f32(12582912.0f), load(at + 4), factor);
            int16x8_t q = vuzp1q_s16(vreinterpretq_s16_f32(a), vreinterpretq_s16_f32(b));
            part[j] = vrshrq_n_s16(q, 6);
            rest[j] = vsubq_s16(q, vshlq_n_s16(part[j], 6));
            sum += vaddlvq_s16(q);
        }
        h[i] = vuzp1q_s8(vreinterpretq_s8_s16(part[0]), vreinterpretq_s8_s16(part[1]));
        l[i] = vuzp1q_s8(vreinterpretq_s8_s16(rest[0]), vreinterpretq_s8_s16(rest[1]));
        vst1q_s8(high + 16 * i, h[i]);
        vst1q_s8(low + 16 * i, l[i]);
    }
    return sum;
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

inline void store8(int8_t* p, const Weights& w) {
    for (int i = 0; i < 8; i++) vst1q_s8(p + 16 * i, w.quad[i]);
}

}  // namespace hunch
