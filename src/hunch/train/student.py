"""The base of all recipes: tensors that learn, a loss, guesses to count, files to write.

Shape letters: T tokens of a pack, M positions that teach, D width, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.models.decoder import Decoder
from hunch.models.source import Shape, Source
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights
from hunch.train.attend import can_capture
from hunch.train.loss import Late, teach
from hunch.train.packs import PackInputs, PackShape
from hunch.train.states import States, TopOpinions
from hunch.train.vocab import Columns

DECAY = 0.8  # weight of a guess, relative to the one before it
# Many steps teach more than large ones: after 14 seconds a draft for a target of 2B's cost has 2.10
# tokens per pass on unseen prompts by steps over 4,096 tokens, 1.94 by 8,192 (`hunch bench part
# drafters`, docs/training.md). So a GPU's step has so many floating-point operations, which are
# 4,096 tokens of that draft; and these tokens at least and at most.
_STEP_FLOPS, _BATCHES = 1.2e12, (4096, 32768)
_CPU_BATCH = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """An entry of the registry: how a method is trained."""

    options: type  # a frozen dataclass; its fields are the KEY=VALUE a user may give
    student: Callable[[Any, Decoder, Columns, Weights], Student]
    draft_vocab: int | None = None  # tokens it may guess unless told; None: all,
    has_few_columns: bool = False  # or the tokens that most answers need
    lr: float = 3.6e-3
    drafts_as: str = ""  # the method that drafts with it, if that has another name
    # Raises for options that do not fit the target, before anything is made.
    check: Callable[[Any, ModelSpec], None] = lambda options, spec: None


def option_names(options: type) -> dict[str, str]:
    """What a user writes for each field; `from`, a word of the language, is the field `from_`."""
    return {f.name.removesuffix("_"): f.name for f in fields(options)}


@dataclass(frozen=True, kw_only=True, slots=True)
class CountRecipe:
    """An entry of the registry for a method that is counted from the answers, without training."""

    options: type
    count: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Packed texts, with the target's outputs on them."""

    pack: PackInputs
    states: States
    opinions: TopOpinions | None  # None: a test, which only counts right guesses
    late: Late = 1.0


@dataclass(slots=True)
class PackLoss:
    """The loss on a pack, and its right guesses: agreed[i] marks positions whose next token was
    guessed right as the i-th of a draft, given that the guesses before it were."""

    loss: Tensor
    agreed: list[Tensor]  # each T


class Masters(Source):
    """Float32 tensors, given to networks in the precision of their products."""

    def __init__(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(dtype, device)
        self.tensors = tensors

    def read(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self.tensors[name]
        assert tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)}, not {shape}"
        return tensor

    def below(self, prefix: str) -> Masters:
        """The tensors whose names begin with this prefix, without it."""
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }
        return Masters(own, self.dtype, self.device)


class Student:
    """Base of the recipes' networks; `tensors` are float32 leaves under the published names."""

    feature_layers: tuple[int, ...] = ()  # of the target; their states come with the outputs
    needs_hidden = False  # whether the student reads the target's last state too
    plain: Collection[str] = ()  # tensors that Adam steps: embeddings and output matrices
    rate = 1.0  # share of the recipe's rate: less for what begins as a whole model
    num_walks = 1  # how often its network goes over a text for one loss
    layer_names: Collection[str] = ()  # prefixes of layers, whose tensors become `sources`
    anchors = 0  # places of each text where blocks of guesses begin
    spec: ModelSpec | None = None  # of its layers, if it has some that attend

    def __init__(self, target: Decoder, columns: Columns) -> None:
        self.target, self.columns = target, columns
        self.width = target.spec.width  # of the output matrix
        self.tensors: dict[str, Tensor] = {}

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors to these values."""
        device = self.target.device
        self.tensors = {
            name: tensor.detach().to(device, torch.float32, copy=True).requires_grad_()
            for name, tensor in tensors.items()
        }
        self.sources = [self.source().below(prefix) for prefix in self.layer_names]

    def source(self) -> Masters:
        """The tensors in the target's precision, for networks; gradients flow back."""
        return Masters(self.tensors, self.target.dtype, self.target.device)

    def loss_on(self, given: StepInputs) -> PackLoss:
        """The loss on packed texts."""
        raise NotImplementedError

    @property
    def can_capture(self) -> bool:
        """Whether its steps can be a CUDA graph."""
        device = self.target.device
        if self.spec is not None:
            return can_capture(self.spec, device, self.target.dtype)
        return device.type == "cuda"

    def flops(self, shape: PackShape) -> float:
        """Floating-point operations of its products in one step: forward and backward."""
        return self.flops_of(shape.num_tokens, shape.num_rows)

    def flops_of(self, num_tokens: int, num_rows: int) -> float:
        """The same for a step over so many tokens, of which so many teach."""
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

    @property
    def asks(self) -> tuple[Any, ...]:
        """The target's outputs that it learns from: students that need the same ones share them."""
        ids = self.columns.ids_C.cpu().numpy().tobytes()
        return ids, self.feature_layers, self.needs_hidden

    def settled(self) -> dict[str, Any]:
        """The values of options that the recipe chose, for the card."""
        return {}

    def values(self) -> dict[str, Tensor]:
        """The tensors as they are now, to be written."""
        return {name: tensor.detach() for name, tensor in self.tensors.items()}

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and the tensors of the published form."""
        raise NotImplementedError


class Teaching:
    """Teaches the tokens of a draft, and counts where guesses were right.

    A later guess is only ever used when the ones before it were right, so it learns mostly from
    such positions, and from a share of the others, without which it would learn little at first.
    Each depth goes over all positions, and those that are not taught have no weight: a CUDA graph
    has a fixed shape.
    """

    def __init__(self, given: StepInputs, loss_name: str) -> None:
        self.pack, self.opinions = given.pack, given.opinions
        self.loss_name, self.late = loss_name, given.late
        self.loss = torch.zeros((), device=given.pack.row_M.device)
        self.agreed: list[Tensor] = []
        self.depth = 0
        self._begin()

    def _begin(self) -> None:
        """Begin with the state before the first guess."""

    def result(self) -> PackLoss:
        return PackLoss(self.loss, self.agreed)

    def _spared(self, depth: int) -> Tensor:
        is_test = self.opinions is None
        return torch.zeros_like(self.pack.is_row_M) if is_test else self.pack.spared(depth)

    def _teach(
        self, state_MD: Tensor, head_CD: Tensor, place_M: Tensor | None, is_taught_M: Tensor
    ) -> Tensor:
        """Teach that these states guess the tokens after rows `place_M` (None: each after its own
        row); returns where they are right."""
        opinions, label_M = self.opinions, self.pack.label_M
        if place_M is not None:
            opinions = None if opinions is None else opinions[place_M]
            label_M = label_M.index_select(0, place_M)
        weight_M = is_taught_M * DECAY**self.depth / is_taught_M.sum().clamp(min=1)
        words = (weight_M, self.loss_name, self.late)
        loss, best_M = teach(state_MD, head_CD, opinions, *words)
        self.loss, self.depth = self.loss + loss, self.depth + 1
        return (best_M == label_M) & is_taught_M

    def _count(self, row_M: Tensor, is_right_M: Tensor) -> Tensor:
        # Not by brackets: padding rows are copies of others.
        agreed_T = torch.zeros_like(self.pack.pos_T).index_add(0, row_M, is_right_M.long()) > 0
        self.agreed.append(agreed_T)
        return agreed_T


class Walk(Teaching):
    """Teaches one token after the other, where a draft would get that far."""

    def _begin(self) -> None:
        self.reached_T = torch.ones_like(self.pack.pos_T, dtype=torch.bool)

    def taught(self, x_TD: Tensor, shift: int) -> Tensor:
        """The stream `shift` positions before those that decide the tokens, MD."""
        # Not by brackets: their gradient would sort the rows.
        return x_TD.index_select(0, (self.pack.row_M - shift).clamp(min=0))

    def teach(self, state_MD: Tensor, shift: int, head_CD: Tensor) -> None:
        """Teach that the states of these positions guess those tokens."""
        pack = self.pack
        is_taught_M = self.reached_T.index_select(0, pack.row_M) | self._spared(self.depth)
        is_taught_M = is_taught_M & (pack.pos_T.index_select(0, pack.row_M) >= shift)
        is_right_M = self._teach(state_MD, head_CD, None, is_taught_M & pack.is_row_M)
        self.reached_T = (self.reached_T & self._count(pack.row_M, is_right_M)).roll(1)


class Fan(Teaching):
    """Teaches guesses that start from one state of the target, each one token further."""

    def _begin(self) -> None:
        pack = self.pack
        self.place_T = pack.place_T()
        self.start_M = (pack.row_M - 1).clamp(min=0)  # positions whose states are used
        self.is_taught_M = pack.is_row_M & (pack.pos_T.index_select(0, pack.row_M) > 0)
        self.is_right_M, self.is_spared_M = self.is_taught_M, self._spared(0)

    def _rows(self) -> Tensor:
        """For each start, the position that decides the token to guess."""
        return (self.pack.row_M + self.depth).clamp(max=len(self.place_T) - 1)

    def tokens(self) -> Tensor:
        """For each start, the token before the one to guess."""
        return self.pack.ids_T.index_select(0, self._rows())

    def teach(self, state_MD: Tensor, head_CD: Tensor) -> None:
        """Teach that these states, one per start, guess the next token."""
        row_M = self._rows()
        place_M = self.place_T.index_select(0, row_M).clamp(min=0)
        is_right_M = self._teach(state_MD, head_CD, place_M, self.is_taught_M)
        self.is_right_M = self.is_right_M & is_right_M
        self._count(row_M, self.is_right_M)
        # A text's last token decides nothing: no start continues into the next text.
        is_there_M = self.place_T.index_select(0, self._rows()) >= 0
        self.is_taught_M = (self.is_right_M | (self.is_spared_M & self.is_taught_M)) & is_there_M


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
    """Properties that layers cut from a target may not have, and whether these have them."""
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
    """Properties that layers written as Llama's may not have, and whether these have them."""
    return {
        "learned positions": spec.rope is None,
        "norms of what is added": spec.has_branch_norms,
        "scaled residual sums": spec.residual_scale != 1.0,
        "attention and MLP side by side": spec.is_parallel,
        "no norms before attention and MLP": not spec.has_input_norms,
        "layer norms": spec.norm != "rms",
    }


def check_target(spec: ModelSpec, method: str, origin: str = "") -> None:
    """Raise if drafters of this kind cannot be built from the target's parts, or from those of
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
