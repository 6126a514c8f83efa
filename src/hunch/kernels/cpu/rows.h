// Products with a weight as torch holds it: row by row, float32, bfloat16 or float16.
//
// Each number of the result is summed over the inputs in one order, by two vectors of sums, whatever
// rows and channels are computed beside it.
#pragma once
#include <cstdint>

#include "pool.h"

namespace hunch {

enum class Stored : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// out [num_rows][num_out] = x [num_rows][num_in] times the transpose of w [num_out][num_in].
void multiply_rows(Team& team, const float* x, int num_rows, int num_in, const void* w,
                   Stored stored, int num_out, float* out);

}  // namespace hunch
