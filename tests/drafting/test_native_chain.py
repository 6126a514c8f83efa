"""Chains of single rows: a draft that waits stays as it is, a new request is chosen for anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hunch import LLM, SamplingParams
from hunch.kernels import native_library
from tiny_models import write_llama

pytestmark = pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The target drafts for itself, so that every guess is right where nothing is mixed up."""
    path: Path = write_llama(tmp_path_factory.mktemp("models") / "target")
    small: Any = {
        "always_draft": True,
        "max_num_seqs": 2,
        "max_model_len": 256,
        "kv_bytes": 8_000_000,
    }
    with LLM(str(path), speculate=f"draft:{path}:num_nodes=4", dtype="float32", **small) as llm:
        runner: Any = llm.engine.runner
        assert runner.drafter.network.method.chains is not None
        yield llm


def test_a_draft_waits_while_another_row_drafts(llm: LLM) -> None:
    runner: Any = llm.engine.runner
    rows = runner.rows
    for row, prompt in enumerate(([5, 6, 7, 8, 9], [101, 52, 3, 77, 20])):
        rows.tokens[row, :5], rows.known[row], rows.max_draft[row] = prompt, 5, 4
        rows.table[row, :2] = 2 * row, 2 * row + 1
    rows.put_drafts([0], runner.drafter.network.method.propose(rows.view([0])))
    before = rows.drafts[0].tokens_N.tolist()
    rows.put_drafts([1], runner.drafter.network.method.propose(rows.view([1])))
    assert rows.drafts[1].tokens_N.tolist() != before
    assert rows.drafts[0].tokens_N.tolist() == before
    assert rows.drafts[0].parents_N.tolist() == [-1, 0, 1, 2]
    runner.drafter.network.method.forget([0, 1])
    rows.drafts[:2] = None, None


def test_each_request_is_guessed_by_its_own_noise(llm: LLM) -> None:
    """The same row, one request after another; drafts cross the edges of blocks."""
    texts = []
    for seed, temperature in ((1, 1.0), (2, 1.0), (2, 0.0), (2, 0.7)):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=60, ignore_eos=True)
        (output,) = llm.generate([list(range(10, 21))], params, use_tqdm=False)
        stats = output.outputs[0].stats
        assert stats["accepted"] == stats["drafted"] > 40
        texts.append(output.outputs[0].token_ids)
    assert len(np.unique([str(text) for text in texts])) == 4
