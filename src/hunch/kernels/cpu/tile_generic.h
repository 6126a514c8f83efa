// The tiles of a quantised product: R rows by one panel, groups in order.
#pragma once
#include "gemm.h"

namespace hunch {

constexpr int READ_AHEAD = 4096;  // bytes; the weights come from memory once per pass

inline void read_ahead(const uint8_t* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + READ_AHEAD + i);
}

// IS_UNPACKED: a panel of INT4 that unpack_panel prepared, for more rows than one tile holds. K formats
// have their scales apart.
template <Format FORMAT, bool IS_UNPACKED>
inline Weights weights_of(const uint8_t* w) {
    if constexpr (IS_UNPACKED) return load4((const int8_t*)w);
    else if constexpr (FORMAT == Format::INT8) return load8((const int8_t*)w + head_bytes(FORMAT));
    else if constexpr (FORMAT == Format::INT4 || FORMAT == Format::K4) return unpack4(w + head_bytes(FORMAT));
    else return unpack5(w + head_bytes(FORMAT));
}

template <int R, bool FINE, Format FORMAT, bool IS_UNPACKED = false>
inline void tile_panel(const uint8_t* w, const float* scales, int num_groups, const uint8_t* a,
                       float* out, int stride) {
    constexpr bool IS_4BIT = FORMAT == Format::INT4 || FORMAT == Format::K4;
    constexpr bool HAS_MINIMA = IS_4BIT || FORMAT == Format::K5;
    constexpr int SIZE = IS_UNPACKED ? UNPACKED_GROUP : group_bytes(FORMAT);
    vf acc[R];
    HUNCH_UNROLL for (int r = 0; r < R; r++) acc[r] = zero();
    for (int g = 0; g < num_groups; g++, w += SIZE, a += tile_group_bytes(FINE)) {
        if (!IS_UNPACKED) read_ahead(w, SIZE);
        const int8_t* q = (const int8_t*)a;
        const float* d_a = (const float*)(a + activation_bytes(FINE));
        if constexpr (FORMAT == Format::K6) {
            Scale first(load(scales + P)), second(load(scales + 3 * P));
            add_group<R, false, FINE, Span::FIRST>(acc, unpack6(w), first, q, d_a);
            add_group<R, false, FINE, Span::SECOND>(acc, unpack6(w + 12 * P), second, q, d_a);
        } else if constexpr (FORMAT == Format::TABLE) {
            const float* then = scales + scales_floats(FORMAT) / 2;
            const LevelTable table((const int8_t*)(scales + 2 * P));
            Scale first(load(scales + P)), second(load(then + P));
            add_group<R, false, FINE, Span::FIRST>(acc, low_levels(w, table), first, q, d_a);
            add_group<R, false, FINE, Span::SECOND>(acc, high_levels(w, table), second, q, d_a);
        } else {
            const float* apart = IS_UNPACKED ? (const float*)(w + 32 * P) : scales + P;
            constexpr bool IS_APART = IS_UNPACKED || has_supers(FORMAT);
            Scale scale(IS_APART ? load(apart) : load_half((const uint16_t*)w));
            vf m = !HAS_MINIMA ? zero() : IS_APART ? load(apart + P) : load_half((const uint16_t*)w + P);
            add_group<R, IS_4BIT, FINE>(acc, weights_of<FORMAT, IS_UNPACKED>(w), scale, q, d_a);
            if (HAS_MINIMA)  // times the sums of the rows' activations, which stand behind their scales
                HUNCH_UNROLL for (int r = 0; r < R; r++) acc[r] = fma(acc[r], m, d_a[RT + r]);
        }
        if (has_supers(FORMAT)) scales += scales_floats(FORMAT);
    }
    HUNCH_UNROLL for (int r = 0; r < R; r++) store(out + (size_t)r * stride, acc[r]);
}

#define HUNCH_TILE(NAME, ...)                                                                  \
    template <int R, bool FINE>                                                                \
    void NAME(const uint8_t* w, int num_groups, const uint8_t* a, float* out, int stride) {    \
        tile_panel<R, FINE, __VA_ARGS__>(w, nullptr, num_groups, a, out, stride);              \
    }
#define HUNCH_K_TILE(NAME, FORMAT)                                                             \
    template <int R, bool FINE>                                                                \
    void NAME(const uint8_t* w, const float* scales, int num_groups, const uint8_t* a,         \
              float* out, int stride) {                                                        \
        tile_panel<R, FINE, FORMAT>(w, scales, num_groups, a, out, stride);                    \
    }
HUNCH_TILE(tile_int4_panel, Format::INT4)
HUNCH_TILE(tile_unpacked_panel, Format::INT4, true)
HUNCH_TILE(tile_int8_panel, Format::INT8)
HUNCH_TILE(tile_int5_panel, Format::INT5)
HUNCH_K_TILE(tile_k4_panel, Format::K4)
HUNCH_K_TILE(tile_k5_panel, Format::K5)
HUNCH_K_TILE(tile_k6_panel, Format::K6)
HUNCH_K_TILE(tile_levels_panel, Format::TABLE)

}  // namespace hunch
