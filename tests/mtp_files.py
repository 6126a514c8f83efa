"""Small checkpoints of several MTP layers, and the paper's formula for them in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from head_files import MTP_NAMES, Study, fit, layer_config, layer_tensors, normal, write
from plain_heads import MtpHead

PREFIX = {"mimo": "model.mtp_layers.{}.", "qwen": "mtp.", "deepseek": "model.layers.{}."}
LAYER = {**PREFIX, "qwen": "mtp.layers.{}."}
FIRST = {"mimo": 0, "qwen": 0, "deepseek": 2}


class StagedHead:
    """Stage k takes, at position i, the state of stage k - 1 at i and token i + 1 + k."""

    def __init__(self, stages: list[MtpHead]) -> None:
        self.stages = stages

    def states(self, h: Tensor, tokens: Tensor) -> list[Tensor]:
        """[B, T - 1 - k, D] per stage k, from the target's states and tokens, [B, T]."""
        found = [h]
        for k, stage in enumerate(self.stages):
            found.append(stage.states(found[-1][:, : tokens.shape[1] - 1 - k], tokens[:, k + 1 :]))
        return found[1:]

    def replay(self, h: Tensor, tokens: list[int], known: int, depth: int) -> list[int]:
        """The greedy chain drafted once `known` tokens are decided; past the last stage, it again.

        All at the positions of the paper: every stage ends at known - 2, whatever was drafted.
        """
        text = list(tokens[:known])
        h = h[None, : known - 1]
        for k in range(depth):
            stage = self.stages[min(k, len(self.stages) - 1)]
            first = min(k, len(self.stages) - 1) + 1
            following = torch.tensor(text[first : first + h.shape[1]])[None]
            states = stage.states(h, following)
            text.append(int(stage.logits(states[0, -1]).argmax()))
            h = states if k + 1 < len(self.stages) else torch.cat([h, states[:, -1:]], 1)
        return text[known:]


def make_stages(
    s: Study, path: Path, form: str, num_stages: int, *, num_steps: int = 40
) -> StagedHead:
    c = layer_config(s, num_nextn_predict_layers=num_stages)
    tensors: dict[str, Tensor] = {}
    stages: list[MtpHead] = []
    for k in range(num_stages):
        prefix, layer = (x[form].format(FIRST[form] + k) for x in (PREFIX, LAYER))
        names = tuple(prefix + name for name in MTP_NAMES[form])
        for at, name in enumerate(names):
            if f"{name}.weight" not in tensors:
                shape = (s.width, 2 * s.width) if at == 2 else (s.width,)
                seed = 100 * k + at
                tensors[f"{name}.weight"] = normal(*shape, seed=seed) + float(at != 2)
        tensors |= layer_tensors(layer, c, s.width, 100 * k + 10)
        more: dict[str, Any] = {"is_reversed": form == "mimo", "is_masked": form == "deepseek"}
        stages.append(MtpHead(tensors, c, s.embedding, s.lm_head, names=names, layer=layer, **more))
    head = StagedHead(stages)

    def loss() -> Tensor:
        total = torch.zeros(())
        for k, states in enumerate(head.states(s.hidden, s.tokens)):
            logits = stages[k].logits(states[:, :-1]).flatten(0, 1)
            total = total + F.cross_entropy(logits, s.tokens[:, k + 2 :].flatten())
        return total

    fit(tensors, loss, num_steps)
    write(path, c, tensors)
    return head
