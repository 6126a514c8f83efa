#include "scores.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace hunch {

namespace {

constexpr double MASS = 1099511627776.0;  // 2^40: units of probability
constexpr double FAINT = -27.8;           // a token this far below the best has less than a unit

struct Entry {
    float x;
    int64_t id;
};

bool is_before(const Entry& a, const Entry& b) { return a.x != b.x ? a.x > b.x : a.id < b.id; }

// log of the sum of e^x: an integer sum of mass, so that its order does not matter.
double log_normaliser(const float* x, int64_t size, float top) {
    int64_t mass = 0;
    for (int64_t i = 0; i < size; i++) {
        double gap = x[i] == top ? 0.0 : (double)x[i] - (double)top;
        if (gap > FAINT) mass += (int64_t)(std::exp(gap) * MASS);
    }
    return (double)top + std::log((double)mass / MASS);
}

// The best few. Tokens come by id, so that one equal to the last of a full heap is behind it.
void find_best(const float* x, int64_t size, int64_t count, std::vector<Entry>& heap) {
    heap.clear();
    for (int64_t i = 0; i < size; i++) {
        if ((int64_t)heap.size() < count) {
            heap.push_back({x[i], i});
            std::push_heap(heap.begin(), heap.end(), is_before);
        } else if (x[i] > heap.front().x) {
            std::pop_heap(heap.begin(), heap.end(), is_before);
            heap.back() = {x[i], i};
            std::push_heap(heap.begin(), heap.end(), is_before);
        }
    }
    std::sort_heap(heap.begin(), heap.end(), is_before);
}

}  // namespace

int64_t score_row(const float* x, int64_t size, int64_t token, int64_t num_best, int64_t* ids,
                  float* values) {
    thread_local std::vector<Entry> heap;
    float top = x[0], own = x[token];
    int64_t num_before = 0;
    for (int64_t i = 0; i < size; i++) {
        top = std::max(top, x[i]);
        num_before += (x[i] > own) | ((x[i] == own) & (i < token));
    }
    double norm = log_normaliser(x, size, top);
    ids[0] = token;
    if (num_best) find_best(x, size, num_best, heap);
    for (int64_t i = 0; i < num_best; i++) ids[1 + i] = heap[i].id;
    for (int64_t i = 0; i <= num_best; i++) {
        float value = x[ids[i]];
        bool is_removed = value == -std::numeric_limits<float>::infinity();
        values[i] = is_removed ? value : (float)((double)value - norm);
    }
    return num_before + 1;
}

}  // namespace hunch
