// Half floats without hardware for them.
#pragma once
#include <cstdint>
#include <cstring>

namespace hunch {

inline float float_of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t bits_of_float(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h >> 15) << 31, rest = (uint32_t)(h & 0x7fff) << 13;
    if ((h & 0x7c00) == 0x7c00) return float_of_bits(sign | rest | 0x7f800000);
    // 2^112 is the difference of the exponents' biases; subnormal halves come out right too.
    return float_of_bits(sign | bits_of_float(float_of_bits(rest) * 5.192296858534828e33f));
}

// Rounds to nearest, ties to even.
inline uint16_t to_half(float x) {
    uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest >= 0x7f800000) return (uint16_t)(sign | 0x7c00 | (rest > 0x7f800000 ? 0x200 : 0));
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds past the largest
    if (rest < 0x38800000) {
        // Subnormal: adding 0.5 leaves the rounded half in the low bits.
        uint32_t low = bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000;
        return (uint16_t)(sign | low);
    }
    rest += 0xfff + (rest >> 13 & 1) - 0x38000000;
    return (uint16_t)(sign | rest >> 13);
}

// 2^(e - 128)
inline float from_power(uint8_t e) { return float_of_bits(e < 2 ? 0x200000u << e : (e - 1u) << 23); }

}  // namespace hunch
