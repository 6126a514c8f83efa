"""What a node of a draft model reads of memory, as a share of what a pass of the target reads."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from hunch.models.weights import Weights

MAX_SHARE = 0.2  # above which a draft model rarely pays


def byte_share(weights: Weights, target: Any) -> float:
    """By the files alone: nothing is loaded. Of embeddings a pass reads next to nothing."""
    config, spec = weights.config, target.spec
    sizes = {name: prod(weights.shape(name)) for name in weights.names()}
    num_read = sum(size for name, size in sizes.items() if "embed_tokens" not in name)
    if not any("lm_head" in name for name in sizes):  # the embedding is the output matrix too
        num_columns = config.get("draft_vocab_size") or config.get("vocab_size", 0)
        num_read += num_columns * config.get("hidden_size", 0)
    # Beside a quantised target a draft model is held in 8 bits.
    is_quantised = target.kernels == "native" and target.kv_dtype != torch.float32
    size = 1 if is_quantised else target.dtype.itemsize
    embedding = 0 if spec.is_tied else spec.vocab_size * spec.width * size
    return float(num_read * size / max(target.weight_bytes - embedding, 1))
