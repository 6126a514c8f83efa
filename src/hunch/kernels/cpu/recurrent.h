// Layers that keep a state per row in attention's place: gated delta nets, Mamba 2, short
// convolutions. The structs are filled by Python (kernels/native_structs.py), the specification is
// kernels/recurrence.py with delta.py, ssm.py and short_conv.py.
//
// A work item folds one sequence's tokens into the state of one head, token by token, so a row's
// bits follow from its tokens alone. Drafted nodes go on in a copy that is dropped.
#pragma once
#include <cstdint>
#include <vector>

#include "products.h"

namespace hunch {

enum class Rule : int32_t { DELTA, SSM, CONV };

// What the matrices give is [channel], [head], [head], [v]. Channels are queries, keys and values
// of a delta net; values, keys that write and keys that read of an ssm; two factors of every value
// of a convolution. A delta net alone has beta, a convolution no decay.
struct RecurrentSpec {
    const Matrix *channels, *beta, *decay, *gate;
    const Matrix* out;         // where the layer attends too; else the layer's own
    const float *conv;         // [tap][channel], of a convolution [tap][v]; the token's own is the last
    const float *conv_bias;    // may be null, as skip and norm
    const float *rate, *bias;  // [head]
    const float *skip;         // [head]: how much of its own value a token reads
    const float *norm;         // [v_dim] of a delta net, else [v]
    int32_t num_k_heads, num_v_heads, k_dim, v_dim, num_taps;
    int32_t is_tiled;  // value head n has key head n % num_k_heads; else neighbours share one
    int32_t is_norm_first;  // of an ssm: before the gate
    Rule rule;
    int32_t place;  // of its states
    float eps;

    int key_width() const { return num_k_heads * k_dim; }
    int value_width() const { return num_v_heads * v_dim; }
    int num_channels() const { return channels->num_out; }
    int num_inputs() const {
        return num_channels() + (beta ? num_v_heads : 0) + (decay ? num_v_heads : 0);
    }
};

// What the layers remember of rows; `inputs` of position p stands in place p % num_places.
struct RecurrentStates {
    float* state;     // [layer][row][v head][k_dim][v_dim]
    float* inputs;    // [layer][row][place][num_inputs]
    int64_t* folded;  // [layer][row]: tokens that the state holds
    int64_t num_rows, num_places;
    int64_t num_spans;
    const int64_t* spans;  // [span][4]: first packed token, last, known ones of them, row
};

class Recurrent {
public:
    // `specs` are those of the recurrent layers; all are of one size.
    Recurrent(const std::vector<const RecurrentSpec*>& specs, const std::vector<const Matrix*>& outs,
              int width, bool is_fine);
    void reserve(int num_rows, int num_threads);
    // What the layer's last product takes is then in `output`.
    void run(Worker& worker, const RecurrentSpec& spec, const RecurrentStates& states, const Input& input,
             const int64_t* pos, const int64_t* slot, int num_rows);
    const Input& output() const { return output_; }

private:
    struct Thread {
        std::vector<uint8_t> panel;
        std::vector<float> out, row, state;
    };
    void project(Worker& worker, const RecurrentSpec& spec, const Input& input, int num_rows);
    void fold(Thread& mine, const RecurrentSpec& spec, const RecurrentStates& states, const int64_t* span,
              int head, const int64_t* pos);
    void keep(const RecurrentSpec& spec, const RecurrentStates& states, const int64_t* span,
              const int64_t* pos) const;
    void finish_row(Thread& mine, const RecurrentSpec& spec, int row, bool is_live);

    const int width_;
    int num_inputs_ = 0, value_width_ = 0, state_size_ = 0, row_size_ = 0;
    Forms forms_;
    int num_rows_ = 0;
    std::vector<Thread> threads_;
    std::vector<float> inputs_, gates_, read_;  // [row][num_inputs], [row][v], [row][v]
    HeldInput output_;
};

}  // namespace hunch
