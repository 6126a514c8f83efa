// What is done to one row, or one head of it, between products.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vecmath.h"

namespace hunch {

// x / rms(x) * weight, which may be null; x and out may be the same.
inline void rms_norm(const float* x, const float* weight, int size, float eps, float* out) {
    vf sum = zero();
    for (int i = 0; i < size; i += P) {
        vf a = load(x + i);
        sum = fma(sum, a, a);
    }
    vf factor = set1(1.0f / std::sqrt(sum_lanes(sum) / (float)size + eps));
    for (int i = 0; i < size; i += P) {
        vf y = mul(load(x + i), factor);
        store(out + i, weight ? mul(y, load(weight + i)) : y);
    }
}

inline void add_bias(float* x, const float* bias, int size) {
    for (int i = 0; bias && i < size; i++) x[i] += bias[i];
}

// Pairs (h, h + size / 2) turn by the position's angles.
inline void rotate(float* x, const float* angles, int size) {
    int half = size / 2;
    const float *cosines = angles, *sines = angles + half;
    for (int h = 0; h < half; h++) {
        float a = x[h], b = x[h + half];
        x[h] = a * cosines[h] - b * sines[h];
        x[h + half] = b * cosines[h] + a * sines[h];
    }
}

}  // namespace hunch
