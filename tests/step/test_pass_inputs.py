"""What a pass reads is sent in one copy; passes of all sizes share the memory it is sent to."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hunch import LLM, SamplingParams
from hunch.step import pass_inputs
from hunch.step.pass_inputs import RING, PassInputs
from stand_in import stand_in
from tiny_models import write_llama

CPU = torch.device("cpu")


@pytest.mark.parametrize("staged", [1 << 16, 8], ids=["pinned", "more than fits"])
def test_words_and_blocks_of_every_pass(staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_inputs, "STAGED", staged)
    inputs = PassInputs((3, 10), 40, CPU)
    for number in range(2 * RING + 1):
        words_W = np.arange(number, number + (40, 7, 16)[number % 3])
        table_SB = np.arange(4 * (1 + number % 3)).reshape(-1, 4) + 100 * number
        inputs.send(len(words_W), table_SB, partial(np.copyto, src=words_W))
        assert inputs.before_table(len(words_W)).tolist() == words_W.tolist()
        assert inputs.table_XB[: len(table_SB), :4].tolist() == table_SB.tolist()


def test_a_pass_captured_between_others_repeats_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To capture is to run: with the slots of the pass before, it would write KV of zeros there."""
    stand_in(monkeypatch)
    path = write_llama(tmp_path / "model", width=32, layers=1)
    size = {"device": "cpu", "kv_bytes": 2_000_000, "max_model_len": 64}
    with LLM(str(path), speculate="off", **size) as llm:
        runner = llm.engine.runner
        passes = runner.host.passes
        passes.drop(16, 0)
        llm.generate([5, 6, 7, 8] * 5, SamplingParams(temperature=0, max_tokens=2))
        before = runner.host.kv[0].k_LCMH.clone()
        assert before.count_nonzero()
        passes.prepare(16)
        assert torch.equal(runner.host.kv[0].k_LCMH, before)
