"""Targets of every kind: training reads their texts as they do, and a block drafter fits them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from train_setup import ENGINE, new_job, write_prompts

from builders import plain_logits, tiny_config, tiny_weights
from hunch import LLM, SamplingParams
from hunch.models.load import load_decoder
from hunch.train.batches import Batch
from hunch.train.job import run_job
from hunch.train.progress import Progress
from hunch.train.states import run_target
from hunch.train.vocab import count_columns
from tiny_families import FAMILIES, write_family

READ = [name for name in FAMILIES if not name.startswith(("deepseek", "glm 4.7"))]


@pytest.mark.parametrize("name", READ)
def test_texts_are_read_as_the_target_reads_them(name: str) -> None:
    architecture, changes = FAMILIES[name]
    target = load_decoder(tiny_weights(tiny_config(architecture, **changes), scale=2.0))
    ids_BL = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids_BL, torch.tensor([40, 40]), torch.tensor([1, 1]), np.arange(2))
    columns = count_columns(np.ones(96, dtype=np.int64), None)
    outputs = run_target(target, batch, columns, is_complete=True)
    assert isinstance(outputs.p_MC, torch.Tensor)
    found = outputs.p_MC.view(2, 39, -1)
    for row in range(2):
        expected = plain_logits(target, ids_BL[row].tolist()).softmax(-1)[:-1]
        torch.testing.assert_close(found[row][:, columns.column_V], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-2", "gemma 2", "phi-3", "gpt-oss", "qwen3-moe", "granite"])
def test_a_block_drafter_for_any_target(name: str, tmp_path: Path) -> None:
    target = write_family(tmp_path / "target", name)
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    words = {"layers": 1, "block": 3, "rank": 8, "lr": 0.02, "draft_vocab": 160}
    job = new_job(target, prompts, tmp_path / "out", "block", **words)
    measured = run_job(job, Progress(is_quiet=True))
    assert measured.tokens_per_pass > 1.0
    found = []
    for way in ("off", f"dspark:{job.out}"):
        with LLM(str(target), speculate=way, **ENGINE) as llm:
            output = llm.generate("the model in", SamplingParams(temperature=0, max_tokens=24))
            found.append(output[0].outputs[0].token_ids)
    assert found[0] == found[1]
