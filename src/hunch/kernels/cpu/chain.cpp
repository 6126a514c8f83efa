#include "chain.h"

#include <vector>

namespace hunch {

namespace {

// Processes the known tokens; `state` becomes the last one's.
bool catch_up(Decoder& decoder, Team& team, const Chain& chain, std::vector<float>& state) {
    thread_local std::vector<float> hidden;
    thread_local std::vector<int64_t> pos, base, seq;
    const int64_t count = chain.num_known, width = decoder.width();
    hidden.resize(count * width);
    pos.resize(count);
    base.resize(count);
    seq.assign(count, *chain.pass.seq);
    for (int64_t i = 0; i < count; i++) {
        pos[i] = chain.first_pos + i;
        base[i] = pos[i] + 1;
    }
    Pass pass = chain.pass;
    pass.num_rows = count;
    pass.ids = chain.known;
    pass.pos = pos.data();
    pass.base = base.data();
    pass.seq = seq.data();
    pass.slot = chain.slots;
    pass.hidden = hidden.data();
    if (decoder.forward(team, pass) >= 0) return false;
    state.assign(hidden.end() - width, hidden.end());
    return true;
}

}  // namespace

int draft_chain(Decoder& decoder, Team& team, const Chain& chain) {
    thread_local Chooser chooser;
    thread_local std::vector<float> logits, state, next;
    const int64_t num_known = chain.num_known, width = decoder.width();
    logits.resize(decoder.num_out());
    next.resize(width);
    if (num_known) {
        if (!catch_up(decoder, team, chain, state)) return 0;
    } else {
        state.assign(chain.hidden, chain.hidden + width);
    }
    ChoiceSpec choice = chain.choice;
    for (int64_t i = 0; i < chain.num_tokens; i++, choice.position++) {
        decoder.logits(team, state.data(), 1, logits.data());
        chain.tokens[i] = chooser.choose(logits.data(), (int)chain.num_columns, choice, chain.ids);
        if (i + 1 == chain.num_tokens) break;
        const int64_t pos = chain.first_pos + num_known + i, base = pos + 1;
        Pass pass = chain.pass;
        pass.num_rows = 1;
        pass.ids = &chain.tokens[i];
        pass.pos = &pos;
        pass.slot = &chain.slots[num_known + i];
        pass.base = &base;
        pass.state = state.data();
        pass.hidden = next.data();
        if (decoder.forward(team, pass) >= 0) return (int)i;
        state.swap(next);
    }
    return -1;
}

}  // namespace hunch
