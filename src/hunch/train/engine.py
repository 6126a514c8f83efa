"""The serving engine as training uses it: many answers at once, and a GPU shared by turns."""

from __future__ import annotations

import gc
from typing import Any

import torch

from hunch.hub import resolve as find_files
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights

NUM_ROWS = 1024  # answers written at once on a GPU


def for_answers(
    target: str, given: dict[str, Any], context: int, num_rows: int = NUM_ROWS
) -> dict[str, Any]:
    """Arguments for an engine that answers many prompts; what is given stays as it is.

    A GPU gets as many rows as pay, each as long as training looks at, so that they have room.
    """
    if not torch.cuda.is_available() or given.get("device") == "cpu":
        return given
    own = ModelSpec.from_config(open_weights(find_files(target)).config).max_len
    more = {"max_num_seqs": num_rows, "max_model_len": min(context, own)}
    return {**more, "enable_prefix_caching": False, **given}


def give_back() -> None:
    """Let go of a GPU's memory that a stage before held, for the next one to take."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
