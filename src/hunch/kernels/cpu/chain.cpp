#include "chain.h"

#include <vector>

namespace hunch {

int draft_chain(Decoder& decoder, Team& team, const Chain& chain) {
    thread_local Chooser chooser;
    thread_local std::vector<float> logits, state, next;
    logits.resize(decoder.num_out());
    next.resize(decoder.width());
    state.assign(chain.hidden, chain.hidden + decoder.width());
    ChoiceSpec choice = chain.choice;
    for (int64_t i = 0; i < chain.num_tokens; i++, choice.position++) {
        decoder.logits(team, state.data(), 1, logits.data());
        chain.tokens[i] = chooser.choose(logits.data(), (int)chain.num_columns, choice, chain.ids);
        if (i + 1 == chain.num_tokens) break;
        const int64_t pos = chain.first_pos + i, base = pos + 1;
        Pass pass = chain.pass;
        pass.num_rows = 1;
        pass.ids = &chain.tokens[i];
        pass.pos = &pos;
        pass.slot = &chain.slots[i];
        pass.base = &base;
        pass.state = state.data();
        pass.hidden = next.data();
        if (decoder.forward(team, pass) >= 0) return (int)i;
        state.swap(next);
    }
    return -1;
}

}  // namespace hunch
