"""Stage 4: a drafter's directory in its published form, with a card that says what it is."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hunch.errors import ConfigError
from hunch.models.heads.draft_model import CUT_FROM, DRAFTS_FOR
from hunch.train.files import write_json, write_whole
from hunch.train.select import Measured

PRECISIONS = ("float16", "bfloat16", "float32", "int8")


def card(
    *,
    method: str,
    target: str,
    cut_from: str,  # another model than the target; empty: none
    recipe: Mapping[str, Any],
    data: str,
    measured: Measured,
    num_parameters: int,
) -> str:
    """What a reader of the drafter's README learns."""
    positions = ", ".join(f"{share:.2f}" for share in measured.per_position)
    options = "\n".join(f"- {key}: {value}" for key, value in recipe.items())
    origin = (
        f"Its layers are cut from {cut_from}; embedding and output matrix are read from that "
        "model's files (`cut_from` in config.json).\n\n"
    )
    return (
        f"# {method} drafter for {target}\n\n"
        f"It guesses tokens that {target} would write; the target checks every guess, so the text "
        "is the target's own. Of no use alone, or beside another target.\n\n"
        f"{origin if cut_from else ''}"
        f"Use: `hunch generate ... --model {target} --speculate {method}:DIRECTORY`\n"
        f"\nParameters of its own: {num_parameters:,}.\n"
        f"\n## Measured\n\nTokens per pass {measured.tokens_per_pass:.2f} (held-out prompts, "
        f"greedy, in the engine); acceptance by position {positions}; cost of a drafted node "
        f"{measured.cost_per_node:.3f} of a target pass.\n"
        f"\n## Data\n\n{data}\n\n## Recipe\n\n{options}\n\nhunch commit: {source_commit()}\n"
    )


def write_drafter(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    *,
    target: str,
    precision: str = "float16",
    tokenizer_from: Path | None = None,
) -> None:
    """Write a drafter's files; the weights come last, so a directory is whole or old."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}")
    if CUT_FROM in config:  # if it is another model, by its name
        config = {**config, CUT_FROM: config[CUT_FROM] or target}
    if DRAFTS_FOR in config:
        config = {**config, DRAFTS_FOR: target}
    dtype = "float16" if precision == "int8" else precision
    write_json(folder / "config.json", {**config, "torch_dtype": dtype})
    if tokenizer_from is not None and tokenizer_from.is_dir():
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (tokenizer_from / name).is_file() and CUT_FROM not in config:
                shutil.copyfile(tokenizer_from / name, folder / name)
    stored = pack(tensors, precision)
    write_whole(folder / "model.safetensors", lambda part: save_file(stored, part))


def source_commit() -> str:
    """The source's commit, where hunch runs from a checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def pack(tensors: dict[str, Tensor], precision: str) -> dict[str, Tensor]:
    """Floats in the precision asked for; int8 keeps a scale for every row of a matrix."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if not tensor.is_floating_point():
            stored[name] = tensor.contiguous()
        elif precision == "int8" and tensor.dim() == 2:
            scale_N1 = (tensor.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
            stored[name] = (tensor.float() / scale_N1).round().to(torch.int8).contiguous()
            stored[f"{name}_scale"] = scale_N1.squeeze(1).contiguous()
        else:
            dtype = getattr(torch, "float16" if precision == "int8" else precision)
            stored[name] = tensor.to(dtype).contiguous().clone()
    return stored
