// What stands between the products of an MLP; the numbers are those of native_structs.py.
#pragma once
#include "vecmath.h"

namespace hunch {

enum class Activation : int { SILU, RELU, GELU, GELU_TANH, CLIPPED, RELU2 };

inline vf relu(vf x) { return max(x, zero()); }

// x * (1 + erf(x / sqrt 2)) / 2 to 3e-7, absolute: erf by Abramowitz and Stegun, 7.1.26.
inline vf gelu(vf x) {
    vf size = abs(x), t = div(set1(1.0f), fma(set1(1.0f), size, set1(0.3275911f * 0.70710678f)));
    vf y = fma(set1(-1.453152027f), t, set1(1.061405429f));
    y = fma(set1(1.421413741f), y, t);
    y = fma(set1(-0.284496736f), y, t);
    y = mul(fma(set1(0.254829592f), y, t), t);
    vf rest = mul(y, exp(mul(set1(-0.5f), mul(x, x))));  // 1 - erf(|x| / sqrt 2)
    return sub(relu(x), mul(mul(set1(0.5f), size), rest));
}

// x * (1 + tanh(u)) / 2 is x / (1 + e^-2u).
inline vf gelu_tanh(vf x) {
    vf u = mul(x, fma(set1(-1.59576912f), mul(x, x), set1(-0.07135481f)));
    return div(x, add(set1(1.0f), exp(min(u, set1(87.0f)))));
}

// gpt-oss's: both within limits, the gate by a sigmoid of its own, up plus one.
inline vf clipped(vf gate, vf up) {
    gate = min(gate, set1(7.0f));
    up = max(min(up, set1(7.0f)), set1(-7.0f));
    vf wave = exp(min(mul(gate, set1(-1.702f)), set1(87.0f)));
    return mul(add(up, set1(1.0f)), div(gate, add(set1(1.0f), wave)));
}

// gate = act(gate) * up, or act(gate) where up is null; `count` is a whole number of vectors.
inline void activate(Activation activation, float* gate, const float* up, int count) {
    auto each = [&](auto&& act) {
        for (int i = 0; i < count; i += P) {
            vf x = act(load(gate + i));
            store(gate + i, up ? mul(x, load(up + i)) : x);
        }
    };
    switch (activation) {
        case Activation::SILU: return each([](vf x) { return silu(x); });
        case Activation::RELU: return each([](vf x) { return relu(x); });
        case Activation::RELU2: return each([](vf x) { return mul(relu(x), relu(x)); });
        case Activation::GELU: return each([](vf x) { return gelu(x); });
        case Activation::GELU_TANH: return each([](vf x) { return gelu_tanh(x); });
        case Activation::CLIPPED:
            for (int i = 0; i < count; i += P) store(gate + i, clipped(load(gate + i), load(up + i)));
    }
}

}  // namespace hunch
