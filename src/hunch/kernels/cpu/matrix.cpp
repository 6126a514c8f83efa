#include "matrix.h"

#include <sys/mman.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "half.h"

namespace hunch {

namespace {

constexpr size_t HUGE_PAGE = 2 << 20;  // streaming through small pages costs a tenth of the speed

size_t rounded(size_t bytes) { return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }

}  // namespace

Matrix::Matrix(Kind kind, int num_out, int num_in)
    : kind(kind),
      num_out(num_out),
      num_in(num_in),
      num_panels((num_out + P - 1) / P),
      num_groups((num_in + GROUP - 1) / GROUP) {
    // Reading ahead of the last group must stay inside: one page more than is needed.
    void* memory = mmap(nullptr, rounded(num_bytes() + 4096), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (num_bytes() >= HUGE_PAGE) madvise(memory, rounded(num_bytes() + 4096), MADV_HUGEPAGE);
#endif
    data = static_cast<uint8_t*>(memory);
}

Matrix::~Matrix() {
    if (data) munmap(data, rounded(num_bytes() + 4096));
}

// q holds the group's 32 values as GGUF does: INT4 16 bytes (input j in the low nibble of byte j,
// j + 16 in the high one), INT8 32 bytes.
void Matrix::put_group(int channel, int g, float d, float m, const uint8_t* q) {
    uint8_t* at = group(channel, g);
    int lane = channel % P;
    uint16_t half = to_half(d);
    std::memcpy(at + 2 * lane, &half, 2);
    at += 2 * P;
    int parts = 8;
    if (kind == Kind::INT4) {
        half = to_half(m);
        std::memcpy(at + 2 * lane, &half, 2);
        at += 2 * P;
        parts = 4;
    }
    for (int i = 0; i < parts; i++) std::memcpy(at + (i * P + lane) * 4, q + 4 * i, 4);
}

void Matrix::fill_q4_0(const uint8_t* rows, int first, int count) {
    for (int n = 0; n < count; n++)
        for (int g = 0; g < num_groups; g++, rows += 18) {
            uint16_t half;
            std::memcpy(&half, rows, 2);
            float d = from_half(half);
            put_group(first + n, g, d, -8 * d, rows + 2);
        }
}

void Matrix::fill_q4_1(const uint8_t* rows, int first, int count) {
    for (int n = 0; n < count; n++)
        for (int g = 0; g < num_groups; g++, rows += 20) {
            uint16_t half[2];
            std::memcpy(half, rows, 4);
            put_group(first + n, g, from_half(half[0]), from_half(half[1]), rows + 4);
        }
}

void Matrix::fill_q8_0(const uint8_t* rows, int first, int count) {
    for (int n = 0; n < count; n++)
        for (int g = 0; g < num_groups; g++, rows += 34) {
            uint16_t half;
            std::memcpy(&half, rows, 2);
            put_group(first + n, g, from_half(half), 0, rows + 2);
        }
}

void Matrix::fill_float(const float* rows, int first, int count) {
    for (int n = 0; n < count; n++, rows += num_in)
        for (int g = 0; g < num_groups; g++) {
            float x[GROUP] = {};
            int size = num_in - g * GROUP < GROUP ? num_in - g * GROUP : GROUP;
            std::memcpy(x, rows + g * GROUP, size * sizeof(float));
            if (kind == Kind::FLOAT) {
                float* at = reinterpret_cast<float*>(group(first + n, g)) + (first + n) % P;
                for (int j = 0; j < GROUP; j++) at[j * P] = x[j];
                continue;
            }
            float low = x[0], high = x[0], top = 0;
            for (float value : x) {
                low = value < low ? value : low;
                high = value > high ? value : high;
                top = std::fabs(value) > top ? std::fabs(value) : top;
            }
            uint8_t q[GROUP] = {};
            if (kind == Kind::INT8) {
                float d = from_half(to_half(top / 127)), inverse = d > 0 ? 1 / d : 0;
                for (int j = 0; j < GROUP; j++) {
                    float value = std::nearbyint(x[j] * inverse);
                    q[j] = (uint8_t)(int8_t)std::fmin(std::fmax(value, -127.0f), 127.0f);
                }
                put_group(first + n, g, d, 0, q);
            } else {
                float d = from_half(to_half((high - low) / 15)), m = from_half(to_half(low));
                float inverse = d > 0 ? 1 / d : 0;
                for (int j = 0; j < GROUP; j++) {
                    float value = std::nearbyint((x[j] - m) * inverse);
                    int level = (int)std::fmin(std::fmax(value, 0.0f), 15.0f);
                    q[j % 16] |= (uint8_t)(level << (j < 16 ? 0 : 4));
                }
                put_group(first + n, g, d, m, q);
            }
        }
}

void Matrix::read_row(int channel, float* out) const {
    int lane = channel % P;
    for (int g = 0; g < num_groups; g++) {
        const uint8_t* at = const_cast<Matrix*>(this)->group(channel, g);
        int size = num_in - g * GROUP < GROUP ? num_in - g * GROUP : GROUP;
        if (kind == Kind::FLOAT) {
            for (int j = 0; j < size; j++)
                out[g * GROUP + j] = reinterpret_cast<const float*>(at)[j * P + lane];
            continue;
        }
        uint16_t half[2] = {};
        std::memcpy(half, at + 2 * lane, 2);
        if (kind == Kind::INT4) std::memcpy(half + 1, at + 2 * P + 2 * lane, 2);
        float d = from_half(half[0]), m = from_half(half[1]);
        const uint8_t* q = at + (kind == Kind::INT4 ? 4 : 2) * P + 4 * lane;
        for (int j = 0; j < size; j++) {
            int part = kind == Kind::INT4 ? j % 16 / 4 : j / 4;
            uint8_t byte = q[part * 4 * P + j % 4];
            if (kind == Kind::INT4)
                out[g * GROUP + j] = d * (j < 16 ? byte & 15 : byte >> 4) + m;
            else
                out[g * GROUP + j] = d * (int8_t)byte;
        }
    }
}

}  // namespace hunch
