"""The kernels of recurrent layers against the specification, and a row's bits in any company."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from builders import Seq, pack, tables
from hunch.kernels import gpu_short_conv
from hunch.kernels.attention import AttnInputs
from hunch.kernels.delta import DeltaShape, DeltaWeights
from hunch.kernels.gpu_fold import fold, gate
from hunch.kernels.gpu_recurrence import keep, padded_taps, step_sequences
from hunch.kernels.recur import recur
from hunch.kernels.recurrence import Recurrence, RecurrentStates, StatesShape
from hunch.kernels.short_conv import ConvShape, ConvWeights
from hunch.kernels.ssm import SsmShape, SsmWeights
from hunch.layers.linear import Linear
from hunch.layers.recurrent import Mamba

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_GPU = DEVICE == "cuda"
NUM_ROWS, MAX_NODES, TAPS = 3, 4, 3
# The interpreter takes long for each head; a GPU can have more of them, and heads in parts.
SIZES = (2, 4, 64, 80) if IS_GPU else (1, 2, 16, 24)
GROUPS, HEADS, KEY, VALUE = SIZES
DELTA = DeltaShape(num_k_heads=GROUPS, num_v_heads=HEADS, k_dim=KEY, v_dim=VALUE, num_taps=TAPS)
SSM = SsmShape(num_groups=GROUPS, num_heads=HEADS, k_dim=KEY, v_dim=VALUE, num_taps=TAPS)
CONV = ConvShape(width=300 if IS_GPU else 24, num_taps=TAPS)


def random(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


RATE, BIAS = -random(HEADS, seed=2).exp(), random(HEADS, seed=3)
WEIGHTS: dict[Recurrence, Any] = {
    DELTA: DeltaWeights(random(TAPS, DELTA.num_channels, seed=1), RATE, BIAS),
    SSM: SsmWeights(
        random(TAPS, SSM.num_channels, seed=1),
        random(SSM.num_channels, seed=4),
        RATE,
        BIAS,
        random(HEADS, seed=5),
    ),
    CONV: ConvWeights(random(TAPS, CONV.width, seed=1)),
}
SHAPES = [pytest.param(shape, id=type(shape).__name__) for shape in WEIGHTS]


def padded(shape: Recurrence) -> Any:
    weights = {key: tensor.to(DEVICE) for key, tensor in asdict(WEIGHTS[shape]).items()}
    weights |= {key: padded_taps(weights[key]) for key in ("conv_JC", "conv_JD") if key in weights}
    return type(WEIGHTS[shape])(**weights)


def new_states(recurrence: Recurrence, device: str) -> RecurrentStates:
    shape = StatesShape(recurrence, num_layers=2, num_rows=NUM_ROWS, max_nodes=MAX_NODES)
    states = RecurrentStates.create(shape, torch.bfloat16, torch.device(device))
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


def run(
    shape: Recurrence, states: RecurrentStates, inputs_TI: torch.Tensor, attn: AttnInputs
) -> torch.Tensor:
    gate_TZ = inputs_TI.new_ones(len(inputs_TI), shape.value_width)
    y_TW = torch.cat((inputs_TI, gate_TZ), dim=1).to(DEVICE)
    read_TZ = torch.full((len(y_TW), shape.value_width), torch.nan, device=DEVICE)
    does = gpu_short_conv.mix if shape is CONV else fold
    does(y_TW, shape, padded(shape), states, 1, attn, read_TZ)
    keep(y_TW, states, 1, attn)
    return read_TZ.cpu()


def given(shape: Recurrence, row: int, first: int, last: int) -> torch.Tensor:
    """What positions of a row's text are given; a node's differ from those of the text."""
    return random(40, shape.num_inputs, seed=20 + row)[first:last].bfloat16()


# Of each step and row: position, known tokens, nodes, how many of these are accepted.
STEPS = [
    {0: (0, 9, 0, 0), 1: (0, 3, 2, 2)},
    {1: (5, 1, 3, 1), 0: (9, 2, 3, 0), 2: (0, 1, 0, 0)},
    {0: (11, 1, 4, 4), 1: (7, 1, 0, 0), 2: (1, 1, 4, 2)},
    {2: (4, 1, 1, 1), 0: (16, 4, 0, 0)},
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_do_what_the_specification_says_and_drafts_leave_no_trace(
    shape: Recurrence,
) -> None:
    states, spec, alone = (new_states(shape, device) for device in (DEVICE, "cpu", DEVICE))
    for step in STEPS:
        seqs, inputs = [], []
        for row, (start, num_known, num_nodes, num_good) in step.items():
            seqs.append(Seq([0] * num_known, start=start, draft=[0] * num_nodes))
            parts = [given(shape, row, start, start + num_known + num_good)]
            rejected = num_nodes - num_good
            parts.append(given(shape, row, 30, 30 + rejected))
            inputs.append(torch.cat(parts))
        _, attn = pack(seqs, tables(len(seqs)), num_padding=2)
        attn.row_S = torch.tensor(list(step))
        inputs_TI = torch.cat((*inputs, inputs[0].new_zeros(2, shape.num_inputs)))
        read_TZ = run(shape, states, inputs_TI, on_device(attn))
        want = recur(inputs_TI, shape, WEIGHTS[shape], spec, 1, attn).flatten(1)
        live = attn.slot_T >= 0
        torch.testing.assert_close(read_TZ[live], want[live], atol=1e-4, rtol=1e-4)
        for (row, (start, num_known, _, num_good)), span in zip(
            step.items(), attn.spans, strict=True
        ):
            for pos in range(start, start + num_known + num_good):  # as if nothing was drafted
                _, one = pack([Seq([0], start=pos)])
                one.row_S = torch.tensor([row])
                plain = run(shape, alone, given(shape, row, pos, pos + 1), on_device(one))
                assert torch.equal(read_TZ[span.first + pos - start], plain[0])
    torch.testing.assert_close(states.state_LXNHD[1].cpu(), spec.state_LXNHD[1])
    assert torch.equal(states.folded_LX.cpu(), spec.folded_LX)
    assert (states.state_LXNHD[0] == 7.0).all()  # another layer's


@pytest.mark.parametrize("shape", SHAPES)
def test_a_captured_step_names_rows_by_their_tokens(shape: Recurrence) -> None:
    """Rows of two tokens each; of the first one is padding, the second has ended."""
    states, spec = new_states(shape, DEVICE), new_states(shape, "cpu")
    _, attn = pack([Seq([0] * 5)])
    attn.row_S = torch.tensor([2])
    for each, where in ((states, on_device(attn)), (spec, attn)):
        if each is spec:
            recur(given(shape, 2, 0, 5), shape, WEIGHTS[shape], spec, 1, where)
        else:
            run(shape, each, given(shape, 2, 0, 5), where)
    pos, slot = torch.tensor([5, 0, 0, 0]), torch.tensor([9, -1, -1, -1])
    seq = torch.tensor([2, 2, 0, 0])
    table = torch.zeros(3, 4, dtype=torch.int64)
    step = on_device(AttnInputs(pos, slot, seq, table, pos + 1, None, 4))
    step.memo["sequences"] = step_sequences(2, 2, torch.device(DEVICE))
    read_TZ = run(shape, states, given(shape, 2, 5, 9), step)
    _, attn = pack([Seq([0], start=5)])
    attn.row_S = torch.tensor([2])
    want = recur(given(shape, 2, 5, 6), shape, WEIGHTS[shape], spec, 1, attn).flatten(1)
    torch.testing.assert_close(read_TZ[:1], want, atol=1e-4, rtol=1e-4)
    assert torch.equal(states.folded_LX.cpu(), spec.folded_LX)


def test_heads_are_normed_and_gated() -> None:
    read_TZ, gate_TZ = random(3, 96, seed=4), random(3, 96, seed=5).bfloat16()
    norm_D, out_TZ = random(24, seed=6), torch.empty(3, 96, dtype=torch.bfloat16, device=DEVICE)
    slot_T = torch.tensor([4, -1, 2], device=DEVICE)
    shape = DeltaShape(num_k_heads=2, num_v_heads=4, k_dim=8, v_dim=24, num_taps=4)
    inputs = (read_TZ.to(DEVICE), gate_TZ.to(DEVICE))
    gate(*inputs, shape, norm_D.to(DEVICE), 1e-6, slot_T, out_TZ)
    heads = read_TZ.view(3, 4, 24)
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6) * norm_D
    want = normed.flatten(1) * torch.nn.functional.silu(gate_TZ.float())
    want[1] = 0
    torch.testing.assert_close(out_TZ.cpu().float(), want, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("order", ["gate, norm", "norm, gate", "gate"])
def test_groups_are_gated_and_normed(order: str) -> None:
    shape = SsmShape(num_groups=2, num_heads=4, k_dim=8, v_dim=24, num_taps=4)
    shape = replace(shape, is_norm_first=order.startswith("norm"))
    read_TZ, gate_TZ = random(3, 96, seed=4), random(3, 96, seed=5).bfloat16()
    norm_Z = random(96, seed=6) if "norm" in order else None
    slot_T = torch.tensor([4, -1, 2], device=DEVICE)
    out_TZ = torch.empty(3, 96, dtype=torch.bfloat16, device=DEVICE)
    inputs = (read_TZ.to(DEVICE), gate_TZ.to(DEVICE))
    norm = None if norm_Z is None else norm_Z.to(DEVICE)
    gate(*inputs, shape, norm, 1e-6, slot_T, out_TZ)
    nothing = torch.empty(0)
    layer = Mamba(
        Linear(nothing), SsmWeights(*(nothing,) * 5), Linear(nothing), shape, 0, norm_Z, 1e-6
    )
    want = layer.gated(read_TZ.view(3, 4, 24), gate_TZ)
    want[1] = 0
    torch.testing.assert_close(out_TZ.cpu().float(), want, atol=2e-2, rtol=1e-2)
