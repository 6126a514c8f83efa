#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "activation.h"

namespace hunch {

namespace {

enum { NORMED, ATTENDED, GATED, JOINED, OTHER_ATTENDED, OTHER_GATED, ASKED, ROUTED };
constexpr float INPUT_SHARE = 0.70710678f;  // of what table and embedding say together

// (x - mean) / deviation * weight + bias; x and out may be the same.
void layer_norm(const float* x, NormSpec norm, int size, float eps, float* out) {
    vf sum = zero(), squares = zero();
    for (int i = 0; i < size; i += P) sum = add(sum, load(x + i));
    vf mean = set1(sum_lanes(sum) / (float)size);
    for (int i = 0; i < size; i += P) {
        vf a = sub(load(x + i), mean);
        squares = fma(squares, a, a);
    }
    vf factor = set1(1.0f / std::sqrt(sum_lanes(squares) / (float)size + eps));
    for (int i = 0; i < size; i += P) {
        vf y = mul(mul(sub(load(x + i), mean), factor), load(norm.weight + i));
        store(out + i, norm.bias ? add(y, load(norm.bias + i)) : y);
    }
}

}  // namespace

struct Decoder::Step {
    int num_rows;
    const int64_t *pos, *slot;
    Kept k, v;  // of this layer
};

Decoder::Decoder(const DecoderSpec& spec)
    : spec_(spec), layers_(spec.layers, spec.layers + spec.num_layers) {
    auto note = [&](const Matrix* w) { forms_.note(w); };
    std::vector<const ExpertsSpec*> experts;
    std::vector<const RecurrentSpec*> recurrent;
    std::vector<const Matrix*> outs;
    std::vector<const LatentSpec*> latents;
    for (const LayerSpec& layer : layers_) {
        if (const RecurrentSpec* some = layer.recurrent) {
            recurrent.push_back(some);
            outs.push_back(some->out ? some->out : layer.out);
            for (auto* w : {some->channels, some->beta, some->decay, some->gate}) note(w);
        }
        note(layer.attn_gate);
        if (layer.inputs)
            for (auto* w : {layer.inputs->gate, layer.inputs->project}) note(w);
        if (layer.ffn_width) input_[OTHER_GATED].num_in = layer.ffn_width;
        if (layer.beside_norm) input_[ROUTED].num_in = spec.width;
        if (layer.experts) experts.push_back(layer.experts);
        if (layer.latent) latents.push_back(layer.latent);
        for (auto* w : {layer.q, layer.k, layer.v, layer.out, layer.gate, layer.up, layer.down}) note(w);
        if (layer.experts)
            for (auto* w : {layer.experts->up, layer.experts->shared_up, layer.experts->router}) note(w);
        if (layer.latent)
            for (auto* w : {layer.latent->q_down, layer.latent->q, layer.latent->kv}) note(w);
    }
    if (!experts.empty()) experts_.reset(new Experts(experts, spec.width, spec.is_fine));
    if (!recurrent.empty())
        recurrent_.reset(new Recurrent(recurrent, outs, spec.width, spec.is_fine));
    if (!latents.empty()) latent_.reset(new Latent(latents, spec.num_heads, spec.width, spec.is_fine));
    note(spec.head);
    note(spec.project);
    note(spec.input_project);
    input_[OTHER_ATTENDED].num_in = spec.num_heads * spec.other_head_dim;
    input_[ASKED].num_in = spec.table_width;
    input_[NORMED].num_in = spec.width;
    input_[ATTENDED].num_in = spec.num_heads * (latents.empty() ? spec.head_dim : latents[0]->value);
    input_[GATED].num_in = spec.ffn_width;
    input_[JOINED].num_in = spec.joins ? 2 * spec.width : 0;
    for (Input& input : input_) input.is_fine = spec.is_fine;
}

void Decoder::reserve(int num_rows, int num_threads) {
    int widest = 0;
    for (Input& input : input_) widest = std::max(widest, input.num_in);
    if ((int)threads_.size() < num_threads) {
        threads_.resize(num_threads);
        size_t scratch = Attention::scratch_floats(heads_of(false));
        if (spec_.other_head_dim) scratch = std::max(scratch, Attention::scratch_floats(heads_of(true)));
        const int most = std::max({2 * CHANNELS, spec_.head_dim, spec_.other_head_dim, spec_.table_width});
        for (Thread& thread : threads_) {
            thread.panel.resize(Scratch::panel_bytes(widest));
            thread.attn.resize(scratch);
            thread.out.resize((size_t)ROW_CHUNK * most + P);
            thread.other.resize(thread.out.size());
            thread.row.resize(widest + P);
        }
    }
    if (experts_) experts_->reserve(num_rows, num_threads);
    if (recurrent_) recurrent_->reserve(num_rows, num_threads);
    if (latent_) latent_->reserve(num_rows, num_threads);
    if (num_rows <= num_rows_) return;
    num_rows_ = num_rows;
    x_.resize((size_t)num_rows * spec_.width);
    bool has_branches = false;
    for (const LayerSpec& layer : layers_)
        has_branches |= layer.attn_out_norm.weight || (layer.experts && spec_.residual_scale != 1);
    if (has_branches) branch_.resize(x_.size());
    if (spec_.reduce) part_.resize(x_.size());
    for (const LayerSpec& layer : layers_)
        if (layer.beside_norm) answer_.resize(x_.size());
    for (const LayerSpec& layer : layers_)
        if (layer.attn_gate) gate_.resize((size_t)num_rows * layer.attn_gate->num_out);
    q_.resize((size_t)num_rows * spec_.num_heads * std::max(spec_.head_dim, spec_.other_head_dim));
    if (spec_.is_qk_norm_whole)
        qk_.resize((size_t)num_rows * (spec_.num_heads + spec_.num_kv_heads) * spec_.head_dim);
    layer_inputs_.resize((size_t)num_rows * spec_.num_layers * spec_.table_width);
    for (HeldInput& input : input_) input.reserve(forms_, num_rows);
}

void Decoder::embed(Worker& worker, const Pass& pass) {
    worker.each((int)pass.num_rows, [&](int row) {
        float* x = &x_[(size_t)row * spec_.width];
        if (pass.embedded)
            std::memcpy(x, pass.embedded + (size_t)row * spec_.width, spec_.width * sizeof(float));
        else
            spec_.embedding->read_row((int)pass.ids[row], x);
        if (spec_.embed_scale != 1)
            for (int i = 0; i < spec_.width; i++) x[i] *= spec_.embed_scale;
        if (spec_.positions) add_bias(x, spec_.positions + pass.pos[row] * spec_.width, spec_.width);
    });
}

Heads Decoder::heads_of(bool is_other) const {
    return Heads{spec_.num_heads, is_other ? spec_.other_kv_heads : spec_.num_kv_heads,
                 is_other ? spec_.other_head_dim : spec_.head_dim};
}

const Input& Decoder::attended_by(const LayerSpec& layer) const {
    return input_[layer.is_other ? OTHER_ATTENDED : ATTENDED];
}

const Input& Decoder::gated_by(const LayerSpec& layer) const {
    return input_[layer.ffn_width ? OTHER_GATED : GATED];
}

// What the table and the embedding say of each token to each layer.
void Decoder::make_inputs(Worker& worker, const Pass& pass) {
    const int num_rows = (int)pass.num_rows, size = spec_.table_width, all = spec_.num_layers * size;
    norm_phase(worker, NormSpec{nullptr, nullptr}, input_[NORMED], num_rows);
    worker.each(num_rows, [&](int row) {
        spec_.input_table->read_row((int)pass.ids[row], &layer_inputs_[(size_t)row * all]);
    });
    const float scale = 1.0f / std::sqrt((float)spec_.width);
    each_item(worker, num_rows, all, size, [&](const Item& item) {
        Thread& mine = threads_[worker.id()];
        multiply(*spec_.input_project, item, input_[NORMED], mine.out.data(), size, mine.panel);
        for (int r = 0; r < item.count; r++) {
            float* seen = &mine.out[(size_t)r * size];
            float* entry = &layer_inputs_[(size_t)(item.row + r) * all + item.first];
            for (int i = 0; i < size; i++) seen[i] *= scale;
            rms_norm(seen, spec_.input_norm, size, spec_.norm_eps, seen);
            for (int i = 0; i < size; i++) entry[i] = (seen[i] + entry[i] * spec_.table_scale) * INPUT_SHARE;
        }
    });
}

// The MLP's answer, which is in branch_, and the experts', each normed, added up in branch_.
void Decoder::beside_phase(Worker& worker, const LayerSpec& layer, int num_rows) {
    const int width = spec_.width;
    worker.each(num_rows, [&](int row) {
        const size_t at = (size_t)row * width;
        float* normed = threads_[worker.id()].row.data();
        rms_norm(&branch_[at], layer.beside_norm, width, spec_.norm_eps, &branch_[at]);
        std::fill_n(&answer_[at], width, 0.0f);
        rms_norm(&x_[at], layer.experts_norm, width, spec_.norm_eps, normed);
        input_[NORMED].put_row(row, normed);
        rms_norm(&x_[at], nullptr, width, spec_.norm_eps, normed);
        input_[ROUTED].put_row(row, normed);
    });
    experts_->run(worker, *layer.experts, input_[NORMED], input_[ROUTED], answer_.data(), num_rows);
    worker.each(num_rows, [&](int row) {
        float *answer = &answer_[(size_t)row * width], *branch = &branch_[(size_t)row * width];
        rms_norm(answer, layer.experts_out_norm, width, spec_.norm_eps, answer);
        for (int i = 0; i < width; i++) branch[i] += answer[i];
    });
}

// act(gate(x)) * entry, which goes through a projection and a norm to the stream.
void Decoder::inputs_phase(Worker& worker, const LayerSpec& layer, int number, int num_rows) {
    const int size = spec_.table_width;
    norm_phase(worker, NormSpec{nullptr, nullptr}, input_[NORMED], num_rows);
    each_item(worker, num_rows, size, CHANNELS, [&](const Item& item) {
        Thread& mine = threads_[worker.id()];
        float *gate = mine.out.data(), *entry = mine.other.data();
        multiply(*layer.inputs->gate, item, input_[NORMED], gate, CHANNELS, mine.panel);
        std::fill(entry, entry + CHANNELS, 0.0f);
        for (int r = 0; r < item.count; r++, gate += CHANNELS) {
            const size_t at = ((size_t)(item.row + r) * spec_.num_layers + number) * size + item.first;
            std::memcpy(entry, &layer_inputs_[at], (item.last - item.first) * sizeof(float));
            activate((Activation)spec_.activation, gate, entry, CHANNELS);
            input_[ASKED].put(item.row + r, item.part, item.part + 1, gate);
        }
    });
    residual_phase(worker, *layer.inputs->project, nullptr, input_[ASKED], num_rows, true);
    after_branch(worker, NormSpec{layer.inputs->norm, nullptr}, NormSpec{nullptr, nullptr}, num_rows,
                 layer.stream_scale);
}

// Token and state, each normed, side by side; then the projection, or the state as the stream.
void Decoder::join(Worker& worker, const Pass& pass) {
    const int width = spec_.width;
    worker.each((int)pass.num_rows, [&](int row) {
        float *pair = threads_[worker.id()].row.data(), *x = &x_[(size_t)row * width];
        float *token = pair + (spec_.is_state_first ? width : 0);
        float *state = pair + (spec_.is_state_first ? 0 : width);
        const float* given = pass.state + (size_t)row * width;
        if (spec_.is_first_masked && pass.pos[row] == 0)
            std::fill(token, token + width, 0.0f);
        else
            spec_.embedding->read_row((int)pass.ids[row], token);
        if (spec_.token_norm) rms_norm(token, spec_.token_norm, width, spec_.norm_eps, token);
        std::memcpy(state, given, width * sizeof(float));
        if (spec_.state_norm) rms_norm(state, spec_.state_norm, width, spec_.norm_eps, state);
        input_[JOINED].put_row(row, pair);
        if (spec_.project)
            std::fill(x, x + width, 0.0f);
        else
            std::memcpy(x, spec_.is_residual_normed ? state : given, width * sizeof(float));
    });
    if (spec_.project)
        residual_phase(worker, *spec_.project, spec_.project_bias, input_[JOINED], (int)pass.num_rows);
}

void Decoder::norm(const float* x, NormSpec norm, int size, float* out) const {
    if (spec_.is_layer_norm)
        layer_norm(x, norm, size, spec_.norm_eps, out);
    else
        rms_norm(x, norm.weight, size, spec_.norm_eps, out);
}

void Decoder::norm_phase(Worker& worker, NormSpec norm, const Input& input, int num_rows) {
    worker.each(num_rows, [&](int row) {
        const float* x = &x_[(size_t)row * spec_.width];
        float* normed = threads_[worker.id()].row.data();
        if (norm.weight) this->norm(x, norm, spec_.width, normed);
        input.put_row(row, norm.weight ? normed : x);
    });
}

// What stands between a branch and the stream: its own norm and scale; or the stream's norm, where
// that comes after the sum.
void Decoder::after_branch(Worker& worker, NormSpec branch, NormSpec after, int num_rows,
                           float stream_scale) {
    const int width = spec_.width;
    worker.each(num_rows, [&](int row) {
        float *x = &x_[(size_t)row * width], *part = threads_[worker.id()].row.data();
        if (!branch_.empty()) {
            std::memcpy(part, &branch_[(size_t)row * width], width * sizeof(float));
            if (branch.weight) norm(part, branch, width, part);
            for (int i = 0; i < width; i++) x[i] += part[i] * spec_.residual_scale;
        }
        if (after.weight) norm(x, after, width, x);
        if (stream_scale != 1)
            for (int i = 0; i < width; i++) x[i] *= stream_scale;
    });
}

// A head of q, k or v as it leaves its product: bias, norm, rotation, then to its place.
void Decoder::finish_head(const LayerSpec& layer, const Step& step, int head, int row, float* x) const {
    const int size = head_dim_of(layer), num_q = spec_.num_heads;
    const int num_kv = layer.is_other ? spec_.other_kv_heads : spec_.num_kv_heads;
    const bool is_q = head < num_q, is_k = !is_q && head < num_q + num_kv;
    const int index = is_q ? head : is_k ? head - num_q : head - num_q - num_kv;
    const float* bias = is_q ? layer.q_bias : is_k ? layer.k_bias : layer.v_bias;
    if (bias) add_bias(x, bias + index * size, size);
    if (spec_.is_qk_norm_whole && (is_q || is_k)) {
        float* kept = const_cast<float*>(qk_.data()) + ((size_t)row * (num_q + num_kv) + head) * size;
        std::memcpy(kept, x, size * sizeof(float));
        return;
    }
    const float* norm = is_q ? layer.q_norm : is_k ? layer.k_norm : layer.v_norm;
    if (norm) rms_norm(x, norm, size, spec_.norm_eps, x);
    place_head(layer, step, head, row, x);
}

// The rest of finish_head for q and k, once all their heads are there to be normed.
void Decoder::whole_norm_phase(Worker& worker, const LayerSpec& layer, const Step& step) {
    const int size = head_dim_of(layer), num_q = spec_.num_heads, num_kv = spec_.num_kv_heads;
    worker.each(step.num_rows, [&](int row) {
        float *q = &qk_[(size_t)row * (num_q + num_kv) * size], *k = q + num_q * size;
        rms_norm(q, layer.q_norm, num_q * size, spec_.norm_eps, q);
        rms_norm(k, layer.k_norm, num_kv * size, spec_.norm_eps, k);
        for (int head = 0; head < num_q + num_kv; head++)
            place_head(layer, step, head, row, q + head * size);
    });
}

// A head as it is after its norm: turned, then to its place.
void Decoder::place_head(const LayerSpec& layer, const Step& step, int head, int row, float* x) const {
    const int size = head_dim_of(layer), num_q = spec_.num_heads;
    const int num_kv = layer.is_other ? spec_.other_kv_heads : spec_.num_kv_heads;
    const bool is_q = head < num_q, is_k = !is_q && head < num_q + num_kv;
    const int index = is_q ? head : is_k ? head - num_q : head - num_q - num_kv;
    if (is_q || is_k) {
        const float* rope = layer.rope ? layer.rope : spec_.rope;
        if (rope) rotate(x, rope + (size_t)step.pos[row] * size, size);
    }
    if (is_q) {
        float scale = spec_.scale * LOG2_E;  // attention takes powers of two
        if (layer.temper) scale *= layer.temper[step.pos[row]];
        float* q = const_cast<float*>(q_.data()) + ((size_t)row * num_q + index) * size;
        for (int h = 0; h < size; h += P) store(q + h, mul(load(x + h), set1(scale)));
        return;
    }
    if (step.slot[row] < 0) return;
    (is_k ? step.k : step.v).store(step.slot[row] * num_kv + index, x, size);
}

LatentStep Decoder::latent_step(const LayerSpec& layer, const Step& step) const {
    return LatentStep{step.num_rows, step.pos, step.slot, step.k, layer.rope ? layer.rope : spec_.rope,
                      spec_.scale * LOG2_E};
}

void Decoder::qkv_phase(Worker& worker, const LayerSpec& layer, const Input& input,
                        const Step& step) {
    const int num_q = spec_.num_heads, size = head_dim_of(layer);
    const int num_kv = layer.is_other ? spec_.other_kv_heads : spec_.num_kv_heads;
    const int num_heads = layer.is_reader ? num_q : num_q + 2 * num_kv;
    each_item(worker, step.num_rows, num_heads * size, size, [&](Item item) {
        const int head = item.part;
        const Matrix* w = head < num_q ? layer.q : head < num_q + num_kv ? layer.k : layer.v;
        item.first = (head < num_q ? head : (head - num_q) % num_kv) * size;
        if (head >= num_q) item.first += (int)(head < num_q + num_kv ? layer.k_row : layer.v_row);
        item.last = item.first + size;
        Thread& mine = threads_[worker.id()];
        multiply(*w, item, input, mine.out.data(), size, mine.panel);
        for (int r = 0; r < item.count; r++)
            finish_head(layer, step, head, item.row + r, &mine.out[(size_t)r * size]);
    });
}

void Decoder::gate_phase(Worker& worker, const LayerSpec& layer, const Input& input, int num_rows) {
    const int width = layer.attn_gate->num_out;
    each_item(worker, num_rows, width, CHANNELS, [&](const Item& item) {
        Thread& mine = threads_[worker.id()];
        multiply(*layer.attn_gate, item, input, mine.out.data(), CHANNELS, mine.panel);
        put_item(item, mine.out.data(), CHANNELS, layer.attn_gate_bias, gate_.data(), width);
    });
}

// Queries, keys and values, what the rows read with them, and how much of it they take.
void Decoder::attend_phase(Worker& worker, const LayerSpec& layer, const Step& step,
                           const Input& input, Attention& attention) {
    Thread& mine = threads_[worker.id()];
    if (layer.latent)
        latent_->project(worker, *layer.latent, input, latent_step(layer, step), q_.data());
    else
        qkv_phase(worker, layer, input, step);
    if (spec_.is_qk_norm_whole) whole_norm_phase(worker, layer, step);
    if (layer.attn_gate) gate_phase(worker, layer, input, step.num_rows);
    const Kept& values = layer.latent ? step.k : step.v;
    AttnCall call{q_.data(), step.k, values, layer.window, spec_.attn_cap * LOG2_E, layer.sinks};
    attention.run(worker, call, mine.attn.data());
    if (layer.latent)
        return latent_->expand(worker, *layer.latent, attention, call, step.num_rows, input_[ATTENDED]);
    worker.each(step.num_rows, [&](int row) {
        float* read = mine.row.data();
        attention.read_row(row, call, read);
        const int width = layer.attn_gate ? layer.attn_gate->num_out : 0;
        for (int i = 0; i < width; i += P) {
            vf wave = exp(min(sub(zero(), load(&gate_[(size_t)row * width + i])), set1(87.0f)));
            store(read + i, div(load(read + i), add(set1(1.0f), wave)));
        }
        attended_by(layer).put_row(row, read);
    });
}

// x += w * input * scale; a branch that is normed first goes to its own place.
void Decoder::residual_phase(Worker& worker, const Matrix& w, const float* bias, const Input& input,
                             int num_rows, bool is_branch) {
    each_item(worker, num_rows, spec_.width, CHANNELS, [&](const Item& item) {
        Thread& mine = threads_[worker.id()];
        float* out = mine.out.data();
        multiply(w, item, input, out, CHANNELS, mine.panel);
        if (spec_.reduce) return put_item(item, out, CHANNELS, nullptr, part_.data(), spec_.width);
        if (is_branch) return put_item(item, out, CHANNELS, bias, branch_.data(), spec_.width);
        for (int r = 0; r < item.count; r++, out += CHANNELS) {
            float* x = &x_[(size_t)(item.row + r) * spec_.width];
            if (bias) add_bias(out, bias + item.first, item.last - item.first);
            for (int i = item.first; i < item.last; i++) x[i] += out[i - item.first] * spec_.residual_scale;
        }
    });
    if (spec_.reduce) add_parts(worker, bias, num_rows, is_branch);
}

// What the products of all processes add up to goes to the stream; the bias is added once.
void Decoder::add_parts(Worker& worker, const float* bias, int num_rows, bool is_branch) {
    if (worker.id() == 0) spec_.reduce(part_.data(), (int64_t)num_rows * spec_.width);
    worker.each(0, [](int) {});  // until it is there
    worker.each(num_rows, [&](int row) {
        const size_t at = (size_t)row * spec_.width;
        float* sum = &part_[at];
        add_bias(sum, bias, spec_.width);
        if (is_branch)
            std::memcpy(&branch_[at], sum, spec_.width * sizeof(float));
        else
            for (int i = 0; i < spec_.width; i++) x_[at + i] += sum[i] * spec_.residual_scale;
    });
}

void Decoder::mlp_phase(Worker& worker, const LayerSpec& layer, int num_rows) {
    const int width = layer.ffn_width ? layer.ffn_width : spec_.ffn_width;
    each_item(worker, num_rows, width, CHANNELS, [&](const Item& item) {
        Thread& mine = threads_[worker.id()];
        float *gate = mine.out.data(), *up = mine.other.data();
        const int shift = (int)layer.up_row, first = item.first, num = item.last - first;
        if (layer.gate)
            multiply(*layer.gate, item, input_[NORMED], gate, CHANNELS, mine.panel);
        else
            std::swap(gate, up);  // what goes through the activation is up
        multiply(*layer.up, shift + first, shift + item.last, input_[NORMED], item.row, item.count,
                 layer.gate ? up : gate, CHANNELS, Scratch{mine.panel.data()});
        for (int r = 0; r < item.count; r++, gate += CHANNELS, up += CHANNELS) {
            if (layer.gate_bias) add_bias(gate, layer.gate_bias + first, num);
            if (layer.up_bias) add_bias(layer.gate ? up : gate, layer.up_bias + first, num);
            activate((Activation)spec_.activation, gate, layer.gate ? up : nullptr, CHANNELS);
            gated_by(layer).put(item.row + r, item.part, item.part + 1, gate);
        }
    });
}

int Decoder::forward(Team& team, const Pass& pass) {
    const int num_rows = (int)pass.num_rows;
    for (int row = 0; row < num_rows; row++) {
        bool is_token = !pass.ids || (pass.ids[row] >= 0 && pass.ids[row] < spec_.embedding->num_out);
        if (!is_token || pass.pos[row] < 0 || pass.pos[row] >= spec_.max_len) return row;
    }
    reserve(num_rows, team.size());
    Places places{num_rows,  pass.pos,  pass.slot,         pass.seq,         pass.base,
                  pass.table, pass.tree, pass.table_stride, pass.tree_stride, pass.block_size};
    Attention attention(heads_of(false), places, team.size());
    std::unique_ptr<Attention> other;
    if (spec_.other_head_dim) other.reset(new Attention(heads_of(true), places, team.size()));
    auto step_of = [&](const LayerSpec& layer) {
        const int64_t at = layer.place * (layer.is_other ? pass.other_stride : pass.layer_stride);
        const Kept &k = layer.is_other ? pass.k_other : pass.k, &v = layer.is_other ? pass.v_other : pass.v;
        const int size = head_dim_of(layer);
        return Step{num_rows, pass.pos, pass.slot, k.from(at, size), v.from(at, size)};
    };

    auto keep_features = [&](int layer) {
        for (int i = 0; i < pass.num_features; i++)
            if (pass.feature_layers[i] == layer)
                std::memcpy(pass.features[i], x_.data(), (size_t)num_rows * spec_.width * sizeof(float));
    };
    team.run([&](Worker& worker) {
        if (spec_.joins)
            join(worker, pass);
        else
            embed(worker, pass);
        if (spec_.input_table) make_inputs(worker, pass);
        for (int l = 0; l < spec_.num_layers; l++) {
            const LayerSpec& layer = layers_[l];
            if (worker.id() == 0) keep_features(l);
            const Step step = step_of(layer);
            const bool is_joined = l == 0 && spec_.joins && !spec_.project;
            const NormSpec none{nullptr, nullptr};
            const bool is_post = spec_.is_post_norm;
            const bool attends = layer.q || layer.latent, has_branch = layer.attn_out_norm.weight;
            if (!is_joined && layer.out)
                norm_phase(worker, is_post ? none : layer.attn_norm, input_[NORMED], num_rows);
            if (layer.recurrent)
                recurrent_->run(worker, *layer.recurrent, *pass.states, input_[NORMED], pass.pos,
                                pass.slot, num_rows);
            if (attends)
                attend_phase(worker, layer, step, input_[is_joined ? JOINED : NORMED],
                             layer.is_other ? *other : attention);
            if (spec_.is_parallel && layer.mlp_norm.weight)
                norm_phase(worker, layer.mlp_norm, input_[NORMED], num_rows);
            if (layer.out)
                residual_phase(worker, *layer.out, layer.out_bias,
                               attends ? attended_by(layer) : recurrent_->output(), num_rows, has_branch);
            if (layer.recurrent && layer.recurrent->out)
                residual_phase(worker, *layer.recurrent->out, nullptr, recurrent_->output(), num_rows);
            if (has_branch || is_post)
                after_branch(worker, layer.attn_out_norm, is_post ? layer.attn_norm : none, num_rows);
            if (!layer.experts && !layer.down) continue;
            if (!spec_.is_parallel)
                norm_phase(worker, is_post ? none : layer.mlp_norm, input_[NORMED], num_rows);
            const bool is_scaled = layer.experts && spec_.residual_scale != 1;
            if (layer.experts && !layer.beside_norm) {
                float* into = has_branch || is_scaled ? branch_.data() : x_.data();
                if (into != x_.data()) worker.each(num_rows, [&](int row) {
                    std::fill_n(into + (size_t)row * spec_.width, spec_.width, 0.0f);
                });
                experts_->run(worker, *layer.experts, input_[NORMED], input_[NORMED], into, num_rows);
            } else {
                mlp_phase(worker, layer, num_rows);
                residual_phase(worker, *layer.down, layer.down_bias, gated_by(layer), num_rows,
                               has_branch);
                if (layer.beside_norm) beside_phase(worker, layer, num_rows);
            }
            if (has_branch || is_scaled || is_post)
                after_branch(worker, layer.mlp_out_norm, is_post ? layer.mlp_norm : none, num_rows,
                             layer.inputs ? 1 : layer.stream_scale);
            if (layer.inputs) inputs_phase(worker, layer, l, num_rows);
        }
        if (worker.id() == 0) keep_features(spec_.num_layers);
        worker.each(num_rows, [&](int row) {
            const float* x = &x_[(size_t)row * spec_.width];
            float* out = pass.hidden + (size_t)row * spec_.width;
            if (spec_.final_norm.weight)
                norm(x, spec_.final_norm, spec_.width, out);
            else
                std::memcpy(out, x, spec_.width * sizeof(float));
        });
    });
    return -1;
}

void Decoder::logits(Team& team, const float* hidden, int num_rows, float* out) {
    reserve(num_rows, team.size());
    const int num_out = spec_.head->num_out, size = 2 * CHANNELS;
    team.run([&](Worker& worker) {
        worker.each(num_rows, [&](int row) {
            const float* x = hidden + (size_t)row * spec_.width;
            float* normed = threads_[worker.id()].row.data();
            const float* weight = spec_.logits_norm;
            if (weight) rms_norm(x, weight, spec_.width, spec_.norm_eps, normed);
            input_[NORMED].put_row(row, weight ? normed : x);
        });
        each_item(worker, num_rows, num_out, size, [&](const Item& item) {
            Thread& mine = threads_[worker.id()];
            multiply(*spec_.head, item, input_[NORMED], mine.out.data(), size, mine.panel);
            for (int r = 0; r < item.count; r++) {
                const float* bias = spec_.head_bias ? spec_.head_bias + item.first : nullptr;
                add_bias(&mine.out[r * size], bias, item.last - item.first);
                finish_logits(&mine.out[r * size], size);
            }
            put_item(item, mine.out.data(), size, nullptr, out, num_out);
        });
    });
}

void Decoder::finish_logits(float* logits, int count) const {
    if (spec_.logits_scale != 1)
        for (int i = 0; i < count; i++) logits[i] *= spec_.logits_scale;
    if (spec_.logits_cap == 0) return;
    const vf cap = set1(spec_.logits_cap);
    for (int i = 0; i < count; i += P)
        store(logits + i, mul(cap, tanh(div(load(logits + i), cap))));
}

}  // namespace hunch
