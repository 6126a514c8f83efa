// What Python calls, on plain pointers.
#include <vector>

#include "attention.h"
#include "chain.h"
#include "decoder.h"
#include "lookup.h"
#include "products.h"
#include "rows.h"
#include "sampling.h"
#include "scores.h"
#include "successors.h"

using namespace hunch;

extern "C" {

int hunch_panel() { return P; }
const char* hunch_vector_unit() { return VECTOR_UNIT; }

Team* hunch_team_new(int num_threads) { return new Team(num_threads); }
void hunch_team_free(Team* team) { delete team; }

Matrix* hunch_matrix_new(int format, int num_out, int num_in) {
    return new Matrix((Format)format, num_out, num_in);
}
void hunch_matrix_free(Matrix* w) { delete w; }
// Of a matrix of Format::TABLE, before it is filled.
void hunch_matrix_levels(Matrix* w, const int8_t* levels, float unit) {
    for (int i = 0; i < 16; i++) w->levels[i] = levels[i];
    w->unit = unit;
}
int64_t hunch_matrix_bytes(const Matrix* w) { return (int64_t)w->num_bytes(); }

// Rows [first, first + count) of the matrix, first a multiple of P; block_format: see BlockFormat.
void hunch_matrix_fill(Matrix* w, Team* team, int block_format, const uint8_t* rows, int64_t row_bytes,
                       int64_t first, int64_t count) {
    const int part = 16 * P;
    team->run([&](Worker& worker) {
        worker.each(((int)count + part - 1) / part, [&](int item) {
            int at = item * part, num = (int)count - at < part ? (int)count - at : part;
            w->fill((BlockFormat)block_format, rows + at * row_bytes, (int)first + at, num);
        });
    });
}

void hunch_matrix_rows(const Matrix* w, const int64_t* ids, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) w->read_row((int)ids[i], out + i * w->num_in);
}

// out = x times w, for rows of floats; is_fine: see Input
void hunch_multiply(const Matrix* w, Team* team, const float* x, int64_t num_rows, float* out,
                    int is_fine) {
    HeldInput input;
    input.is_fine = is_fine;
    input.num_in = w->num_in;
    const bool is_int = w->format != Format::FLOAT;
    input.reserve(Forms{is_int, false, w->format == Format::K2}, (int)num_rows);
    if (!is_int) input.rows = const_cast<float*>(x);
    const int size = 64;
    team->run([&](Worker& worker) {
        std::vector<uint8_t> panel(Scratch::panel_bytes(w->num_in));
        std::vector<float> part((size_t)ROW_CHUNK * size);
        worker.each(is_int ? (int)num_rows : 0,
                    [&](int row) { input.put_row(row, x + (size_t)row * w->num_in); });
        each_item(worker, (int)num_rows, w->num_out, size, [&](const Item& item) {
            multiply(*w, item, input, part.data(), size, panel);
            put_item(item, part.data(), size, nullptr, out, w->num_out);
        });
    });
}

// The same with a weight as torch holds it, float32 (0), bfloat16 (1) or float16 (2).
void hunch_multiply_rows(Team* team, const float* x, int64_t num_rows, int64_t num_in, const void* w,
                         int stored, int64_t num_out, float* out) {
    multiply_rows(*team, x, (int)num_rows, (int)num_in, w, (Stored)stored, (int)num_out, out);
}

// Attention of one layer; q as AttnCall has it, out [num_rows][head][head_dim].
void hunch_attend(Team* team, const float* q, const Kept* k, const Kept* v, const int64_t* pos,
                  const int64_t* slot, const int64_t* seq, const int64_t* base, const int64_t* table,
                  const int64_t* tree, int64_t num_rows, int64_t table_stride, int64_t tree_stride,
                  int64_t block_size, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                  int64_t window, float cap, const float* sinks, const float* alibi,
                  int64_t alibi_stride, float* out) {
    Places places{(int)num_rows, pos, slot, seq, base, table, tree, table_stride, tree_stride,
                  block_size};
    Heads heads{(int)num_heads, (int)num_kv_heads, (int)head_dim};
    AttnCall call{q, *k, *v, window, cap, sinks, alibi, alibi_stride};
    Attention attention(heads, places, team->size());
    team->run([&](Worker& worker) {
        std::vector<float> scratch(Attention::scratch_floats(heads));
        attention.run(worker, call, scratch.data());
        worker.each((int)num_rows, [&](int row) {
            attention.read_row(row, call, out + (size_t)row * num_heads * head_dim);
        });
    });
}

Decoder* hunch_decoder_new(const DecoderSpec* spec) { return new Decoder(*spec); }
void hunch_decoder_free(Decoder* decoder) { delete decoder; }
int hunch_decoder_forward(Decoder* decoder, Team* team, const Pass* pass) {
    return decoder->forward(*team, *pass);
}
void hunch_decoder_logits(Decoder* decoder, Team* team, const float* hidden, int64_t num_rows,
                          float* out) {
    decoder->logits(*team, hidden, (int)num_rows, out);
}

// Drafts a chain of one row; see chain.h.
int hunch_draft_chain(Decoder* decoder, Team* team, const Chain* chain) {
    return draft_chain(*decoder, *team, *chain);
}

// The best few tokens after each row: [row][num] tokens and gains.
void hunch_best(Team* team, const float* logits, const float* temperature, const int64_t* top_k,
                const double* top_p, const float* log_min_p, const int64_t* seed,
                const int64_t* sample_index, const int64_t* position, const int64_t* ids,
                int64_t* tokens, float* gains, int64_t num, int64_t num_rows, int64_t size,
                int64_t row_stride, int stream) {
    team->run([&](Worker& worker) {
        thread_local Chooser chooser;
        thread_local std::vector<Candidate> found;
        found.resize(num);
        worker.each((int)num_rows, [&](int row) {
            ChoiceSpec spec{temperature[row], top_k[row],        top_p[row],    log_min_p[row],
                            seed[row],        sample_index[row], position[row], stream};
            chooser.best(logits + row * row_stride, (int)size, spec, ids, (int)num, found.data());
            for (int i = 0; i < num; i++) {
                tokens[row * num + i] = found[i].token;
                gains[row * num + i] = found[i].gain;
            }
        });
    });
}

// One token per row of logits [num_rows][size]; the other arrays hold one entry per row.
void hunch_choose(Team* team, const float* logits, const float* temperature, const int64_t* top_k,
                  const double* top_p, const float* log_min_p, const int64_t* seed,
                  const int64_t* sample_index, const int64_t* position, const int64_t* ids,
                  int64_t* out, int64_t num_rows, int64_t size, int64_t row_stride, int stream) {
    team->run([&](Worker& worker) {
        thread_local Chooser chooser;
        worker.each((int)num_rows, [&](int row) {
            ChoiceSpec spec{temperature[row], top_k[row],        top_p[row],    log_min_p[row],
                            seed[row],        sample_index[row], position[row], stream};
            out[row] = chooser.choose(logits + row * row_stride, (int)size, spec, ids);
        });
    });
}

// The same for one row, on the calling thread.
int64_t hunch_choose_row(const float* logits, int64_t size, float temperature, int64_t top_k,
                         double top_p, float log_min_p, int64_t seed, int64_t sample_index,
                         int64_t position, int64_t stream) {
    thread_local Chooser chooser;
    ChoiceSpec spec{temperature, top_k, top_p, log_min_p, seed, sample_index, position, stream};
    return chooser.choose(logits, (int)size, spec);
}

// Of the rows at[] of the logits: see score_row. A single one wakes nobody.
void hunch_scores(Team* team, const float* logits, const int64_t* at, const int64_t* tokens,
                  int64_t* ids, float* values, int64_t* ranks, int64_t num_rows, int64_t size,
                  int64_t row_stride, int64_t num_best) {
    auto score = [&](int64_t row) {
        ranks[row] = score_row(logits + at[row] * row_stride, size, tokens[row], num_best,
                               ids + row * (1 + num_best), values + row * (1 + num_best));
    };
    if (num_rows == 1) return score(0);
    team->run([&](Worker& worker) { worker.each((int)num_rows, [&](int row) { score(row); }); });
}

Lookup* hunch_lookup_new(const LookupSpec* spec, int64_t num_rows) {
    return new Lookup(*spec, num_rows);
}
void hunch_lookup_free(Lookup* lookup) { delete lookup; }
void hunch_lookup_forget(Lookup* lookup, int64_t row) { lookup->forget(row); }
void hunch_lookup_follow(Lookup* lookup, int64_t row, const int64_t* tokens, int64_t count) {
    lookup->follow(row, tokens, count);
}
int64_t hunch_lookup_guess(Lookup* lookup, int64_t row, int64_t max_guesses, int64_t* tokens,
                           double* chances) {
    return lookup->guess(row, max_guesses, tokens, chances);
}

SuccessorTrees* hunch_successors_new(const SuccessorSpec* spec, int64_t num_rows) {
    return new SuccessorTrees(*spec, num_rows);
}
void hunch_successors_free(SuccessorTrees* trees) { delete trees; }
void hunch_successors_forget(SuccessorTrees* trees, int64_t row) { trees->forget(row); }
void hunch_successors_follow(SuccessorTrees* trees, int64_t row, const int64_t* tokens,
                             int64_t count) {
    trees->follow(row, tokens, count);
}
int64_t hunch_successors_guess(SuccessorTrees* trees, int64_t row, int64_t most,
                               const int64_t* chain, const double* chances, int64_t num_chain,
                               int64_t* tokens, int64_t* parents, double* paths) {
    return trees->guess(row, most, chain, chances, num_chain, tokens, parents, paths);
}

}  // extern "C"
