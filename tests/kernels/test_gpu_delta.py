"""The kernels of gated delta nets against the specification, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from builders import Seq, pack, tables
from hunch.kernels.attention import AttnInputs
from hunch.kernels.delta import DeltaShape, DeltaWeights
from hunch.kernels.gpu_delta import MAX_TAPS, fold, gated_norm, keep, step_sequences
from hunch.kernels.recurrence import RowStates, StatesShape, recur

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_GPU = DEVICE == "cuda"
# The interpreter takes long for each head; a GPU can have more of them, and heads in parts.
SIZES = (2, 4, 64, 80) if IS_GPU else (1, 2, 16, 24)
SHAPE = DeltaShape(
    num_k_heads=SIZES[0], num_v_heads=SIZES[1], k_dim=SIZES[2], v_dim=SIZES[3], num_taps=3
)
NUM_ROWS, MAX_NODES, WIDTH = 3, 4, 8


def random(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


WEIGHTS = DeltaWeights(
    random(3, SHAPE.num_channels, seed=1), -random(SIZES[1], seed=2).exp(), random(SIZES[1], seed=3)
)
PADDED = DeltaWeights(
    torch.cat((torch.zeros(MAX_TAPS - 3, SHAPE.num_channels), WEIGHTS.conv_JC)).to(DEVICE),
    WEIGHTS.rate_N.to(DEVICE),
    WEIGHTS.bias_N.to(DEVICE),
)


def new_states(device: str) -> RowStates:
    shape = StatesShape(SHAPE, num_layers=2, num_rows=NUM_ROWS, max_nodes=MAX_NODES)
    states = RowStates.create(shape, torch.bfloat16, torch.device(device))
    assert states is not None
    states.state_LXNHD.fill_(7.0)  # of whoever was in the rows before
    states.inputs_LXGI.fill_(5.0)
    states.folded_LX.fill_(3)
    return states


def on_device(attn: AttnInputs) -> AttnInputs:
    tensors = (attn.pos_T, attn.slot_T, attn.seq_T, attn.table_SB, attn.base_T)
    pos, slot, seq, table, base = (tensor.to(DEVICE) for tensor in tensors)
    row_S = None if attn.row_S is None else attn.row_S.to(DEVICE)
    return AttnInputs(pos, slot, seq, table, base, None, attn.block_size, attn.spans, row_S)


def run(states: RowStates, inputs_TI: torch.Tensor, attn: AttnInputs) -> torch.Tensor:
    y_TW = torch.cat((inputs_TI, inputs_TI.new_zeros(len(inputs_TI), WIDTH)), dim=1).to(DEVICE)
    read_TZ = torch.full((len(y_TW), SHAPE.value_width), torch.nan, device=DEVICE)
    fold(y_TW, SHAPE, PADDED, states, 1, attn, read_TZ)
    keep(y_TW, states, 1, attn)
    return read_TZ.cpu()


def given(row: int, first: int, last: int) -> torch.Tensor:
    """What positions of a row's text are given; a node's differ from those of the text."""
    return random(40, SHAPE.num_inputs, seed=20 + row)[first:last].bfloat16()


# Of each step and row: position, known tokens, nodes, how many of these are accepted.
STEPS = [
    {0: (0, 9, 0, 0), 1: (0, 3, 2, 2)},
    {1: (5, 1, 3, 1), 0: (9, 2, 3, 0), 2: (0, 1, 0, 0)},
    {0: (11, 1, 4, 4), 1: (7, 1, 0, 0), 2: (1, 1, 4, 2)},
    {2: (4, 1, 1, 1), 0: (16, 4, 0, 0)},
]


@pytest.mark.slow
def test_kernels_do_what_the_specification_says_and_drafts_leave_no_trace() -> None:
    states, spec, alone = new_states(DEVICE), new_states("cpu"), new_states(DEVICE)
    for step in STEPS:
        seqs, inputs = [], []
        for row, (start, num_known, num_nodes, num_good) in step.items():
            seqs.append(Seq([0] * num_known, start=start, draft=[0] * num_nodes))
            parts = [given(row, start, start + num_known + num_good)]
            parts.append(given(row, 30, 30 + num_nodes - num_good))  # nodes that are rejected
            inputs.append(torch.cat(parts))
        _, attn = pack(seqs, tables(len(seqs)), num_padding=2)
        attn.row_S = torch.tensor(list(step))
        inputs_TI = torch.cat((*inputs, inputs[0].new_zeros(2, SHAPE.num_inputs)))
        read_TZ = run(states, inputs_TI, on_device(attn))
        want = recur(inputs_TI, SHAPE, WEIGHTS, spec, 1, attn).flatten(1)
        live = attn.slot_T >= 0
        torch.testing.assert_close(read_TZ[live], want[live], atol=1e-4, rtol=1e-4)
        for (row, (start, num_known, _, num_good)), span in zip(
            step.items(), attn.spans, strict=True
        ):
            for pos in range(start, start + num_known + num_good):  # as if nothing was drafted
                _, one = pack([Seq([0], start=pos)])
                one.row_S = torch.tensor([row])
                plain = run(alone, given(row, pos, pos + 1), on_device(one))
                assert torch.equal(read_TZ[span.first + pos - start], plain[0])
    torch.testing.assert_close(states.state_LXNHD[1].cpu(), spec.state_LXNHD[1])
    assert torch.equal(states.folded_LX.cpu(), spec.folded_LX)
    assert (states.state_LXNHD[0] == 7.0).all()  # another layer's


def test_a_captured_step_names_rows_by_their_tokens() -> None:
    """Rows of two tokens each; of the first one is padding, the second has ended."""
    states, spec = new_states(DEVICE), new_states("cpu")
    _, attn = pack([Seq([0] * 5)])
    attn.row_S = torch.tensor([2])
    for each, where in ((states, on_device(attn)), (spec, attn)):
        if each is spec:
            recur(given(2, 0, 5), SHAPE, WEIGHTS, spec, 1, where)
        else:
            run(each, given(2, 0, 5), where)
    pos, slot = torch.tensor([5, 0, 0, 0]), torch.tensor([9, -1, -1, -1])
    seq = torch.tensor([2, 2, 0, 0])
    table = torch.zeros(3, 4, dtype=torch.int64)
    step = on_device(AttnInputs(pos, slot, seq, table, pos + 1, None, 4))
    step.memo["sequences"] = step_sequences(2, 2, torch.device(DEVICE))
    read_TZ = run(states, given(2, 5, 9), step)
    _, attn = pack([Seq([0], start=5)])
    attn.row_S = torch.tensor([2])
    want = recur(given(2, 5, 6), SHAPE, WEIGHTS, spec, 1, attn).flatten(1)
    torch.testing.assert_close(read_TZ[:1], want, atol=1e-4, rtol=1e-4)
    assert torch.equal(states.folded_LX.cpu(), spec.folded_LX)


def test_heads_are_normed_and_gated() -> None:
    read_TZ, gate_TZ = random(3, 96, seed=4), random(3, 96, seed=5).bfloat16()
    norm_D, out_TZ = random(24, seed=6), torch.empty(3, 96, dtype=torch.bfloat16, device=DEVICE)
    slot_T = torch.tensor([4, -1, 2], device=DEVICE)
    gated_norm(read_TZ.to(DEVICE), gate_TZ.to(DEVICE), norm_D.to(DEVICE), 1e-6, slot_T, out_TZ)
    heads = read_TZ.view(3, 4, 24)
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6) * norm_D
    want = normed.flatten(1) * torch.nn.functional.silu(gate_TZ.float())
    want[1] = 0
    torch.testing.assert_close(out_TZ.cpu().float(), want, atol=2e-2, rtol=1e-2)
