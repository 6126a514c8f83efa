"""The GPU's fused kernels over ranks: the scores of one, and the same bits in any company."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tiny_families
from builders import tiny_config
from hunch.layers.rope import RopeSpec
from hunch.models.source import EXPAND
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


def family(name: str, **changes: Any) -> ModelSpec:
    architecture, sizes = tiny_families.FAMILIES[name]
    return ModelSpec.from_config(tiny_config(architecture, **sizes, **changes))


MODELS_OF_TESTS = {  # name -> what it is, and how its matrices are held
    "plain": (SPEC, EXPAND),
    "4 bits": (replace(SPEC, width=64, ffn_width=128), "int4"),
    "8 bits": (replace(SPEC, width=64, ffn_width=128), "int8"),
    "experts": (family("qwen2-moe"), EXPAND),
    "gemma 4": (family("gemma 4"), EXPAND),
    "gemma 4 with experts": (family("gemma 4, experts"), EXPAND),
}


def start(size: int, folder: Path, name: str) -> list[subprocess.Popen[bytes]]:
    """A model on so many ranks; rank 0 leaves the scores, of one pass and of three."""
    folder.mkdir()
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    env = {**os.environ, "PYTHONPATH": paths, "HUNCH_RANKS_SHARE_GPUS": "1"}
    command = [sys.executable, "-m", "parallel.fused_rank"]
    return [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder), name], env=env, cwd=HERE.parent
        )
        for rank in range(size)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS_OF_TESTS)
def test_fused_kernels_split_over_two_ranks(name: str, tmp_path: Path) -> None:
    processes = [one for size in (1, 2) for one in start(size, tmp_path / str(size), name)]
    try:
        assert [process.wait(900) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    (whole, _), (together, apart) = (torch.load(tmp_path / str(size) / "0.pt") for size in (1, 2))
    assert together.equal(apart)
    # In few bits, another part of a sum has other scales of its own.
    assert (together - whole).norm() / whole.norm() < (0.02 if " bits" not in name else 0.2)
