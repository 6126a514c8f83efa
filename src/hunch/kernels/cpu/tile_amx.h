// AMX: integer sums of 8 rows by a panel of 16 channels in one instruction, for products of many rows.
// What a group's sums become is what simd_avx512.h makes of them, in the same order: equal bits.
//
// Weights go in as signed bytes. A group of a panel, 8 quads of [16][4], is a tile as it stands; so are
// the activations of RT rows. Tiles 0 to 3 hold sums, 4 and 5 the activations and weights of a group,
// 6 and 7 those of half a group (K6).
#pragma once
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>

#include "gemm.h"

// Whatever CPU the rest is built for: the choice is made at run time.
#define HUNCH_AMX_CODE __attribute__((target("amx-tile,amx-int8")))

namespace hunch {

// Rows from which a product takes AMX; INT_MAX where the CPU or the system has none, or where the
// environment says HUNCH_AMX_ROWS=0.
inline int amx_from_rows() {
    static const int from = [] {
        const char* told = std::getenv("HUNCH_AMX_ROWS");
        const int rows = told ? std::atoi(told) : 16;
        unsigned a, b, c, d;
        if (rows <= 0 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return INT_MAX;
        const bool has_tiles = d >> 24 & 1, has_int8 = d >> 25 & 1;
        // Linux gives a process the tiles' state when it asks (ARCH_REQ_XCOMP_PERM, XTILEDATA).
        const bool is_there = has_tiles && has_int8 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
        return is_there ? rows : INT_MAX;
    }();
    return from;
}

struct TileShapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
alignas(64) static const TileShapes TILE_SHAPES = {
    1, 0, {}, {64, 64, 64, 64, GROUP, 64, GROUP / 2, 64}, {RT, RT, RT, RT, RT, 8, RT, 4}};
static_assert(P == 16 && RT == 8 && sizeof(TileShapes) == 64, "tiles are of this shape");

// A panel as the tiles take it: signed weights, [group][8][P][4], and scales where scales_floats has
// them; those of K kinds are there already.
inline void unpack_levels(const Matrix& w, int panel, int8_t* levels, float* scales) {
    const uint8_t* at = w.panel(panel) + w.scales_bytes();
    const bool is_4bit = w.kind == Kind::INT4 || w.kind == Kind::K4;
    const __m512i offset = _mm512_set1_epi8(is_4bit ? 0 : (char)0x80);
    for (int g = 0; g < w.num_groups; g++, at += group_bytes(w.kind), levels += 32 * P) {
        for (int i = 0; i < group_bytes(w.kind); i += 64) __builtin_prefetch(at + 4096 + i);
        const uint8_t* numbers = at + head_bytes(w.kind);
        Weights levels_of;
        if (w.kind == Kind::K6) {
            const Weights first = unpack6(numbers), second = unpack6(numbers + 12 * P);
            for (int i = 0; i < 4; i++) levels_of.quad[i] = first.quad[i], levels_of.quad[i + 4] = second.quad[i];
        } else {
            levels_of = is_4bit                  ? unpack4(numbers)
                        : w.kind == Kind::INT8 ? load8((const int8_t*)numbers)
                                               : unpack5(numbers);
        }
        for (int i = 0; i < 8; i++)
            _mm512_storeu_si512(levels + 64 * i, _mm512_xor_si512(levels_of.quad[i], offset));
        if (has_supers(w.kind)) continue;
        float* to = scales + (size_t)g * scales_floats(w.kind);
        store(to + P, load_half((const uint16_t*)at));
        if (w.kind == Kind::INT4) store(to + 2 * P, load_half((const uint16_t*)at + P));
    }
}

#define HUNCH_TILE_SUMS(SUMS, A, W, at, to)            \
    _tile_zero(SUMS);                                  \
    _tile_loadd(A, at, GROUP);                         \
    _tile_dpbssd(SUMS, A, W);                          \
    _tile_stored(SUMS, to, P * sizeof(int32_t));

// Integer sums of T tiles of rows, [tile][part][RT][P]: the low parts of fine activations stand second.
template <int T, bool FINE, Span SPAN>
HUNCH_AMX_CODE inline void tile_sums(const int8_t* levels, const uint8_t* a, size_t tile_bytes,
                                     int32_t* out) {
    constexpr int SIZE = RT * P, LOW = RT * GROUP, PARTS = FINE ? 2 : 1;
    if (SPAN == Span::WHOLE) {
        _tile_loadd(5, levels, 64);
        HUNCH_TILE_SUMS(0, 4, 5, a, out)
        if (FINE) { HUNCH_TILE_SUMS(2, 4, 5, a + LOW, out + SIZE) }
        if (T == 2) { HUNCH_TILE_SUMS(1, 4, 5, a + tile_bytes, out + PARTS * SIZE) }
        if (T == 2 && FINE) { HUNCH_TILE_SUMS(3, 4, 5, a + tile_bytes + LOW, out + 3 * SIZE) }
    } else {
        if (SPAN == Span::SECOND) a += 16, levels += 16 * P;
        _tile_loadd(7, levels, 64);
        HUNCH_TILE_SUMS(0, 6, 7, a, out)
        if (FINE) { HUNCH_TILE_SUMS(2, 6, 7, a + LOW, out + SIZE) }
        if (T == 2) { HUNCH_TILE_SUMS(1, 6, 7, a + tile_bytes, out + PARTS * SIZE) }
        if (T == 2 && FINE) { HUNCH_TILE_SUMS(3, 6, 7, a + tile_bytes + LOW, out + 3 * SIZE) }
    }
}

// add_group of simd_avx512.h for T tiles of rows; `d_a` are the first one's scales.
template <int T, bool IS_4BIT, bool FINE, Span SPAN = Span::WHOLE>
HUNCH_AMX_CODE inline void add_tiles(vf* acc, const int8_t* levels, const Scale& scale,
                                     const uint8_t* a, const float* d_a, size_t tile_bytes) {
    constexpr bool COUNTS = !FINE || IS_4BIT;
    constexpr int PARTS = FINE ? 2 : 1;
    alignas(64) int32_t sums[T * PARTS * RT * P];
    tile_sums<T, FINE, SPAN>(levels, a, tile_bytes, sums);
    HUNCH_UNROLL for (int t = 0; t < T; t++)
        HUNCH_UNROLL for (int r = 0; r < RT; r++) {
            const int32_t* at = sums + (t * PARTS * RT + r) * P;
            __m512i s = _mm512_load_si512(at);
            if (FINE) s = _mm512_add_epi32(_mm512_slli_epi32(s, 6), _mm512_load_si512(at + RT * P));
            if (COUNTS) s = _mm512_add_epi32(s, _mm512_set1_epi32(MAGIC_BITS));
            vf p = COUNTS ? fma(scale.offset, _mm512_castsi512_ps(s), scale.d)
                          : mul(_mm512_cvtepi32_ps(s), scale.d);
            acc[t * RT + r] = fma(acc[t * RT + r], p, ((const float*)((const uint8_t*)d_a + t * tile_bytes))[r]);
        }
}

// The first `num` rows of T tiles by one panel.
template <int T, Kind KIND, bool FINE>
HUNCH_AMX_CODE void amx_panel(const int8_t* levels, const float* scales, int num_groups,
                              const uint8_t* a, size_t tile_bytes, int num, float* out, int stride) {
    constexpr bool IS_4BIT = KIND == Kind::INT4 || KIND == Kind::K4;
    constexpr bool HAS_MINIMA = IS_4BIT || KIND == Kind::K5;
    vf acc[T * RT];
    HUNCH_UNROLL for (int r = 0; r < T * RT; r++) acc[r] = zero();
    for (int g = 0; g < num_groups; g++, a += tile_group_bytes(FINE)) {
        const float* d_a = (const float*)(a + (FINE ? 2 : 1) * RT * GROUP);
        const Scale scale(load(scales + P));
        if (KIND == Kind::K6) {
            add_tiles<T, false, FINE, Span::FIRST>(acc, levels, scale, a, d_a, tile_bytes);
            add_tiles<T, false, FINE, Span::SECOND>(acc, levels, Scale(load(scales + 3 * P)), a, d_a,
                                                    tile_bytes);
        } else {
            add_tiles<T, IS_4BIT, FINE>(acc, levels, scale, a, d_a, tile_bytes);
        }
        if (HAS_MINIMA)
            HUNCH_UNROLL for (int t = 0; t < T; t++)
                add_minimum<RT>(acc + t * RT, load(scales + 2 * P),
                                (const float*)((const uint8_t*)d_a + t * tile_bytes) + RT);
        levels += 32 * P;
        scales += scales_floats(KIND);
    }
    HUNCH_UNROLL for (int r = 0; r < T * RT; r++)
        if (r < num) store(out + (size_t)r * stride, acc[r]);
}

// All rows by one panel that unpack_levels prepared.
template <Kind KIND, bool FINE>
HUNCH_AMX_CODE void amx_rows(const int8_t* levels, const float* scales, int num_groups,
                             const uint8_t* tiles, size_t tile_bytes, int count, float* out, int stride) {
    asm volatile("" ::: "memory");  // the tiles' loads are not known to read what was stored
    _tile_loadconfig(&TILE_SHAPES);
    for (int r = 0; r < count; r += 2 * RT) {
        const uint8_t* a = tiles + r / RT * tile_bytes;
        float* to = out + (size_t)r * stride;
        if (count - r > RT)
            amx_panel<2, KIND, FINE>(levels, scales, num_groups, a, tile_bytes,
                                     count - r < 2 * RT ? count - r : 2 * RT, to, stride);
        else
            amx_panel<1, KIND, FINE>(levels, scales, num_groups, a, tile_bytes, count - r, to, stride);
    }
    _tile_release();
}

typedef void AmxRows(const int8_t* levels, const float* scales, int num_groups, const uint8_t* tiles,
                     size_t tile_bytes, int count, float* out, int stride);

inline AmxRows* amx_rows_of(Kind kind, bool is_fine) {
    switch (kind) {
        case Kind::INT4: return is_fine ? amx_rows<Kind::INT4, true> : amx_rows<Kind::INT4, false>;
        case Kind::INT5: return is_fine ? amx_rows<Kind::INT5, true> : amx_rows<Kind::INT5, false>;
        case Kind::INT8: return is_fine ? amx_rows<Kind::INT8, true> : amx_rows<Kind::INT8, false>;
        case Kind::K4: return is_fine ? amx_rows<Kind::K4, true> : amx_rows<Kind::K4, false>;
        case Kind::K5: return is_fine ? amx_rows<Kind::K5, true> : amx_rows<Kind::K5, false>;
        case Kind::K6: return is_fine ? amx_rows<Kind::K6, true> : amx_rows<Kind::K6, false>;
        case Kind::FLOAT: break;
    }
    return nullptr;
}

}  // namespace hunch
