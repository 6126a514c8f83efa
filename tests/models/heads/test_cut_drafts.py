"""Drafts that share the target's embedding and output matrix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hunch.models.heads.draft_model import cut_decoder
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights
from hunch.train.costs import BlankWeights
from tiny_models import write_llama


@pytest.mark.parametrize(
    ("given", "is_shared"), [("auto", True), ("bfloat16", True), ("float16", False)]
)
def test_it_computes_in_the_precision_of_the_tables_it_shares(
    given: str, is_shared: bool, tmp_path: Path
) -> None:
    path = write_llama(tmp_path / "model", width=32, layers=2)
    weights = open_weights(str(path))
    target = load_decoder(weights, dtype="bfloat16", device="cpu")
    spec = replace(target.spec, num_layers=1)
    cut = BlankWeights(weights, spec)
    cut.config |= {"torch_dtype": "float16", "cut_from": str(path)}
    draft = cut_decoder(cut, spec, target, given, None)
    assert (draft.embedding_VD is target.embedding_VD) == is_shared
    hidden_1D = torch.ones(1, target.spec.width, dtype=draft.dtype)
    assert draft.logits(hidden_1D).shape == (1, target.spec.vocab_size)
