// Trees of likely successors beside a lookup's chain: what kernels/successor_trees.py says, in C++.
#pragma once
#include <cstdint>
#include <vector>

namespace hunch {

constexpr int NUM_SHARES = 16;  // levels of the chances that a table gives

// The table, as kernels/successors.py has it, and how chances are learned.
struct SuccessorSpec {
    const int64_t* pair;         // [num_slots]
    const int32_t* after_pair;   // [num_slots][width]
    const int32_t* after_token;  // [token][width]
    const double* odds;          // [NUM_SHARES]
    int64_t num_slots, width, num_nodes, depth;
    double min_chance, beside, first_rate, last_rate, fade, row_rate, row_limit;
};

struct Successor {
    int32_t token, parent;  // index among the guesses; -1: the row's last token
    double path;            // the chance of all tokens up to here
    double own;             // the chance that the level gives it
    int32_t level, place, depth, serial;
};

struct SuccessorRow {
    int32_t before = -1, last = -1;
    double term = 0;
    std::vector<Successor> guesses;
};

class SuccessorTrees {
   public:
    SuccessorTrees(const SuccessorSpec& spec, int64_t num_rows);
    void forget(int64_t row) { rows[row] = SuccessorRow(); }
    void follow(int64_t row, const int64_t* tokens, int64_t count);
    // `chain`: the lookup's guesses, and the chances of the paths to them. Returns how many nodes.
    int64_t guess(int64_t row, int64_t most, const int64_t* chain, const double* chances,
                  int64_t num_chain, int64_t* tokens, int64_t* parents, double* paths);

   private:
    struct Found {
        int32_t token, share;
    };
    int find(int32_t before, int32_t last, Found* found) const;
    int learn(SuccessorRow& row, const std::vector<Successor>& guesses, int parent, int64_t token);
    void push(const Successor& guess);

    SuccessorSpec spec;
    double terms[NUM_SHARES], rates[NUM_SHARES];
    std::vector<SuccessorRow> rows;
    std::vector<Successor> heap, learned;
    int32_t serial = 0;  // of the next guess
};

}  // namespace hunch
