// A mixture of experts in place of a layer's MLP. The struct is filled by Python
// (kernels/native_structs.py).
//
// Rows that ask the same expert stand side by side, so that its weights are read once. A row's
// product does not depend on the rows beside it, and its experts are added in ascending order.
#pragma once
#include <cstdint>
#include <vector>

#include "activation.h"
#include "products.h"

namespace hunch {

enum class Scores : int { SOFTMAX = 0, CHOSEN = 1, SIGMOID = 2, CHOSEN_SIGMOID = 3, NEAR = 4 };

struct ExpertsSpec {
    const Matrix *router, *up, *down;       // up: [expert][gate, up][width]; down: [expert][D]
    const float *router_bias, *choice_bias;  // may be null
    const float *up_bias, *down_bias;        // as up and down have their channels; may be null
    const Matrix *shared_up, *shared_down, *shared_gate;  // null: none; shared_up: gate, then up
    int32_t num_experts, num_chosen, width, shared_width;
    int32_t scores, is_normed, num_groups, num_groups_kept, num_best, activation;
    float scale;
    const float* factor;  // of each expert's weights; may be null
    int32_t is_of_input;  // weights are those of what experts read, not of what they answer
    float spread;         // of NEAR: how far below the chosen one, as a part of the larger of the two
};

class Experts {
public:
    // `specs` are those of the layers that have experts; all are of one size.
    Experts(const std::vector<const ExpertsSpec*>& specs, int width, bool is_fine);
    void reserve(int num_rows, int num_threads);
    // x += the experts' answers to `input`, whose rows are kept as floats too; the router reads
    // `routed`.
    void run(Worker& worker, const ExpertsSpec& spec, const Input& input, const Input& routed, float* x,
             int num_rows);

private:
    struct Thread {
        std::vector<uint8_t> panel;
        std::vector<float> out, other, row;
    };
    struct Piece {  // rows of one expert that one work item computes
        int expert, first, count;
    };
    void route(const ExpertsSpec& spec, const float* logits, int row);
    void plan(int num_rows, int num_experts);
    void up_phase(Worker& worker, const ExpertsSpec& spec);
    void down_phase(Worker& worker, const ExpertsSpec& spec, float* x);
    void shared_phase(Worker& worker, const ExpertsSpec& spec, const Input& input, float* x,
                      int num_rows);
    // An item's gated product, put into `to`; gate and up begin at these channels.
    void gated(Thread& mine, Activation act, const Matrix& w, const float* bias, int gate, int up,
               const Item& item, const Input& from, const Input& to);

    const int width_;
    int num_chosen_ = 0, num_experts_ = 0;
    Forms forms_;
    int num_rows_ = 0;
    std::vector<Thread> threads_;
    std::vector<float> logits_, weights_, shares_;  // [row][expert], [row][chosen], [row]
    std::vector<int> chosen_;                       // [row][chosen], ascending
    std::vector<int> place_;                        // [row][chosen]: row of the gathered input
    std::vector<int> row_of_, slot_of_;             // of a gathered row; -1: padding
    std::vector<Piece> pieces_;
    HeldInput gathered_, gated_, shared_;
};

}  // namespace hunch
