#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "vecmath.h"

namespace hunch {

namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr double MASS = 1099511627776.0;  // 2^40: units of probability
constexpr int LANES = 8;                  // Philox blocks computed side by side
constexpr int SPAN = 4 * LANES;           // tokens they serve
// Depths below the best token at which candidates are looked for: most are near the top.
constexpr float DEPTHS[] = {2, 4, 6, 8, 11, 16, 24, 40, INFINITE};

// Philox4x32-10 of LANES blocks, four words each.
void philox(const uint32_t* blocks, const ChoiceSpec& spec, uint32_t* words) {
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
    uint32_t k0 = (uint32_t)spec.seed, k1 = (uint32_t)((uint64_t)spec.seed >> 32);
    for (int i = 0; i < LANES; i++) {
        c0[i] = blocks[i];
        c1[i] = (uint32_t)spec.position;
        c2[i] = (uint32_t)spec.sample_index;
        c3[i] = (uint32_t)spec.stream;
    }
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < LANES; i++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0[i], p1 = (uint64_t)0xCD9E8D57u * c2[i];
            c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
            c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
            c1[i] = (uint32_t)p1;
            c3[i] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < LANES; i++) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
}

// The same of blocks [first, first + LANES): words[token - 4 * first].
void philox(uint32_t first, const ChoiceSpec& spec, uint32_t* words) {
    uint32_t blocks[LANES];
    for (int i = 0; i < LANES; i++) blocks[i] = first + (uint32_t)i;
    philox(blocks, spec, words);
}

// The words of up to LANES tokens.
void token_words(const int64_t* tokens, int count, const ChoiceSpec& spec, uint32_t* out) {
    uint32_t blocks[LANES] = {}, words[SPAN];
    for (int i = 0; i < count; i++) blocks[i] = (uint32_t)tokens[i] >> 2;
    philox(blocks, spec, words);
    for (int i = 0; i < count; i++) out[i] = words[4 * i + (tokens[i] & 3)];
}

float gumbel(uint32_t word) {
    float v = std::min(((float)word + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
    return -std::log(-std::log1p(-v));
}

int64_t argmax(const float* x, int size) {
    vf best[4] = {set1(-INFINITE), set1(-INFINITE), set1(-INFINITE), set1(-INFINITE)};
    int i = 0;
    for (; i + 4 * P <= size; i += 4 * P)
        HUNCH_UNROLL for (int j = 0; j < 4; j++) best[j] = max(best[j], load(x + i + j * P));
    float top = max_lane(max(max(best[0], best[1]), max(best[2], best[3])));
    for (; i < size; i++) top = x[i] > top ? x[i] : top;
    for (i = 0; i < size; i++)
        if (x[i] == top) return i;
    return 0;
}

int64_t mass_of(float ratio) { return (int64_t)((double)ratio * MASS); }

}  // namespace

void Chooser::soften(const float* logits, int size, float temperature, float top) {
    const int padded = (size + SPAN - 1) / SPAN * SPAN;
    z_.resize(padded);
    ratio_.resize(padded);
    peak_.resize(padded / SPAN);
    float *z = z_.data(), *ratio = ratio_.data();
    for (int i = 0; i < padded; i += SPAN) {
        if (i + SPAN > size) {  // past the end nothing can be chosen
            std::fill(z + i, z + i + SPAN, -INFINITE);
            std::memcpy(z + i, logits + i, (size - i) * sizeof(float));
            logits = z;
        }
        vf peak = set1(-INFINITE);
        HUNCH_UNROLL for (int j = i; j < i + SPAN; j += P) {
            vf x = div(load(logits + j), set1(temperature));
            store(z + j, x);
            store(ratio + j, exp(sub(x, set1(top))));
            peak = max(peak, x);
        }
        peak_[i / SPAN] = max_lane(peak);
    }
    std::fill(ratio + size, ratio + padded, 0.0f);
}

// Appends the tokens that are left and whose z is in [from, below).
void Chooser::gather(float from, float below) {
    for (size_t span = 0; span < peak_.size(); span++) {
        if (peak_[span] < from) continue;
        for (int i = (int)span * SPAN; i < (int)(span + 1) * SPAN; i++)
            if (z_[i] >= from && z_[i] < below && ratio_[i] > 0)
                some_.push_back({z_[i], i, mass_of(ratio_[i])});
    }
}

// Removes what ranks behind token `last` with z = `edge`.
void Chooser::cut(float edge, int last) {
    const float* z = z_.data();
    float* ratio = ratio_.data();
    for (int i = 0; i < (int)z_.size(); i++) {
        bool is_kept = (z[i] > edge) | ((z[i] == edge) & (i <= last));
        ratio[i] = is_kept ? ratio[i] : 0.0f;
    }
}

// Fills some_ with what is left nearest to the top, `count` of them or more where there are so many.
void Chooser::gather_near(int count, float top) {
    some_.clear();
    float below = INFINITE;
    for (float depth : DEPTHS) {
        gather(top - depth, below);
        below = top - depth;
        if ((int)some_.size() >= count) break;
    }
}

void Chooser::keep_top_k(int count, float top) {
    gather_near(count, top);
    if ((int)some_.size() < count) return;  // fewer are left than may be kept
    auto last = some_.begin() + (count - 1);
    std::nth_element(some_.begin(), last, some_.end(), is_before);
    cut(last->z, last->id);
}

// The first token, in order of rank, with which the sum of masses reaches the limit is the last one
// kept. It is found by halves, as nth_element finds a rank: only sums of parts are needed.
void Chooser::keep_top_p(double share, float top) {
    int64_t total = 0, sum = 0;
    const float* ratio = ratio_.data();
    for (size_t i = 0; i < ratio_.size(); i++) total += mass_of(ratio[i]);
    const double limit = share * (double)total;
    auto mass = [](auto from, auto to) {
        int64_t all = 0;
        for (; from != to; ++from) all += from->mass;
        return all;
    };
    float below = INFINITE;
    for (float depth : DEPTHS) {
        some_.clear();
        gather(top - depth, below);
        below = top - depth;
        int64_t here = mass(some_.begin(), some_.end());
        if ((double)(sum + here) < limit) {
            sum += here;
            continue;
        }
        auto from = some_.begin(), to = some_.end();
        while (to - from > 1) {
            auto middle = from + (to - from) / 2;
            std::nth_element(from, middle, to, is_before);
            int64_t upper = mass(from, middle);
            if ((double)(sum + upper) >= limit)
                to = middle;
            else
                sum += upper, from = middle;
        }
        if (from != to) cut(from->z, from->id);
        return;
    }
}

// The best of z + noise over what is left. A token wins over the first one only if its noise exceeds
// the gap; noise above g takes a word below e^-g * 2^32, which rules out nearly all tokens without a
// logarithm.
int64_t Chooser::draw(int64_t first, const ChoiceSpec& spec) const {
    uint32_t words[SPAN];
    philox((uint32_t)first >> 2, spec, words);
    float best = z_[first] + gumbel(words[first & 3]);
    int64_t chosen = first;
    const float factor = std::exp(z_[first] - best) * 4294967296.0f * 1.001f;  // on the safe side
    for (size_t span = 0; span < peak_.size(); span++) {
        const float* ratio = &ratio_[span * SPAN];
        vf most = zero();
        for (int j = 0; j < SPAN; j += P) most = max(most, load(ratio + j));
        if (max_lane(most) * factor < 0.4f) continue;  // the lowest word counts as 0.5
        philox((uint32_t)(span * LANES), spec, words);
        for (int j = 0; j < SPAN; j++) {
            if ((float)words[j] > ratio[j] * factor || ratio[j] == 0) continue;
            int64_t id = (int64_t)span * SPAN + j;
            float score = z_[id] + gumbel(words[j]);
            if (score > best || (score == best && id < chosen)) best = score, chosen = id;
        }
    }
    return chosen;
}

// The same where columns are not tokens: every word is asked for by its token.
int64_t Chooser::draw_columns(int64_t first, const ChoiceSpec& spec, const int64_t* ids) const {
    uint32_t words[LANES];
    token_words(ids + first, 1, spec, words);
    float best = z_[first] + gumbel(words[0]);
    int64_t chosen = first, columns[LANES] = {}, tokens[LANES] = {};
    const float factor = std::exp(z_[first] - best) * 4294967296.0f * 1.001f;
    int count = 0;
    auto compare = [&] {
        token_words(tokens, count, spec, words);
        for (int i = 0; i < count; i++) {
            int64_t column = columns[i];
            if ((float)words[i] > ratio_[column] * factor) continue;
            float score = z_[column] + gumbel(words[i]);
            if (score > best || (score == best && column < chosen)) best = score, chosen = column;
        }
        count = 0;
    };
    for (size_t column = 0; column < ratio_.size(); column++) {
        if (ratio_[column] * factor < 0.4f) continue;
        columns[count] = (int64_t)column;
        tokens[count++] = ids[column];
        if (count == LANES) compare();
    }
    compare();
    return chosen;
}

int64_t Chooser::choose(const float* logits, int size, const ChoiceSpec& spec, const int64_t* ids) {
    int64_t first = argmax(logits, size);
    if (spec.temperature > 0 && std::isfinite(logits[first])) {
        filter(logits, size, spec, first);
        first = ids ? draw_columns(first, spec, ids) : draw(first, spec);
    }
    return ids ? ids[first] : first;
}

// Fills some_ with the `count` likeliest of what is left.
void Chooser::keep_near(int count, float top) {
    gather_near(count, top);
    if ((int)some_.size() <= count) return;
    std::nth_element(some_.begin(), some_.begin() + count, some_.end(), is_before);
    some_.resize(count);
}

void Chooser::best(const float* logits, int size, const ChoiceSpec& spec, const int64_t* ids,
                   int num, Candidate* out) {
    const int64_t first = argmax(logits, size);
    auto token = [&](int64_t column) { return ids ? ids[column] : column; };
    ChoiceSpec plain = spec;
    const bool is_greedy = !(spec.temperature > 0) || !std::isfinite(logits[first]);
    if (is_greedy) plain = {1.0f, 0, 1.0, -INFINITE, 0, 0, 0, 0};
    filter(logits, size, plain, first);
    const float top = z_[first];
    int64_t chosen = first;
    double total = 0;
    if (is_greedy) {
        for (float ratio : ratio_) total += ratio;
        keep_near(num, top);
    } else {
        chosen = ids ? draw_columns(first, spec, ids) : draw(first, spec);
        keep_near(std::max(num, NEAR), top);
        for (size_t i = 0; i < some_.size(); i += LANES) {
            int64_t tokens[LANES];
            uint32_t words[LANES];
            int count = (int)std::min<size_t>(LANES, some_.size() - i);
            for (int j = 0; j < count; j++) tokens[j] = token(some_[i + j].id);
            token_words(tokens, count, spec, words);
            for (int j = 0; j < count; j++) some_[i + j].z += gumbel(words[j]);
        }
        for (const Entry& entry : some_) total += std::exp((double)(entry.z - top));
    }
    const int count = std::min(num, (int)some_.size());
    std::partial_sort(some_.begin(), some_.begin() + count, some_.end(), is_before);
    const double log_total = std::log(total);
    for (int i = 0; i < count; i++)
        out[i] = {token(some_[i].id), std::min(0.0f, (float)(some_[i].z - top - log_total))};
    int place = 0;  // of what `choose` gives: it may stand further down by rounding, or be missing
    while (place < count && out[place].token != token(chosen)) place++;
    const float gain = out[0].gain;
    for (int i = std::min(place, count - 1); i > 0; i--) out[i] = out[i - 1];
    out[0] = {token(chosen), gain};
    for (int i = count, column = 0; i < num; i++) {  // fixed shapes want every place filled
        auto is_there = [&] {
            return std::any_of(out, out + i, [&](auto& c) { return c.token == token(column); });
        };
        while (is_there()) column++;
        out[i] = {token(column), -INFINITE};
    }
}

void Chooser::filter(const float* logits, int size, const ChoiceSpec& spec, int64_t first) {
    const float top = logits[first] / spec.temperature;
    soften(logits, size, spec.temperature, top);
    for (int i = 0; i < size && spec.log_min_p > -INFINITE; i++)
        ratio_[i] = z_[i] - top >= spec.log_min_p ? ratio_[i] : 0.0f;
    if (spec.top_k > 0 && spec.top_k < size) keep_top_k((int)spec.top_k, top);
    if (spec.top_p < 1) keep_top_p(spec.top_p, top);
}

}  // namespace hunch
