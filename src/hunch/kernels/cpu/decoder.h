// A whole pass of a decoder in one call. The structs are filled by Python (kernels/native.py).
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "latent.h"
#include "products.h"
#include "recurrent.h"

namespace hunch {

// A weight, and a bias that may be null.
struct NormSpec {
    const float *weight, *bias;
};

// A layer's use of what a table says of its tokens: x += norm(project(act(gate(x)) * entry)).
struct InputsSpec {
    const Matrix *gate, *project;
    const float* norm;
};

struct LayerSpec {
    const Matrix *q, *k, *v, *out, *gate, *up, *down;  // gate may be null: the MLP has none
    NormSpec attn_norm, mlp_norm;          // null: the input goes in bare
    NormSpec attn_out_norm, mlp_out_norm;  // of what is added to the stream; null: none
    const float *q_norm, *k_norm;          // may be null
    const float *sinks, *rope;             // null: none; the decoder's
    const float *q_bias, *k_bias, *v_bias, *out_bias;  // may be null
    const float *gate_bias, *up_bias, *down_bias;      // may be null
    int64_t window;                                    // as AttnCall's
    int64_t k_row, v_row, up_row;  // where they begin, should q, k, v or gate, up be one matrix
    const ExpertsSpec* experts;    // in place of gate, up and down, which then are null
    const RecurrentSpec* recurrent;  // in place of q, k and v, which then are null, or beside them
    const Matrix* attn_gate;       // of what attention read, by a sigmoid; null: none
    const float* attn_gate_bias;   // may be null
    int64_t place;                 // among the layers of its kind: of the cache, or of the states
    const LatentSpec* latent;      // in place of q, k and v, which then are null
    const float* v_norm;           // may be null
    const InputsSpec* inputs;      // may be null
    float stream_scale;            // of x at the layer's end
    int32_t is_reader;             // q alone: it reads the keys and values that lie in its place
    int32_t is_other;              // its heads are of the decoder's other shape
    int32_t ffn_width;             // 0: the decoder's
    // Of experts that stand beside gate, up and down: what they read, what they answer, what the
    // MLP answers; null: there are none beside.
    const float *experts_norm, *experts_out_norm, *beside_norm;
    const float* temper;  // [position]: what queries are multiplied with; null: nothing
};

struct DecoderSpec {
    int32_t width, ffn_width, num_heads, num_kv_heads, head_dim, num_layers, max_len;
    float norm_eps;
    float scale;  // of the scores
    const Matrix *embedding, *head;
    NormSpec final_norm;      // null: none
    const float* rope;        // [position][head_dim]: cosines, then sines; null: none is turned
    const float* positions;   // [position][width], added to the embedding; null: none
    const LayerSpec* layers;
    // A drafter's network begins with a token and a state side by side (`joins`); with a projection
    // the layers take its result, without one the first layer's attention takes both as they are.
    const Matrix* project;                                // may be null
    const float *project_bias, *token_norm, *state_norm;  // may be null
    const float* logits_norm;                             // may be null; of a state before the head
    int32_t joins, is_state_first, is_first_masked, is_residual_normed;
    int32_t is_fine;  // activations of 14 bits instead of 8, before quantised weights
    int32_t is_layer_norm, is_post_norm;
    int32_t is_parallel;  // the MLP reads x of before attention; without mlp_norm attention's norm
    int32_t is_qk_norm_whole;  // q_norm and k_norm are over all heads at once
    int32_t activation;
    float embed_scale, residual_scale, logits_scale;
    float attn_cap, logits_cap;  // scores s become cap * tanh(s / cap); 0: as they are
    // Other processes hold the rest of the model: makes parts of a sum the whole sum, in place.
    void (*reduce)(float* parts, int64_t count);  // may be null
    int32_t other_kv_heads, other_head_dim;       // of layers whose heads differ; 0: there are none
    // Of each token the table has `table_width` numbers for every layer; null: there is no table.
    int32_t table_width;
    float table_scale;           // of the table's numbers
    const Matrix *input_table, *input_project;
    const float* input_norm;
    const float* head_bias;  // of logits; may be null
};

struct Pass {
    int64_t num_rows;
    const int64_t* ids;       // null where `embedded` is given
    const float* embedded;    // [row][width]
    const int64_t *pos, *slot, *seq, *base, *table, *tree;  // tree may be null
    int64_t table_stride, tree_stride, block_size;
    Kept k, v;                // of all layers
    int64_t layer_stride;     // numbers from one layer to the next
    int64_t num_features;
    const int64_t* feature_layers;
    float* const* features;   // [row][width] each
    float* hidden;            // [row][width], after the final norm
    const float* state;       // [row][width], where the network joins
    const RecurrentStates* states;  // null where no layer is recurrent
    Kept k_other, v_other;      // of layers whose heads are of the other shape
    int64_t other_stride;
};

class Decoder {
public:
    explicit Decoder(const DecoderSpec& spec);
    // The first row whose id or position is out of range, or -1 and the pass is done.
    int forward(Team& team, const Pass& pass);
    void logits(Team& team, const float* hidden, int num_rows, float* out);
    int num_out() const { return spec_.head->num_out; }
    int width() const { return spec_.width; }

private:
    struct Thread {
        std::vector<uint8_t> panel;
        std::vector<float> attn, out, other, row;
    };
    struct Step;  // what the phases of one layer share
    void reserve(int num_rows, int num_threads);
    void embed(Worker& worker, const Pass& pass);
    void join(Worker& worker, const Pass& pass);
    void make_inputs(Worker& worker, const Pass& pass);
    void beside_phase(Worker& worker, const LayerSpec& layer, int num_rows);
    void inputs_phase(Worker& worker, const LayerSpec& layer, int number, int num_rows);
    Heads heads_of(bool is_other) const;
    int head_dim_of(const LayerSpec& layer) const {
        return layer.is_other ? spec_.other_head_dim : spec_.head_dim;
    }
    const Input& attended_by(const LayerSpec& layer) const;
    const Input& gated_by(const LayerSpec& layer) const;
    void norm_phase(Worker& worker, NormSpec norm, const Input& input, int num_rows);
    void after_branch(Worker& worker, NormSpec branch, NormSpec after, int num_rows,
                      float stream_scale = 1);
    void norm(const float* x, NormSpec norm, int size, float* out) const;
    void qkv_phase(Worker& worker, const LayerSpec& layer, const Input& input, const Step& step);
    void residual_phase(Worker& worker, const Matrix& w, const float* bias, const Input& input,
                        int num_rows, bool is_branch = false);
    void add_parts(Worker& worker, const float* bias, int num_rows, bool is_branch);
    void attend_phase(Worker& worker, const LayerSpec& layer, const Step& step, const Input& input,
                      Attention& attention);
    void gate_phase(Worker& worker, const LayerSpec& layer, const Input& input, int num_rows);
    void mlp_phase(Worker& worker, const LayerSpec& layer, int num_rows);
    LatentStep latent_step(const LayerSpec& layer, const Step& step) const;
    void finish_logits(float* logits, int count) const;
    void finish_head(const LayerSpec& layer, const Step& step, int head, int row, float* x) const;
    void place_head(const LayerSpec& layer, const Step& step, int head, int row, float* x) const;
    void whole_norm_phase(Worker& worker, const LayerSpec& layer, const Step& step);

    const DecoderSpec spec_;
    const std::vector<LayerSpec> layers_;
    Forms forms_;
    int num_rows_ = 0;  // that the buffers hold
    std::vector<Thread> threads_;
    std::vector<float> x_, q_;
    std::vector<float> qk_;      // all heads of q and k before they are normed at once
    std::vector<float> branch_;  // what is normed before it is added to x_
    std::vector<float> answer_;  // of experts beside an MLP
    std::vector<float> gate_;    // of what attention reads
    std::vector<float> part_;    // this process's share of a sum over processes
    std::vector<float> layer_inputs_;    // [row][layer][table_width]
    std::unique_ptr<Experts> experts_;  // null where no layer has any
    std::unique_ptr<Recurrent> recurrent_;
    std::unique_ptr<Latent> latent_;    // null where layers have q, k and v
    // Normed stream, attention's result, gated MLP, token and state; then results of the other
    // shape of heads and of MLPs of another width, and what a layer takes of the table, and
    // what a router reads that is not what its experts read.
    HeldInput input_[8];
};

}  // namespace hunch
