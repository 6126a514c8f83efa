// Any CPU: vectors of four floats that the compiler maps to what there is.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "config.h"
#include "half.h"

namespace hunch {

constexpr const char* VECTOR_UNIT = "plain C++";
constexpr int P = 4;   // output channels per panel: float lanes of a vector
constexpr int RT = 4;  // rows per register tile
constexpr bool KEEPS_SUMS = false;
constexpr int32_t SUMS_START = 0;
constexpr bool IN_PAIRS = false;
constexpr bool IN_WORDS = false;

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

inline vf set1(float x) { return vf{x, x, x, x}; }
inline vf zero() { return set1(0.0f); }
inline vf load(const float* p) {
    vf x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
inline vf add(vf a, vf b) { return a + b; }
inline vf sub(vf a, vf b) { return a - b; }
inline vf mul(vf a, vf b) { return a * b; }
inline vf div(vf a, vf b) { return a / b; }
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }
// A product and a sum, each rounded: a fused one would be a call on CPUs that lack it.
inline vf fma(vf acc, vf a, vf b) { return acc + a * b; }
inline vf fma(vf acc, vf a, float b) { return acc + a * set1(b); }
inline vf abs(vf a) { return a < 0 ? -a : a; }
inline float max_lane(vf a) {
    float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}
inline vf load_half(const uint16_t* p) {
    return vf{from_half(p[0]), from_half(p[1]), from_half(p[2]), from_half(p[3])};
}
inline void store_half(uint16_t* p, vf x) {
    for (int i = 0; i < P; i++) p[i] = to_half(x[i]);
}
// P codes of 8 bits: whole numbers, or those of kept.h, 2^-8 as large.
inline vf load_int8(const int8_t* p) {
    return vf{(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
}
inline vf load_fp8(const uint8_t* p) {
    auto one = [&](int i) { return from_half((uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7F) << 7)); };
    return vf{one(0), one(1), one(2), one(3)};
}
// 2P small whole numbers.
inline void load_uint8(const uint8_t* p, vf& first, vf& second) {
    first = vf{(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
    second = vf{(float)p[4], (float)p[5], (float)p[6], (float)p[7]};
}
inline void load_int8(const uint8_t* p, vf& first, vf& second) {
    const int8_t* q = (const int8_t*)p;
    first = vf{(float)q[0], (float)q[1], (float)q[2], (float)q[3]};
    second = vf{(float)q[4], (float)q[5], (float)q[6], (float)q[7]};
}
// 2^n, exact, for whole n in [-126, 127] that stand in the low bits of x = 1.5 * 2^23 + n.
inline vf pow2(vf x) {
    vi n;
    std::memcpy(&n, &x, sizeof n);
    n = (n + 127) << 23;
    std::memcpy(&x, &n, sizeof x);
    return x;
}

// q = x * factor rounded to nearest even, for 32 numbers that stay within int8; returns their sum.
inline int quantise32(const float* x, float factor, int8_t* q) {
    int sum = 0;
    for (int i = 0; i < 32; i++) {
        q[i] = (int8_t)std::nearbyint(x[i] * factor);
        sum += q[i];
    }
    return sum;
}

// The same for 14 bits, q = 64 * high + low.
inline int quantise32_fine(const float* x, float factor, int8_t* high, int8_t* low) {
    int sum = 0;
    for (int i = 0; i < 32; i++) {
        int q = (int)std::nearbyint(x[i] * factor), h = (q + 32) >> 6;
        high[i] = (int8_t)h;
        low[i] = (int8_t)(q - 64 * h);
        sum += q;
    }
    return sum;
}

// Stores the sums over lanes of four vectors.
inline void store_sums(float* p, vf a, vf b, vf c, vf d) {
    p[0] = (a[0] + a[1]) + (a[2] + a[3]);
    p[1] = (b[0] + b[1]) + (b[2] + b[3]);
    p[2] = (c[0] + c[1]) + (c[2] + c[3]);
    p[3] = (d[0] + d[1]) + (d[2] + d[3]);
}

// The weights of one group of 32 inputs, channel by channel.
struct Weights {
    int8_t of[P][32];
};

inline Weights unpack4(const uint8_t* p) {
    Weights w;
    for (int part = 0; part < 4; part++)
        for (int n = 0; n < P; n++)
            for (int j = 0; j < 4; j++) {
                uint8_t byte = p[(part * P + n) * 4 + j];
                w.of[n][4 * part + j] = (int8_t)(byte & 15);
                w.of[n][16 + 4 * part + j] = (int8_t)(byte >> 4);
            }
    return w;
}

// The nibbles of unpack4, then a byte whose bit i says that quad i is below zero.
inline Weights unpack5(const uint8_t* p) {
    Weights w = unpack4(p);
    for (int n = 0; n < P; n++)
        for (int j = 0; j < 32; j++)
            if (p[(4 * P + n) * 4 + j % 4] >> (j / 4) & 1) w.of[n][j] = (int8_t)(w.of[n][j] - 16);
    return w;
}

// Half a group of 6 bits, times 4: the first 16 inputs.
inline Weights unpack6(const uint8_t* p) {
    Weights w;
    for (int n = 0; n < P; n++)
        for (int j = 0; j < 4; j++) {
            int last = 0;
            for (int i = 0; i < 3; i++) {
                uint8_t byte = p[(i * P + n) * 4 + j];
                w.of[n][4 * i + j] = (int8_t)(byte & 0xFC);
                last = last << 2 | (byte & 3);
            }
            w.of[n][12 + j] = (int8_t)(last << 2);
        }
    return w;
}

// 16 levels, and the levels of half a group's nibbles: the first 16 inputs.
struct LevelTable {
    int8_t of[16];
    explicit LevelTable(const int8_t* p) { std::memcpy(of, p, sizeof of); }
};
inline Weights low_levels(const uint8_t* p, const LevelTable& table) {
    Weights w = unpack4(p);
    for (int n = 0; n < P; n++)
        for (int j = 0; j < 16; j++) w.of[n][j] = table.of[w.of[n][j]];
    return w;
}
inline Weights high_levels(const uint8_t* p, const LevelTable& table) {
    Weights w = unpack4(p);
    for (int n = 0; n < P; n++)
        for (int j = 0; j < 16; j++) w.of[n][j] = table.of[w.of[n][j + 16]];
    return w;
}

inline Weights load8(const int8_t* p) {
    Weights w;
    for (int part = 0; part < 8; part++)
        for (int n = 0; n < P; n++) std::memcpy(&w.of[n][4 * part], p + (part * P + n) * 4, 4);
    return w;
}

inline Weights load4(const int8_t* p) { return load8(p); }

inline void store8(int8_t* p, const Weights& w) {
    for (int part = 0; part < 8; part++)
        for (int n = 0; n < P; n++) std::memcpy(p + (part * P + n) * 4, &w.of[n][4 * part], 4);
}

struct Scale {
    vf d;
    explicit Scale(vf factor) : d(factor) {}
};

// For each of R rows, acc += (sum of w * a over the group) * scale * d_a, the same for every R.
template <int R, bool IS_4BIT, bool FINE, Span SPAN = Span::WHOLE>
inline void add_group(vf* acc, const Weights& w, const Scale& scale, const int8_t* a,
                      const float* d_a) {
    if (SPAN == Span::SECOND) a += 16;
    for (int r = 0; r < R; r++, a += 32) {
        vf sums;
        for (int n = 0; n < P; n++) {
            int sum = 0;
            for (int j = 0; j < 4 * num_quads(SPAN); j++)
                sum += w.of[n][j] * (FINE ? 64 * a[j] + a[RT * 32 + j] : a[j]);
            sums[n] = (float)sum;
        }
        acc[r] = fma(acc[r], mul(sums, scale.d), d_a[r]);
    }
}

}  // namespace hunch
