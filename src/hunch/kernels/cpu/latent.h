// Latent attention: keys and values of all heads are one vector per token, [latent, turned key].
// The struct is filled by Python (kernels/native_structs.py).
//
// The matrices that would expand the latent are multiplied into the queries before attention and
// into what was read after it. A head's rows stand side by side for both products.
#pragma once
#include <cstdint>
#include <vector>

#include "attention.h"
#include "products.h"

namespace hunch {

struct LatentSpec {
    const Matrix* q_down;  // null: `q` reads the stream itself
    const Matrix *q, *kv;  // [head][flat, turned]; [latent, turned]
    const Matrix* k_up;    // [head][latent], of a head's flat part
    const Matrix* v_up;    // [head][value], of the latent
    const float *q_norm, *kv_norm, *q_bias, *kv_bias;  // of q_down and kv; biases may be null
    int32_t flat, turned, latent, value;
    float norm_eps;
};

// Where the rows of a layer write what they keep.
struct LatentStep {
    int num_rows;
    const int64_t *pos, *slot;
    Kept cache;
    const float* rope;  // [position][turned]
    float scale;        // of queries
};

class Latent {
public:
    // `specs` are those of all layers; all are of one size.
    Latent(const std::vector<const LatentSpec*>& specs, int num_heads, int width, bool is_fine);
    void reserve(int num_rows, int num_threads);
    // Queries as attention takes them, [row][head][latent + turned]; latents go to the cache.
    void project(Worker& worker, const LatentSpec& spec, const Input& input, const LatentStep& step,
                 float* q);
    // Each head's values of what was read, put into `to`.
    void expand(Worker& worker, const LatentSpec& spec, const Attention& attention,
                const AttnCall& call, int num_rows, const Input& to);

private:
    struct Thread {
        std::vector<uint8_t> panel;
        std::vector<float> out, row;
    };
    void down_phase(Worker& worker, const LatentSpec& spec, const Input& input, int num_rows);
    void keep_phase(Worker& worker, const LatentSpec& spec, const LatentStep& step);
    int padded() const { return (num_rows_ + ROW_CHUNK - 1) / ROW_CHUNK * ROW_CHUNK; }

    const int num_heads_, width_;
    int flat_ = 0, turned_ = 0, latent_ = 0, value_ = 0, q_latent_ = 0;
    Forms forms_;
    int num_rows_ = 0;  // that the buffers hold
    std::vector<Thread> threads_;
    std::vector<float> down_, kept_, values_;  // [row][q_latent], [row][latent + turned], [row][head][value]
    HeldInput narrow_;          // normed, before q
    HeldInput flat_in_, read_;  // [head][row]: before k_up, before v_up
};

}  // namespace hunch
