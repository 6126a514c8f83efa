#include "experts.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace hunch {

namespace {

int num_parts(int num_channels) { return (num_channels + CHANNELS - 1) / CHANNELS; }

}  // namespace

Experts::Experts(const std::vector<const ExpertsSpec*>& specs, int width, bool is_fine)
    : width_(width) {
    for (const ExpertsSpec* spec : specs) {
        for (auto* w : {spec->up, spec->down, spec->shared_up, spec->shared_down}) forms_.note(w);
        num_chosen_ = spec->num_chosen;
        num_experts_ = spec->num_experts;
        gathered_.num_in = width;
        gated_.num_in = spec->width;
        shared_.num_in = spec->shared_width;
    }
    for (Input* input : {&gathered_, &gated_, &shared_}) input->is_fine = is_fine;
}

void Experts::reserve(int num_rows, int num_threads) {
    const int widest = std::max({width_, gated_.num_in, shared_.num_in});
    if ((int)threads_.size() < num_threads) {
        threads_.resize(num_threads);
        for (Thread& thread : threads_) {
            thread.panel.resize(Scratch::panel_bytes(widest));
            thread.out.resize((size_t)ROW_CHUNK * CHANNELS + P);
            thread.other.resize(thread.out.size());
            thread.row.resize(width_);
        }
    }
    if (num_rows <= num_rows_) return;
    num_rows_ = num_rows;
    const size_t num_pairs = (size_t)num_rows * num_chosen_;
    logits_.resize((size_t)num_rows * num_experts_);
    weights_.resize(num_pairs);
    chosen_.resize(num_pairs);
    place_.resize(num_pairs);
    shares_.resize(num_rows);
    // Each expert's rows begin at a tile.
    const int num_gathered = (int)(num_pairs + std::min(num_pairs, (size_t)num_experts_) * (RT - 1));
    gathered_.reserve(forms_, num_gathered + RT);
    gated_.reserve(forms_, num_gathered + RT);
    shared_.reserve(forms_, num_rows);
}

// The experts of a row, ascending, and their weights. Of equal scores the lowest expert wins.
void Experts::route(const ExpertsSpec& spec, const float* logits, int row) {
    const int count = spec.num_experts, size = count / spec.num_groups;
    std::vector<float> score(logits, logits + count), choice;
    const Scores rule = (Scores)spec.scores;
    if (rule == Scores::SOFTMAX) {
        float top = *std::max_element(score.begin(), score.end()), total = 0;
        for (float& s : score) total += s = std::exp(s - top);
        for (float& s : score) s /= total;
    } else if (rule == Scores::SIGMOID) {
        for (float& s : score) s = 1.0f / (1.0f + std::exp(-s));
    }
    choice = score;
    for (int e = 0; spec.choice_bias && e < count; e++) choice[e] += spec.choice_bias[e];
    const float never = -std::numeric_limits<float>::infinity();
    auto best_of = [&](std::vector<float>& from) {
        int best = (int)(std::max_element(from.begin(), from.end()) - from.begin());  // the first
        from[best] = never;
        return best;
    };
    if (spec.num_groups_kept < spec.num_groups) {
        std::vector<float> worth(spec.num_groups, 0.0f);
        for (int g = 0; g < spec.num_groups; g++) {
            std::vector<float> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
            for (int i = 0; i < std::min(spec.num_best, size); i++) {
                float top = *std::max_element(members.begin(), members.end());
                best_of(members);
                worth[g] += top;
            }
        }
        for (int i = 0; i < spec.num_groups_kept; i++) best_of(worth);
        for (int g = 0; g < spec.num_groups; g++)
            if (worth[g] != never) std::fill_n(choice.begin() + g * size, size, never);
    }
    int* chosen = &chosen_[(size_t)row * spec.num_chosen];
    float* weight = &weights_[(size_t)row * spec.num_chosen];
    for (int i = 0; i < spec.num_chosen; i++) {
        std::vector<float> left = rule == Scores::NEAR ? choice : std::vector<float>();
        const int best = chosen[i] = best_of(choice);
        float total = 0;
        for (float other : left) {
            const float below = (left[best] - other) / std::max(std::fabs(other), left[best]);
            if (other != never && !(below > spec.spread)) total += std::exp(other - left[best]);
        }
        if (rule == Scores::NEAR) score[best] = 1 / total;
    }
    std::sort(chosen, chosen + spec.num_chosen);
    float top = never, total = 0;
    for (int i = 0; i < spec.num_chosen; i++) top = std::max(top, weight[i] = score[chosen[i]]);
    for (int i = 0; i < spec.num_chosen; i++) {
        if (rule == Scores::CHOSEN) weight[i] = std::exp(weight[i] - top);
        if (rule == Scores::CHOSEN_SIGMOID) weight[i] = 1.0f / (1.0f + std::exp(-weight[i]));
        total += weight[i];
    }
    const bool is_divided = spec.is_normed || rule == Scores::CHOSEN;
    for (int i = 0; i < spec.num_chosen; i++)
        weight[i] = (is_divided ? weight[i] / (total + 1e-20f) : weight[i]) *
                    (spec.factor ? spec.factor[chosen[i]] : 1) * spec.scale;
}

// Where the rows of each expert stand in the gathered input, and the pieces they are computed in.
void Experts::plan(int num_rows, int num_experts) {
    std::vector<int> count(num_experts, 0), first(num_experts, 0);
    const int num_pairs = num_rows * num_chosen_;
    for (int p = 0; p < num_pairs; p++) count[chosen_[p]]++;
    pieces_.clear();
    int end = 0;
    for (int e = 0; e < num_experts; e++) {
        first[e] = end;
        for (int at = 0; at < count[e]; at += ROW_CHUNK)
            pieces_.push_back({e, end + at, std::min(ROW_CHUNK, count[e] - at)});
        end += (count[e] + RT - 1) / RT * RT;
    }
    row_of_.resize(end);
    slot_of_.resize(end);
    for (int p = 0; p < num_pairs; p++) {
        int at = place_[p] = first[chosen_[p]]++;
        row_of_[at] = p / num_chosen_;
        slot_of_[at] = p;
    }
}

void Experts::gated(Thread& mine, Activation act, const Matrix& w, const float* bias, int gate_row,
                    int up_row, const Item& item, const Input& from, const Input& to) {
    const int first = item.first, last = item.last, row = item.row;
    Scratch scratch{mine.panel.data()};
    float *gate = mine.out.data(), *up = mine.other.data();
    multiply(w, gate_row + first, gate_row + last, from, row, item.count, gate, CHANNELS, scratch);
    multiply(w, up_row + first, up_row + last, from, row, item.count, up, CHANNELS, scratch);
    for (int r = 0; r < item.count; r++, gate += CHANNELS, up += CHANNELS) {
        for (int i = 0; bias && i < last - first; i++) {
            gate[i] += bias[gate_row + first + i];
            up[i] += bias[up_row + first + i];
        }
        activate(act, gate, up, CHANNELS);
        to.put(row + r, item.part, item.part + 1, gate);
    }
}

void Experts::up_phase(Worker& worker, const ExpertsSpec& spec) {
    const int parts = num_parts(spec.width);
    worker.each((int)pieces_.size() * parts, [&](int item) {
        const Piece& piece = pieces_[item / parts];
        const int part = item % parts, first = part * CHANNELS, gate = piece.expert * 2 * spec.width;
        Item some{piece.first, piece.count, part, first, std::min(first + CHANNELS, spec.width)};
        gated(threads_[worker.id()], (Activation)spec.activation, *spec.up, spec.up_bias, gate,
              gate + spec.width, some, gathered_, gated_);
    });
}

// A work item is a few channels of all experts, so that a row's experts are added in order.
void Experts::down_phase(Worker& worker, const ExpertsSpec& spec, float* x) {
    worker.each(num_parts(width_), [&](int part) {
        const int first = part * CHANNELS, last = std::min(first + CHANNELS, width_);
        Thread& mine = threads_[worker.id()];
        for (const Piece& piece : pieces_) {
            const int shift = piece.expert * width_;
            multiply(*spec.down, shift + first, shift + last, gated_, piece.first, piece.count,
                     mine.out.data(), CHANNELS, Scratch{mine.panel.data()});
            for (int r = 0; r < piece.count; r++) {
                const float weight = spec.is_of_input ? 1.0f : weights_[slot_of_[piece.first + r]];
                float *out = &mine.out[(size_t)r * CHANNELS];
                float *to = x + (size_t)row_of_[piece.first + r] * width_;
                for (int i = first; i < last; i++) {
                    float value = out[i - first] + (spec.down_bias ? spec.down_bias[shift + i] : 0);
                    to[i] += weight * value;
                }
            }
        }
    });
}

void Experts::shared_phase(Worker& worker, const ExpertsSpec& spec, const Input& input, float* x,
                           int num_rows) {
    each_item(worker, num_rows, spec.shared_width, CHANNELS, [&](const Item& item) {
        gated(threads_[worker.id()], (Activation)spec.activation, *spec.shared_up, nullptr, 0,
              spec.shared_width, item, input, shared_);
    });
    each_item(worker, num_rows, width_, CHANNELS, [&](const Item& item) {
        Thread& mine = threads_[worker.id()];
        multiply(*spec.shared_down, item, shared_, mine.out.data(), CHANNELS, mine.panel);
        for (int r = 0; r < item.count; r++)
            for (int i = item.first; i < item.last; i++)
                x[(size_t)(item.row + r) * width_ + i] +=
                    shares_[item.row + r] * mine.out[(size_t)r * CHANNELS + i - item.first];
    });
}

void Experts::run(Worker& worker, const ExpertsSpec& spec, const Input& input, const Input& routed,
                  float* x, int num_rows) {
    const int parts = num_parts(spec.num_experts);
    each_item(worker, num_rows, parts * CHANNELS + 1, CHANNELS, [&](Item item) {
        Thread& mine = threads_[worker.id()];
        float* out = mine.out.data();
        if (item.part == parts) {  // how much of the shared expert each row takes
            item.first = 0, item.last = 1;
            if (spec.shared_gate) multiply(*spec.shared_gate, item, input, out, CHANNELS, mine.panel);
            for (int r = 0; r < item.count; r++, out += CHANNELS)
                shares_[item.row + r] = spec.shared_gate ? 1.0f / (1.0f + std::exp(-*out)) : 1.0f;
            return;
        }
        item.last = std::min(item.last, spec.num_experts);
        multiply(*spec.router, item, routed, out, CHANNELS, mine.panel);
        put_item(item, out, CHANNELS, spec.router_bias, logits_.data(), spec.num_experts);
    });
    worker.each(num_rows,
                [&](int row) { route(spec, &logits_[(size_t)row * spec.num_experts], row); });
    worker.each(1, [&](int) { plan(num_rows, spec.num_experts); });
    worker.each(num_rows * spec.num_chosen, [&](int pair) {
        const float* from = input.rows + (size_t)(pair / spec.num_chosen) * width_;
        if (spec.is_of_input) {
            float* scaled = threads_[worker.id()].row.data();
            for (int i = 0; i < width_; i++) scaled[i] = weights_[pair] * from[i];
            from = scaled;
        }
        gathered_.put_row(place_[pair], from);
    });
    up_phase(worker, spec);
    down_phase(worker, spec, x);
    if (spec.shared_up) shared_phase(worker, spec, input, x, num_rows);
}

}  // namespace hunch
