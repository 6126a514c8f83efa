#include "successors.h"

#include <algorithm>
#include <cmath>

namespace hunch {

namespace {

const int CERTAIN = 255, MAX_WIDTH = 8, BY_CHAIN = -1, NO_PLACE = -2;

// Of equals the first one is taken first.
bool is_less(const Successor& a, const Successor& b) {
    return a.path != b.path ? a.path < b.path : a.serial > b.serial;
}

int level_of(int share) {
    return std::min(NUM_SHARES - 1, (int)(2 * std::log2((double)(CERTAIN * CERTAIN) / share)));
}

}  // namespace

SuccessorTrees::SuccessorTrees(const SuccessorSpec& spec, int64_t num_rows)
    : spec(spec), rows(num_rows) {
    for (int i = 0; i < NUM_SHARES; i++) terms[i] = spec.odds[i], rates[i] = spec.first_rate;
}

void SuccessorTrees::follow(int64_t at, const int64_t* tokens, int64_t count) {
    SuccessorRow& row = rows[at];
    learned.swap(row.guesses);
    row.guesses.clear();
    int parent = -1;
    for (int64_t i = 0; i < count; i++) {
        row.before = row.last;
        row.last = (int32_t)tokens[i];
        if (parent < (int)learned.size()) parent = learn(row, learned, parent, tokens[i]);
    }
}

int SuccessorTrees::learn(SuccessorRow& row, const std::vector<Successor>& guesses, int parent,
                          int64_t token) {
    int right = (int)guesses.size();
    for (int n = 0; n < (int)guesses.size(); n++)
        if (guesses[n].parent == parent && guesses[n].token == token) right = n;
    if (right < (int)guesses.size() && guesses[right].level == BY_CHAIN) return right;
    for (const Successor& guess : guesses) {
        if (guess.parent != parent || guess.level == BY_CHAIN) continue;
        double error = (guess.token == token ? 1.0 : 0.0) - guess.own;
        double& rate = rates[guess.level];
        terms[guess.level] += rate * error;
        rate = std::max(spec.last_rate, rate * spec.fade);
        row.term = std::max(-spec.row_limit, std::min(spec.row_limit, row.term + spec.row_rate * error));
    }
    return right;
}

// Successors.find: each token once, those of the pair first.
int SuccessorTrees::find(int32_t before, int32_t last, Found* found) const {
    int count = 0, left = CERTAIN;
    const int64_t pair = (int64_t)before * (1ll << 32) | last;
    const uint64_t product = (uint64_t)pair * 0x9E3779B97F4A7C15ull;
    const int64_t slot = (int64_t)(product >> 32) & (spec.num_slots - 1);
    if (before >= 0 && spec.pair[slot] == pair) {
        for (int w = 0; w < spec.width; w++) {
            const int32_t packed = spec.after_pair[slot * spec.width + w];
            if (!(packed & 255)) continue;
            found[count++] = {packed >> 8, (packed & 255) * CERTAIN};
            left -= packed & 255;
        }
    }
    const int num_pair = count;
    for (int w = 0; w < spec.width && left > 0 && last >= 0; w++) {
        const int32_t packed = spec.after_token[(int64_t)last * spec.width + w];
        if (!(packed & 255)) continue;
        bool is_known = false;
        for (int i = 0; i < num_pair; i++) is_known = is_known || found[i].token == packed >> 8;
        if (!is_known) found[count++] = {packed >> 8, (packed & 255) * left};
    }
    return count;
}

void SuccessorTrees::push(const Successor& guess) {
    if (!(guess.path > spec.min_chance)) return;
    heap.push_back(guess);
    heap.back().serial = serial++;
    std::push_heap(heap.begin(), heap.end(), is_less);
}

int64_t SuccessorTrees::guess(int64_t at, int64_t most, const int64_t* chain, const double* chances,
                              int64_t num_chain, int64_t* tokens, int64_t* parents, double* paths) {
    SuccessorRow& row = rows[at];
    std::vector<Successor>& guesses = row.guesses;
    guesses.clear();
    heap.clear();
    serial = 0;
    double chance[2][NUM_SHARES];  // of the levels; beside a guess of the chain
    for (int i = 0; i < NUM_SHARES; i++) {
        chance[0][i] = 1.0 / (1.0 + std::exp(-terms[i] - row.term));
        chance[1][i] = 1.0 / (1.0 + std::exp(-terms[i] - row.term - spec.beside));
    }
    most = std::min(most, spec.num_nodes);
    Successor parent{row.last, -1, 1.0, 1.0, BY_CHAIN, -1, 0, 0};
    while ((int64_t)guesses.size() < most) {
        const int32_t number = (int32_t)guesses.size() - 1;
        const int32_t place = parent.place + 1, depth = parent.depth + 1;
        const int32_t before = !parent.depth        ? row.before
                               : parent.parent >= 0 ? guesses[parent.parent].token
                                                    : row.last;
        Found found[2 * MAX_WIDTH];
        const int count = depth <= spec.depth ? find(before, parent.token, found) : 0;
        double left = 1.0;  // the chance that the chain's guess is wrong
        int32_t guessed = -1;
        const double* level_chance = chance[0];
        if (place >= 0 && place < num_chain) {
            guessed = (int32_t)chain[place];
            double own = place ? chances[place] / chances[place - 1] : chances[place];
            left -= own;
            level_chance = chance[1];
            for (int i = 0; i < count; i++)
                if (found[i].token == guessed) own += left * level_chance[level_of(found[i].share)];
            push({guessed, number, parent.path * own, 0.0, BY_CHAIN, place, depth, 0});
        }
        for (int i = 0; i < count; i++) {
            if (found[i].token == guessed) continue;
            const int level = level_of(found[i].share);
            const double own = level_chance[level];
            push({found[i].token, number, parent.path * (left * own), own, level, NO_PLACE, depth, 0});
        }
        if (heap.empty()) break;
        std::pop_heap(heap.begin(), heap.end(), is_less);
        parent = heap.back();
        heap.pop_back();
        tokens[guesses.size()] = parent.token;
        parents[guesses.size()] = parent.parent;
        paths[guesses.size()] = parent.path;
        guesses.push_back(parent);
    }
    return (int64_t)guesses.size();
}

}  // namespace hunch
