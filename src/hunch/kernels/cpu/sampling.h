// Choosing a token: the argmax, or the filters and keyed noise of sampling/filters.py and
// kernels/noise.py, whose definitions these follow.
#pragma once
#include <cstdint>
#include <vector>

namespace hunch {

struct ChoiceSpec {
    float temperature;  // 0: argmax
    int64_t top_k;      // 0: all
    double top_p;       // 1: all
    float log_min_p;    // -inf: all
    int64_t seed, sample_index, position, stream;
};

// A token that may follow, and the log of its share among those that were compared.
struct Candidate {
    int64_t token;
    float gain;
};

// Where a drafter's logits cover a part of the vocabulary, ids[column] is the token, which the noise
// belongs to; null: all of it.
//
// Keeps its scratch memory from call to call: one per thread.
class Chooser {
public:
    int64_t choose(const float* logits, int size, const ChoiceSpec& spec,
                   const int64_t* ids = nullptr);
    // The best few by what `choose` compares, best first; noise goes to the likeliest `NEAR` alone,
    // and the first is exactly what `choose` gives. Where filters leave fewer, some others follow
    // with a gain of -infinity. num is at most size.
    void best(const float* logits, int size, const ChoiceSpec& spec, const int64_t* ids, int num,
              Candidate* out);
    static constexpr int NEAR = 128;

private:
    struct Entry {
        float z;
        int id;
        int64_t mass;
    };
    static bool is_before(const Entry& a, const Entry& b) {
        return a.z != b.z ? a.z > b.z : a.id < b.id;
    }
    void soften(const float* logits, int size, float temperature, float top);
    void gather(float from, float below);
    void gather_near(int count, float top);
    void keep_top_k(int count, float top);
    void keep_top_p(double share, float top);
    void cut(float edge, int last);
    void filter(const float* logits, int size, const ChoiceSpec& spec, int64_t first);
    void keep_near(int count, float top);
    int64_t draw(int64_t first, const ChoiceSpec& spec) const;
    int64_t draw_columns(int64_t first, const ChoiceSpec& spec, const int64_t* ids) const;

    std::vector<float> z_;      // logits / temperature
    std::vector<float> ratio_;  // e^(z - largest z); 0: removed
    std::vector<float> peak_;   // largest z of each SPAN tokens
    std::vector<Entry> some_;   // tokens near the top, being ranked
};

}  // namespace hunch
