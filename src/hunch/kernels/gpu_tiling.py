"""How one network's attention on a GPU is shared out, step by step.

Shape letters: see gpu_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.gpu_attention import Tiling, Workspace, programs_for, tiles_of
from hunch.kernels.gpu_launch import next_power_of_2

SHARED_TOKENS = 256  # up to so many packed tokens, programs share a row's positions


@dataclass(slots=True)
class Tiler:
    """What tilings depend on besides a step's spans, and the room all of them share."""

    num_heads: int
    num_kv_heads: int
    max_len: int  # no token has a position from here on
    workspace: Workspace
    device: torch.device

    @staticmethod
    def create(
        num_heads: int, num_kv_heads: int, head: int, max_len: int, device: torch.device,
        max_bytes: int,
    ) -> Tiler:  # fmt: skip
        """Partial results of rows that are shared out take up to max_bytes."""
        workspace = Workspace.create(SHARED_TOKENS, num_heads, head, max_len, device, max_bytes)
        return Tiler(num_heads, num_kv_heads, max_len, workspace, device)

    def of(self, attn: AttnInputs) -> Tiling:
        """The step's tiling. A captured step brings its own: its host knows no spans."""
        if "tiling" not in attn.memo:
            attn.memo["tiling"] = self.tiling(attn.spans, len(attn.pos_T))
        return attn.memo["tiling"]

    def tiling(self, spans: tuple[Span, ...], num_tokens: int) -> Tiling:
        """By the spans' sizes alone: a captured step keeps its tiling, with other contents."""
        longest = max((span.last - span.first for span in spans), default=1)
        is_shared = num_tokens <= self.workspace.max_tokens
        if longest == 1:
            return Tiling(None, 1, self._programs(num_tokens, is_shared), self.workspace)
        group = next_power_of_2(self.num_heads // self.num_kv_heads)
        block = 4 if num_tokens <= 64 or longest <= 16 else max(4, 64 // group)
        tiles = tiles_of(spans, block).to(self.device, non_blocking=True)
        return Tiling(tiles, block, self._programs(len(tiles), is_shared), self.workspace)

    def _programs(self, num_tiles: int, is_shared: bool) -> int:
        return programs_for(num_tiles, self.num_kv_heads, self.max_len) if is_shared else 1
