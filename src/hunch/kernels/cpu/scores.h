// Log-probabilities of a row of logits, as sampling/logprobs.py defines them.
#pragma once
#include <cstdint>

namespace hunch {

// Ids of the token and of the `num_best` best ones (at most `size`), best first, ties by id; their
// log-probabilities; returns the token's rank, from 1. ids and values hold 1 + num_best.
int64_t score_row(const float* logits, int64_t size, int64_t token, int64_t num_best, int64_t* ids,
                  float* values);

}  // namespace hunch
