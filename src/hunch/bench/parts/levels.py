"""A draft model's tree on a GPU: what it takes as a whole, and what each level adds.

Layers of random weights, of the shape that a draft cut from a target has: some of its layers with a
share of their units, one after the other or side by side. A draft is captured as a step holds it: a
pass over known tokens, then one for each further level, each with scores and the choice of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from hunch.bench.parts import PartOptions
from hunch.bench.parts.kernels import GEOMETRIES, RandomSource
from hunch.drafting.draft_model import DeviceDraftModel
from hunch.kernels.step import FIRST, Draws, RowState, StepRows
from hunch.layers.rope import RopeSpec
from hunch.models.cuda import CudaDecoder
from hunch.models.spec import ModelSpec
from hunch.registry import MODELS, resolve
from hunch.sampling.state import SamplingState
from hunch.step.capture import Graph, new_pool, seconds_of
from hunch.types import Request, SamplingParams

BLOCK_SIZE, MAX_LEN = 16, 2048


class Form(NamedTuple):
    """How a draft's layers stand."""

    layers: int
    abreast: int


FORMS = (Form(1, 1), Form(2, 1), Form(1, 2), Form(1, 4), Form(2, 2))


def build(geometry: str, form: Form, units: float, columns: int) -> CudaDecoder:
    width, _, heads, kv, head, ffn, _ = GEOMETRIES[geometry]
    inner = max(round(units * ffn / 256), 1) * 256
    spec = ModelSpec(
        architecture="LlamaForCausalLM", vocab_size=columns, width=width, num_layers=form.layers,
        num_heads=form.abreast * heads, num_kv_heads=form.abreast * kv, head_dim=head,
        ffn_width=form.abreast * inner, max_len=MAX_LEN, rope=RopeSpec(), is_tied=True,
        windows=(None,) * form.layers,
    )  # fmt: skip
    torch.manual_seed(0)
    return CudaDecoder(resolve(MODELS, spec.architecture)(spec, RandomSource()))


def drafter(model: CudaDecoder, width: int, num_levels: int) -> DeviceDraftModel:
    sampling = SamplingState(1, model.spec.vocab_size, model.device, dense=True)
    params = SamplingParams(temperature=0.0)
    sampling.start(0, Request(id="0", prompt_ids=[1], params=params, seed=0), [1])
    return DeviceDraftModel(
        name="draft", model=model, kv=model.new_kv(MAX_LEN), sampling=sampling, ids_C=None,
        num_levels=num_levels, level_size=width, width=width, branch=width, max_len=MAX_LEN,
    )  # fmt: skip


def seconds(model: DeviceDraftModel, context: int, again: int) -> float:
    """Seconds of a captured draft for one row with a text of this length."""
    device, num_nodes = model.model.device, model.num_nodes
    state = RowState.create(1, MAX_LEN, MAX_LEN // BLOCK_SIZE, num_nodes, 2, BLOCK_SIZE, device)
    state.table_XB.copy_(torch.arange(MAX_LEN // BLOCK_SIZE)[None])
    state.known_X.fill_(context)
    state.end_X.fill_(MAX_LEN)
    row, many = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([num_nodes])
    step = StepRows(
        ids_R=row, max_checked_R=many.to(device), max_draft_R=many.to(device),
        num_checked_R=row.clone(), path_RK=row[:, None].repeat(1, again),
        result_RC=row[:, None].repeat(1, FIRST + again + num_nodes),
    )  # fmt: skip

    def body() -> None:
        model.grow(state, step, Draws.GREEDY, model.num_levels, again)

    body()  # compiles kernels
    return seconds_of(Graph(body, device, new_pool(device)), device)


@torch.inference_mode()
def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("levels", __doc__)
    parser.add_argument("--geometry", default="1.5B", choices=GEOMETRIES)
    parser.add_argument("--units", type=float, default=0.25, help="share of a layer's units")
    parser.add_argument("--columns", type=int, default=32768, help="tokens that are guessed among")
    parser.add_argument("--width", type=int, default=4, help="nodes of a level")
    parser.add_argument("--levels", type=int, default=4, help="at least 2")
    parser.add_argument("--again", type=int, default=31, help="known tokens of the first pass")
    parser.add_argument("--context", type=int, default=300)
    asked = parser.parse_args(words)
    for form in FORMS:
        model = build(asked.geometry, form, asked.units, asked.columns)
        whole = drafter(model, asked.width, asked.levels)
        one = replace(whole, num_levels=1, num_nodes=0)
        all_of_it, first = (seconds(some, asked.context, asked.again) for some in (whole, one))
        level = (all_of_it - first) / (asked.levels - 1)
        print(
            f"layers: {form.layers}, in each: {form.abreast}; {1e6 * all_of_it:.0f} us, the first "
            f"level {1e6 * first:.0f}, each further one {1e6 * level:.0f}",
            flush=True,
        )
