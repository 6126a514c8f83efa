// What drafting/pace.py says of lookups, in C++: a GPU's step is shorter than numpy's sixty calls.
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int FIRST = 0, NEXT = 1;  // guess
constexpr int MAX_SIZES = 8;

// Arrays by row of the engine, held by Python; the rest are drafting/pace.py's and record.py's numbers.
struct Pace {
    double *own[2], *doubt, *match, *before, *common;
    int64_t *guess, num_guesses;
    double hope[2], match_odds[2];
    double rate, common_rate, limit, low, high, floor, doubt_fade, slow;
};

double chance(const Pace& pace, double log_odds) {
    return std::min(std::max(1.0 / (1.0 + std::exp(-log_odds)), pace.low), pace.high);
}

struct Seen {
    int64_t right, asked;
};

// Moves a row's term by what was seen; returns the error that the common term shares.
double teach(const Pace& pace, double log_odds, double& own, Seen seen) {
    const double p = chance(pace, log_odds + own);
    const double error =
        (double(seen.right) - double(seen.asked) * p) / std::max(p * (1.0 - p), pace.floor);
    own = std::min(std::max(own + pace.rate * error, -pace.limit), pace.limit);
    return error;
}

// Leading tokens that were guessed.
int64_t run_of(const int64_t* tokens, const int64_t* guess, int64_t most) {
    int64_t run = 0;
    while (run < most && tokens[run] == guess[run]) run++;
    return run;
}

struct Chances {
    double first, next;
    // Tokens that so many guesses bring.
    double gain(double size) const { return first * (1.0 - std::pow(next, size)) / (1.0 - next); }
};

Chances chances_of(const Pace& pace, int64_t row, double doubt) {
    double p[2];
    for (int place : {FIRST, NEXT}) {
        const double hint = pace.match_odds[place] * pace.match[row];
        const double term = pace.hope[place] + pace.common[place] + pace.own[place][row];
        p[place] = chance(pace, term + hint - doubt);
    }
    return {p[FIRST], p[NEXT]};
}

}  // namespace

extern "C" {

// Of each row: tokens it said (num of up to num_tokens), new guesses and the match behind them;
// rows of what is given stand `stride` numbers apart.
void hunch_pace_learn(const Pace* held, int64_t num_rows, const int64_t* rows, int64_t stride,
                      const int64_t* num, const int64_t* tokens, int64_t num_tokens,
                      const int64_t* guess, const int64_t* matched) {
    const Pace& pace = *held;
    const int64_t most = std::min(num_tokens, pace.num_guesses), last = pace.num_guesses - 1;
    const double term[2] = {pace.hope[0] + pace.common[0], pace.hope[1] + pace.common[1]};
    double errors[2] = {0.0, 0.0};
    int64_t taught[2] = {0, 0};
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t row = rows[r], at = r * stride, match = matched[at];
        int64_t* held_guess = pace.guess + row * pace.num_guesses;
        const int64_t said = std::min(num[at], most);
        const int64_t run = std::min(run_of(tokens + at, held_guess, most), said);
        const bool is_missed = run < said;
        const int64_t right = std::min(std::max<int64_t>(run - 1, 0), last);
        const bool is_next_missed = is_missed && run > 0 && run <= last;
        const Seen seen[2] = {{run > 0, run > 0 || is_missed}, {right, right + is_next_missed}};
        for (int place : {FIRST, NEXT}) {
            if (!seen[place].asked) continue;
            const double hint = pace.match_odds[place] * pace.before[row];
            errors[place] += teach(pace, term[place] + hint, pace.own[place][row], seen[place]);
            taught[place]++;
        }
        pace.doubt[row] *= 1.0 - pace.doubt_fade;
        pace.before[row] = pace.match[row];
        pace.match[row] = std::log2(1.0 + double(match));
        for (int64_t g = 0; g < pace.num_guesses; g++)
            held_guess[g] = match > 0 ? guess[at + g] : -1;
    }
    for (int place : {FIRST, NEXT})
        if (taught[place])
            pace.common[place] +=
                pace.common_rate * pace.rate * errors[place] / double(taught[place]);
}

// Tokens beside the bonus that a step of each size would bring a row.
void hunch_pace_gains(const Pace* held, int64_t num_rows, const int64_t* rows, const int64_t* left,
                      int64_t is_flowing, int64_t num_sizes, const int64_t* sizes, double* gains) {
    const Pace& pace = *held;
    const bool is_slow = num_rows > 1 && !is_flowing;
    const double doubled = is_slow ? std::log2(double(num_rows)) : 0.0;
    const double longest = double(*std::max_element(left, left + num_rows));
    double total[MAX_SIZES] = {}, least[MAX_SIZES], shares = 0.0;
    std::fill(least, least + MAX_SIZES, 1e30);
    for (int64_t r = 0; r < num_rows; r++) {
        const double share = is_slow ? std::pow(double(left[r]) / longest, pace.slow) : 1.0;
        shares += share;
        const Chances chances = chances_of(pace, rows[r], doubled * pace.doubt[rows[r]]);
        for (int64_t s = 0; s < num_sizes; s++) {
            const double gain = chances.gain(double(sizes[s]));
            total[s] += is_slow ? share * std::pow(1.0 + gain, -pace.slow) : gain;
            least[s] = std::min(least[s], gain);
        }
    }
    for (int64_t s = 0; s < num_sizes; s++) {
        const double mean = total[s] / shares;
        if (is_slow)
            gains[s] = std::pow(mean, -1.0 / pace.slow) - 1.0;
        else
            gains[s] = num_rows > 1 ? 0.5 * (mean + least[s]) : mean;
    }
}
}
