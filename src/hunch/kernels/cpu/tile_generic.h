// The tiles of a quantised product: R rows by one panel, groups in order.
#pragma once
#include "gemm.h"

namespace hunch {

constexpr int READ_AHEAD = 4096;  // bytes; the weights come from memory once per pass

inline void read_ahead(const uint8_t* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + READ_AHEAD + i);
}

template <int R>
inline void store_panel(const vf* acc, float* out, int stride) {
    HUNCH_UNROLL for (int r = 0; r < R; r++) store(out + (size_t)r * stride, acc[r]);
}

template <int R, bool FINE>
void tile_int4_panel(const uint8_t* w, int num_groups, const uint8_t* a, float* out, int stride) {
    vf acc[R];
    HUNCH_UNROLL for (int r = 0; r < R; r++) acc[r] = zero();
    for (int g = 0; g < num_groups; g++, a += tile_group_bytes(FINE)) {
        read_ahead(w, group_bytes(Format::INT4));
        Scale scale(load_half((const uint16_t*)w));
        vf m = load_half((const uint16_t*)w + P);
        const float* d_a = (const float*)(a + (FINE ? 2 : 1) * RT * GROUP);
        add_group<R, true, FINE>(acc, unpack4(w + 4 * P), scale, (const int8_t*)a, d_a);
        add_minimum<R>(acc, m, d_a + RT);
        w += group_bytes(Format::INT4);
    }
    store_panel<R>(acc, out, stride);
}

// The same from a panel that unpack_panel prepared, for more rows than one tile holds.
template <int R, bool FINE>
void tile_unpacked_panel(const uint8_t* w, int num_groups, const uint8_t* a, float* out, int stride) {
    vf acc[R];
    HUNCH_UNROLL for (int r = 0; r < R; r++) acc[r] = zero();
    for (int g = 0; g < num_groups; g++, a += tile_group_bytes(FINE)) {
        Scale scale(load((const float*)(w + 32 * P)));
        vf m = load((const float*)(w + 32 * P) + P);
        const float* d_a = (const float*)(a + (FINE ? 2 : 1) * RT * GROUP);
        add_group<R, true, FINE>(acc, load4((const int8_t*)w), scale, (const int8_t*)a, d_a);
        add_minimum<R>(acc, m, d_a + RT);
        w += UNPACKED_GROUP;
    }
    store_panel<R>(acc, out, stride);
}

template <int R, bool FINE>
void tile_int8_panel(const uint8_t* w, int num_groups, const uint8_t* a, float* out, int stride) {
    vf acc[R];
    HUNCH_UNROLL for (int r = 0; r < R; r++) acc[r] = zero();
    for (int g = 0; g < num_groups; g++, a += tile_group_bytes(FINE)) {
        read_ahead(w, group_bytes(Format::INT8));
        Scale scale(load_half((const uint16_t*)w));
        const float* d_a = (const float*)(a + (FINE ? 2 : 1) * RT * GROUP);
        add_group<R, false, FINE>(acc, load8((const int8_t*)w + 2 * P), scale, (const int8_t*)a, d_a);
        w += group_bytes(Format::INT8);
    }
    store_panel<R>(acc, out, stride);
}

template <int R, bool FINE>
void tile_int5_panel(const uint8_t* w, int num_groups, const uint8_t* a, float* out, int stride) {
    vf acc[R];
    HUNCH_UNROLL for (int r = 0; r < R; r++) acc[r] = zero();
    for (int g = 0; g < num_groups; g++, a += tile_group_bytes(FINE)) {
        read_ahead(w, group_bytes(Format::INT5));
        Scale scale(load_half((const uint16_t*)w));
        const float* d_a = (const float*)(a + (FINE ? 2 : 1) * RT * GROUP);
        add_group<R, false, FINE>(acc, unpack5(w + 2 * P), scale, (const int8_t*)a, d_a);
        w += group_bytes(Format::INT5);
    }
    store_panel<R>(acc, out, stride);
}

// K4 and K5.
template <int R, bool FINE, Format FORMAT>
void tile_scaled_panel(const uint8_t* w, const float* scales, int num_groups, const uint8_t* a,
                       float* out, int stride) {
    constexpr bool IS_4BIT = FORMAT == Format::K4;
    vf acc[R];
    HUNCH_UNROLL for (int r = 0; r < R; r++) acc[r] = zero();
    for (int g = 0; g < num_groups; g++, a += tile_group_bytes(FINE), scales += scales_floats(FORMAT)) {
        read_ahead(w, group_bytes(FORMAT));
        const float* d_a = (const float*)(a + (FINE ? 2 : 1) * RT * GROUP);
        add_group<R, IS_4BIT, FINE>(acc, IS_4BIT ? unpack4(w) : unpack5(w), Scale(load(scales + P)),
                                    (const int8_t*)a, d_a);
        add_minimum<R>(acc, load(scales + 2 * P), d_a + RT);
        w += group_bytes(FORMAT);
    }
    store_panel<R>(acc, out, stride);
}

template <int R, bool FINE>
void tile_k4_panel(const uint8_t* w, const float* scales, int num_groups, const uint8_t* a,
                   float* out, int stride) {
    tile_scaled_panel<R, FINE, Format::K4>(w, scales, num_groups, a, out, stride);
}

template <int R, bool FINE>
void tile_k5_panel(const uint8_t* w, const float* scales, int num_groups, const uint8_t* a,
                   float* out, int stride) {
    tile_scaled_panel<R, FINE, Format::K5>(w, scales, num_groups, a, out, stride);
}

template <int R, bool FINE>
void tile_k6_panel(const uint8_t* w, const float* scales, int num_groups, const uint8_t* a,
                   float* out, int stride) {
    vf acc[R];
    HUNCH_UNROLL for (int r = 0; r < R; r++) acc[r] = zero();
    for (int g = 0; g < num_groups; g++, a += tile_group_bytes(FINE), scales += 4 * P) {
        read_ahead(w, group_bytes(Format::K6));
        const float* d_a = (const float*)(a + (FINE ? 2 : 1) * RT * GROUP);
        add_group<R, false, FINE, Span::FIRST>(acc, unpack6(w), Scale(load(scales + P)),
                                               (const int8_t*)a, d_a);
        add_group<R, false, FINE, Span::SECOND>(acc, unpack6(w + 12 * P), Scale(load(scales + 3 * P)),
                                                (const int8_t*)a, d_a);
        w += group_bytes(Format::K6);
    }
    store_panel<R>(acc, out, stride);
}

}  // namespace hunch
