// Functions of vectors, built from exactly rounded operations: the same bits in every lane.
#pragma once
#include "simd.h"

namespace hunch {

// e^x to 2.4e-7, relative, for x up to 88; x below -87 counts as -87. A minimax polynomial over half
// a binade; the factor ln 2 is close enough to its float that one exact product reduces x.
inline vf exp(vf x) {
    x = max(x, set1(-87.0f));
    vf shifted = fma(set1(12582912.0f), x, set1(1.44269504f));  // the whole part, in the low bits
    vf r = fma(x, sub(shifted, set1(12582912.0f)), set1(-0.693147181f));
    vf y = fma(set1(0.04189016f), r, set1(0.00831252f));
    y = fma(set1(0.16667115f), y, r);
    y = fma(set1(0.49999231f), y, r);
    y = fma(set1(1.0f), y, r);
    y = fma(set1(1.0f), y, r);
    return mul(y, pow2(shifted));
}

// 2^x to 2e-7, relative, for x up to 127; x below -126 counts as -126.
inline vf exp2(vf x) {
    x = max(x, set1(-126.0f));
    vf shifted = add(x, set1(12582912.0f));
    vf r = sub(x, sub(shifted, set1(12582912.0f)));
    vf y = fma(set1(0.00967151f), r, set1(0.00132647f));
    y = fma(set1(0.05550734f), y, r);
    y = fma(set1(0.24022242f), y, r);
    y = fma(set1(0.69314698f), y, r);
    y = fma(set1(1.0f), y, r);
    return mul(y, pow2(shifted));
}

inline vf silu(vf x) { return div(x, add(set1(1.0f), exp(min(sub(zero(), x), set1(87.0f))))); }

// To 1.2e-7, absolute.
inline vf tanh(vf x) {
    x = max(min(x, set1(20.0f)), set1(-20.0f));
    return sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
}

inline float sum_lanes(vf x) {
    float lanes[P], total = 0;
    store(lanes, x);
    for (int i = 0; i < P; i++) total += lanes[i];
    return total;
}

}  // namespace hunch
