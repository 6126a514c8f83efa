// Weight matrices as the kernels read them: panels of P output channels, inputs in groups of 32.
//
// A group of a panel holds, with all channels side by side:
//   INT4   d[P] m[P] as half floats, then 4 x [P][4] bytes; the low nibbles of part i are inputs
//          4i..4i+3 of the group, the high ones 16 more. weight = d * q + m, q in 0..15.
//   INT8   d[P] as half floats, then 8 x [P][4] bytes: inputs 4i..4i+3. weight = d * q.
//   FLOAT  [32][P] floats.
// Channels are padded with zeros to a full panel, inputs to a full group.
#pragma once
#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace hunch {

enum class Kind : int { INT4 = 0, INT8 = 1, FLOAT = 2 };

constexpr int group_bytes(Kind kind) {
    return kind == Kind::INT4 ? 4 * P + 16 * P : kind == Kind::INT8 ? 2 * P + 32 * P : 4 * 32 * P;
}

struct Matrix {
    Kind kind;
    int num_out, num_in, num_panels, num_groups;
    uint8_t* data = nullptr;

    Matrix(Kind kind, int num_out, int num_in);
    ~Matrix();
    Matrix(const Matrix&) = delete;
    Matrix& operator=(const Matrix&) = delete;

    size_t panel_bytes() const { return (size_t)num_groups * group_bytes(kind); }
    size_t num_bytes() const { return panel_bytes() * num_panels; }
    const uint8_t* panel(int p) const { return data + p * panel_bytes(); }
    uint8_t* group(int channel, int g) {
        return data + channel / P * panel_bytes() + (size_t)g * group_bytes(kind);
    }

    // Rows [first, first + count) from GGUF blocks: Q4_0, Q4_1 (INT4) or Q8_0 (INT8).
    void fill_q4_0(const uint8_t* rows, int first, int count);
    void fill_q4_1(const uint8_t* rows, int first, int count);
    void fill_q8_0(const uint8_t* rows, int first, int count);
    // The same from floats, rounded to the matrix's kind.
    void fill_float(const float* rows, int first, int count);
    // One row as floats: the embedding of a token.
    void read_row(int channel, float* out) const;

private:
    void put_group(int channel, int g, float d, float m, const uint8_t* q);
};

}  // namespace hunch
