"""The GPU's fused kernels over ranks: the scores of one, and the same bits in any company."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from hunch.layers.rope import RopeSpec
from hunch.models.spec import ModelSpec

HERE = Path(__file__).parent
SPEC = ModelSpec(
    architecture="Qwen2ForCausalLM",
    vocab_size=50,
    width=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_width=64,
    max_len=256,
    norm_eps=1e-5,
    rope=RopeSpec(),
    windows=(None, 5),
    is_tied=True,
    has_qkv_bias=True,
)


def run(size: int, folder: Path) -> list[torch.Tensor]:
    """Rank 0's scores, of one pass and of three."""
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-m", "parallel.fused_rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(folder)], env=env, cwd=HERE.parent)
        for rank in range(size)
    ]
    for process in ranks:
        assert process.wait(300) == 0
    found: list[torch.Tensor] = torch.load(folder / "rank0.pt")
    return found


@pytest.mark.slow
def test_fused_kernels_split_over_two_ranks(tmp_path: Path) -> None:
    (whole, _), (together, apart) = run(1, tmp_path / "one"), run(2, tmp_path / "two")
    assert together.equal(apart)
    assert (together - whole).norm() / whole.norm() < 0.02
