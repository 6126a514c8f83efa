// The scales of a panel that has them apart as its tiles read them: see scales_floats.
#pragma once
#include <cstring>

#include "gemm.h"
#include "half.h"

namespace hunch {

constexpr float MINUS_MAGIC = -12582912.0f;

// The scale of half a group of levels; returns where the next one begins.
inline float* put_half_scale(const Matrix& w, vf d, float* out) {
    store(out, mul(d, set1(MINUS_MAGIC)));
    store(out + P, d);
    std::memcpy(out + 2 * P, w.levels, sizeof w.levels);
    return out + scales_floats(Format::TABLE) / 2;
}

// weight = d * (q + 16) + m; returns where the next group's scales begin.
inline float* put_shifted_scale(vf d, vf m, float* out) {
    store(out, mul(d, set1(MINUS_MAGIC)));
    store(out + P, d);
    store(out + 2 * P, fma(m, d, 16.0f));
    return out + scales_floats(Format::K5);
}

// Of formats that have d for 8 groups. Products of d, whole numbers and MAGIC are exact.
template <Format FORMAT>
void expand_scales(const Matrix& w, int panel, float* out) {
    const uint8_t* at = w.panel(panel);
    for (int s = 0; s < w.num_groups / SUPER; s++) {
        vf d = load_half((const uint16_t*)at), minus_m = zero();
        if (FORMAT == Format::K6) d = mul(d, set1(0.25f));
        if (FORMAT == Format::TABLE) d = mul(d, set1(w.unit));
        if (!has_halves(FORMAT)) minus_m = sub(zero(), load_half((const uint16_t*)at + P));
        at += has_halves(FORMAT) ? 2 * P : 4 * P;
        HUNCH_UNROLL for (int i = 0; i < SUPER; i++, at += 2 * P) {
            vf first, second;
            if (has_halves(FORMAT)) load_int8(at, first, second);
            else load_uint8(at, first, second);
            if (FORMAT == Format::TABLE) {
                out = put_half_scale(w, mul(d, second), put_half_scale(w, mul(d, first), out));
            } else if (FORMAT == Format::K5) {
                out = put_shifted_scale(mul(d, first), mul(minus_m, second), out);
            } else {
                store(out, mul(mul(d, first), set1(MINUS_MAGIC)));
                store(out + P, mul(d, first));
                store(out + 2 * P, FORMAT == Format::K4 ? mul(minus_m, second)
                                                        : mul(mul(d, second), set1(MINUS_MAGIC)));
                if (FORMAT == Format::K6) store(out + 3 * P, mul(d, second));
                out += scales_floats(FORMAT);
            }
        }
    }
}

// 2^(e - 128) of P bytes e: what is below 2^-126 is a product.
inline vf load_powers(const uint8_t* at) {
    vf e, next;
    load_uint8(at, e, next);
    const vf normal = pow2(add(max(e, set1(2.0f)), set1(12582912.0f - 128)));
    return mul(normal, pow2(add(min(e, set1(2.0f)), set1(12582912.0f - 2))));
}

// Of formats that have nothing but d, or d and m.
template <Format FORMAT>
void expand_scales_apart(const Matrix& w, int panel, float* out) {
    for (int g = 0; g < w.num_groups; g++) {
        const uint8_t* at = w.panel(panel) + (size_t)(g / super_groups(FORMAT)) * super_bytes(FORMAT);
        vf d = FORMAT == Format::FP4 ? load_powers(at) : load_half((const uint16_t*)at);
        if (FORMAT == Format::INT5M)
            out = put_shifted_scale(d, load_half((const uint16_t*)at + P), out);
        else
            out = put_half_scale(w, d, put_half_scale(w, d, out));
    }
}

// Of K2, whose minima go to out + minima_at.
inline void expand_scales_k2(const Matrix& w, int panel, float* out) {
    const uint8_t* at = w.panel(panel);
    float* minima = out + minima_at(w.num_groups);
    for (int s = 0; s < w.num_groups / SUPER; s++) {
        const vf d = load_half((const uint16_t*)at), m = load_half((const uint16_t*)at + P);
        at += 4 * P;
        for (int i = 0; i < SUPER; i++, at += 2 * P, minima += 2 * P) {
            uint8_t low[2 * P], high[2 * P];
            for (int j = 0; j < 2 * P; j++) {
                low[j] = at[j] & 15;
                high[j] = at[j] >> 4;
            }
            vf first, second;
            load_uint8(low, first, second);
            out = put_half_scale(w, mul(d, second), put_half_scale(w, mul(d, first), out));
            load_uint8(high, first, second);
            store(minima, mul(m, first));
            store(minima + P, mul(m, second));
        }
    }
}

// Codes of 2 bits as the nibbles that TABLE has.
inline void unpack2(const uint8_t* from, int num_groups, uint8_t* to) {
    for (int g = 0; g < num_groups; g++, from += 8 * P, to += 16 * P)
        for (int i = 0; i < 8 * P; i++) {
            to[i] = (uint8_t)((from[i] & 3) | (from[i] & 12) << 2);
            to[i + 8 * P] = (uint8_t)((from[i] >> 4 & 3) | (from[i] >> 2 & 48));
        }
}

// Takes K2's minima times the inputs' sums from the products. Four sums side by side: one waits for itself.
inline void take_minima(const float* minima, const float* sums, int num_halves, int count, float* out,
                        int stride) {
    for (int r = 0; r < count; r++, sums += num_halves, out += stride) {
        vf acc[4] = {zero(), zero(), zero(), zero()};
        for (int h = 0; h < num_halves; h += 4)
            HUNCH_UNROLL for (int i = 0; i < 4; i++)
                acc[i] = fma(acc[i], load(minima + (size_t)(h + i) * P), sums[h + i]);
        store(out, sub(load(out), add(add(acc[0], acc[1]), add(acc[2], acc[3]))));
    }
}

}  // namespace hunch
