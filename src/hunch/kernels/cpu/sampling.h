// Choosing tokens: argmax, or the filters and keyed noise of kernels/noise.py and
// sampling/filters.py, whose definitions these follow.
#pragma once
#include <cstdint>

#include "pool.h"

namespace hunch {

struct ChoiceSpec {
    float temperature;  // 0: argmax
    int64_t top_k;      // 0: all
    double top_p;       // 1: all
    float log_min_p;    // -inf: all
    int64_t seed, sample_index, position, stream;
};

int64_t choose(const float* logits, int size, const ChoiceSpec& spec, float* scratch, int* ids);

}  // namespace hunch
