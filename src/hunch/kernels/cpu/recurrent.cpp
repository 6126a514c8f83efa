#include "recurrent.h"

#include <cmath>

namespace hunch {

namespace {

constexpr float NORM_EPS = 1e-6f;  // of queries and keys

int num_parts(int num_channels) { return (num_channels + CHANNELS - 1) / CHANNELS; }

// Parts of `of` in order, then of the next matrix.
struct Part {
    const Matrix* w;
    int first;
    float* to;
    int stride;
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// silu of the convolution, for some channels; taps before the text's first token are null.
void convolve(const float* const* taps, const RecurrentSpec& spec, int first, int count, float* out) {
    const size_t stride = spec.num_channels();
    for (int i = 0; i < count; i += P) {
        vf sum = spec.conv_bias ? load(spec.conv_bias + first + i) : zero();
        for (int tap = 0; tap < spec.num_taps; tap++)
            if (taps[tap])
                sum = fma(sum, load(taps[tap] + first + i), load(spec.conv + tap * stride + first + i));
        store(out + i, silu(sum));
    }
}

// The convolution of a product of two factors, which stand one after the other.
void convolve_product(const float* const* taps, const RecurrentSpec& spec, float* out) {
    const int width = spec.value_width();
    for (int i = 0; i < width; i += P) {
        vf sum = zero();
        for (int tap = 0; tap < spec.num_taps; tap++)
            if (taps[tap])
                sum = fma(sum, mul(load(taps[tap] + i), load(taps[tap] + width + i)),
                          load(spec.conv + (size_t)tap * width + i));
        store(out + i, sum);
    }
}

void normalise(float* x, int count, float scale) {
    vf sum = zero();
    for (int i = 0; i < count; i += P) sum = fma(sum, load(x + i), load(x + i));
    vf factor = set1(scale / std::sqrt(sum_lanes(sum) + NORM_EPS));
    for (int i = 0; i < count; i += P) store(x + i, mul(load(x + i), factor));
}

// One token and N vectors of the values: the state [k_dim][v_dim] from one to the next, and what
// the token reads of it.
template <int N>
void fold_block(float* state, int k_dim, int v_dim, const float* q, const float* k, const float* v,
                float decay, float beta, float* out) {
    vf seen[N], read[N], gain[N];
    for (int n = 0; n < N; n++) seen[n] = read[n] = zero();
    for (int i = 0; i < k_dim; i++) {
        float* at = state + (size_t)i * v_dim;
        for (int n = 0; n < N; n++) {
            vf x = mul(load(at + n * P), set1(decay));
            store(at + n * P, x);
            seen[n] = fma(seen[n], x, k[i]);
        }
    }
    for (int n = 0; n < N; n++) gain[n] = mul(sub(load(v + n * P), seen[n]), set1(beta));
    for (int i = 0; i < k_dim; i++) {
        float* at = state + (size_t)i * v_dim;
        for (int n = 0; n < N; n++) {
            vf x = fma(load(at + n * P), gain[n], k[i]);
            store(at + n * P, x);
            read[n] = fma(read[n], x, q[i]);
        }
    }
    for (int n = 0; n < N; n++) store(out + n * P, read[n]);
}

void fold_delta(float* state, int k_dim, int v_dim, const float* q, const float* k, const float* v,
                float decay, float beta, float* out) {
    int i = 0;
    for (; i + 4 * P <= v_dim; i += 4 * P)
        fold_block<4>(state + i, k_dim, v_dim, q, k, v + i, decay, beta, out + i);
    for (; i < v_dim; i += P)
        fold_block<1>(state + i, k_dim, v_dim, q, k, v + i, decay, beta, out + i);
}

// The same for an ssm: `written` is the key by which it takes up a value, `read` that of the token.
template <int N>
void fold_ssm_block(float* state, int k_dim, int v_dim, const float* read, const float* written,
                    const float* v, float decay, float size, float skip, float* out) {
    vf gain[N], sum[N];
    for (int n = 0; n < N; n++) {
        gain[n] = mul(load(v + n * P), set1(size));
        sum[n] = mul(load(v + n * P), set1(skip));
    }
    for (int i = 0; i < k_dim; i++) {
        float* at = state + (size_t)i * v_dim;
        for (int n = 0; n < N; n++) {
            vf x = fma(mul(load(at + n * P), set1(decay)), gain[n], written[i]);
            store(at + n * P, x);
            sum[n] = fma(sum[n], x, read[i]);
        }
    }
    for (int n = 0; n < N; n++) store(out + n * P, sum[n]);
}

void fold_ssm(float* state, int k_dim, int v_dim, const float* read, const float* written,
              const float* v, float decay, float size, float skip, float* out) {
    int i = 0;
    for (; i + 4 * P <= v_dim; i += 4 * P)
        fold_ssm_block<4>(state + i, k_dim, v_dim, read, written, v + i, decay, size, skip, out + i);
    for (; i < v_dim; i += P)
        fold_ssm_block<1>(state + i, k_dim, v_dim, read, written, v + i, decay, size, skip, out + i);
}

}  // namespace

Recurrent::Recurrent(const std::vector<const RecurrentSpec*>& specs, const std::vector<const Matrix*>& outs,
                     int width, bool is_fine)
    : width_(width) {
    for (const Matrix* w : outs) forms_.note(w);
    const RecurrentSpec& spec = *specs.front();
    num_inputs_ = spec.num_inputs();
    value_width_ = spec.value_width();
    state_size_ = spec.k_dim * spec.v_dim;
    row_size_ = std::max(2 * spec.k_dim + spec.v_dim, value_width_) + CHANNELS;
    output_.num_in = value_width_;
    output_.is_fine = is_fine;
}

void Recurrent::reserve(int num_rows, int num_threads) {
    if ((int)threads_.size() < num_threads) {
        threads_.resize(num_threads);
        for (Thread& thread : threads_) {
            thread.panel.resize(Scratch::panel_bytes(std::max(width_, value_width_)));
            thread.out.resize((size_t)ROW_CHUNK * CHANNELS + P);
            thread.row.resize(row_size_);
            thread.state.resize(state_size_);
        }
    }
    if (num_rows <= num_rows_) return;
    num_rows_ = num_rows;
    inputs_.resize((size_t)num_rows * num_inputs_);
    gates_.resize((size_t)num_rows * value_width_);
    read_.resize(gates_.size());
    output_.reserve(forms_, num_rows);
}

void Recurrent::project(Worker& worker, const RecurrentSpec& spec, const Input& input, int num_rows) {
    std::vector<Part> parts = {
        {spec.channels, num_parts(spec.num_channels()), inputs_.data(), num_inputs_},
        {spec.gate, num_parts(value_width_), gates_.data(), value_width_},
    };
    float* next = inputs_.data() + spec.num_channels();
    for (const Matrix* w : {spec.beta, spec.decay}) {
        if (!w) continue;
        parts.push_back({w, num_parts(spec.num_v_heads), next, num_inputs_});
        next += spec.num_v_heads;
    }
    int total = 0;
    for (const Part& part : parts) total += part.first;
    each_item(worker, num_rows, total * CHANNELS, CHANNELS, [&](Item item) {
        const Part* part = parts.data();
        for (; item.part >= part->first; part++) item.part -= part->first;
        item.first = item.part * CHANNELS;
        item.last = std::min(item.first + CHANNELS, part->w->num_out);
        Thread& mine = threads_[worker.id()];
        multiply(*part->w, item, input, mine.out.data(), CHANNELS, mine.panel);
        put_item(item, mine.out.data(), CHANNELS, nullptr, part->to, part->stride);
    });
}

void Recurrent::fold(Thread& mine, const RecurrentSpec& spec, const RecurrentStates& states,
                     const int64_t* span, int head, const int64_t* pos) {
    const int64_t first = span[0], last = span[1], at = spec.place * states.num_rows + span[3];
    const int64_t start = pos[first], known = start + span[2], end = start + last - first;
    const int64_t begin = start && spec.rule != Rule::CONV ? states.folded[at] : start;
    const int k_dim = spec.k_dim, v_dim = spec.v_dim, taps = spec.num_taps;
    const int group = spec.num_v_heads / spec.num_k_heads;
    const int k_head = spec.is_tiled ? head % spec.num_k_heads : head / group;
    const bool is_delta = spec.rule == Rule::DELTA;
    // A delta net's queries stand first and its values last; with an ssm it is the other way round.
    const int k_first = k_head * k_dim + (is_delta ? spec.key_width() : spec.value_width());
    const int q_first = is_delta ? k_head * k_dim : k_first + spec.key_width();
    const int v_first = head * v_dim + (is_delta ? 2 * spec.key_width() : 0);
    const int stride = spec.num_channels();
    const float* ring = states.inputs + at * states.num_places * num_inputs_;
    float* state = states.state + (at * spec.num_v_heads + head) * state_size_;
    if (!start) std::fill_n(state, state_size_, 0.0f);
    auto input_at = [&](int64_t p) -> const float* {
        if (p < 0) return nullptr;
        return p >= start ? &inputs_[(first + p - start) * num_inputs_]
                          : ring + p % states.num_places * num_inputs_;
    };
    float *q = mine.row.data(), *k = q + k_dim, *v = k + k_dim;
    std::vector<const float*> window(taps);
    for (int64_t p = begin; p < end; p++) {
        if (p == known) {  // from here on, nodes
            std::memcpy(mine.state.data(), state, state_size_ * sizeof(float));
            state = mine.state.data();
        }
        for (int tap = 0; tap < taps; tap++) window[tap] = input_at(p - taps + 1 + tap);
        float* out = p >= start ? &read_[(first + p - start) * value_width_ + head * v_dim] : v;
        if (spec.rule == Rule::CONV) {
            convolve_product(window.data(), spec, out);
            continue;
        }
        convolve(window.data(), spec, q_first, k_dim, q);
        convolve(window.data(), spec, k_first, k_dim, k);
        convolve(window.data(), spec, v_first, v_dim, v);
        const float* own = window[taps - 1] + stride + (is_delta ? spec.num_v_heads : 0);
        const float size = softplus(own[head] + spec.bias[head]);
        const float decay = std::exp(spec.rate[head] * size);
        if (!is_delta) {
            fold_ssm(state, k_dim, v_dim, q, k, v, decay, size, spec.skip[head], out);
            continue;
        }
        normalise(q, k_dim, 1.0f / std::sqrt((float)k_dim));
        normalise(k, k_dim, 1.0f);
        const float beta = sigmoid(window[taps - 1][stride + head]);
        fold_delta(state, k_dim, v_dim, q, k, v, decay, beta, out);
    }
}

// The last inputs go to the ring, once every head has read what stood there.
void Recurrent::keep(const RecurrentSpec& spec, const RecurrentStates& states, const int64_t* span,
                     const int64_t* pos) const {
    const int64_t first = span[0], last = span[1], at = spec.place * states.num_rows + span[3];
    float* ring = states.inputs + at * states.num_places * num_inputs_;
    for (int64_t row = std::max(first, last - states.num_places); row < last; row++) {
        const int64_t place = (pos[first] + row - first) % states.num_places;
        std::memcpy(ring + place * num_inputs_, &inputs_[row * num_inputs_],
                    num_inputs_ * sizeof(float));
    }
    states.folded[at] = pos[first] + span[2];
}

// A delta net's heads are normed, then gated. An ssm's groups are gated and then normed, the other
// way round, or not normed. A convolution is multiplied by its gate.
void Recurrent::finish_row(Thread& mine, const RecurrentSpec& spec, int row, bool is_live) {
    float* out = mine.row.data();
    std::fill(mine.row.begin(), mine.row.end(), 0.0f);
    const float *read = &read_[(size_t)row * value_width_], *gate = &gates_[(size_t)row * value_width_];
    const bool is_delta = spec.rule == Rule::DELTA, is_conv = spec.rule == Rule::CONV;
    const bool is_normed_late = spec.norm && !is_delta && !spec.is_norm_first;
    const int num_parts = is_delta ? spec.num_v_heads : spec.num_k_heads, count = value_width_ / num_parts;
    if (is_live) {
        auto norm = [&](const float* x) {
            for (int part = 0; part < num_parts; part++)
                rms_norm(x + part * count, spec.norm + (is_delta ? 0 : part * count), count, spec.eps,
                         out + part * count);
        };
        if (spec.norm && !is_normed_late) norm(read);
        const float* x = spec.norm && !is_normed_late ? out : read;
        for (int i = 0; i < value_width_; i += P) {
            vf by = load(gate + i);
            store(out + i, mul(load(x + i), is_conv ? by : silu(by)));
        }
        if (is_normed_late) norm(out);
    }
    output_.put_row(row, out);
}

void Recurrent::run(Worker& worker, const RecurrentSpec& spec, const RecurrentStates& states,
                    const Input& input, const int64_t* pos, const int64_t* slot, int num_rows) {
    project(worker, spec, input, num_rows);
    const int num_heads = spec.num_v_heads, num_spans = (int)states.num_spans;
    worker.each(num_spans * num_heads, [&](int item) {
        const int64_t* span = states.spans + 4 * (item / num_heads);
        fold(threads_[worker.id()], spec, states, span, item % num_heads, pos);
    });
    worker.each(num_spans + num_rows, [&](int item) {
        if (item < num_spans)
            keep(spec, states, states.spans + 4 * item, pos);
        else
            finish_row(threads_[worker.id()], spec, item - num_spans, slot[item - num_spans] >= 0);
    });
}

}  // namespace hunch
