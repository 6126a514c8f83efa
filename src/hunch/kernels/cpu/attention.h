// Paged attention over positions in fixed tiles.
//
// A query's scores, weights and sums over one tile of positions depend on nothing but the query and
// the keys and values at those positions; tiles are then merged in order. So neither the rows
// computed together, nor the chunks a prompt came in, nor the threads can change a bit.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "kept.h"
#include "pool.h"
#include "simd.h"

namespace hunch {

constexpr int TILE = 128;        // positions whose softmax is computed at once
constexpr int MAX_HEAD_DIM = 1024;
constexpr int MAX_HALF_DIM = 256;  // longer sums of products are never made in half floats
constexpr float LOG2_E = 1.44269504f;
constexpr int MAX_QUERIES = 48;  // (row, head) pairs that share the keys of a tile

// Where each packed token writes its KV and finds its keys; the fields are those of AttnInputs.
struct Places {
    int num_rows;
    const int64_t *pos, *slot, *seq, *base, *table, *tree;
    int64_t table_stride, tree_stride, block_size;

    // Positions below this are found in the block table.
    int64_t table_end(int row) const {
        return tree && base[row] <= pos[row] ? base[row] : pos[row] + 1;
    }
};

struct Heads {
    int num_heads, num_kv_heads, head_dim;
    // A KV head's queries are computed in groups of so many, all of which read the same keys.
    int group() const { return num_heads / num_groups(); }
    int num_groups() const { return num_kv_heads * num_parts(); }
    int kv_head_of(int group) const { return group / num_parts(); }

private:
    int num_parts() const {
        const int all = num_heads / num_kv_heads;
        int parts = 1;
        while (all % parts || all / parts > MAX_QUERIES) parts++;
        return parts;
    }
};

// One layer.
struct AttnCall {
    const float* q;  // [row][head][head_dim], scaled so that scores are in units of log2
    Kept k, v;
    int64_t window;      // positions a token sees; below 0: those of its chunk; 0: all
    float cap;           // scores s become cap * tanh(s / cap), in their units; 0: as they are
    const float* sinks;  // may be null; [head], scores (not in log2) that join the softmax
    const float* alibi = nullptr;  // [head][position], added to scores (not in log2) of this key
    int64_t alibi_stride = 0;

    // The first position that a token at `pos` sees.
    int64_t first_seen(int64_t pos) const {
        if (window < 0) return pos / -window * -window;
        return window > 0 && pos >= window ? pos - window + 1 : 0;
    }
};

// Rows of one sequence that are computed together.
struct RowBlock {
    int first, last;
    int widest;          // the row that looks back from the highest position
    int64_t shared_end;  // positions below are in the same slots for every row of the block
    int64_t highest;
    size_t at;           // its places in Attention::at_
};

struct TileOf {
    int group, tile;
};

class Attention {
public:
    Attention(const Heads& heads, const Places& places, int num_threads);

    // Called by every thread of the team; all rows are done when it returns.
    void run(Worker& worker, const AttnCall& call, float* scratch);
    // The result of a row after `run`, [head][head_dim].
    void read_row(int row, const AttnCall& call, float* out) const;

    static size_t scratch_floats(const Heads& heads);

    Attention(const Attention&) = delete;
    Attention& operator=(const Attention&) = delete;

private:
    int first_tile(int row, const AttnCall& call) const {
        return (int)(call.first_seen(places_.pos[row]) / TILE);
    }
    // Largest score, sum of weights, weighted values of one (row, head): head_dim + 2 floats.
    float* state(int row, int head, int tile) const {
        size_t index = ((size_t)row * heads_.num_heads + head) * states_per_head_ + tile;
        return states_.get() + index * (heads_.head_dim + 2);
    }
    void place(RowBlock& block);
    void place_row(int row, int64_t start, int count, int64_t shared_end, const int64_t* at,
                   int64_t* where) const;
    int64_t slot_of(int row, int64_t position) const;
    void find_factors(const Kept& kept, int group, const int64_t* where, int count, float unit,
                      float* out) const;
    void keep(int row, int head, int tile, const AttnCall& call, float largest, float total,
              const float* sums) const;
    template <class Math>
    void run_tile(const RowBlock& block, TileOf now, TileOf next, const AttnCall& call,
                  float* scratch) const;

    const Heads heads_;
    const Places places_;
    std::vector<RowBlock> blocks_;
    std::vector<int64_t> at_;  // of each sequence's positions: distance of its KV in the cache
    int max_tiles_ = 1;
    bool is_split_ = false;  // few blocks: every tile is an item, merged in read_row
    int states_per_head_ = 1;
    std::unique_ptr<float[]> states_;
};

}  // namespace hunch
