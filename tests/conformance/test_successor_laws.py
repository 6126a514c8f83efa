"""Trees of successors and chains from common words: plain decoding's tokens, on a CPU's host and in
captured steps, whose kernels are replaced by plain Python here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hunch import LLM
from hunch.kernels.successor_entries import ONE_TOKEN, Entries, counted
from small_requests import PARAMS, PROMPTS, SMALL, tokens
from stand_in import stand_in
from tiny_models import write_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("successors") / "model", width=32, layers=2)


def common_words(texts: list[list[int]]) -> Entries:
    """What follows what in these texts: many guesses are right, and as many are not."""
    last = np.array([token for text in texts for token in text[:-1]])
    following = np.array([token for text in texts for token in text[1:]])
    first = np.array([token for text in texts for token in (ONE_TOKEN, *text[:-2])])
    return counted(first, last, following, 1000)


@pytest.mark.parametrize("is_captured", [False, True], ids=["host", "captured"])
@pytest.mark.parametrize("speculate", ["auto", "suffix"])
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_text_does_not_depend_on_common_words(
    is_captured: bool, speculate: str, max_num_seqs: int, model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if is_captured:
        pytest.importorskip("triton")
        stand_in(monkeypatch)
    with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
        plain = {kind: tokens(llm, params) for kind, params in PARAMS.items()}
    entries = common_words([text for texts in plain.values() for text in texts])
    monkeypatch.setattr("hunch.drafting.base.common_successors", lambda *_: entries)
    with LLM(str(model), speculate=speculate, max_num_seqs=max_num_seqs, **SMALL) as llm:
        for kind, params in PARAMS.items():
            assert tokens(llm, params) == plain[kind], kind
        drafters = llm.stats()["drafters"]
        assert sum(one["accepted"] for one in drafters.values()) > 10


def test_common_words_save_passes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(model), speculate="off", **SMALL) as llm:
        plain = tokens(llm, PARAMS["greedy"])
    monkeypatch.setattr("hunch.drafting.base.common_successors", lambda *_: common_words(plain))
    steps = {}
    for speculate in ("suffix:phrases=off:adaptive=false", "suffix:adaptive=false"):
        with LLM(str(model), speculate=speculate, **SMALL) as llm:
            outputs = llm.generate(PROMPTS, PARAMS["greedy"])
            steps[speculate] = sum(out.outputs[0].stats["steps"] for out in outputs)
    without, with_words = steps.values()
    assert with_words < without
