// Suffix lookup for the rows of an engine: what kernels/guided.py says, in C++.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hunch {

constexpr int MAX_MATCH = 16, MAX_PLACES = 12, NUM_TIERS = 3, NUM_LEVELS = 16;
constexpr int NUM_GUESS_TYPES = 48, NUM_TERMS = NUM_GUESS_TYPES + NUM_LEVELS;

// What guesses are worth, and a phrase table or none (num_entries 0; the other pointers null).
struct LookupSpec {
    const double* own_odds;  // [NUM_GUESS_TYPES]
    int64_t num_entries, max_order, sort_bits, vocab_size;
    const uint32_t* hashes;  // sorted
    const int32_t* tokens;
    const uint8_t* levels;
    const int32_t* starts;  // the first entry for each value of a hash's first sort_bits
    const double *seen_odds, *level_odds, *versus_odds;
    const double *guess_trust, *last_trust;  // by token
    double min_chance, first_rate, last_rate, fade, row_rate, row_limit;
};

// n-gram -> the place of what followed it last, and before that, ...; no place is 0.
struct Followers {
    std::vector<uint64_t> keys;  // 0: free
    std::vector<int32_t> last;
    std::vector<int32_t> before;  // by place
    size_t used = 0;

    void clear();
    int32_t find(uint64_t key) const;
    void put(uint64_t key, int32_t place);
    void grow();
};

struct Guess {
    int32_t token, term;
    double chance;  // given that those before it are right
};

struct LookupRow {
    std::vector<int32_t> tokens;
    Followers tiers[NUM_TIERS];
    std::vector<Guess> guesses;
    double term[2] = {0, 0};  // log-odds by which own text and table are better here than elsewhere
};

class Lookup {
   public:
    Lookup(const LookupSpec& spec, int64_t num_rows);
    void forget(int64_t row);
    void follow(int64_t row, const int64_t* tokens, int64_t count);
    // Chances are those of whole paths. Returns how many guesses there are.
    int64_t guess(int64_t row, int64_t max_guesses, int64_t* tokens, double* chances);

   private:
    struct Match {
        int length = 0, count = 0;
        int32_t places[MAX_PLACES];
    };
    void learn(LookupRow& row, const int64_t* tokens, int64_t count);
    Match find(const LookupRow& row, const int32_t* end, int size) const;
    int64_t entry(const int32_t* end, int size) const;
    double chance(int term, double odds) const;

    LookupSpec spec;
    double terms[NUM_TERMS], rates[NUM_TERMS];
    std::vector<LookupRow> rows;
};

}  // namespace hunch
