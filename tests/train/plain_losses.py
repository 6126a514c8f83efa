"""The losses of all recipes, the plain way: text by text, draft by draft, with masks over a text.

A guess is named by its depth in a draft and by the position that decides its token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hunch.layers.attention import Heads, split_heads
from hunch.layers.linear import Linear
from hunch.models.build import build_block
from hunch.models.heads.block import build_body, context_heads
from hunch.models.heads.files import Table
from hunch.models.heads.mlp import EPS, BiasedNorm, MlpNet
from hunch.train.loss import shares_of
from hunch.train.packs import Pack, Spans
from hunch.train.states import States, TopOpinions
from hunch.train.student import DECAY, Student

Guess = Callable[[int, int], Tensor]  # depth and position to logits


def slope(z_MC: Tensor, p_MC: Tensor, loss_name: str, late: float = 1.0) -> tuple[Tensor, Tensor]:
    """The loss of each row and its gradient by the logits, for a whole distribution."""
    entropy, variation = shares_of(loss_name, late)
    log_q_MC = functional.log_softmax(z_MC, dim=-1, dtype=torch.float32)
    q_MC, p_MC = log_q_MC.exp(), p_MC.float()
    gap_MC = q_MC - p_MC
    sign_MC = variation * 0.5 * gap_MC.sign()
    loss_M = variation * 0.5 * gap_MC.abs().sum(-1) - entropy * (p_MC * log_q_MC).sum(-1)
    if loss_name != "ce":
        loss_M += entropy * torch.xlogy(p_MC, p_MC).sum(-1)
    push_MC = q_MC * (sign_MC - (q_MC * sign_MC).sum(-1, keepdim=True))
    return loss_M, entropy * gap_MC + push_MC


def dense(top: TopOpinions) -> Tensor:
    """The distribution that few columns stand for."""
    p_MC = torch.zeros(len(top), top.num_columns)
    return p_MC.scatter_add_(1, top.column_MK.long(), top.p_MK.float())


class OneText:
    """A text of a pack, and what the target says of it."""

    def __init__(self, pack: Pack, number: int, states: States, p_MC: Tensor) -> None:
        first, last = pack.start_S[number : number + 2].tolist()
        self.ids = torch.from_numpy(pack.ids_T[first:last].astype(np.int64))
        self.features = tuple(x[first:last] for x in states.features)
        self.hidden = states.hidden_TD[first:last]
        is_here = (pack.row_M >= first) & (pack.row_M < last)
        rows = (pack.row_M[is_here] - first).tolist()
        self.label = dict(zip(rows, pack.label_M[is_here].tolist(), strict=True))
        self.spared = dict(zip(rows, pack.spared_M[is_here].tolist(), strict=True))
        self.p = dict(zip(rows, p_MC[torch.from_numpy(is_here)], strict=True))
        is_here = (pack.anchor_A >= first) & (pack.anchor_A < last)
        self.anchors = (pack.anchor_A[is_here] - first).tolist()


def attend_by(mask: Tensor, rotation: Any, before: list[tuple[Tensor, Tensor]]) -> Any:
    """Attention over what is before and over the tokens themselves, which are added to it."""

    def attend(qkv: Tensor, heads: Heads, layer: int, sinks: Tensor | None = None) -> Tensor:
        q, k, v = split_heads(qkv, heads, rotation)
        before.append((k, v))
        k, v = (torch.cat(part) for part in zip(*before, strict=True))
        group = heads.num_heads // heads.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        scores = (q.transpose(0, 1) @ k.mT) * heads.scale
        out: Tensor = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return out.transpose(0, 1)

    return attend


def draft_guesses(student: Any, text: OneText) -> Guess:
    x = student.normed(student.stream(text.ids, Spans.of([len(text.ids)], text.ids.device)))
    return lambda depth, row: x[row] @ student.head_CD.T


def eagle3_guesses(student: Any, text: OneText) -> Guess:
    """Step i is a pass over all positions, whose states come from one position before."""
    spec, source, size = student.spec, student.source(), len(text.ids)
    prefixes = ["midlayer.", *(f"layers.{layer}." for layer in range(1, spec.num_layers))]
    words: dict[str, Any] = {"input_width": 2 * spec.width, "has_attn_norm": False}
    blocks = [build_block(spec, source, prefixes[0], 0, **words)]
    blocks += [build_block(spec, source, p, i + 1) for i, p in enumerate(prefixes[1:])]
    norms = [
        source.rms_norm(name, spec.width, spec.norm_eps)
        for name in ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm")
    ]
    token = norms[1](student.target.embed(text.ids.roll(-1)))
    hidden = (
        torch.cat(text.features, dim=-1)
        @ source.take("fc.weight", spec.width, len(text.features) * spec.width).t()
    )
    back = torch.arange(size)[:, None] - torch.arange(size)
    rotation, states = student.target.rope(torch.arange(size)), []
    before: list[list[tuple[Tensor, Tensor]]] = [[] for _ in blocks]
    for step in range(student.options.unroll):
        masks = [back >= step, *(back == step - j for j in range(1, step + 1))]
        mask = torch.cat(masks, dim=1)
        mask[:step, 0] = True  # drafts that were begun before the text, which nobody looks at
        layers = [attend_by(mask, rotation, one) for one in before]
        hidden = blocks[0].mix(hidden, torch.cat((token, norms[2](hidden)), dim=-1), layers[0])
        for block, attend in zip(blocks[1:], layers[1:], strict=True):
            hidden = block(hidden, attend)
        states.append(norms[0](hidden))
        hidden = hidden.roll(1, dims=0)
    return lambda depth, row: states[depth][row - 1] @ student.head_CD.T


def medusa_guesses(student: Any, text: OneText) -> Guess:
    head = student.tensors.get("lm_head.weight", student.head_CD)

    def guess(depth: int, row: int) -> Tensor:
        x = text.hidden[row - depth - 1]
        for layer in range(student.options.layers):
            x = x + functional.silu(student.tensors[f"blocks.{depth}.layers.{layer}.weight"] @ x)
        return head @ x

    return guess


def mlp_guesses(student: Any, text: OneText) -> Guess:
    own, count = student.tensors, student.options.stages
    parts = {key.removeprefix("speculator."): value for key, value in own.items()}
    proj = [Linear(parts[f"proj.{min(i, 1)}.weight"]) for i in range(count)]
    norm = BiasedNorm(parts["ln.0.weight"], parts["ln.0.bias"], EPS)
    embed, head = Table(parts["emb.0.weight"]), Linear(parts["head.0.weight"])
    net = MlpNet([embed] * count, proj, [norm] * count, [head] * count, student.options.inner, True)

    def guess(depth: int, row: int) -> Tensor:
        state = net.start(text.hidden[row - depth - 1][None])
        for stage in range(depth + 1):
            token = text.ids[row - depth + stage][None]
            state, logits = net.step(stage, state, token)
        return logits[0]

    return guess


def block_guesses(student: Any, text: OneText) -> Guess:
    """Each block by itself; of a guess, how sure it is comes last."""
    body = build_body(student.shape, student.source())
    context, found = body.context(text.features), dict[int, Tensor]()

    def states(anchor: int) -> Tensor:
        if anchor not in found:
            pos = torch.arange(anchor + student.shape.num_places)
            known, own = (student.rope(part) for part in (pos[:anchor], pos[anchor:]))
            x = body.inputs(student.target.embed(text.ids[anchor][None]), body.mask_D)
            for block in body.blocks:
                kv = context_heads(block.attn, context[:anchor], known)
                mask = torch.ones(len(x), len(pos), dtype=torch.bool)
                x = block(x, attend_by(mask, own, [kv]))
            found[anchor] = body.telling(body.norm(x))[0]
        return found[anchor]

    def guess(depth: int, row: int) -> Tensor:
        state, token = states(row - depth)[depth][None], text.ids[row][None]
        logits = body.scores(state @ student.head_CD.T, token, state)
        return torch.cat((logits, body.confidences(token, state)[:, None]), dim=1)[0]

    return guess


GUESSES = {
    "draft": (draft_guesses, 1, 0),
    "eagle3": (eagle3_guesses, 5, 1),
    "medusa": (medusa_guesses, 4, 1),
    "mlp": (mlp_guesses, 4, 1),
}


def loss_of(logits: Tensor, p: Tensor, loss_name: str, late: float) -> Tensor:
    """With its gradient: the slope is what autograd shall see."""
    loss, by_logits = slope(logits.detach()[None], p[None], loss_name, late)
    return loss[0] + ((logits - logits.detach()) * by_logits[0]).sum()


def plain_loss(student: Student, method: str, texts: list[OneText], late: float) -> Tensor:
    """The loss of a pack of these texts."""
    options: Any = getattr(student, "options", student)
    loss_name = getattr(options, "loss", None) or options.loss_name
    if method == "block":
        return _block_loss(student, texts, loss_name, late)
    make, _, shift = GUESSES[method]
    total, is_fan = torch.zeros(()), method in ("medusa", "mlp")
    guesses = [(text, make(student, text)) for text in texts]
    # Where a draft goes on: those before were right, or it is spared.
    going: list[dict[int, bool]] = [
        {row: True for row in text.label if row >= shift} for text in texts
    ]
    for depth in range(getattr(options, "unroll", 0) or getattr(options, "heads", 0)
                       or getattr(options, "stages", 1)):  # fmt: skip
        taught = []
        for (text, guess), on in zip(guesses, going, strict=True):
            rows = [row for row in text.label if row in on or _is_spared(text, row, depth, is_fan)]
            rows = [row for row in rows if row >= shift + depth]
            if is_fan:
                rows = [row for row in rows if row in on]
            taught += [(text, on, row, guess(depth, row)) for row in rows]
        losses = [loss_of(z, text.p[row], loss_name, late) for text, _, row, z in taught]
        total = total + DECAY**depth * sum(losses) / max(len(losses), 1)
        after: dict[int, dict[int, bool]] = {id(on): {} for on in going}
        for text, on, row, logits in taught:
            is_right = on.get(row, False) and int(logits.argmax()) == text.label[row]
            is_spared = is_fan and bool(text.spared[row - depth] & 1)
            if (is_right or is_spared) and row + 1 in text.label:
                after[id(on)][row + 1] = is_right
        going = [after[id(on)] for on in going]
    return total


def _is_spared(text: OneText, row: int, depth: int, is_fan: bool) -> bool:
    return not is_fan and bool(text.spared[row] >> depth & 1)


def _block_loss(student: Any, texts: list[OneText], loss_name: str, late: float) -> Tensor:
    total, weights = torch.zeros(()), 0.0
    for text in texts:
        guess = block_guesses(student, text)
        for anchor in text.anchors:
            for depth in range(student.options.block):
                row = anchor + depth
                if row not in text.label:
                    continue
                *logits, odds = guess(depth, row).split((len(text.p[row]), 1))
                is_right = torch.tensor([float(logits[0].argmax()) == text.label[row]]).float()
                sure = functional.binary_cross_entropy_with_logits(odds, is_right)
                weight = float(np.exp(-depth / student.options.decay))
                total = total + weight * (loss_of(logits[0], text.p[row], loss_name, late) + sure)
                weights += weight
    return total / weights
