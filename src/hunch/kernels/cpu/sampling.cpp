#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "vecmath.h"

namespace hunch {

namespace {

constexpr float NO_MASS = -28.0f;            // e^less is under one unit of mass
constexpr double MASS = 1099511627776.0;     // 2^40
constexpr float MAX_GUMBEL = 23.0f;          // above what any word gives (22.87)

struct Words {
    uint32_t w[4];
};

// Philox4x32-10.
Words philox(uint32_t block, const ChoiceSpec& spec) {
    uint32_t c0 = block, c1 = (uint32_t)spec.position, c2 = (uint32_t)spec.sample_index;
    uint32_t c3 = (uint32_t)spec.stream, k0 = (uint32_t)spec.seed, k1 = (uint32_t)(spec.seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

float gumbel(uint32_t word) {
    float v = std::min(((float)word + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
    return -std::log(-std::log1p(-v));
}

int64_t argmax(const float* x, int size) {
    vf best = set1(-std::numeric_limits<float>::infinity());
    int i = 0;
    for (; i + P <= size; i += P) best = max(best, load(x + i));
    float top = max_lane(best);
    for (; i < size; i++) top = x[i] > top ? x[i] : top;
    for (i = 0; i < size; i++)
        if (x[i] == top) return i;
    return 0;
}

// Keeps the `count` best of ids (ascending), ascending; of equals, the lower ids.
int keep_best(const float* z, int* ids, int num, int count, float* scratch) {
    for (int i = 0; i < num; i++) scratch[i] = z[ids[i]];
    std::nth_element(scratch, scratch + count - 1, scratch + num, std::greater<float>());
    float edge = scratch[count - 1];
    int num_above = 0;
    for (int i = 0; i < num; i++) num_above += z[ids[i]] > edge;
    int at_edge = count - num_above, kept = 0;
    for (int i = 0; i < num; i++) {
        float x = z[ids[i]];
        if (x > edge || (x == edge && at_edge-- > 0)) ids[kept++] = ids[i];
    }
    return kept;
}

// Keeps the most likely of ids (ascending) that hold top_p of their mass, ascending.
int keep_nucleus(const float* z, float top, int* ids, int num, double top_p) {
    struct Entry {
        float gap;
        int id;
        int64_t mass;
    };
    thread_local std::vector<Entry> entries;
    entries.resize(num);
    int64_t total = 0;
    for (int i = 0; i < num; i += P) {
        float lanes[P] = {};
        for (int j = 0; j < P && i + j < num; j++) lanes[j] = z[ids[i + j]] - top;
        vf gap = load(lanes);
        float masses[P];
        store(masses, exp(gap));
        for (int j = 0; j < P && i + j < num; j++) {
            int64_t mass = (int64_t)((double)masses[j] * MASS);
            entries[i + j] = {lanes[j], ids[i + j], mass};
            total += mass;
        }
    }
    double limit = top_p * (double)total;
    auto before = [](const Entry& a, const Entry& b) {
        return a.gap != b.gap ? a.gap > b.gap : a.id < b.id;
    };
    int64_t sum = 0;
    int kept = 0;
    // The nucleus is near the top: order only as much as is needed, band by band.
    auto from = entries.begin();
    for (float depth : {-2.0f, -4.0f, -7.0f, -11.0f, -16.0f, NO_MASS - 1}) {
        auto to = std::partition(from, entries.end(), [&](const Entry& e) { return e.gap >= depth; });
        std::sort(from, to, before);
        for (; from != to; ++from) {
            if ((double)sum >= limit) goto done;
            sum += from->mass;
            ids[kept++] = from->id;
        }
    }
done:
    std::sort(ids, ids + kept);
    return kept;
}

// The best of z + noise over all tokens. Blocks whose best could not win get no noise.
int64_t draw_all(const float* z, int size, float top, const ChoiceSpec& spec) {
    float best = -std::numeric_limits<float>::infinity();
    int64_t chosen = 0;
    // First the tokens near the top: their best score then rules out nearly all others.
    for (float depth : {-6.0f, -std::numeric_limits<float>::infinity()}) {
        for (int first = 0; first < size; first += 4) {
            int count = std::min(4, size - first);
            float highest = z[first];
            for (int j = 1; j < count; j++) highest = std::max(highest, z[first + j]);
            bool is_near = highest - top >= -6.0f;
            if (is_near != (depth == -6.0f) || highest + MAX_GUMBEL < best) continue;
            Words words = philox((uint32_t)first >> 2, spec);
            for (int j = 0; j < count; j++) {
                if (!(z[first + j] + MAX_GUMBEL >= best)) continue;
                float score = z[first + j] + gumbel(words.w[j]);
                if (score > best || (score == best && first + j < chosen)) {
                    best = score;
                    chosen = first + j;
                }
            }
        }
    }
    return chosen;
}

}  // namespace

int64_t choose(const float* logits, int size, const ChoiceSpec& spec, float* scratch, int* ids) {
    int64_t first = argmax(logits, size);
    if (!(spec.temperature > 0)) return first;
    float top = logits[first] / spec.temperature;
    if (!std::isfinite(top)) return first;
    float* z = scratch;
    vf divisor = set1(spec.temperature);
    int i = 0;
    for (; i + P <= size; i += P) store(z + i, div(load(logits + i), divisor));
    for (; i < size; i++) z[i] = logits[i] / spec.temperature;
    bool has_top_p = spec.top_p < 1, has_top_k = spec.top_k > 0 && spec.top_k < size;
    float floor = has_top_p ? std::max(spec.log_min_p, NO_MASS) : spec.log_min_p;
    if (!has_top_p && !has_top_k && std::isinf(floor)) return draw_all(z, size, top, spec);

    int num = 0;
    for (i = 0; i < size; i++) {
        ids[num] = i;
        num += z[i] - top >= floor;
    }
    if (has_top_k && num > spec.top_k) num = keep_best(z, ids, num, (int)spec.top_k, scratch + size);
    if (has_top_p) num = keep_nucleus(z, top, ids, num, spec.top_p);
    if (num == 0) return first;
    float best = -std::numeric_limits<float>::infinity();
    int64_t chosen = ids[0];
    for (i = 0; i < num; i++) {
        int id = ids[i];
        Words words = philox((uint32_t)id >> 2, spec);
        float score = z[id] + gumbel(words.w[id & 3]);
        if (score > best) best = score, chosen = id;
    }
    return chosen;
}

}  // namespace hunch
