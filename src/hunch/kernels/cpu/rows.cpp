#include "rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "half.h"
#include "simd.h"

namespace hunch {
namespace {

constexpr int STEP = 2 * P;             // inputs that enter both vectors of sums once
constexpr int ROWS = P == 8 ? 2 : 4;    // rows and channels whose sums fit the registers
constexpr int CHANNELS = 2;
constexpr int PART = 16;                // channels of one work item
constexpr int64_t MIN_SHARED = 1 << 16; // products below which waking the team costs more

int padded(int num_in) { return (num_in + STEP - 1) / STEP * STEP; }

float sum_of(vf a, vf b) {
    float lanes[P];
    store(lanes, add(a, b));
    float total = 0;
    for (float lane : lanes) total += lane;
    return total;
}

// out[r * stride + c] for R rows of x and C channels of w; both padded with zeros to `size`.
template <int R, int C>
void tile(const float* x, const float* const* w, int size, float* out, int stride) {
    vf sums[R][C][2];
    HUNCH_UNROLL for (int r = 0; r < R; r++)
        HUNCH_UNROLL for (int c = 0; c < C; c++) sums[r][c][0] = sums[r][c][1] = zero();
    for (int k = 0; k < size; k += STEP)
        HUNCH_UNROLL for (int half = 0; half < 2; half++) {
            vf weight[C];
            HUNCH_UNROLL for (int c = 0; c < C; c++) weight[c] = load(w[c] + k + half * P);
            HUNCH_UNROLL for (int r = 0; r < R; r++) {
                vf input = load(x + (size_t)r * size + k + half * P);
                HUNCH_UNROLL for (int c = 0; c < C; c++)
                    sums[r][c][half] = fma(sums[r][c][half], input, weight[c]);
            }
        }
    HUNCH_UNROLL for (int r = 0; r < R; r++)
        HUNCH_UNROLL for (int c = 0; c < C; c++)
            out[(size_t)r * stride + c] = sum_of(sums[r][c][0], sums[r][c][1]);
}

template <int C>
void channels(const float* x, int num_rows, const float* const* w, int size, float* out, int stride) {
    int r = 0;
    for (; r + ROWS <= num_rows; r += ROWS)
        tile<ROWS, C>(x + (size_t)r * size, w, size, out + (size_t)r * stride, stride);
    for (; r < num_rows; r++)
        tile<1, C>(x + (size_t)r * size, w, size, out + (size_t)r * stride, stride);
}

// A channel's weights as floats, padded: in place where they are that already.
const float* read_channel(const void* w, Stored stored, int channel, int num_in, float* room) {
    size_t at = (size_t)channel * num_in;
    if (stored == Stored::FLOAT32) {
        const float* found = (const float*)w + at;
        if (padded(num_in) == num_in) return found;
        std::memcpy(room, found, num_in * sizeof(float));
        return room;
    }
    const uint16_t* found = (const uint16_t*)w + at;
    if (stored == Stored::BFLOAT16) {
        for (int k = 0; k < num_in; k++) room[k] = float_of_bits((uint32_t)found[k] << 16);
        return room;
    }
    int k = 0;
    for (; k + P <= num_in; k += P) store(room + k, load_half(found + k));
    for (; k < num_in; k++) room[k] = from_half(found[k]);
    return room;
}

}  // namespace

void multiply_rows(Team& team, const float* x, int num_rows, int num_in, const void* w,
                   Stored stored, int num_out, float* out) {
    const int size = padded(num_in), num_parts = (num_out + PART - 1) / PART;
    std::vector<float> wide;
    if (size != num_in) {
        wide.assign((size_t)num_rows * size, 0.0f);
        for (int r = 0; r < num_rows; r++)
            std::memcpy(&wide[(size_t)r * size], x + (size_t)r * num_in, num_in * sizeof(float));
        x = wide.data();
    }
    auto compute = [&](int item, float* room) {
        int last = std::min(num_out, (item + 1) * PART);
        for (int n = item * PART; n < last; n += CHANNELS) {
            int count = std::min(CHANNELS, last - n);
            const float* weights[CHANNELS];
            for (int c = 0; c < count; c++)
                weights[c] = read_channel(w, stored, n + c, num_in, room + (size_t)c * size);
            if (count == CHANNELS)
                channels<CHANNELS>(x, num_rows, weights, size, out + n, num_out);
            else
                channels<1>(x, num_rows, weights, size, out + n, num_out);
        }
    };
    if ((int64_t)num_rows * num_in * num_out < MIN_SHARED) {
        std::vector<float> room((size_t)CHANNELS * size);
        for (int item = 0; item < num_parts; item++) compute(item, room.data());
        return;
    }
    team.run([&](Worker& worker) {
        std::vector<float> room((size_t)CHANNELS * size);
        worker.each(num_parts, [&](int item) { compute(item, room.data()); });
    });
}

}  // namespace hunch
