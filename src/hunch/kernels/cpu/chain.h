// A whole chain drafted in one call: choose a token, process it, choose the next.
#pragma once
#include <cstdint>

#include "decoder.h"
#include "sampling.h"

namespace hunch {

// One row. First the known tokens that were not processed yet, if any, at positions from first_pos
// on; then node i says tokens[i] and is processed at the next position. The last one is not: nothing
// follows it. slots[i] belongs to position first_pos + i.
struct Chain {
    Pass pass;             // its table, cache and block size
    const float* hidden;   // without known tokens: the state the first token is chosen from
    const int64_t* known;  // may be null
    int64_t num_known;
    const int64_t* slots;
    const int64_t* ids;    // the token of each column of logits; null: all of them
    int64_t num_columns;   // logits past these are padding
    int64_t first_pos, num_tokens;
    ChoiceSpec choice;     // its position is the first token's
    int64_t* tokens;       // [num_tokens]
};

// -1, or the number of the node that could not be processed.
int draft_chain(Decoder& decoder, Team& team, const Chain& chain);

}  // namespace hunch
