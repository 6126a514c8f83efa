// Weight matrices as the kernels read them: panels of P output channels, inputs in groups of 32.
// Every number of a file's blocks is kept as it is; only their order changes.
//
// A group of a panel holds, with all channels side by side:
//   INT4   d[P] m[P] as half floats, then 4 x [P][4] bytes; the low nibbles of part i are inputs
//          4i..4i+3 of the group, the high ones 16 more. weight = d * q + m, q in 0..15.
//   INT5   d[P] as half floats, the nibbles of INT4, then [P][4] bytes whose bit i says that inputs
//          4i..4i+3 are below zero. weight = d * q, q in -16..15.
//   INT8   d[P] as half floats, then 8 x [P][4] bytes: inputs 4i..4i+3. weight = d * q.
//   FLOAT  [32][P] floats.
//   K4     the nibbles of INT4.
//   K5     the nibbles and signs of INT5.
//   K6     for each half of 16 inputs 3 x [P][4] bytes: the high 6 bits are inputs 4i..4i+3; the low 2
//          are bits 5-4, 3-2 and 1-0 of the last four inputs. weight = scale * q, q in -32..31.
//   TABLE, NL, FP4  the nibbles of INT4. weight = scale * levels[q] for the matrix's 16 levels, each a
//          small whole number.
//   K2 T2  8 P bytes: the low half of byte i has the lower two bits of both nibbles of INT4's byte i, the
//          high half those of byte i + 8 P. They number levels too.
//   INT5M  the nibbles and signs of INT5.
// Before the groups of a panel whose groups hold no scales stand these, for each 8 groups:
//   K4 K5  d[P] m[P] as half floats, then for each group scale[P] minimum[P] as uint8:
//          weight = d * scale * q - m * minimum, q in 0..15 and 0..31 (kept as q - 16).
//   K6     d[P] as half floats, then for each half group scale[P] as int8: weight = d * scale * q.
//   TABLE  the same: weight = unit * d * scale * levels[q], where the matrix has a unit too.
//   K2     d[P] m[P] as half floats, then for each half group bytes [P] of scale (low nibble) and minimum:
//          weight = d * scale * q - m * minimum, q in 0..3.
//   T2     d[P] as half floats: weight = d * (q - 1).
// or for each group:
//   NL     d[P] as half floats.
//   FP4    e[P] as uint8: the scale is 2^(e - 128). Products are finite for e below 232.
//   INT5M  d[P] m[P] as half floats: weight = d * q + m, q in 0..31 (kept as q - 16).
// IN_PAIRS, vectors of 16 numbers hold inputs 8i..8i+7 of channels 0 and 1, then of 2 and 3, where [P][4]
// holds inputs 4i..4i+3 of all; nibbles, signs and K6's low bits belong to vectors in the same way.
// Channels are padded with zeros to a full panel, inputs to a full group.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "simd.h"

namespace hunch {

enum class Format : int {
    INT4 = 0, INT8 = 1, FLOAT = 2, INT5 = 3, K4 = 4, K5 = 5, K6 = 6, TABLE = 7, INT5M = 8, NL = 9, FP4 = 10,
    K2 = 11, T2 = 12
};

constexpr int group_bytes(Format format) {
    switch (format) {
        case Format::INT4: return 4 * P + 16 * P;
        case Format::INT5: return 2 * P + 20 * P;
        case Format::INT8: return 2 * P + 32 * P;
        case Format::FLOAT: return 4 * 32 * P;
        case Format::K4:
        case Format::TABLE:
        case Format::NL:
        case Format::FP4: return 16 * P;
        case Format::K5:
        case Format::INT5M: return 20 * P;
        case Format::K6: return 24 * P;
        case Format::K2:
        case Format::T2: return 8 * P;
    }
    return 0;
}

// Of these the scales, which come first.
constexpr int head_bytes(Format format) {
    return format == Format::INT4 ? 4 * P : format == Format::INT5 || format == Format::INT8 ? 2 * P : 0;
}

constexpr int SUPER = 8;  // groups of a K matrix that share d

// Whether each half of a group has a scale of its own.
constexpr bool has_halves(Format format) { return format == Format::K6 || format == Format::TABLE; }
constexpr bool is_2bit(Format format) { return group_bytes(format) == 8 * P; }
constexpr bool has_levels(Format format) {
    return format == Format::TABLE || format == Format::NL || format == Format::FP4 || is_2bit(format);
}
// Whether numbers of 5 bits are kept less 16.
constexpr bool is_shifted(Format format) { return format == Format::K5 || format == Format::INT5M; }

// Bytes of scales that stand together before the groups.
constexpr int super_bytes(Format format) {
    switch (format) {
        case Format::K4:
        case Format::K5: return 4 * P + SUPER * 2 * P;
        case Format::K6:
        case Format::TABLE: return 2 * P + SUPER * 2 * P;
        case Format::K2: return 4 * P + SUPER * 2 * P;
        case Format::T2:
        case Format::NL: return 2 * P;
        case Format::FP4: return P;
        case Format::INT5M: return 4 * P;
        default: return 0;
    }
}
constexpr bool has_supers(Format format) { return super_bytes(format) > 0; }
// Whose scales these are: of SUPER groups, or of one.
constexpr int super_groups(Format format) {
    const bool is_of_one = format == Format::NL || format == Format::FP4 || format == Format::INT5M;
    return is_of_one || !has_supers(format) ? 1 : SUPER;
}

// GGUF's blocks, by the numbers that Python has for them.
enum class BlockFormat : int {
    FLOATS = 0, Q4_0 = 1, Q4_1 = 2, Q8_0 = 3, Q5_0 = 4, Q4_K = 5, Q5_K = 6, Q6_K = 7,
    CODED = 8,  // not GGUF's: d, 16 scales as int8, then for each group the nibbles of Q4_0
    Q5_1 = 9, IQ4_NL = 10, MXFP4 = 11, Q2_K = 12, TQ1_0 = 13, TQ2_0 = 14
};

struct Pages;  // memory that matrices share

struct Matrix {
    Format format;
    int num_out, num_in, num_panels, num_groups;
    uint8_t* data = nullptr;
    int8_t levels[16] = {};  // where there are any, -127..127
    float unit = 1;

    Matrix(Format format, int num_out, int num_in);
    ~Matrix();
    Matrix(const Matrix&) = delete;
    Matrix& operator=(const Matrix&) = delete;

    size_t scales_bytes() const {
        return (size_t)(num_groups / super_groups(format)) * super_bytes(format);
    }
    size_t panel_bytes() const { return scales_bytes() + (size_t)num_groups * group_bytes(format); }
    size_t num_bytes() const { return panel_bytes() * num_panels; }
    const uint8_t* panel(int p) const { return data + p * panel_bytes(); }
    uint8_t* group(int channel, int g) const {
        return data + channel / P * panel_bytes() + scales_bytes() + (size_t)g * group_bytes(format);
    }
    uint8_t* super(int channel, int s) const {  // the scales of groups 8s..8s+7, or of group s
        return data + channel / P * panel_bytes() + (size_t)s * super_bytes(format);
    }

    // Rows [first, first + count) from a file's blocks, or from floats rounded to the matrix's format.
    void fill(BlockFormat block_format, const uint8_t* rows, int first, int count);
    // One row as floats: the embedding of a token. In the order of ggml's operations: equal bits.
    void read_row(int channel, float* out) const;

    // A group of one channel: its 32 numbers (or the codes of levels), and the scale that it holds.
    void put_levels(int channel, int g, const int8_t* q);
    void get_levels(int channel, int g, int8_t* q) const;
    void put_scale(int channel, int g, float d, float m);
    // A part of the scale of one group that stands before the groups: `size` bytes for each of P channels,
    // the first channel's at `at`.
    void put_apart(int channel, int g, const uint8_t* scale, int size, int at = 0);
    // The scales of 8 groups of one channel; d and m point at half floats. K6 and TABLE have no minima,
    // K2 has them beside the scales.
    void put_super(int channel, int s, const uint8_t* d, const uint8_t* m, const uint8_t* scales,
                   const uint8_t* minima);

private:
    void scales_of(int channel, int g, float* d, float* m) const;
    void fill_floats(const float* rows, int first, int count);
    std::shared_ptr<Pages> pages_;
};

}  // namespace hunch
