// GGUF's blocks to the panels of a matrix. Offsets are those of dequant.py, which says every layout.
#include <cstring>
#include <initializer_list>

#include "half.h"
#include "matrix.h"

namespace hunch {

namespace {

float half(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return from_half(bits);
}

// 16 bytes: input j in the low nibble of byte j, j + 16 in the high one.
void nibbles(const uint8_t* from, int8_t* q) {
    for (int j = 0; j < 16; j++) {
        q[j] = from[j] & 15;
        q[j + 16] = from[j] >> 4;
    }
}

// 4 bytes whose bits say which numbers have 16 more, then the nibbles; less 16.
void five_bits(const uint8_t* from, int8_t* q) {
    uint32_t high;
    std::memcpy(&high, from, 4);
    nibbles(from + 4, q);
    for (int j = 0; j < GROUP; j++) q[j] = (int8_t)(q[j] - (high >> j & 1 ? 0 : 16));
}

// 8 scales and 8 minima of 6 bits in 12 bytes.
void six_bits(const uint8_t* from, uint8_t* scales, uint8_t* minima) {
    for (int i = 0; i < 4; i++) {
        scales[i] = from[i] & 63;
        minima[i] = from[4 + i] & 63;
        scales[4 + i] = (uint8_t)((from[8 + i] & 15) | from[i] >> 6 << 4);
        minima[4 + i] = (uint8_t)(from[8 + i] >> 4 | from[4 + i] >> 6 << 4);
    }
}

struct Filler {
    Matrix& w;
    int channel;

    // One block each; returns the block after it. i counts blocks of the row.
    const uint8_t* q4_0(int i, const uint8_t* block) const {
        int8_t q[GROUP];
        nibbles(block + 2, q);
        w.put_scale(channel, i, half(block), -8 * half(block));
        w.put_levels(channel, i, q);
        return block + 18;
    }
    const uint8_t* q4_1(int i, const uint8_t* block) const {
        int8_t q[GROUP];
        nibbles(block + 4, q);
        w.put_scale(channel, i, half(block), half(block + 2));
        w.put_levels(channel, i, q);
        return block + 20;
    }
    const uint8_t* q5_0(int i, const uint8_t* block) const {
        int8_t q[GROUP];
        five_bits(block + 2, q);
        w.put_scale(channel, i, half(block), 0);
        w.put_levels(channel, i, q);
        return block + 22;
    }
    const uint8_t* q5_1(int i, const uint8_t* block) const {
        int8_t q[GROUP];
        five_bits(block + 4, q);
        w.put_apart(channel, i, block, 2);
        w.put_apart(channel, i, block + 2, 2, 2 * P);
        w.put_levels(channel, i, q);
        return block + 24;
    }
    // A scale of one or two bytes, then nibbles that number levels.
    const uint8_t* levels(int i, const uint8_t* block, int scale_bytes) const {
        int8_t q[GROUP];
        nibbles(block + scale_bytes, q);
        w.put_apart(channel, i, block, scale_bytes);
        w.put_levels(channel, i, q);
        return block + scale_bytes + 16;
    }
    const uint8_t* q8_0(int i, const uint8_t* block) const {
        w.put_scale(channel, i, half(block), 0);
        w.put_levels(channel, i, (const int8_t*)block + 2);
        return block + 34;
    }
    const uint8_t* q45_k(int i, const uint8_t* block, bool is_5bit) const {
        uint8_t scales[SUPER], minima[SUPER];
        six_bits(block + 4, scales, minima);
        w.put_super(channel, i, block, block + 2, scales, minima);
        const uint8_t *high = block + 16, *low = is_5bit ? high + 32 : high;
        for (int g = 0; g < SUPER; g++) {  // two groups share 32 bytes of nibbles
            int8_t q[GROUP];
            for (int j = 0; j < GROUP; j++) {
                q[j] = (int8_t)(low[g / 2 * 32 + j] >> (g % 2 ? 4 : 0) & 15);
                if (is_5bit && !(high[j] >> g & 1)) q[j] = (int8_t)(q[j] - 16);
            }
            w.put_levels(channel, i * SUPER + g, q);
        }
        return low + 128;
    }
    const uint8_t* q6_k(int i, const uint8_t* block) const {
        w.put_super(channel, i, block + 208, nullptr, block + 192, nullptr);
        for (int g = 0; g < SUPER; g++) {  // four groups share 64 bytes of nibbles and 32 of pairs
            const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *pairs = block + 128 + g / 4 * 32;
            int8_t q[GROUP];
            for (int j = 0; j < GROUP; j++) {
                int nibble = low[j] >> (g % 4 / 2 * 4) & 15, pair = pairs[j] >> (g % 4 * 2) & 3;
                q[j] = (int8_t)((nibble | pair << 4) - 32);
            }
            w.put_levels(channel, i * SUPER + g, q);
        }
        return block + 210;
    }
    // Codes of 2 bits: four groups share 32 bytes.
    void pairs(int i, const uint8_t* from) const {
        for (int g = 0; g < SUPER; g++) {
            int8_t q[GROUP];
            for (int j = 0; j < GROUP; j++) q[j] = (int8_t)(from[g / 4 * 32 + j] >> (g % 4 * 2) & 3);
            w.put_levels(channel, i * SUPER + g, q);
        }
    }
    const uint8_t* q2_k(int i, const uint8_t* block) const {
        w.put_super(channel, i, block + 80, block + 82, block, nullptr);
        pairs(i, block + 16);
        return block + 84;
    }
    const uint8_t* tq2_0(int i, const uint8_t* block) const {
        w.put_apart(channel, i, block + 64, 2);
        pairs(i, block);
        return block + 66;
    }
    // 32 bytes, 16 and 4: each holds five digits of three levels (the last four), the highest first.
    const uint8_t* tq1_0(int i, const uint8_t* block) const {
        int8_t q[SUPER * GROUP], *to = q;
        const uint8_t* from = block;
        for (int size : {32, 16, 4}) {
            for (int power = 1; power < (size == 4 ? 81 : 243); power *= 3)
                for (int j = 0; j < size; j++) *to++ = (int8_t)((uint8_t)(from[j] * power) * 3 >> 8);
            from += size;
        }
        w.put_apart(channel, i, from, 2);
        for (int g = 0; g < SUPER; g++) w.put_levels(channel, i * SUPER + g, q + g * GROUP);
        return from + 2;
    }
    const uint8_t* coded(int i, const uint8_t* block) const {
        w.put_super(channel, i, block, nullptr, block + 2, nullptr);
        block += 18;
        for (int g = 0; g < SUPER; g++, block += 16) {
            int8_t q[GROUP];
            nibbles(block, q);
            w.put_levels(channel, i * SUPER + g, q);
        }
        return block;
    }
};

}  // namespace

void Matrix::fill(BlockFormat block_format, const uint8_t* rows, int first, int count) {
    if (block_format == BlockFormat::FLOATS) return fill_floats((const float*)rows, first, count);
    const int num_blocks = num_groups / super_groups(format);
    for (int n = 0; n < count; n++) {
        Filler filler{*this, first + n};
        for (int i = 0; i < num_blocks; i++) switch (block_format) {
                case BlockFormat::FLOATS: break;
                case BlockFormat::Q4_0: rows = filler.q4_0(i, rows); break;
                case BlockFormat::Q4_1: rows = filler.q4_1(i, rows); break;
                case BlockFormat::Q5_0: rows = filler.q5_0(i, rows); break;
                case BlockFormat::Q8_0: rows = filler.q8_0(i, rows); break;
                case BlockFormat::Q4_K: rows = filler.q45_k(i, rows, false); break;
                case BlockFormat::Q5_K: rows = filler.q45_k(i, rows, true); break;
                case BlockFormat::Q6_K: rows = filler.q6_k(i, rows); break;
                case BlockFormat::CODED: rows = filler.coded(i, rows); break;
                case BlockFormat::Q5_1: rows = filler.q5_1(i, rows); break;
                case BlockFormat::IQ4_NL: rows = filler.levels(i, rows, 2); break;
                case BlockFormat::MXFP4: rows = filler.levels(i, rows, 1); break;
                case BlockFormat::Q2_K: rows = filler.q2_k(i, rows); break;
                case BlockFormat::TQ1_0: rows = filler.tq1_0(i, rows); break;
                case BlockFormat::TQ2_0: rows = filler.tq2_0(i, rows); break;
            }
    }
}

}  // namespace hunch
