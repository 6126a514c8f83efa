"""What a GPU must keep free beside weights and KV: measured by one largest pass over nobody."""

from __future__ import annotations

import torch

from hunch.kernels.attention import AttnInputs, Span
from hunch.models.target import Target

GRAPHS = 2**28  # captured steps keep their logits and inputs
RULES = 9  # bytes per row and token of `kernels.process.ProcessTables`


@torch.inference_mode()
def working_bytes(target: Target, num_tokens: int, num_rows: int) -> int:
    """Memory at the peak of a pass over so many tokens, with the logits of so many rows."""
    device: torch.device = target.device
    if device.type != "cuda":
        return 0
    kv = target.new_kv(1)
    zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    attn = AttnInputs(
        pos_T=zeros_T,
        slot_T=zeros_T - 1,  # padding: nothing is written, nothing is read
        seq_T=zeros_T,
        table_SB=zeros_T[:1, None],
        base_T=zeros_T + 1,
        tree_TP=None,
        block_size=1,
        spans=(Span(0, num_tokens, 0, 0, num_tokens),),
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    hidden = target.forward(zeros_T, attn, kv)
    target.logits(hidden.last_TD[:num_rows])
    peak = torch.cuda.max_memory_allocated(device) - before
    del hidden
    torch.cuda.empty_cache()
    return int(peak) + GRAPHS + RULES * num_rows * int(target.spec.vocab_size)
