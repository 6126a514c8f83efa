#include "lookup.h"

#include <algorithm>
#include <cmath>

namespace hunch {

namespace {

const int TIERS[NUM_TIERS] = {4, 2, 1};
const int LENGTHS[MAX_MATCH + 1] = {0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7};
const int DIFFER = 4, SECOND = 5, CLASSES = 8;

inline uint64_t mix(uint64_t state, int32_t token) {
    state = (state ^ ((uint64_t)token + 1)) * 0x9E3779B97F4A7C15ull;
    return state ^ (state >> 29);
}

// The key of the n-gram that ends before `end`; never 0, which marks a free place.
inline uint64_t key_of(const int32_t* end, int size) {
    uint64_t state = 0;
    for (int i = 1; i <= size; i++) state = mix(state, end[-i]);
    return state | 1;
}

}  // namespace

void Followers::clear() {
    keys.assign(256, 0);
    last.assign(256, 0);
    before.clear();
    used = 0;
}

int32_t Followers::find(uint64_t key) const {
    size_t mask = keys.size() - 1;
    for (size_t at = (key >> 20) & mask;; at = (at + 1) & mask) {
        if (keys[at] == key) return last[at];
        if (!keys[at]) return 0;
    }
}

void Followers::put(uint64_t key, int32_t place) {
    if (used * 2 >= keys.size()) grow();
    size_t mask = keys.size() - 1, at = (key >> 20) & mask;
    while (keys[at] && keys[at] != key) at = (at + 1) & mask;
    if (!keys[at]) used++;
    before.resize(place + 1, 0);
    before[place] = last[at];
    keys[at] = key;
    last[at] = place;
}

void Followers::grow() {
    std::vector<uint64_t> old_keys = std::move(keys);
    std::vector<int32_t> old_last = std::move(last);
    keys.assign(old_keys.size() * 2, 0);
    last.assign(old_last.size() * 2, 0);
    size_t mask = keys.size() - 1;
    for (size_t i = 0; i < old_keys.size(); i++) {
        if (!old_keys[i]) continue;
        size_t at = (old_keys[i] >> 20) & mask;
        while (keys[at]) at = (at + 1) & mask;
        keys[at] = old_keys[i];
        last[at] = old_last[i];
    }
}

Lookup::Lookup(const LookupSpec& spec, int64_t num_rows) : spec(spec), rows(num_rows) {
    for (int i = 0; i < NUM_TERMS; i++) {
        terms[i] = i < NUM_GUESS_TYPES ? spec.own_odds[i]
                                       : (spec.num_entries ? spec.level_odds[i - NUM_GUESS_TYPES] : 0.0);
        rates[i] = spec.first_rate;
    }
    for (int64_t row = 0; row < num_rows; row++) forget(row);
}

void Lookup::forget(int64_t at) {
    LookupRow& row = rows[at];
    row.tokens.clear();
    row.guesses.clear();
    for (Followers& tier : row.tiers) tier.clear();
    row.term[0] = row.term[1] = 0;
}

double Lookup::chance(int term, double odds) const {
    return 1.0 / (1.0 + std::exp(-terms[term] - odds));
}

void Lookup::learn(LookupRow& row, const int64_t* tokens, int64_t count) {
    int64_t limit = std::min(count, (int64_t)row.guesses.size());
    for (int64_t i = 0; i < limit; i++) {
        const Guess& guess = row.guesses[i];
        bool is_right = guess.token == tokens[i];
        double error = (is_right ? 1.0 : 0.0) - guess.chance;
        terms[guess.term] += rates[guess.term] * error;
        rates[guess.term] = std::max(spec.last_rate, rates[guess.term] * spec.fade);
        double& own = row.term[guess.term >= NUM_GUESS_TYPES];
        own = std::max(-spec.row_limit, std::min(spec.row_limit, own + spec.row_rate * error));
        if (!is_right) break;
    }
    row.guesses.clear();
}

void Lookup::follow(int64_t at, const int64_t* tokens, int64_t count) {
    LookupRow& row = rows[at];
    learn(row, tokens, count);
    size_t first = row.tokens.size();
    row.tokens.insert(row.tokens.end(), tokens, tokens + count);
    const int32_t* all = row.tokens.data();
    for (int tier = 0; tier < NUM_TIERS; tier++)
        for (size_t place = std::max(first, (size_t)TIERS[tier]); place < row.tokens.size(); place++)
            row.tiers[tier].put(key_of(all + place, TIERS[tier]), (int32_t)place);
}

// The longest match of the `size` tokens before `end`, and where what follows it stands.
Lookup::Match Lookup::find(const LookupRow& row, const int32_t* end, int size) const {
    Match match;
    const int32_t* tokens = row.tokens.data();
    for (int tier = 0; tier < NUM_TIERS; tier++) {
        const int least = TIERS[tier];
        int32_t place = size < least ? 0 : row.tiers[tier].find(key_of(end, least));
        if (!place) continue;
        int limit = std::min(size, MAX_MATCH);
        for (int asked = 0; place && asked < MAX_PLACES; asked++) {
            int length = least, most = std::min(limit, (int)place);
            if (least > 1)
                while (length < most && tokens[place - length - 1] == end[-length - 1]) length++;
            if (length > match.length) {
                match.length = length;
                match.count = 0;
            }
            if (length == match.length) match.places[match.count++] = place;
            place = row.tiers[tier].before[place];
        }
        break;
    }
    return match;
}

// The entry of the longest context known, or -1.
int64_t Lookup::entry(const int32_t* end, int size) const {
    int64_t found = -1;
    uint64_t state = 0;
    for (int i = 1; i <= std::min((int64_t)size, spec.max_order); i++) {
        state = mix(state, end[-i]);
        uint32_t hash = (uint32_t)(state >> 32), sort = hash >> (32 - spec.sort_bits);
        for (int32_t at = spec.starts[sort]; at < spec.starts[sort + 1]; at++)
            if (spec.hashes[at] == hash) {
                found = at;
                break;
            }
    }
    return found;
}

int64_t Lookup::guess(int64_t at, int64_t max_guesses, int64_t* out, double* chances) {
    LookupRow& row = rows[at];
    row.guesses.clear();
    const int64_t num_known = (int64_t)row.tokens.size();
    if (!num_known) return 0;
    // The end of the text, then the guesses: what a match may have to be compared with.
    int kept = (int)std::min<int64_t>(num_known, MAX_MATCH);
    std::vector<int32_t> tail(row.tokens.end() - kept, row.tokens.end());
    tail.reserve(kept + max_guesses);
    Match match = find(row, tail.data() + kept, kept);
    double path = 1.0;
    for (int64_t i = 0; i < max_guesses; i++) {
        const int32_t* end = tail.data() + tail.size();
        int32_t after[MAX_PLACES], token = -1;
        int term = -1, guess_type = NUM_GUESS_TYPES;
        double best = 0.0;
        int64_t entry = spec.num_entries ? this->entry(end, std::min((int)tail.size(), MAX_MATCH))
                                         : -1;
        if (match.length) {
            bool is_agreed = true;
            for (int p = 0; p < match.count; p++) {
                int32_t place = match.places[p];
                // A match that reaches the end of the text goes on with the guesses themselves.
                after[p] = place < num_known ? row.tokens[place]
                                             : row.guesses[place - num_known].token;
                is_agreed = is_agreed && after[p] == after[0];
            }
            token = after[0];
            guess_type = (is_agreed ? std::min(match.count, 4) - 1 : DIFFER) * CLASSES +
                         LENGTHS[match.length];
            double odds = row.term[0];
            if (spec.num_entries) {
                int seen = 0;
                if (entry >= 0)
                    seen = 1 + spec.levels[entry] + (spec.tokens[entry] == token ? 0 : NUM_LEVELS);
                odds += spec.seen_odds[seen] + spec.guess_trust[token] + spec.last_trust[end[-1]];
            }
            term = guess_type;
            best = chance(guess_type, odds);
        }
        if (entry >= 0 && spec.tokens[entry] != token) {
            int other = NUM_GUESS_TYPES + spec.levels[entry], versus = guess_type;
            for (int p = 1; match.length && p < match.count; p++)
                if (after[p] == spec.tokens[entry]) versus = SECOND * CLASSES + guess_type % CLASSES;
            double offered = chance(other, row.term[1] + spec.versus_odds[versus]);
            if (offered > best) token = spec.tokens[entry], term = other, best = offered;
        }
        path *= best;
        if (term < 0 || path < spec.min_chance) break;
        row.guesses.push_back({token, term, best});
        tail.push_back(token);
        out[i] = token;
        chances[i] = path;
        int left = 0;
        for (int p = 0; p < match.count; p++)
            if (after[p] == token) match.places[left++] = match.places[p] + 1;
        match.count = left;
        match.length = std::min(match.length + 1, MAX_MATCH);
        if (!left) match = find(row, tail.data() + tail.size(), std::min((int)tail.size(), MAX_MATCH));
    }
    return (int64_t)row.guesses.size();
}

}  // namespace hunch
