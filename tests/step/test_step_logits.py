"""A step's logits are the target's, and their array is the same memory."""

from __future__ import annotations

import pytest
import torch

from builders import tiny_config, tiny_weights
from hunch.kernels import native_library
from hunch.models.load import load_decoder
from hunch.models.native import load_native
from hunch.step.step_logits import MAX_KEPT, StepLogits

CONFIG = tiny_config(hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=2)


@pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize("num_rows", [1, 3, MAX_KEPT, MAX_KEPT + 1])
def test_they_are_the_targets(num_rows: int) -> None:
    target = load_native(tiny_weights(CONFIG), dtype="float32")
    assert target is not None
    logits = StepLogits(target)
    for seed in (0, 1):  # the second step's are not the first's
        hidden_MD = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(seed))
        logits_MV = logits(hidden_MD)
        assert logits_MV.equal(target.logits(hidden_MD))
        assert logits.array(logits_MV).tolist() == logits_MV.tolist()


def test_other_decoders_give_their_own() -> None:
    target = load_decoder(tiny_weights(CONFIG), dtype="bfloat16")
    logits = StepLogits(target)
    hidden_MD = torch.randn(2, 64, dtype=torch.bfloat16)
    logits_MV = logits(hidden_MD)
    assert logits_MV.equal(target.logits(hidden_MD))
    assert logits.array(logits_MV).tolist() == logits_MV.float().tolist()
