"""How the attention of one network is divided among a GPU's programs, for each step.

Shape letters: see gpu_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hunch.kernels import gpu_launch
from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options

SPLIT = 128  # positions per partial result
MAX_PROGRAMS = 32  # that share one row's splits
MAX_WIDE_ROWS = 32  # rows of a program where heads are wider than 256
MAX_NUMBERS = 1 << 15  # of a program's queries elsewhere: twice as many do not fit shared memory
NUM_SMS = 132
WIDE_BYTES = 128 * 1024  # of shared memory, needed to read wide heads ahead
SHARED_TOKENS = 256  # up to this many packed tokens, programs share a row's positions


@dataclass(slots=True)
class Workspace:
    """Partial results of rows that several programs share. Kernels set the counts back to zero."""

    acc: Tensor
    stat: Tensor
    count: Tensor
    max_tokens: int
    max_splits: int

    @staticmethod
    def create(
        max_tokens: int, num_heads: int, head: int, max_len: int, device: torch.device | str,
        max_bytes: int | None = None,
    ) -> Workspace:  # fmt: skip
        """Memory for rows of up to max_len positions; for fewer tokens if it would be too much."""
        max_splits = cdiv(max_len, SPLIT)
        if max_bytes is not None:
            token_bytes = num_heads * max_splits * (head + 2) * 4
            max_tokens = max(1, min(max_tokens, max_bytes // token_bytes))
        parts = max_tokens * num_heads * max_splits
        return Workspace(
            torch.empty(parts * head, dtype=torch.float32, device=device),
            torch.empty(parts * 2, dtype=torch.float32, device=device),
            torch.zeros(max_tokens * num_heads, dtype=torch.int32, device=device),
            max_tokens,
            max_splits,
        )


@dataclass(slots=True)
class Tiling:
    """How one launch divides its work, chosen by sizes alone. Any tiling gives the same bits. It is
    kept in `AttnInputs.memo["tiling"]`."""

    tiles_I2: Tensor | None  # (first token, tokens) of each tile; None: every token is one
    block_tokens: int = 1  # most tokens of a tile
    programs: int = 1  # programs that share one tile's splits
    workspace: Workspace | None = None
    num_warps: int = 0  # 0: by size


def tiles_of(spans: tuple[Span, ...], block_tokens: int, num_tiles: int = 0) -> Tensor:
    """Tiles of up to block_tokens tokens, none across two sequences, padded to num_tiles."""
    count = num_tiles_of(spans, block_tokens)
    tiles_I2 = np.zeros((max(count, num_tiles), 2), dtype=np.int32)
    write_tiles(spans, block_tokens, tiles_I2)
    return torch.from_numpy(tiles_I2)


def num_tiles_of(spans: tuple[Span, ...], block_tokens: int) -> int:
    return sum([cdiv(span.last - span.first, block_tokens) for span in spans])


def write_tiles(spans: tuple[Span, ...], block_tokens: int, tiles_I2: np.ndarray) -> None:
    """Write the tiles of these spans to the first lines."""
    firsts = [np.arange(span.first, span.last, block_tokens) for span in spans]
    if len(spans) == 1:
        first_I, last_I = firsts[0], spans[0].last
    elif spans:
        first_I = np.concatenate(firsts)
        last_I = np.repeat([span.last for span in spans], [len(some) for some in firsts])
    else:
        return
    here_I2 = tiles_I2[: len(first_I)]
    here_I2[:, 0] = first_I
    np.minimum(last_I - first_I, block_tokens, out=here_I2[:, 1], casting="same_kind")


def parts_of(num_heads: int, num_kv_heads: int, head: int) -> int:
    """Programs that share the query heads of a KV head: wide heads need many registers."""
    group, parts = num_heads // num_kv_heads, 1
    while head > 256 and (group % parts or next_power_of_2(group // parts) > MAX_WIDE_ROWS):
        parts += 1
    return parts


def programs_for(num_tiles: int, num_kv_heads: int, max_len: int) -> int:
    """Programs that share a row's splits: enough to fill the chip. There are always a few, as all
    rows wait for the longest one."""
    num_rows = max(num_tiles * num_kv_heads, 1)
    least = 8 if num_rows < 3 * NUM_SMS else 4
    wanted = max(cdiv(2 * NUM_SMS, num_rows), least)
    return max(1, min(wanted, cdiv(max_len, SPLIT), MAX_PROGRAMS))


@dataclass(slots=True)
class Tiler:
    """What tilings depend on besides a step's spans, and the workspace that they share."""

    num_heads: int
    num_kv_heads: int  # programs per tile of tokens
    max_len: int  # positions are below this
    workspace: Workspace
    device: torch.device
    max_rows: int = 0  # of a tile: tokens times the heads that share keys; 0: no limit

    @staticmethod
    def create(
        num_heads: int, num_kv_heads: int, head: int, max_len: int, device: torch.device,
        max_bytes: int,
    ) -> Tiler:  # fmt: skip
        """A tiler whose workspace takes up to max_bytes."""
        workspace = Workspace.create(SHARED_TOKENS, num_heads, head, max_len, device, max_bytes)
        num_groups = num_kv_heads * parts_of(num_heads, num_kv_heads, head)
        most = MAX_WIDE_ROWS if head > 256 else MAX_NUMBERS // next_power_of_2(head)
        return Tiler(num_heads, num_groups, max_len, workspace, device, most)

    def of(self, attn: AttnInputs) -> Tiling:
        """The step's tiling. A captured step has its own, as the host does not know its spans."""
        if "tiling" not in attn.memo:
            attn.memo["tiling"] = self.tiling(attn.spans, len(attn.pos_T))
        return attn.memo["tiling"]

    def tiling(self, spans: tuple[Span, ...], num_tokens: int) -> Tiling:
        """A tiling by the sizes of spans alone, so that a captured step can keep it."""
        longest = max((span.last - span.first for span in spans), default=1)
        is_shared = num_tokens <= self.workspace.max_tokens
        if longest == 1:
            return Tiling(None, 1, self._programs(num_tokens, is_shared), self.workspace)
        block = self.block(num_tokens if longest > 16 else 1)
        tiles = tiles_of(spans, block).to(self.device, non_blocking=True)
        return Tiling(tiles, block, self._programs(len(tiles), is_shared), self.workspace)

    def block(self, num_tokens: int) -> int:
        """Most tokens of a tile."""
        group = next_power_of_2(self.num_heads // self.num_kv_heads)
        size = max(16 // group, 1) if num_tokens <= 64 else max(4, 64 // group)
        return max(1, min(size, self.max_rows // group)) if self.max_rows else size

    def padded(self, num_tiles: int, num_tokens: int) -> Tiling:
        """A tiling with room for this many tiles, to be filled in before each replay of a pass."""
        tiles_I2 = torch.zeros(num_tiles, 2, dtype=torch.int32, device=self.device)
        is_shared = num_tokens <= self.workspace.max_tokens
        programs = self._programs(num_tiles, is_shared)
        return Tiling(tiles_I2, self.block(num_tokens), programs, self.workspace)

    def _programs(self, num_tiles: int, is_shared: bool) -> int:
        return programs_for(num_tiles, self.num_kv_heads, self.max_len) if is_shared else 1


def least_share(num_rows: int) -> int:
    """The fewest splits of a row for which several programs pay, for rows x KV heads."""
    return 1 if num_rows < 1.25 * NUM_SMS else 2 if num_rows < 2.5 * NUM_SMS else 3


def launch_options(
    tiling: Tiling, rows: int, num_rows: int, head: int, is_latent: bool, is_tree: bool
) -> dict[str, object]:
    """Launch options of attention: many warps for few programs, few warps for many, so that more of
    them fit; and more stages if the heads leave room for them."""
    if 64 < head <= 128:
        num_warps = 8 if num_rows < NUM_SMS // 3 else 2
    else:
        num_warps = 8 if num_rows < NUM_SMS // 2 else 4 if num_rows < 1.25 * NUM_SMS else 2
    is_small = is_tree and rows < 64 and head <= 128
    if tiling.block_tokens >= 16 and head > 64 and num_rows >= NUM_SMS // 3:
        is_small = False  # each head has keys of its own: reading ahead gains more
    if is_small and NUM_SMS // 8 <= num_rows < 1.25 * NUM_SMS:
        # Programs for one or two tokens beside those for all, and each with a tile or two: as many
        # as possible shall fit.
        return options(tiling.num_warps or (4 if num_rows < 3 * NUM_SMS // 4 else 2))
    if rows >= 64:
        num_warps = 8 if rows >= 128 else 4
    is_ahead = num_warps == 2 and head <= 64
    has_room = head <= 128 or gpu_launch.SHARED_BYTES >= WIDE_BYTES
    if head > 256:
        return options(8, 2 if is_latent and has_room else 1)
    return options(tiling.num_warps or num_warps, 3 if is_ahead else 2 if has_room else 1)
