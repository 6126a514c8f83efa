#include "gemm.h"

#include <cstring>

#if defined(__ARM_FEATURE_DOTPROD)
#include "tile_neon.h"
#else
#include "tile_generic.h"
#endif
#include "scales.h"

namespace hunch {

namespace {

constexpr int UNPACK_FROM = 4 * RT;  // rows from which unpacking a panel first takes less time

// R rows by `num_panels` panels that lie one after the other.
typedef void Tile(const uint8_t* w, int num_panels, int num_groups, const uint8_t* a, float* out,
                  int stride);

// The same for one panel of a K matrix.
typedef void ScaledTile(const uint8_t* w, const float* scales, int num_groups, const uint8_t* a,
                        float* out, int stride);

#define HUNCH_TABLE(type, table, name)                                                         \
    type* const table[2][9] = {                                                                \
        {nullptr, name<1, false>, name<2, false>, name<3, false>, name<4, false>,              \
         name<5, false>, name<6, false>, name<7, false>, name<8, false>},                      \
        {nullptr, name<1, true>, name<2, true>, name<3, true>, name<4, true>,                  \
         name<5, true>, name<6, true>, name<7, true>, name<8, true>}};
#define HUNCH_PANELS(name, bytes)                                                              \
    template <int R, bool FINE>                                                                \
    void name(const uint8_t* w, int num_panels, int num_groups, const uint8_t* a, float* out,  \
              int stride) {                                                                    \
        for (int p = 0; p < num_panels; p++, w += (size_t)num_groups * (bytes), out += P)      \
            name##_panel<R, FINE>(w, num_groups, a, out, stride);                              \
    }                                                                                          \
    HUNCH_TABLE(Tile, name##_table, name)
static_assert(RT <= 8, "the tables end at 8 rows");
HUNCH_PANELS(tile_int4, group_bytes(Format::INT4))
HUNCH_PANELS(tile_unpacked, UNPACKED_GROUP)
HUNCH_PANELS(tile_int8, group_bytes(Format::INT8))
HUNCH_PANELS(tile_int5, group_bytes(Format::INT5))
HUNCH_TABLE(ScaledTile, tile_k4_table, tile_k4_panel)
HUNCH_TABLE(ScaledTile, tile_k5_table, tile_k5_panel)
HUNCH_TABLE(ScaledTile, tile_k6_table, tile_k6_panel)
HUNCH_TABLE(ScaledTile, tile_levels_table, tile_levels_panel)

void unpack_panel(const uint8_t* w, int num_groups, uint8_t* out) {
    for (int g = 0; g < num_groups; g++, w += group_bytes(Format::INT4), out += UNPACKED_GROUP) {
        for (int i = 0; i < group_bytes(Format::INT4); i += 64) __builtin_prefetch(w + 1280 + i);
        store8((int8_t*)out, unpack4(w + 4 * P));
        store((float*)(out + 32 * P), load_half((const uint16_t*)w));
        store((float*)(out + 32 * P) + P, load_half((const uint16_t*)w + P));
        store((float*)(out + 32 * P) + 2 * P, mul(load_half((const uint16_t*)w), set1(-12582912.0f)));
    }
}

template <int R>
inline void store_rows(const vf* acc, float* out, int stride) {
    HUNCH_UNROLL for (int r = 0; r < R; r++) store(out + (size_t)r * stride, acc[r]);
}

// Floats: R rows by N panels; every sum is one chain over the inputs.
template <int R, int N>
void tile_float(const Matrix& w, int panel, const float* x, int num_in, float* out, int stride) {
    vf acc[N][R];
    const float* at[N];
    HUNCH_UNROLL for (int n = 0; n < N; n++) {
        at[n] = (const float*)w.panel(panel + n);
        HUNCH_UNROLL for (int r = 0; r < R; r++) acc[n][r] = zero();
    }
    for (int k = 0; k < num_in; k++)
        HUNCH_UNROLL for (int n = 0; n < N; n++) {
            vf column = load(at[n] + (size_t)k * P);
            HUNCH_UNROLL for (int r = 0; r < R; r++)
                acc[n][r] = fma(acc[n][r], column, x[(size_t)r * num_in + k]);
        }
    HUNCH_UNROLL for (int n = 0; n < N; n++) store_rows<R>(acc[n], out + n * P, stride);
}

template <int R>
void float_rows(const Matrix& w, int first, int last, const float* x, int num_in, float* out,
                int stride) {
    constexpr int N = R == 1 ? 8 : R <= 4 ? 4 : 2;
    int p = first;
    for (; p + N <= last; p += N) tile_float<R, N>(w, p, x, num_in, out + (p - first) * P, stride);
    for (; p < last; p++) tile_float<R, 1>(w, p, x, num_in, out + (p - first) * P, stride);
}

void multiply_float(const Matrix& w, int first, int last, const Input& input, int row, int count,
                    float* out, int stride) {
    for (int r = 0; r < count;) {
        const float* x = input.rows + (size_t)(row + r) * input.num_in;
        float* to = out + (size_t)r * stride;
        int num = count - r >= 4 ? 4 : count - r >= 2 ? 2 : 1;
        if (num == 4) float_rows<4>(w, first, last, x, input.num_in, to, stride);
        if (num == 2) float_rows<2>(w, first, last, x, input.num_in, to, stride);
        if (num == 1) float_rows<1>(w, first, last, x, input.num_in, to, stride);
        r += num;
    }
}

int sum16(const int8_t* q) {
    int sum = 0;
    for (int i = 0; i < 16; i++) sum += q[i];
    return sum;
}

// How a panel's scales are expanded, and the tiles that read them.
struct Scaled {
    void (*expand)(const Matrix& w, int panel, float* out);
    ScaledTile* const (*tiles)[9];
};

Scaled scaled_of(Format format) {
    switch (format) {
        case Format::K4: return {expand_scales<Format::K4>, tile_k4_table};
        case Format::K5: return {expand_scales<Format::K5>, tile_k5_table};
        case Format::K6: return {expand_scales<Format::K6>, tile_k6_table};
        case Format::INT5M: return {expand_scales_apart<Format::INT5M>, tile_k5_table};
        case Format::NL: return {expand_scales_apart<Format::NL>, tile_levels_table};
        case Format::FP4: return {expand_scales_apart<Format::FP4>, tile_levels_table};
        case Format::T2: return {expand_scales_apart<Format::T2>, tile_levels_table};
        case Format::K2: return {expand_scales_k2, tile_levels_table};
        default: return {expand_scales<Format::TABLE>, tile_levels_table};
    }
}

// One panel of a matrix whose scales are apart, for all rows.
void multiply_scaled(const Matrix& w, int panel, const Input& input, int row, int count, float* out,
                     int stride, float* scales) {
    const uint8_t* tiles = input.tiles + row / RT * input.tile_bytes();
    const Scaled scaled = scaled_of(w.format);
    scaled.expand(w, panel, scales);
    ScaledTile* const* table = scaled.tiles[input.is_fine];
    const uint8_t* groups = w.panel(panel) + w.scales_bytes();
    if (is_2bit(w.format)) {
        uint8_t* nibbles = (uint8_t*)(scales + nibbles_at(w.num_groups));
        unpack2(groups, w.num_groups, nibbles);
        groups = nibbles;
    }
    for (int r = 0; r < count; r += RT)
        table[count - r < RT ? count - r : RT](groups, scales, w.num_groups,
                                               tiles + r / RT * input.tile_bytes(),
                                               out + (size_t)r * stride, stride);
    if (w.format == Format::K2)
        take_minima(scales + minima_at(w.num_groups), input.sums + (size_t)row * 2 * w.num_groups,
                    2 * w.num_groups, count, out, stride);
}

}  // namespace

void Input::put(int row, int first, int last, const float* x) const {
    if (rows) {
        int end = last * GROUP < num_in ? last * GROUP : num_in;
        std::memcpy(rows + (size_t)row * num_in + first * GROUP, x,
                    (end - first * GROUP) * sizeof(float));
    }
    if (!tiles) return;
    const size_t group_bytes = tile_group_bytes(is_fine);
    const float limit = is_fine ? FINE_TOP : COARSE_TOP;
    uint8_t* at = tiles + row / RT * tile_bytes() + first * group_bytes;
    int r = row % RT;
    for (int g = first; g < last; g++, at += group_bytes) {
        float padded[GROUP];
        const float* in = x + (size_t)(g - first) * GROUP;
        if ((g + 1) * GROUP > num_in) {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, in, (num_in - g * GROUP) * sizeof(float));
            in = padded;
        }
        vf top = zero();
        for (int j = 0; j < GROUP; j += P) top = max(top, abs(load(in + j)));
        float largest = max_lane(top), inverse = largest > 0 ? limit / largest : 0.0f;
        int8_t* q = (int8_t*)at + r * GROUP;
        int8_t parts[2 * GROUP];  // IN_PAIRS
        int8_t *high = IN_PAIRS ? parts : q, *low = IN_PAIRS ? parts + GROUP : q + RT * GROUP;
        int sum = is_fine ? quantise32_fine(in, inverse, high, low) : quantise32(in, inverse, high);
        for (int j = 0; IN_PAIRS && j < GROUP; j += 8) {
            std::memcpy(at + tile_byte(r, j), high + j, 8);
            if (is_fine) std::memcpy(at + RT * GROUP + tile_byte(r, j), low + j, 8);
        }
        int16_t* words = (int16_t*)(at + 2 * RT * GROUP) + r * GROUP;
        for (int j = 0; IN_WORDS && is_fine && j < GROUP; j++) words[j] = (int16_t)(64 * high[j] + low[j]);
        float* scales = (float*)(at + activation_bytes(is_fine));
        float d = largest / limit;
        for (int i = 0; i < SCALE_COPIES; i++) {
            scales[r * SCALE_COPIES + i] = d;
            scales[(RT + r) * SCALE_COPIES + i] = d * (float)sum;
        }
        if (KEEPS_SUMS || sums) {
            const int first = is_fine ? 64 * sum16(high) + sum16(low) : sum16(high);
            if (sums) {
                float* mine = sums + 2 * ((size_t)row * num_groups() + g);
                mine[0] = d * (float)first;
                mine[1] = d * (float)(sum - first);
            }
            if (!KEEPS_SUMS) continue;
            const int times = is_fine ? -2 : -128, start = is_fine ? 0 : SUMS_START;
            int32_t* starts = (int32_t*)scales + 2 * RT + r;
            starts[0] = start + times * sum;
            starts[RT] = start + times * first;
            starts[2 * RT] = start + times * (sum - first);
        }
    }
}

void multiply(const Matrix& w, int first, int last, const Input& input, int row, int count,
              float* out, int stride, const Scratch& scratch) {
    int panel = first / P, end = (last + P - 1) / P;
    if (w.format == Format::FLOAT) {
        multiply_float(w, panel, end, input, row, count, out, stride);
        return;
    }
    if (has_supers(w.format)) {
        float* scales = (float*)scratch.panel;
        for (int p = panel; p < end; p++, out += P)
            multiply_scaled(w, p, input, row, count, out, stride, scales);
        return;
    }
    const uint8_t* tiles = input.tiles + row / RT * input.tile_bytes();
    bool is_unpacked = w.format == Format::INT4 && count >= UNPACK_FROM;
    Tile* const* table = w.format == Format::INT8   ? tile_int8_table[input.is_fine]
                         : w.format == Format::INT5 ? tile_int5_table[input.is_fine]
                         : is_unpacked              ? tile_unpacked_table[input.is_fine]
                                                    : tile_int4_table[input.is_fine];
    const int step = is_unpacked ? 1 : end - panel;  // panels that all rows pass before the next
    for (int p = panel; p < end; p += step, out += step * P) {
        const uint8_t* weights = w.panel(p);
        if (is_unpacked) {
            unpack_panel(weights, w.num_groups, scratch.panel);
            weights = scratch.panel;
        }
        for (int r = 0; r < count; r += RT) {
            int num = count - r < RT ? count - r : RT;
            table[num](weights, step, w.num_groups, tiles + r / RT * input.tile_bytes(),
                       out + (size_t)r * stride, stride);
        }
    }
}

}  // namespace hunch
