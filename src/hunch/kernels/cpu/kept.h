// Keys and values as a cache keeps them: floats, half floats, or codes of 8 bits of which each head
// of a slot has its own scale (kernels/kv_store.py: codes_ref). They are rounded once, here.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "simd.h"

namespace hunch {

enum class KvForm : int64_t { FLOAT, HALF, INT8, FP8 };  // as kernels/native_structs.py counts

// Codes; times their head's scale they are numbers.
struct Int8 {
    int8_t bits;
    static constexpr float MOST = 127.0f;
    static Int8 round(float x) { return Int8{(int8_t)bits_of_float(x + 12582912.0f)}; }
};

struct Fp8 {  // sign, 4 bits of exponent, 3 of mantissa; rounded to nearest, ties to even
    uint8_t bits;
    static constexpr float MOST = 448.0f;
    static Fp8 round(float x) {
        uint32_t all = bits_of_float(x), sign = all >> 24 & 0x80, rest = all & 0x7fffffff;
        if (rest < 0x3c800000)  // subnormal: adding 2^14 leaves the code in the low bits
            return Fp8{(uint8_t)(sign | (bits_of_float(float_of_bits(rest) + 16384.0f) - 0x46800000))};
        rest += 0x7ffff + (rest >> 20 & 1) - 0x3c000000;
        return Fp8{(uint8_t)(sign | rest >> 20)};
    }
};

// P numbers of a cache. Codes of Fp8 come 2^-8 as large: that is a half float with their bits.
inline vf load_kept(const float* p) { return load(p); }
inline vf load_kept(const uint16_t* p) { return load_half(p); }
inline vf load_kept(const Int8* p) { return load_int8((const int8_t*)p); }
inline vf load_kept(const Fp8* p) { return load_fp8((const uint8_t*)p); }

// The keys or the values of one layer, or of all.
struct Kept {
    uint8_t* numbers;  // [slot][head][head_dim]
    float* scales;     // [slot][head], of codes; else null
    KvForm form;

    Kept from(int64_t at, int head_dim) const {  // the number `at` on, the first of a head
        const int bytes = form == KvForm::FLOAT ? 4 : form == KvForm::HALF ? 2 : 1;
        return Kept{numbers + at * bytes, scales ? scales + at / head_dim : nullptr, form};
    }

    // Head `index`, counted over all slots. Saturated: an infinity times a weight of zero would
    // reach rows that must not see it.
    void store(int64_t index, const float* x, int size) const {
        const size_t at = (size_t)index * size;
        if (form == KvForm::FLOAT) {
            std::memcpy((float*)numbers + at, x, size * sizeof(float));
        } else if (form == KvForm::HALF) {
            for (int h = 0; h < size; h += P) store_half((uint16_t*)numbers + at + h, within(x + h, 65504.0f));
        } else if (form == KvForm::INT8) {
            scales[index] = store_codes((Int8*)numbers + at, x, size);
        } else {
            scales[index] = store_codes((Fp8*)numbers + at, x, size);
        }
    }

private:
    static vf within(const float* x, float most) { return min(max(load(x), set1(-most)), set1(most)); }

    template <class Code>
    static float store_codes(Code* codes, const float* x, int size) {
        vf top = zero();
        for (int h = 0; h < size; h += P) top = max(top, abs(within(x + h, 65504.0f)));
        float scale = max_lane(top) / Code::MOST, parts[P];
        if (!(scale > 0)) scale = 1;
        for (int h = 0; h < size; h += P) {
            hunch::store(parts, div(within(x + h, 65504.0f), set1(scale)));
            hunch::store(parts, within(parts, Code::MOST));
            for (int i = 0; i < P; i++) codes[h + i] = Code::round(parts[i]);
        }
        return scale;
    }
};

}  // namespace hunch
