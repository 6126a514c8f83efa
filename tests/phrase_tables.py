"""Small phrase tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from hunch.kernels.lookup import NUM_GUESS_TYPES, PRIORS
from hunch.kernels.phrases import NUM_LEVELS, PhraseTable, context_hash

VOCAB = 64
ODDS = [float(np.log(c / (1 - c))) for chances in PRIORS for c in chances]


def table_of(entries: dict[tuple[int, ...], tuple[int, int]], **odds: Any) -> PhraseTable:
    """Contexts with what follows them and its level."""
    hashes = [int(context_hash([np.array([t]) for t in reversed(c)])[0]) for c in entries]
    rows = sorted(zip(hashes, entries.values(), strict=True))
    share = (np.arange(NUM_LEVELS) + 0.5) / NUM_LEVELS
    given = {
        "own_odds": np.array(ODDS),
        "seen_odds": np.zeros(1 + 2 * NUM_LEVELS),
        "level_odds": np.log(share / (1 - share)),
        "versus_odds": np.zeros(NUM_GUESS_TYPES + 1),
        "guess_trust_V": np.zeros(VOCAB),
        "last_trust_V": np.zeros(VOCAB),
        **odds,
    }
    return PhraseTable(
        max_order=3,
        hash_E=np.array([h for h, _ in rows], dtype=np.uint32),
        token_E=np.array([token for _, (token, _) in rows], dtype=np.int32),
        level_E=np.array([level for _, (_, level) in rows], dtype=np.uint8),
        **given,
    )
