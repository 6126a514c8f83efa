#include "attention.h"

#include <algorithm>
#include <cstring>

#include "attn_math.h"

namespace hunch {

struct Buffers {  // parts of a thread's scratch
    float *scores, *sums, *queries, *numbers;

    Buffers(float* scratch, int size) {
        scores = scratch;
        sums = scores + MAX_QUERIES * TILE;
        queries = sums + MAX_QUERIES * size;
        numbers = queries + MAX_QUERIES * size;
    }
    static size_t floats(int size) {
        return (size_t)MAX_QUERIES * (2 * size + TILE) + TILE * size / 2;  // numbers are half floats
    }
};

namespace {

// Calls body<Q>(i) for queries i.. in groups of Math::QUERIES, then one by one.
template <class Math, class Body>
void each_query(int first, int last, Body&& body) {
    int i = first;
    for (; i + Math::QUERIES <= last; i += Math::QUERIES)
        body(std::integral_constant<int, Math::QUERIES>(), i);
    for (; i + 3 <= last && Math::QUERIES > 3; i += 3) body(std::integral_constant<int, 3>(), i);
    for (; i < last; i++) body(std::integral_constant<int, 1>(), i);
}

// into = into merged with a later tile; both are states.
void merge(float* into, const float* tile, int size) {
    float top = std::max(into[0], tile[0]);
    float factors[2 * P];
    store(factors, exp2(set1(into[0] - top)));
    store(factors + P, exp2(set1(tile[0] - top)));
    vf a = set1(factors[0]), b = set1(factors[P]);
    into[0] = top;
    into[1] = into[1] * factors[0] + tile[1] * factors[P];
    for (int h = 2; h < size + 2; h += P)
        store(into + h, fma(mul(load(into + h), a), load(tile + h), b));
}

}  // namespace

size_t Attention::scratch_floats(const Heads& heads) { return Buffers::floats(heads.head_dim); }

Attention::Attention(const Heads& heads, const Places& places, int num_threads)
    : heads_(heads), places_(places) {
    int max_rows = std::max(1, MAX_QUERIES / heads.group());
    for (int row = 0; row < places.num_rows; row++) {
        if (places.slot[row] < 0) continue;  // padding
        int64_t end = places.table_end(row), pos = places.pos[row];
        int64_t shared_end = end > pos ? INT64_MAX : end;  // all it reads is in the block table
        max_tiles_ = std::max(max_tiles_, (int)(pos / TILE) + 1);
        RowBlock* block = blocks_.empty() ? nullptr : &blocks_.back();
        if (block && block->last == row && row - block->first < max_rows &&
            places.seq[row] == places.seq[block->first]) {
            block->last = row + 1;
            block->shared_end = std::min(block->shared_end, shared_end);
            if (pos > block->highest) block->highest = pos, block->widest = row;
        } else {
            blocks_.push_back({row, row + 1, row, shared_end, pos, 0});
        }
    }
    for (RowBlock& block : blocks_) place(block);
    is_split_ = (int)blocks_.size() * heads.num_groups() < 4 * num_threads && max_tiles_ > 1;
    states_per_head_ = is_split_ ? max_tiles_ : 1;
    size_t num_states = (size_t)places.num_rows * heads.num_heads * states_per_head_;
    states_.reset(new float[num_states * (heads.head_dim + 2)]);
}

// Where the block's shared positions are, to the end of the last tile: past the last one it is
// repeated, so that keys can be read in fours.
void Attention::place(RowBlock& block) {
    int64_t end = std::min(block.highest + 1, block.shared_end);
    int64_t size = (block.highest / TILE + 1) * TILE, stride = heads_.num_kv_heads * heads_.head_dim;
    const int64_t* table = places_.table + places_.seq[block.first] * places_.table_stride;
    block.at = at_.size();
    at_.resize(block.at + size);
    int64_t* at = &at_[block.at];
    for (int64_t p = 0; p < end; p += places_.block_size) {
        int64_t slot = table[p / places_.block_size] * places_.block_size;
        for (int64_t i = p; i < std::min(p + places_.block_size, end); i++) at[i] = slot++ * stride;
    }
    std::fill(at + end, at + size, end > 0 ? at[end - 1] : 0);
}

template <class Math>
void Attention::run_tile(const RowBlock& block, TileOf now, TileOf next, const AttnCall& call,
                         float* scratch) const {
    const int tile = now.tile, first_head = now.group * heads_.group();
    typedef typename Math::Stored Stored;
    typedef typename Math::Number Number;
    const int size = heads_.head_dim, group = heads_.group();
    const int num_queries = (block.last - block.first) * group;
    const int64_t start = (int64_t)tile * TILE;
    const int reach = (int)std::min<int64_t>(TILE, block.highest - start + 1);
    const bool is_shared = start + reach <= block.shared_end;
    const Buffers buffer(scratch, size);
    Number *queries = (Number*)buffer.queries, *scores = (Number*)buffer.scores;
    auto cache_of = [&](const Kept& kept, int of) {
        return (const Stored*)kept.numbers + heads_.kv_head_of(of) * size;
    };
    const Stored *k = cache_of(call.k, now.group), *v = cache_of(call.v, now.group);
    const int64_t* at = &at_[block.at + start];

    auto count_of = [&](int row) {  // positions of the tile the row sees, from the first on
        return (int)std::clamp<int64_t>(places_.pos[row] - start + 1, 0, TILE);
    };
    // Calls body(first query, last query, where, count): for all rows at once where they read the
    // same slots, else for each row with its own.
    auto each_reader = [&](auto&& body) {
        if (is_shared) return body(0, num_queries, at, reach);
        int64_t where[TILE];
        for (int row = block.first; row < block.last; row++) {
            int count = count_of(row), first = (row - block.first) * group;
            if (count == 0) continue;
            place_row(row, start, count, block.shared_end, at, where);
            body(first, first + group, where, count);
        }
    };
    // Codes that several calls would read are turned into numbers first.
    typedef typename Math::Plain Plain;
    const bool is_expanded = Math::EXPANDS && is_shared && num_queries > Math::QUERIES;
    auto* numbers = (typename Plain::Stored*)buffer.numbers;
    int64_t steps[TILE];
    for (int j = 0; is_expanded && j < TILE; j++) steps[j] = j * size;
    auto expand = [&](const Stored* cache, int count) {
        for (int j = 0; is_expanded && j < count; j++)
            Math::expand(cache + at[j], size, numbers + j * size);
    };
    // The cache is read once per pass, from memory, in short pieces: they are asked for ahead of
    // time, values while scores are computed, the next tile's keys while values are summed.
    auto read_ahead = [&](const Stored* cache, const int64_t* where, int from, int to) {
        for (int j = from; j < to; j++)
            for (int h = 0; h < size; h += 64 / (int)sizeof(Stored))
                __builtin_prefetch(cache + where[j] + h);
    };
    // Scores, or weights, times the scales of the codes they are of.
    auto scale = [&](const Kept& kept, int first, int last, const int64_t* where, int count) {
        if (Math::UNIT == 0) return;
        float factors[TILE] = {};
        find_factors(kept, now.group, where, count, Math::UNIT, factors);
        for (int i = first; i < last; i++) Math::multiply(scores + i * TILE, factors, count);
    };
    for (int i = 0; i < num_queries; i++) {
        int head = first_head + i % group, row = block.first + i / group;
        Math::put(call.q + ((size_t)row * heads_.num_heads + head) * size, size, queries + i * size);
    }
    each_reader([&](int first, int last, const int64_t* where, int count) {
        expand(k, (count + 3) / 4 * 4);
        for (int j = 0; j < count; j += 4) {
            read_ahead(v, where, j, std::min(j + 4, count));
            each_query<Math>(first, last, [&](auto q, int i) {
                constexpr int Q = decltype(q)::value;
                Number *query = queries + i * size, *to = scores + i * TILE + j;
                if (is_expanded)
                    Plain::template scores<Q>(query, numbers, steps + j, size, to, TILE);
                else
                    Math::template scores<Q>(query, k, where + j, size, to, TILE);
            });
        }
        scale(call.k, first, last, where, count);
    });
    float largest[MAX_QUERIES], total[MAX_QUERIES];
    for (int i = 0; i < num_queries; i++) {
        int64_t pos = places_.pos[block.first + i / group];
        int64_t from = std::max<int64_t>(0, call.first_seen(pos) - start);
        int count = count_of(block.first + i / group);
        Number* s = scores + i * TILE;
        total[i] = 0;
        if (call.alibi) {  // less the token's own, so that numbers stay small
            const float* by_key = call.alibi + (first_head + i % group) * call.alibi_stride;
            for (int j = 0; j < count; j++) s[j] += (Number)((by_key[start + j] - by_key[pos]) * LOG2_E);
        }
        if (call.cap > 0) Math::cap(s, count, call.cap);
        if (from < count)
            Math::soften(s, (int)from, count, &largest[i], &total[i]);
        else  // the row sees nothing of this tile
            std::fill(s, s + TILE, (Number)0);
    }
    each_reader([&](int first, int last, const int64_t* where, int count) {
        scale(call.v, first, last, where, count);
        expand(v, count);
        each_query<Math>(first, last, [&](auto q, int i) {
            if (next.tile >= 0)
                read_ahead(cache_of(call.k, next.group), &at_[block.at + next.tile * TILE],
                           i * TILE / num_queries, (i + q) * TILE / num_queries);
            constexpr int Q = decltype(q)::value;
            float* sums = buffer.sums + i * size;
            if (is_expanded)
                Plain::template add_values<Q>(sums, scores + i * TILE, TILE, numbers, steps, count, size);
            else
                Math::template add_values<Q>(sums, scores + i * TILE, TILE, v, where, count, size);
        });
    });
    for (int i = 0; i < num_queries; i++) {
        if (total[i] == 0) continue;
        int row = block.first + i / group, head = first_head + i % group;
        keep(row, head, tile, call, largest[i], total[i], buffer.sums + (size_t)i * size);
    }
}

// One tile's outcome for a (row, head), into its state.
void Attention::keep(int row, int head, int tile, const AttnCall& call, float largest, float total,
                     const float* sums) const {
    const int size = heads_.head_dim;
    float fresh[2 + MAX_HEAD_DIM];
    float* into = state(row, head, is_split_ ? tile : 0);
    bool is_first = is_split_ || tile == first_tile(row, call);
    float* to = is_first ? into : fresh;
    to[0] = largest;
    to[1] = total;
    std::memcpy(to + 2, sums, size * sizeof(float));
    if (!is_first) merge(into, fresh, size);
}

// Where one row of a tree reads the tile's positions.
void Attention::place_row(int row, int64_t start, int count, int64_t shared_end, const int64_t* at,
                          int64_t* where) const {
    const int64_t stride = heads_.num_kv_heads * heads_.head_dim;
    for (int j = 0; j < count; j++)
        where[j] = start + j < shared_end ? at[j] : slot_of(row, start + j) * stride;
    for (int j = count; j % 4; j++) where[j] = where[count - 1];
}

// The scales of a tile's codes, times `unit`.
void Attention::find_factors(const Kept& kept, int group, const int64_t* where, int count, float unit,
                             float* out) const {
    const float* scales = kept.scales + heads_.kv_head_of(group);
    const double per_size = 1.0 / heads_.head_dim;  // of whole multiples: no division is needed
    for (int j = 0; j < count; j++) out[j] = scales[(int64_t)((double)where[j] * per_size + 0.5)] * unit;
}

int64_t Attention::slot_of(int row, int64_t position) const {
    if (position >= places_.table_end(row))
        return places_.tree[row * places_.tree_stride + position - places_.base[row]];
    int64_t size = places_.block_size;
    int64_t block = places_.table[places_.seq[row] * places_.table_stride + position / size];
    return block * size + position % size;
}

void Attention::run(Worker& worker, const AttnCall& call, float* scratch) {
    const int size = heads_.head_dim;
    const int num_groups = heads_.num_groups();
    const int per_block = is_split_ ? max_tiles_ * num_groups : num_groups;
    worker.each((int)blocks_.size() * per_block, [&](int item) {
        const RowBlock& block = blocks_[item / per_block];
        int group = item % per_block % num_groups, tile = item % per_block / num_groups;
        int first = INT32_MAX, last = (int)(block.highest / TILE) + 1;
        for (int row = block.first; row < block.last; row++)
            first = std::min(first, first_tile(row, call));
        if (is_split_) {
            if (tile < first || tile >= last) return;
            first = tile, last = tile + 1;
        }
        for (int t = first; t < last; t++) {
            TileOf now{group, t}, next{group, t + 1 < last ? t + 1 : -1};
            if (is_split_) next = group + 1 < num_groups ? TileOf{group + 1, t} : TileOf{0, t + 1};
            if (next.tile > block.highest / TILE) next.tile = -1;
            const bool is_exact = size > MAX_HALF_DIM || call.alibi;
            auto run = [&](auto exact, auto quick) {
                if (is_exact)
                    run_tile<decltype(exact)>(block, now, next, call, scratch);
                else
                    run_tile<decltype(quick)>(block, now, next, call, scratch);
            };
            switch (call.k.form) {
            case KvForm::FLOAT: run(FloatMath<float>(), FloatMath<float>()); break;
            case KvForm::HALF: run(FloatMath<uint16_t>(), QuickMath<uint16_t>()); break;
            case KvForm::INT8: run(FloatMath<Int8>(), QuickMath<Int8>()); break;
            case KvForm::FP8: run(FloatMath<Fp8>(), QuickMath<Fp8>()); break;
            }
        }
    });
}

void Attention::read_row(int row, const AttnCall& call, float* out) const {
    const int size = heads_.head_dim;
    if (places_.slot[row] < 0) {
        std::fill(out, out + (size_t)heads_.num_heads * size, 0.0f);
        return;
    }
    for (int head = 0; head < heads_.num_heads; head++, out += size) {
        int first = is_split_ ? first_tile(row, call) : 0;
        int last = is_split_ ? (int)(places_.pos[row] / TILE) : 0;
        float* result = state(row, head, first);
        for (int tile = first + 1; tile <= last; tile++) merge(result, state(row, head, tile), size);
        vf total = set1(result[1]), share = set1(1.0f);
        if (call.sinks) {
            const float sink = call.sinks[head] * LOG2_E, top = std::max(result[0], sink);
            share = exp2(set1(result[0] - top));
            total = fma(exp2(set1(sink - top)), total, share);
        }
        for (int h = 0; h < size; h += P)
            store(out + h, div(mul(load(result + 2 + h), share), total));
    }
}

}  // namespace hunch
