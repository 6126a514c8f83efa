"""KV storage: one pair of tensors per group, all over the same block ids.

Shape letters: L layers, C slots, M KV heads, H head width.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hunch.config import Config
from hunch.draft import KVShape
from hunch.drafting.step_shapes import MAX_CHECKED
from hunch.errors import CapacityError
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache, has_scales
from hunch.kernels.recurrence import RecurrentStates, StatesShape
from hunch.models.target import Target

GRAPHS = 2**28  # bytes for captured steps, beside their logits
LOGITS = 6  # bytes per checked token and vocabulary entry: in 16 bits, and in 32 where filtered
RULES = 9  # bytes per row and token of `kernels.process.ProcessTables`
ROWS = 9  # bytes per row and position of `kernels.step.RowState`, with its table of blocks


def bytes_per_slot(shapes: Sequence[KVShape]) -> int:
    total = 0
    for shape in (*shapes, *(shape.others for shape in shapes if shape.others is not None)):
        head_bytes = shape.head_dim * shape.dtype.itemsize + 4 * has_scales(shape.dtype)
        total += (2 - shape.is_shared) * shape.num_layers * shape.num_kv_heads * head_bytes
    return total


def count_blocks(
    config: Config,
    shapes: Sequence[KVShape],
    max_len: int,
    max_nodes: int,
    device: torch.device,
    working_bytes: int = 0,
    num_sharing: int = 1,
) -> int:
    """How many blocks fit into memory, at most as many as all rows at full length could use.

    `num_sharing`: processes that take their KV from the same memory.
    """
    cache, max_rows = config.cache, config.schedule.num_rows
    if cache.num_blocks is not None:
        return cache.num_blocks
    block_bytes = bytes_per_slot(shapes) * cache.block_size
    budget = cache.kv_bytes
    if budget is None:
        share = cache.gpu_memory_utilization, cache.engines_per_device
        budget = max(_free_memory(device, *share) - working_bytes, 0)
        budget //= num_sharing
    useful = max_rows * (-(-(max_len + 2 * max_nodes + 2) // cache.block_size))
    num_blocks = min(budget // block_bytes, useful)
    if num_blocks < 1:
        raise CapacityError(
            f"the KV cache has {budget:,} bytes, one block of {cache.block_size} tokens needs "
            f"{block_bytes:,}: give kv_bytes more, or a smaller block_size"
        )
    return int(num_blocks)


def allocate(shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
    size = (shape.num_layers, num_blocks * block_size, shape.num_kv_heads, shape.head_dim)
    try:
        kv = _pair(size, shape.dtype, device, shape.is_shared)
        if has_scales(shape.dtype):
            kv.scales = _pair((*size[:3], 1), torch.float32, device, shape.is_shared)
        if shape.others is not None:
            kv.others = allocate(shape.others, num_blocks, block_size, device)
        return kv
    except (RuntimeError, MemoryError, OSError) as error:
        raise CapacityError(
            f"no memory for {num_blocks} KV blocks on {device}: give a smaller kv_bytes, "
            "max_model_len or max_num_seqs"
        ) from error


def _pair(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device, is_shared: bool
) -> KVCache:
    k_LCMH = _zeros(size, dtype, device)
    return KVCache(k_LCMH, k_LCMH if is_shared else _zeros(size, dtype, device))


def allocate_states(
    shape: StatesShape | None, dtype: torch.dtype, device: torch.device
) -> RecurrentStates | None:
    """Recurrent states of rows; on a CPU memory is taken only as it is used."""
    try:
        return RecurrentStates.create(shape, dtype, device, _zeros)
    except (RuntimeError, MemoryError, OSError) as error:
        assert shape is not None
        raise CapacityError(
            f"no memory on {device} for the recurrent states of {shape.num_rows} rows, "
            f"{shape.num_bytes(dtype):,} bytes: give a smaller max_num_seqs"
        ) from error


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros (masked products must not meet a NaN); on a CPU memory is taken as it is used."""
    if device.type != "cpu" or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return torch.zeros(size, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=flags)
    # With huge pages the first token would take 2 MB per layer.
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(size)


def _free_memory(device: torch.device, utilization: float, num_engines: int = 1) -> int:
    """Bytes that KV may take: the rest of a GPU's share, or a quarter of the free memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        rest = int(total * utilization) - (total - free)
        own = int(total * utilization) // num_engines - torch.cuda.memory_reserved(device)
        return max(rest if num_engines == 1 else min(rest, own), 0)
    return _free_ram() // 4


def _free_ram(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory the system could give without swapping, within the limit of a container."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: half of the machine's memory
    try:
        limit, used = ((cgroup / f"memory.{name}").read_text() for name in ("max", "current"))
        return free if limit.strip() == "max" else max(min(free, int(limit) - int(used)), 0)
    except OSError:
        return free


@torch.inference_mode()
def working_bytes(
    target: Target, num_tokens: int, num_rows: int, max_len: int, max_nodes: int
) -> int:
    """Bytes that a GPU must keep free beside weights and KV.

    Measured by one pass over padding, with `num_tokens` tokens and the logits of `num_rows`. Beside
    that there are the logits of captured steps, whose memory nothing else uses, and the state of
    rows of up to `max_len` tokens.
    """
    device: torch.device = target.device
    if device.type != "cuda":
        return 0
    kv = target.new_kv(1)
    zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    attn = AttnInputs.nobody(zeros_T, zeros_T[:1, None], 1)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    hidden = target.forward(zeros_T, attn, kv)
    target.logits(hidden.last_TD[:num_rows])
    peak = torch.cuda.max_memory_allocated(device) - before
    del hidden
    torch.cuda.empty_cache()
    vocab_size = int(target.spec.vocab_size)
    num_checked = max(num_rows, min(num_rows * (1 + max_nodes), MAX_CHECKED))
    of_steps = GRAPHS + num_checked * LOGITS * vocab_size
    return int(peak) + of_steps + num_rows * (RULES * vocab_size + ROWS * max_len)
