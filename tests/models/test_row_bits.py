"""A model on torch alone: a row's bits are the same whatever rows are beside it, in any dtype."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import Seq, new_kv, pack, tables, tiny_config, tiny_weights
from hunch.kernels import linear as products
from hunch.kernels.linear import linear, linear_in_tiles
from hunch.layers import attention as attention_layer
from hunch.models.load import load_decoder

NUM_BLOCKS = 12
IDS = [[(7 * i + 11 * seq) % 96 for i in range(size)] for seq, size in enumerate((23, 14, 9))]
MODELS = {
    # Widths that fill no vector, heads in groups, a window, learned positions.
    "llama": {"hidden_size": 40, "intermediate_size": 52, "num_attention_heads": 5,
              "num_key_value_heads": 1, "head_dim": 16},
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": 7},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 16},
    "opt": {"architecture": "OPTForCausalLM"},
    "gemma": {"architecture": "Gemma2ForCausalLM", "head_dim": 16, "final_logit_softcapping": 30.0,
              "sliding_window": 7},
    "gelu": {"architecture": "OPTForCausalLM", "activation_function": "gelu"},
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
# Every fourth pair; of torch's own calls, one per token, two. The slow run has them all.
CASES = [
    pytest.param(kernels, name, dtype, id=f"{kernels}-{name}-{dtype}",
                 marks=[] if at % (4 if kernels == "native" else 7) == 0 else pytest.mark.slow)
    for kernels in ("native", "stock")
    for at, (name, dtype) in enumerate((name, dtype) for name in MODELS for dtype in DTYPES)
]  # fmt: skip


def load(name, dtype):
    weights = tiny_weights(tiny_config(**MODELS[name]), scale=2.0)
    return load_decoder(weights, dtype=dtype)


def logits_of(model, steps):
    """Scores after every token of each sequence, by steps of [(sequence, count)]."""
    kv, table_SB = new_kv(model, len(IDS), NUM_BLOCKS), tables(len(IDS), NUM_BLOCKS)
    kv.k_LCMH.zero_()
    kv.v_LCMH.zero_()
    done = [0] * len(IDS)
    found = [[] for _ in IDS]
    for step in steps:
        chosen = [seq for seq, _ in step]
        seqs = [
            Seq(IDS[seq][done[seq] : done[seq] + count], start=done[seq]) for seq, count in step
        ]
        ids_T, attn = pack(seqs, table_SB[chosen], num_padding=len(step) % 2)
        hidden_TD = model.forward(ids_T, attn, kv).last_TD
        at = 0
        for seq, count in step:
            found[seq] += list(model.logits(hidden_TD[at : at + count]))
            done[seq] += count
            at += count
    return [torch.stack(rows) for rows in found if rows]


@st.composite
def chunkings(draw):
    """Steps that take all sequences to their end, in any pieces and any company."""
    left, steps = [len(ids) for ids in IDS], []
    while any(left):
        step = []
        for seq in draw(st.permutations(range(len(IDS)))):
            count = min(left[seq], draw(st.integers(0, 19)))
            if count:
                step.append((seq, count))
                left[seq] -= count
        if not step:
            seq = next(seq for seq, count in enumerate(left) if count)
            step.append((seq, 1))
            left[seq] -= 1
        steps.append(step)
    return steps


@contextmanager
def computed_by(kernels):
    """By our products and attention, or as where they cannot be built."""
    if kernels == "native":
        yield
        return
    with (
        mock.patch.object(products, "can_multiply", return_value=False),
        mock.patch.object(attention_layer, "can_attend", return_value=False),
    ):
        yield


@pytest.mark.parametrize(("kernels", "name", "dtype"), CASES)
def test_bits_do_not_depend_on_company_or_chunks(kernels, name, dtype):
    model = load(name, dtype)

    @settings(max_examples=3, deadline=None, derandomize=True, database=None)
    @given(chunkings())
    def check(steps):
        for got, expected in zip(logits_of(model, steps), alone, strict=True):
            assert torch.equal(got, expected)

    with computed_by(kernels):
        alone = logits_of(model, [[(seq, 1)] for seq in range(len(IDS)) for _ in IDS[seq]])
        check()


@pytest.mark.parametrize(("kernels", "dtype"), [("native", "bfloat16"), ("stock", "float32")])
def test_nodes_of_a_tree_read_as_text_does(kernels, dtype):
    """A node's scores are those of the token had it been said."""
    model = load("llama", dtype)
    table_SB = tables(1, NUM_BLOCKS)
    ids, draft, parents = IDS[0][:9], [3, 4, 5, 6, 7, 8], [-1, -1, 0, 0, 2, 1]
    kv = new_kv(model, 1, NUM_BLOCKS)
    kv.k_LCMH.zero_()
    kv.v_LCMH.zero_()
    with computed_by(kernels):
        ids_T, attn = pack([Seq(ids, draft=draft, parents=parents)], table_SB)
        got = model.logits(model.forward(ids_T, attn, kv).last_TD)[len(ids) + 4]
        path = [*ids, 3, 5, 7]  # node 4 hangs on node 2, that on node 0
        for position, token in enumerate(path):
            ids_T, attn = pack([Seq([token], start=position)], table_SB)
            said = model.logits(model.forward(ids_T, attn, kv).last_TD)[0]
    assert torch.equal(got, said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(num_rows=st.integers(1, 70), num_in=st.integers(1, 90), num_out=st.integers(1, 50))
def test_products_are_sums_and_each_row_its_own(dtype, num_rows, num_in, num_out):
    random = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_in, generator=random).to(dtype)
    w = torch.randn(num_out, num_in, generator=random).to(dtype)
    b = torch.randn(num_out, generator=random).to(dtype)
    got = linear(x, w, b)
    exact = x.double() @ w.double().t() + b.double()
    size = x.double().abs() @ w.double().abs().t() + b.double().abs()
    rounding = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert bool(((got.double() - exact).abs() <= rounding * size).all())
    assert torch.equal(got, torch.cat([linear(row[None], w, b) for row in x]))


@pytest.mark.parametrize("num_rows", [0, 1, 5, 64, 65, 130])
def test_tiles_of_many_rows_compute_all_rows(num_rows):
    x, w, b = torch.randn(num_rows, 24), torch.randn(10, 24), torch.randn(10)
    torch.testing.assert_close(linear_in_tiles(x, w, b, 64), torch.nn.functional.linear(x, w, b))


def test_a_model_can_be_told_to_compute_in_tiles():
    """What a target on a GPU without kernels of ours does."""
    model = load("opt", "float32")
    before = logits_of(model, [[(0, 20)]])[0]
    model.make_exact()
    with mock.patch.object(attention_layer, "can_attend", return_value=False):
        after = logits_of(model, [[(0, 20)]])[0]
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    assert {part.num_tile_rows for part in model.parts() if hasattr(part, "num_tile_rows")} == {64}
