"""EAGLE-3 against the `speculators` package: its files load, its numbers come out.

The package asks for more than tests should bring along, so `make speculators` installs and runs it.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import BLOCK_SIZE, Seq, pack, tables, tiny_model
from hunch.kernels.kv_store import KVCache
from hunch.models.heads.eagle import load_eagle3
from hunch.models.heads.files import detect

pytestmark = pytest.mark.slow
LENGTH = 12
FLAGS = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
]


@pytest.fixture(params=FLAGS, ids=lambda flags: "+".join(flags) or "plain")
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A random head of the package, and the directory it saved itself to."""
    if importlib.util.find_spec("speculators") is None:
        pytest.skip("the speculators package is not installed: run `make speculators`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from speculators import SpeculatorsConfig, VerifierConfig
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from transformers import LlamaConfig

        layer = LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
        )
        layer._attn_implementation = "eager"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=40,
            eagle_aux_hidden_state_layer_ids=[0, 1, 3],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
            **request.param,
        )
        torch.manual_seed(0)
        model = Eagle3DraftModel(config)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.copy_(
                    torch.randn_like(tensor) * (0.3 if tensor.dim() > 1 else 0.1)
                    + (1.0 if tensor.dim() == 1 else 0.0)
                )
        kept = torch.arange(96)[torch.randperm(96)[:40]].sort().values
        t2d = torch.zeros(96, dtype=torch.bool).index_fill(0, kept, True)
        model.load_vocab_mappings(t2d, kept - torch.arange(40))
        model.save_pretrained(tmp_path / "head")
    return model.eval(), tmp_path / "head"


def package_logits(model: Any, fused: Tensor, following: Tensor) -> list[Tensor]:
    """Scores of two unrolled steps; its forward returns only their best tokens."""
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: found.append(call[2][0]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(fused[None], following[None], torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=2)
    hook.remove()
    return found


def test_files_load_and_scores_agree(made: tuple[Any, Path]) -> None:
    model, path = made
    target = tiny_model(vocab_size=96)
    assert detect(path) == "eagle3"
    net = load_eagle3(path, target)
    assert net.feature_layers == (0, 1, 3)
    assert net.num_tokens == 4
    generator = torch.Generator().manual_seed(3)
    features = tuple(torch.randn(LENGTH, 32, generator=generator) for _ in range(3))
    following = torch.randint(96, (LENGTH,), generator=generator)
    first, second = package_logits(model, torch.cat(features, -1), following)

    num_blocks = -(-(LENGTH + 1) // BLOCK_SIZE)
    table = tables(1, num_blocks)
    kv = KVCache(*torch.zeros(2, net.num_kv_layers, num_blocks * BLOCK_SIZE, 2, 8))
    _, attn = pack([Seq(following.tolist())], table)
    states = net.step(following, net.fuse(None, features), attn, kv)
    torch.testing.assert_close(net.logits(states), first, rtol=1e-4, atol=1e-4)
    # The second step from position t: its own state of t and the token after, one position on.
    for t in (4, LENGTH - 2):
        _, attn = pack([Seq([0], start=t + 1)], table)
        state = net.step(following[t + 1 : t + 2], states[t : t + 1], attn, kv)
        torch.testing.assert_close(net.logits(state)[0], second[t], rtol=1e-4, atol=1e-4)
        _, attn = pack([Seq(following.tolist())], table)  # put the overwritten KV back
        net.step(following, net.fuse(None, features), attn, kv)
