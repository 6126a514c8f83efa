"""A model over two processes gives the single one's logits, with the same bits on both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from builders import plain_logits, tiny_config, tiny_model, tiny_weights
from hunch.errors import ConfigError
from hunch.models.load import load_decoder
from hunch.parallel.group import SINGLE, shard, shard_size

HERE = Path(__file__).parent
IDS = [5, 9, 2, 40, 41, 7, 8]
CONFIGS = {
    "llama": tiny_config(),
    "tied": tiny_config(tie_word_embeddings=True),
    "vocabulary that does not divide": tiny_config(vocab_size=95),
    "opt": tiny_config("OPTForCausalLM"),
}


class FakeGroup:
    """One of several ranks, without the others."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_two_processes_equal_one(tmp_path):
    (tmp_path / "work.json").write_text(json.dumps({"configs": CONFIGS, "ids": IDS}))
    command = [sys.executable, str(HERE / "rank_process.py")]
    paths = os.environ | {"PYTHONPATH": str(HERE.parent)}
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=paths) for rank in range(2)]
    for process in ranks:
        assert process.wait(timeout=200) == 0
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for name, config in CONFIGS.items():
        single = load_decoder(tiny_weights(config))
        first, second = found[0][name], found[1][name]
        assert first[0].equal(second[0])
        torch.testing.assert_close(first[0], plain_logits(single, IDS), atol=1e-4, rtol=1e-4)
        assert first[1] < 0.9 * single.weight_bytes


def test_parts_join_to_the_whole():
    whole = torch.arange(24.0).view(4, 6)
    parts = [shard(whole, 1, FakeGroup(rank, 3)) for rank in range(3)]
    assert torch.cat(parts, dim=1).equal(whole)
    assert shard(whole, 1, SINGLE) is whole


def test_sizes_that_do_not_divide_are_named():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 .* KV heads \(2\)"):
        shard_size(2, FakeGroup(0, 3), "KV heads")
    with pytest.raises(ConfigError, match="attention heads"):
        load_decoder(tiny_weights(), group=FakeGroup(0, 3))


def test_one_device_needs_no_group():
    model = tiny_model()
    assert model.group is SINGLE
    part = torch.ones(2)
    assert SINGLE.all_reduce(part) is part
    assert SINGLE.all_gather(part) is part
