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

// Keeps its scratch memory from call to call: one per thread.
class Chooser {
public:
    int64_t choose(const float* logits, int size, const ChoiceSpec& spec);

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
    void keep_top_k(int count, float top);
    void keep_top_p(double share, float top);
    void cut(float edge, int last);
    int64_t draw(int64_t first, const ChoiceSpec& spec) const;

    std::vector<float> z_;      // logits / temperature
    std::vector<float> ratio_;  // e^(z - largest z); 0: removed
    std::vector<float> peak_;   // largest z of each SPAN tokens
    std::vector<Entry> some_;   // tokens near the top, being ranked
};

}  // namespace hunch
