#include "latent.h"

namespace hunch {

Latent::Latent(const std::vector<const LatentSpec*>& specs, int num_heads, int width, bool is_fine)
    : num_heads_(num_heads), width_(width) {
    for (const LatentSpec* spec : specs) {
        for (auto* w : {spec->q, spec->k_up, spec->v_up}) forms_.note(w);
        flat_ = spec->flat, turned_ = spec->turned, latent_ = spec->latent, value_ = spec->value;
        q_latent_ = spec->q_down ? spec->q_down->num_out : 0;
    }
    narrow_.num_in = q_latent_;
    flat_in_.num_in = flat_;
    read_.num_in = latent_;
    for (Input* input : {&narrow_, &flat_in_, &read_}) input->is_fine = is_fine;
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
    narrow_.reserve(forms_, num_rows);
    flat_in_.reserve(forms_, num_heads_ * padded());
    read_.reserve(forms_, num_heads_ * padded());
}

// The stream's two narrow forms: before the queries, and what is kept.
void Latent::down_phase(Worker& worker, const LatentSpec& spec, const Input& input, int num_rows) {
    const int size = latent_ + turned_, q_parts = (q_latent_ + CHANNELS - 1) / CHANNELS;
    each_item(worker, num_rows, q_parts * CHANNELS + size, CHANNELS, [&](Item item) {
        const bool is_q = item.part < q_parts;
        const int width = is_q ? q_latent_ : size;
        if (!is_q) item.first -= q_parts * CHANNELS;
        item.last = std::min(item.first + CHANNELS, width);
        Thread& mine = threads_[worker.id()];
        multiply(is_q ? *spec.q_down : *spec.kv, item, input, mine.out.data(), CHANNELS, mine.panel);
        put_item(item, mine.out.data(), CHANNELS, is_q ? spec.q_bias : spec.kv_bias,
                 (is_q ? down_ : kept_).data(), width);
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
    each_item(worker, num_rows, num_heads_ * head_size, head_size, [&](const Item& item) {
        const int row = item.row, head = item.part, count = item.count, at = head * padded() + row;
        Thread& mine = threads_[worker.id()];
        multiply(*spec.q, item, q_latent_ ? narrow_ : input, mine.out.data(), head_size, mine.panel);
        for (int r = 0; r < count; r++) {
            float *x = &mine.out[(size_t)r * head_size], *turned = x + flat_;
            flat_in_.put_row(at + r, x);
            rotate(turned, step.rope + (size_t)step.pos[row + r] * turned_, turned_);
            float* to = q + ((size_t)(row + r) * num_heads_ + head) * size + latent_;
            for (int i = 0; i < turned_; i++) to[i] = turned[i] * step.scale;
        }
        float* to = q + ((size_t)row * num_heads_ + head) * size;
        multiply(*spec.k_up, head * latent_, (head + 1) * latent_, flat_in_, at, count, to,
                 num_heads_ * size, Scratch{mine.panel.data()});
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
    each_item(worker, num_rows, num_heads_ * value_, value_, [&](Item item) {
        float* values = &values_[((size_t)item.row * num_heads_ + item.part) * value_];
        item.row += item.part * padded();
        multiply(*spec.v_up, item, read_, values, num_heads_ * value_, threads_[worker.id()].panel);
    });
    worker.each(num_rows, [&](int row) {
        to.put_row(row, &values_[(size_t)row * num_heads_ * value_]);
    });
}

}  // namespace hunch
