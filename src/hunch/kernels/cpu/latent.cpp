#include "latent.h"

#include <algorithm>
#include <cstring>

#include "rowmath.h"

namespace hunch {

namespace {

constexpr int CHANNELS = 32;  // of one work item of a product over all of a row

int num_chunks(int num_rows) { return (num_rows + ROW_CHUNK - 1) / ROW_CHUNK; }
int num_parts(int num_channels) { return (num_channels + CHANNELS - 1) / CHANNELS; }

}  // namespace

Latent::Latent(const std::vector<const LatentSpec*>& specs, int num_heads, int width, bool is_fine)
    : num_heads_(num_heads), width_(width) {
    for (const LatentSpec* spec : specs) {
        for (auto* w : {spec->q, spec->k_up, spec->v_up})
            (w->format == Format::FLOAT ? needs_float_ : needs_int_) = true;
        flat_ = spec->flat, turned_ = spec->turned, latent_ = spec->latent, value_ = spec->value;
        q_latent_ = spec->q_down ? spec->q_down->num_out : 0;
    }
    narrow_.num_in = q_latent_;
    flat_in_.num_in = flat_;
    read_.num_in = latent_;
    for (Input* input : {&narrow_, &flat_in_, &read_}) input->is_fine = is_fine;
}

void Latent::store(Input& input, int index, int num_rows) {
    if (needs_int_) tiles_[index].resize(input.bytes_for(num_rows));
    if (needs_float_) rows_[index].resize((size_t)num_rows * input.num_in);
    input.tiles = needs_int_ ? tiles_[index].data() : nullptr;
    input.rows = needs_float_ ? rows_[index].data() : nullptr;
}

void Latent::reserve(int num_rows, int num_threads) {
    const int size = latent_ + turned_, widest = std::max({width_, q_latent_, flat_, latent_});
    if ((int)threads_.size() < num_threads) {
        threads_.resize(num_threads);
        for (Thread& thread : threads_) {
            thread.panel.resize(Scratch::panel_bytes(widest));
            thread.out.resize((size_t)ROW_CHUNK * std::max(CHANNELS, flat_ + turned_) + P);
            thread.row.resize(std::max(num_heads_ * size, q_latent_) + P);
        }
    }
    if (num_rows <= num_rows_) return;
    num_rows_ = num_rows;
    down_.resize((size_t)num_rows * q_latent_);
    kept_.resize((size_t)num_rows * size);
    values_.resize((size_t)num_rows * num_heads_ * value_);
    store(narrow_, 0, num_rows);
    store(flat_in_, 1, num_heads_ * padded());
    store(read_, 2, num_heads_ * padded());
}

// The stream's two narrow forms: before the queries, and what is kept.
void Latent::down_phase(Worker& worker, const LatentSpec& spec, const Input& input, int num_rows) {
    const int size = latent_ + turned_, q_parts = num_parts(q_latent_);
    const int all = q_parts + num_parts(size);
    worker.each(num_chunks(num_rows) * all, [&](int item) {
        int row = item / all * ROW_CHUNK, part = item % all, count = std::min(ROW_CHUNK, num_rows - row);
        const bool is_q = part < q_parts;
        const int width = is_q ? q_latent_ : size, first = (is_q ? part : part - q_parts) * CHANNELS;
        const int last = std::min(first + CHANNELS, width);
        const float* bias = is_q ? spec.q_bias : spec.kv_bias;
        Thread& mine = threads_[worker.id()];
        multiply(is_q ? *spec.q_down : *spec.kv, first, last, input, row, count, mine.out.data(),
                 CHANNELS, Scratch{mine.panel.data()});
        for (int r = 0; r < count; r++) {
            float* out = &mine.out[r * CHANNELS];
            if (bias) add_bias(out, bias + first, last - first);
            float* to = (is_q ? down_ : kept_).data() + (size_t)(row + r) * width + first;
            std::memcpy(to, out, (last - first) * sizeof(float));
        }
    });
}

void Latent::keep_phase(Worker& worker, const LatentSpec& spec, const LatentStep& step) {
    const int size = latent_ + turned_;
    worker.each(step.num_rows, [&](int row) {
        if (q_latent_) {
            float* normed = threads_[worker.id()].row.data();
            rms_norm(&down_[(size_t)row * q_latent_], spec.q_norm, q_latent_, spec.norm_eps, normed);
            narrow_.put_row(row, normed);
        }
        if (step.slot[row] < 0) return;
        float* kept = &kept_[(size_t)row * size];
        rms_norm(kept, spec.kv_norm, latent_, spec.norm_eps, kept);
        rotate(kept + latent_, step.rope + (size_t)step.pos[row] * turned_, turned_);
        step.cache.store(step.slot[row], kept, size);
    });
}

void Latent::project(Worker& worker, const LatentSpec& spec, const Input& input,
                     const LatentStep& step, float* q) {
    const int num_rows = step.num_rows, size = latent_ + turned_, head_size = flat_ + turned_;
    down_phase(worker, spec, input, num_rows);
    keep_phase(worker, spec, step);
    worker.each(num_chunks(num_rows) * num_heads_, [&](int item) {
        int row = item / num_heads_ * ROW_CHUNK, head = item % num_heads_;
        int count = std::min(ROW_CHUNK, num_rows - row), at = head * padded() + row;
        Thread& mine = threads_[worker.id()];
        Scratch scratch{mine.panel.data()};
        multiply(*spec.q, head * head_size, (head + 1) * head_size, q_latent_ ? narrow_ : input, row,
                 count, mine.out.data(), head_size, scratch);
        for (int r = 0; r < count; r++) {
            float *x = &mine.out[(size_t)r * head_size], *turned = x + flat_;
            flat_in_.put_row(at + r, x);
            rotate(turned, step.rope + (size_t)step.pos[row + r] * turned_, turned_);
            float* to = q + ((size_t)(row + r) * num_heads_ + head) * size + latent_;
            for (int i = 0; i < turned_; i++) to[i] = turned[i] * step.scale;
        }
        float* to = q + ((size_t)row * num_heads_ + head) * size;
        multiply(*spec.k_up, head * latent_, (head + 1) * latent_, flat_in_, at, count, to,
                 num_heads_ * size, scratch);
        for (int r = 0; r < count; r++, to += num_heads_ * size)
            for (int i = 0; i < latent_; i++) to[i] *= step.scale;
    });
}

void Latent::expand(Worker& worker, const LatentSpec& spec, const Attention& attention,
                    const AttnCall& call, int num_rows, const Input& to) {
    const int size = latent_ + turned_;
    worker.each(num_rows, [&](int row) {
        float* read = threads_[worker.id()].row.data();
        attention.read_row(row, call, read);
        for (int head = 0; head < num_heads_; head++)
            read_.put_row(head * padded() + row, read + (size_t)head * size);
    });
    worker.each(num_chunks(num_rows) * num_heads_, [&](int item) {
        int row = item / num_heads_ * ROW_CHUNK, head = item % num_heads_;
        float* values = &values_[((size_t)row * num_heads_ + head) * value_];
        multiply(*spec.v_up, head * value_, (head + 1) * value_, read_, head * padded() + row,
                 std::min(ROW_CHUNK, num_rows - row), values, num_heads_ * value_,
                 Scratch{threads_[worker.id()].panel.data()});
    });
    worker.each(num_rows, [&](int row) {
        to.put_row(row, &values_[(size_t)row * num_heads_ * value_]);
    });
}

}  // namespace hunch
