"""What every recipe offers the loop: tensors that learn, a loss, guesses to count, files to write.

Shape letters: T = B * L tokens in a row, M positions that teach, R and S some of them, D width, C
columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.models.decoder import Decoder
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights
from hunch.train.loss import teach
from hunch.train.masters import Masters
from hunch.train.packs import PackInputs
from hunch.train.states import TargetOutputs, TopOpinions
from hunch.train.vocab import Columns

FLOOR = 0.2  # share of places whose guesses before were wrong that teach all the same
DECAY = 0.8  # what a guess counts, of the one before it
# Steps are what teaches: after 14 seconds a draft for a target of 2B's cost has 2.10 tokens per
# pass on unseen prompts by steps over 4,096 tokens, 1.94 by 8,192 (`hunch bench part drafters`,
# docs/training.md). So a GPU's step has so many floating-point operations, which are 4,096 tokens
# of that draft; and these tokens at least and at most.
_STEP_FLOPS, _BATCHES = 1.2e12, (4096, 32768)
_CPU_BATCH = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A line of the registry: what a method is trained with."""

    options: type  # a frozen dataclass; its fields are the KEY=VALUE a user may give
    student: Callable[[Any, Decoder, Columns, Weights], Student]
    draft_vocab: int | None = None  # tokens it may guess unless told; None: all,
    has_few_columns: bool = False  # or those that most answers need
    lr: float = 3.6e-3
    drafts_as: str = ""  # the method that drafts with it, where it has another name
    # Raises for options that do not fit the target, before anything is made.
    check: Callable[[Any, ModelSpec], None] = lambda options, spec: None


def option_names(options: type) -> dict[str, str]:
    """What a user writes for each field; `from`, a word of the language, is the field `from_`."""
    return {f.name.removesuffix("_"): f.name for f in fields(options)}


@dataclass(frozen=True, kw_only=True, slots=True)
class CountRecipe:
    """A line of the registry for what is counted from the answers: no network, no steps."""

    options: type
    count: Callable[..., Any]


@dataclass(slots=True)
class BatchLoss:
    """What a batch taught. agreed[i] marks positions whose next token was guessed right as the
    i-th of a draft, given that the ones before were."""

    loss: Tensor
    agreed: list[Tensor]  # each T


class Student:
    """Base of the recipes' networks; `tensors` are float32 leaves under the published names."""

    feature_layers: tuple[int, ...] = ()  # of the target; their states come with the outputs
    needs_hidden = False  # the target's last state too
    plain: Collection[str] = ()  # tensors that Adam steps: embeddings and output matrices
    rate = 1.0  # of the recipe's: less for what begins as a whole model
    num_walks = 1  # times its network goes over a text for one loss
    layer_names: Collection[str] = ()  # prefixes of layers, whose tensors become `sources`

    def __init__(self, target: Decoder, columns: Columns) -> None:
        self.target, self.columns = target, columns
        self.width = target.spec.width  # of the output matrix
        self.tensors: dict[str, Tensor] = {}

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin from these values."""
        device = self.target.device
        self.tensors = {
            name: tensor.detach().to(device, torch.float32, copy=True).requires_grad_()
            for name, tensor in tensors.items()
        }
        self.sources = [self.source().below(prefix) for prefix in self.layer_names]

    def source(self) -> Masters:
        """The tensors as networks take them, in the target's precision; gradients flow back."""
        return Masters(self.tensors, self.target.dtype, self.target.device)

    def loss_on(self, outputs: TargetOutputs, *, is_test: bool = False) -> BatchLoss:
        """The loss on a batch; a test looks at what a draft would reach, and at nothing else."""
        raise NotImplementedError

    def loss_on_pack(self, inputs: PackInputs, opinions: TopOpinions, late: float) -> Tensor:
        """The loss on texts in a row, where it `takes_packs`; `late` as in TargetOutputs."""
        raise NotImplementedError

    @property
    def takes_packs(self) -> bool:
        return False

    @property
    def is_loss_changing(self) -> bool:
        """Whether its loss is another one later in training."""
        return False

    def flops(self, outputs: TargetOutputs) -> float:
        """Floating-point operations of its products in one step: forward and backward."""
        return self.flops_of(outputs.batch.num_tokens, len(outputs.row_M))

    def flops_of(self, num_tokens: int, num_rows: int) -> float:
        """The same over so many tokens, of which so many teach."""
        inside = sum(
            t.numel() for n, t in self.tensors.items() if t.dim() == 2 and n not in self.plain
        )
        # The output matrix is the target's: it learns nothing, and has no gradient of its own.
        head = len(self.columns) * self.width * num_rows
        return self.num_walks * (6.0 * inside * num_tokens + 4.0 * head)

    @property
    def usual_batch(self) -> int:
        """Tokens of a step."""
        if self.target.device.type != "cuda":
            return _CPU_BATCH
        tokens = _STEP_FLOPS / (self.flops_of(2, 1) / 2)  # every other token teaches
        least, most = _BATCHES
        return int(min(max(2 ** round(math.log2(tokens)), least), most))

    def settled(self) -> dict[str, Any]:
        """Options that were left to the recipe, as it chose them; for the card."""
        return {}

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and the tensors of the published form."""
        raise NotImplementedError


def narrow(outputs: TargetOutputs, share: float, num_columns: int) -> TargetOutputs:
    """The outputs on a share of the texts, over the first columns alone."""
    num_texts = max(round(share * len(outputs.ids_BL)), 1)
    size = num_texts * outputs.ids_BL.shape[1]
    num_rows = int((outputs.row_M < size).sum())
    label_M = outputs.label_M[:num_rows]
    label_M = torch.where(label_M < num_columns, label_M, -1)
    p_MC = outputs.p_MC[:num_rows]
    if isinstance(p_MC, TopOpinions):
        p_MC = p_MC.first(num_columns)
    elif num_columns < p_MC.shape[1]:
        p_MC = p_MC[:, :num_columns]
        p_MC = p_MC / p_MC.sum(-1, keepdim=True, dtype=torch.float32).clamp(min=1e-6).to(p_MC.dtype)
    return replace(
        outputs,
        batch=outputs.batch.part(num_texts),
        hidden_TD=outputs.hidden_TD[:size],
        features=tuple(feature_TD[:size] for feature_TD in outputs.features),
        row_M=outputs.row_M[:num_rows],
        p_MC=p_MC,
        label_M=label_M,
    )


class Teaching:
    """Teaches the tokens of a draft, and counts where guesses were right.

    A later guess is only ever used when the ones before it were right, so it learns mostly from
    such positions, and from a share of the others, without which it would learn little at first.
    """

    def __init__(self, outputs: TargetOutputs, loss_name: str, *, is_test: bool) -> None:
        self.outputs, self.loss_name, self.is_test = outputs, loss_name, is_test
        device = outputs.row_M.device
        self.chance = torch.Generator(device).manual_seed(outputs.seed)
        self.loss = torch.zeros((), device=device)
        self.agreed: list[Tensor] = []
        self.depth = 0

    def result(self) -> BatchLoss:
        return BatchLoss(self.loss, self.agreed)


class Walk(Teaching):
    """One token after the other, where a draft would get that far."""

    def __init__(self, outputs: TargetOutputs, loss_name: str, *, is_test: bool) -> None:
        super().__init__(outputs, loss_name, is_test=is_test)
        size, device = outputs.ids_BL.numel(), outputs.row_M.device
        self.reached_T = torch.ones(size, dtype=torch.bool, device=device)

    def teach(self, state_TD: Tensor, shift: int, head_CD: Tensor) -> None:
        """States `shift` positions before the one that decides the token speak of that token."""
        t = self.outputs
        if not (self.is_test or self.depth or shift):  # all of them, and nothing to be counted
            num_rows, device = len(t.row_M), t.row_M.device
            weight_M = torch.full((num_rows,), 1 / max(num_rows, 1), device=device)
            state_MD = state_TD[t.row_M]
            loss, best_M = teach(state_MD, head_CD, t.p_MC, weight_M, self.loss_name, t.late)
            self._taught(loss, t.row_M, best_M == t.label_M)
            return
        keep_M = self.reached_T[t.row_M]
        if not self.is_test:
            noise_M = torch.rand(keep_M.shape, device=keep_M.device, generator=self.chance)
            keep_M = (keep_M | (noise_M < FLOOR)) & (t.label_M >= 0)
        keep_M = keep_M & (t.row_M % t.ids_BL.shape[1] >= shift)
        index_R = keep_M.nonzero().squeeze(1)
        row_R, label_R = t.row_M[index_R], t.label_M[index_R]
        weight_R = torch.full(
            (len(index_R),), DECAY**self.depth / max(len(index_R), 1), device=keep_M.device
        )
        loss, best_R = teach(
            state_TD[row_R - shift], head_CD, t.p_MC[index_R], weight_R, self.loss_name, t.late
        )
        self._taught(loss, row_R, best_R == label_R)

    def _taught(self, loss: Tensor, row_R: Tensor, is_right_R: Tensor) -> None:
        self.loss = self.loss + loss
        agreed_T = torch.zeros_like(self.reached_T)
        agreed_T[row_R] = is_right_R
        self.agreed.append(agreed_T)
        self.reached_T = (self.reached_T & agreed_T).roll(1)
        self.depth += 1


class Fan(Teaching):
    """Guesses that all start from one state of the target, one token further each time."""

    def __init__(self, outputs: TargetOutputs, loss_name: str, *, is_test: bool) -> None:
        super().__init__(outputs, loss_name, is_test=is_test)
        row_M, self.length = outputs.row_M, outputs.ids_BL.shape[1]
        self.place_T = torch.full((outputs.ids_BL.numel() + 1,), -1, device=row_M.device)
        self.place_T[row_M] = torch.arange(len(row_M), device=row_M.device)
        self.start_R = row_M[row_M % self.length > 0] - 1  # positions whose states are asked
        self.is_right_R = torch.ones_like(self.start_R, dtype=torch.bool)
        noise_R = torch.rand(self.start_R.shape, device=row_M.device, generator=self.chance)
        self.is_spared_R = (noise_R < FLOOR) & (not is_test)

    def tokens(self) -> Tensor:
        """The token before the one to guess, of each start."""
        return self.outputs.ids_BL.flatten()[self.start_R + 1 + self.depth]

    def teach(self, state_RD: Tensor, head_CD: Tensor) -> Tensor:
        """One state per start speaks of the next token; returns which starts go on."""
        t = self.outputs
        row_R = self.start_R + 1 + self.depth
        place_R = self.place_T[row_R]
        label_R = t.label_M[place_R]
        taught = slice(None) if self.is_test else (label_R >= 0).nonzero().squeeze(1)
        place_S = place_R[taught]
        weight_S = torch.full(
            (len(place_S),), DECAY**self.depth / max(len(place_S), 1), device=row_R.device
        )
        loss, best_S = teach(
            state_RD[taught], head_CD, t.p_MC[place_S], weight_S, self.loss_name, t.late
        )
        self.loss = self.loss + loss
        agreed_T = torch.zeros(t.ids_BL.numel(), dtype=torch.bool, device=row_R.device)
        agreed_T[row_R[taught]] = (best_S == label_R[taught]) & self.is_right_R[taught]
        self.agreed.append(agreed_T)
        is_right_R = self.is_right_R & agreed_T[row_R]
        is_inside_R = (row_R % self.length + 1 < self.length) & (self.place_T[row_R + 1] >= 0)
        kept = ((is_right_R | self.is_spared_R) & is_inside_R).nonzero().squeeze(1)
        self.start_R, self.is_spared_R = self.start_R[kept], self.is_spared_R[kept]
        self.is_right_R = is_right_R[kept]
        self.depth += 1
        return kept


def layer_config(spec: ModelSpec, target: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of config.json for a head whose layers have a target's geometry, and turn as it does."""
    assert spec.rope is not None
    scaling = target.get("rope_scaling")
    return {
        **({"rope_scaling": scaling} if scaling else {}),
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.width,
        "intermediate_size": spec.ffn_width,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "hidden_act": spec.activation,
        "tie_word_embeddings": False,
    }


def unlike_llama(spec: ModelSpec) -> dict[str, bool]:
    """What layers cut from a target may not have, and whether it is there."""
    return {
        "norms after the residual sums": spec.is_post_norm,
        "norms over all heads": spec.is_qk_norm_whole,
        "layer norms of heads": spec.is_qk_norm_centred,
        "scores that fall with the distance": spec.alibi is not None,
        "a norm of the embedding": spec.has_embed_norm,
        "a bias of the output matrix": spec.has_head_bias,
        "experts": spec.experts is not None,
        "several rotary tables": bool(spec.more_ropes),
        "a projected embedding": spec.embed_width not in (0, spec.width),
        "capped scores": spec.attn_cap != 0,
        "attention sinks": spec.has_sinks,
        "norms of 1 + w": spec.is_norm_shifted,
        "matrices stored the other way": spec.is_transposed,
        "heads turned in part or in another order": spec.is_rope_interleaved
        or any(rope.dim for rope in spec.ropes),
        "latent attention": spec.latent is not None,
        "recurrent layers": spec.recurrence is not None,
        "layers that read the keys of others": bool(spec.kv_of),
    }


def unlike_llama_inside(spec: ModelSpec) -> dict[str, bool]:
    """What layers written as Llama's may not have, and whether it is there."""
    return {
        "learned positions": spec.rope is None,
        "norms of what is added": spec.has_branch_norms,
        "scaled residual sums": spec.residual_scale != 1.0,
        "attention and MLP side by side": spec.is_parallel,
        "no norms before attention and MLP": not spec.has_input_norms,
        "layer norms": spec.norm != "rms",
    }


def check_target(spec: ModelSpec, method: str, origin: str = "") -> None:
    """Raise for a target whose drafters of this kind could not be built from its parts, or for
    another model that they are to be cut from."""
    problems = unlike_llama(spec)
    if method != "draft":  # whose layers are the target's; others are written as Llama's
        problems |= unlike_llama_inside(spec)
    found = [name for name, is_there in problems.items() if is_there]
    if found and origin:
        raise UnsupportedModelError(
            f"train {method}: from={origin} ({spec.architecture}) has {', '.join(found)}, which "
            "this recipe cannot build on; name another model of the target's family"
        )
    if found:
        raise UnsupportedModelError(
            f"train {method}: the target ({spec.architecture}) has {', '.join(found)}, which this "
            "recipe cannot build on; train block, medusa or mlp for it, or use a lookup method"
        )
