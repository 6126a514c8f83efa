// Matrix products whose rows do not see each other: every row's sums run over the groups in order,
// by the same operations, however many rows are computed beside it.
#pragma once
#include <algorithm>

#include "matrix.h"

namespace hunch {

// The largest whole number an activation becomes. A fine one q is kept as two int8 parts, high and
// low, q = 64 * high + low: 32 products with weights of 4 bits then stay below 2^22 (tile_neon.h).
constexpr int COARSE_TOP = 127, FINE_TOP = 8127;

// Bytes of a group of a tile: int8 [RT][32] (fine: the high parts, then the low ones), then the
// scales d[RT], then d * (sum of the group) [RT], then, where KEEPS_SUMS, -128 times (fine: -2
// times) the sums of the group, its first and its second half as int32 [3][RT], to each of which
// SUMS_START is added (fine: nothing): see add_group.
// IN_PAIRS: int8 [RT / 2][4][2][8], and every scale and sum stands twice. IN_WORDS: after the parts
// of fine ones their numbers, int16 [RT][32].
constexpr size_t activation_bytes(bool is_fine) {
    return (is_fine ? IN_WORDS ? 4 : 2 : 1) * RT * GROUP;
}
constexpr size_t tile_group_bytes(bool is_fine) {
    return activation_bytes(is_fine) + (KEEPS_SUMS ? 5 : IN_PAIRS ? 4 : 2) * RT * sizeof(float);
}
// Where input j of a row stands in it.
constexpr int tile_byte(int row, int j) {
    return IN_PAIRS ? row / 2 * 64 + j / 8 * 16 + row % 2 * 8 + j % 8 : row * GROUP + j;
}
constexpr int SCALE_COPIES = IN_PAIRS ? 2 : 1;

// Rows that enter a product. Quantised formats read `tiles`, tiles of RT rows; FLOAT reads `rows`.
struct Input {
    uint8_t* tiles = nullptr;
    float* rows = nullptr;
    float* sums = nullptr;  // over each half of a group, which K2 reads: [row][2 * num_groups]
    int num_in = 0;
    bool is_fine = false;  // activations of 14 bits instead of 8

    int num_groups() const { return (num_in + GROUP - 1) / GROUP; }
    size_t tile_bytes() const { return num_groups() * tile_group_bytes(is_fine); }
    size_t bytes_for(int num_rows) const { return (size_t)((num_rows + RT - 1) / RT) * tile_bytes(); }

    // Puts groups [first, last) of a row in place; x points at the first of them.
    void put(int row, int first, int last, const float* x) const;
    void put_row(int row, const float* x) const { put(row, 0, num_groups(), x); }
};

// An unpacked INT4 group: int8 [8][P][4], then d, m and (for NEON) -MAGIC * d as floats.
constexpr size_t UNPACKED_GROUP = 32 * P + 3 * P * sizeof(float);

// The scales of a panel that has them apart, as floats, group by group. K4, K5, INT5M: -MAGIC * d (for
// NEON), d, m, with weight = d * q + m. K6: -MAGIC * d and d for each half, with weight = d * 4q. With
// levels: -MAGIC * d, d and the 16 levels as bytes for each half, with weight = d * level.
constexpr int scales_floats(Format format) {
    return has_levels(format) ? 4 * P + 8 : (format == Format::K6 ? 4 : 3) * P;
}

// Where floats stand after the scales of 2-bit panels: K2's minima of each half of a group, and the
// unpacked nibbles.
constexpr size_t minima_at(int num_groups) { return (size_t)num_groups * scales_floats(Format::K2); }
constexpr size_t nibbles_at(int num_groups) { return minima_at(num_groups) + (size_t)num_groups * 2 * P; }

// Scratch of one thread.
struct Scratch {
    uint8_t* panel;  // one unpacked INT4 panel, or the scales of a K panel, and what stands after them
    static size_t panel_bytes(int num_in) {
        const int num_groups = (num_in + SUPER * GROUP - 1) / (SUPER * GROUP) * SUPER;
        const size_t floats = nibbles_at(num_groups) + (size_t)num_groups * 4 * P;
        return std::max(num_groups * UNPACKED_GROUP, floats * sizeof(float));
    }
};

// out[r * stride + n - first] = row r of the input times channel n, for rows [row, row + count)
// and channels [first, last). row is a multiple of RT, first of P; out has room for whole panels.
void multiply(const Matrix& w, int first, int last, const Input& input, int row, int count,
              float* out, int stride, const Scratch& scratch);

}  // namespace hunch
