// Products shared out among threads, and the inputs that layers keep for them.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "gemm.h"
#include "pool.h"
#include "rowmath.h"

namespace hunch {

constexpr int CHANNELS = 32;  // output channels of most work items: a group of the next input

// One work item: some channels of some rows.
struct Item {
    int row, count, part, first, last;
};

// Calls body(item) for `num_channels` channels of all rows, `size` channels at a time.
template <class Body>
void each_item(Worker& worker, int num_rows, int num_channels, int size, Body&& body) {
    const int num_parts = (num_channels + size - 1) / size;
    const int num_chunks = (num_rows + ROW_CHUNK - 1) / ROW_CHUNK;
    worker.each(num_chunks * num_parts, [&](int index) {
        const int row = index / num_parts * ROW_CHUNK, count = std::min(ROW_CHUNK, num_rows - row);
        const int part = index % num_parts, first = part * size;
        body(Item{row, count, part, first, std::min(first + size, num_channels)});
    });
}

// An item's products, [count][stride].
inline void multiply(const Matrix& w, const Item& item, const Input& input, float* out, int stride,
                     std::vector<uint8_t>& panel) {
    multiply(w, item.first, item.last, input, item.row, item.count, out, stride, Scratch{panel.data()});
}

// An item's products, plus a bias that may be null, to their place in `to`, [row][width].
inline void put_item(const Item& item, float* out, int stride, const float* bias, float* to, int width) {
    const int num = item.last - item.first;
    for (int r = 0; r < item.count; r++, out += stride) {
        if (bias) add_bias(out, bias + item.first, num);
        std::memcpy(to + (size_t)(item.row + r) * width + item.first, out, num * sizeof(float));
    }
}

// The forms of input that matrices read.
struct Forms {
    bool has_int = false, has_float = false, has_sums = false;
    void note(const Matrix* w) {  // may be null
        if (!w) return;
        (w->format == Format::FLOAT ? has_float : has_int) = true;
        has_sums = has_sums || w->format == Format::K2;
    }
};

// An input with its memory.
struct HeldInput : Input {
    void reserve(const Forms& forms, int num_rows) {
        if (forms.has_int) tile_memory_.resize(bytes_for(num_rows));
        if (forms.has_float) row_memory_.resize((size_t)num_rows * num_in);
        tiles = forms.has_int ? tile_memory_.data() : nullptr;
        if (forms.has_sums) sum_memory_.resize((size_t)num_rows * 2 * num_groups());
        rows = forms.has_float ? row_memory_.data() : nullptr;
        sums = forms.has_sums ? sum_memory_.data() : nullptr;
    }

private:
    std::vector<uint8_t> tile_memory_;
    std::vector<float> row_memory_, sum_memory_;
};

}  // namespace hunch
