#include "delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vecmath.h"

namespace hunch {

namespace {

constexpr int CHANNELS = 32;  // of one work item
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
void convolve(const float* const* taps, const float* conv, int num_taps, int stride, int first,
              int count, float* out) {
    for (int i = 0; i < count; i += P) {
        vf sum = zero();
        for (int tap = 0; tap < num_taps; tap++)
            if (taps[tap])
                sum = fma(sum, load(taps[tap] + first + i), load(conv + (size_t)tap * stride + first + i));
        store(out + i, silu(sum));
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

void fold_token(float* state, int k_dim, int v_dim, const float* q, const float* k, const float* v,
                float decay, float beta, float* out) {
    int i = 0;
    for (; i + 4 * P <= v_dim; i += 4 * P)
        fold_block<4>(state + i, k_dim, v_dim, q, k, v + i, decay, beta, out + i);
    for (; i < v_dim; i += P)
        fold_block<1>(state + i, k_dim, v_dim, q, k, v + i, decay, beta, out + i);
}

}  // namespace

Delta::Delta(const std::vector<const DeltaSpec*>& specs, const std::vector<const Matrix*>& outs,
             int width, bool is_fine)
    : width_(width) {
    for (const Matrix* w : outs) (w->format == Format::FLOAT ? needs_float_ : needs_int_) = true;
    const DeltaSpec& spec = *specs.front();
    num_inputs_ = spec.num_inputs();
    value_width_ = spec.value_width();
    state_size_ = spec.k_dim * spec.v_dim;
    row_size_ = std::max(2 * spec.k_dim + spec.v_dim, value_width_) + CHANNELS;
    output_.num_in = value_width_;
    output_.is_fine = is_fine;
}

void Delta::reserve(int num_rows, int num_threads) {
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
    if (needs_int_) tiles_.resize(output_.bytes_for(num_rows));
    if (needs_float_) rows_.resize((size_t)num_rows * value_width_);
    output_.tiles = needs_int_ ? tiles_.data() : nullptr;
    output_.rows = needs_float_ ? rows_.data() : nullptr;
}

void Delta::project(Worker& worker, const DeltaSpec& spec, const Input& input, int num_rows) {
    const Part parts[] = {
        {spec.qkv, num_parts(spec.num_channels()), inputs_.data(), num_inputs_},
        {spec.gate, num_parts(value_width_), gates_.data(), value_width_},
        {spec.beta, num_parts(spec.num_v_heads), inputs_.data() + spec.num_channels(), num_inputs_},
        {spec.decay, num_parts(spec.num_v_heads),
         inputs_.data() + spec.num_channels() + spec.num_v_heads, num_inputs_},
    };
    int total = 0;
    for (const Part& part : parts) total += part.first;
    const int num_chunks = (num_rows + ROW_CHUNK - 1) / ROW_CHUNK;
    worker.each(num_chunks * total, [&](int item) {
        int row = item / total * ROW_CHUNK, place = item % total;
        const Part* part = parts;
        for (; place >= part->first; part++) place -= part->first;
        int first = place * CHANNELS, last = std::min(first + CHANNELS, part->w->num_out);
        int count = std::min(ROW_CHUNK, num_rows - row);
        Thread& mine = threads_[worker.id()];
        multiply(*part->w, first, last, input, row, count, mine.out.data(), CHANNELS,
                 Scratch{mine.panel.data()});
        for (int r = 0; r < count; r++)
            std::memcpy(part->to + (size_t)(row + r) * part->stride + first, &mine.out[r * CHANNELS],
                        (last - first) * sizeof(float));
    });
}

void Delta::fold(Thread& mine, const DeltaSpec& spec, const DeltaStates& states, int layer,
                 const int64_t* span, int head, const int64_t* pos) {
    const int64_t first = span[0], last = span[1], row = span[3], at = layer * states.num_rows + row;
    const int64_t start = pos[first], known = start + span[2], end = start + last - first;
    const int64_t begin = start ? states.folded[at] : 0;
    const int k_dim = spec.k_dim, v_dim = spec.v_dim, taps = spec.num_taps;
    const int group = spec.num_v_heads / spec.num_k_heads;
    const int k_head = spec.is_tiled ? head % spec.num_k_heads : head / group;
    const int q_first = k_head * k_dim, k_first = spec.key_width() + q_first;
    const int v_first = 2 * spec.key_width() + head * v_dim, stride = spec.num_channels();
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
        convolve(window.data(), spec.conv, taps, stride, q_first, k_dim, q);
        convolve(window.data(), spec.conv, taps, stride, k_first, k_dim, k);
        convolve(window.data(), spec.conv, taps, stride, v_first, v_dim, v);
        normalise(q, k_dim, 1.0f / std::sqrt((float)k_dim));
        normalise(k, k_dim, 1.0f);
        const float* own = window[taps - 1] + stride;
        float beta = sigmoid(own[head]);
        float decay = std::exp(spec.rate[head] * softplus(own[spec.num_v_heads + head] + spec.bias[head]));
        float* out = p >= start ? &read_[(first + p - start) * value_width_ + head * v_dim] : v;
        fold_token(state, k_dim, v_dim, q, k, v, decay, beta, out);
    }
}

// The last inputs go to the ring, once every head has read what stood there.
void Delta::keep(const DeltaSpec& spec, const DeltaStates& states, int layer, const int64_t* span,
                 const int64_t* pos) const {
    const int64_t first = span[0], last = span[1], at = layer * states.num_rows + span[3];
    float* ring = states.inputs + at * states.num_places * num_inputs_;
    for (int64_t row = std::max(first, last - states.num_places); row < last; row++) {
        const int64_t place = (pos[first] + row - first) % states.num_places;
        std::memcpy(ring + place * num_inputs_, &inputs_[row * num_inputs_],
                    num_inputs_ * sizeof(float));
    }
    states.folded[at] = pos[first] + span[2];
}

// Each head normed, then times silu of the gate.
void Delta::finish_row(Thread& mine, const DeltaSpec& spec, int row, bool is_live) {
    float* out = mine.row.data();
    std::fill(mine.row.begin(), mine.row.end(), 0.0f);
    const float *read = &read_[(size_t)row * value_width_], *gate = &gates_[(size_t)row * value_width_];
    for (int head = 0; is_live && head < spec.num_v_heads; head++) {
        const int first = head * spec.v_dim;
        vf sum = zero();
        for (int i = 0; i < spec.v_dim; i += P)
            sum = fma(sum, load(read + first + i), load(read + first + i));
        vf factor = set1(1.0f / std::sqrt(sum_lanes(sum) / (float)spec.v_dim + spec.eps));
        for (int i = 0; i < spec.v_dim; i += P) {
            vf x = mul(mul(load(read + first + i), factor), load(spec.norm + i));
            store(out + first + i, mul(x, silu(load(gate + first + i))));
        }
    }
    output_.put_row(row, out);
}

void Delta::run(Worker& worker, const DeltaSpec& spec, const DeltaStates& states, int layer,
                const Input& input, const int64_t* pos, const int64_t* slot, int num_rows) {
    project(worker, spec, input, num_rows);
    const int num_heads = spec.num_v_heads, num_spans = (int)states.num_spans;
    worker.each(num_spans * num_heads, [&](int item) {
        const int64_t* span = states.spans + 4 * (item / num_heads);
        fold(threads_[worker.id()], spec, states, layer, span, item % num_heads, pos);
    });
    worker.each(num_spans + num_rows, [&](int item) {
        if (item < num_spans)
            keep(spec, states, layer, states.spans + 4 * item, pos);
        else
            finish_row(threads_[worker.id()], spec, item - num_spans, slot[item - num_spans] >= 0);
    });
}

}  // namespace hunch
