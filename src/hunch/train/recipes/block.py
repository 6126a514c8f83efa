"""Block: one pass guesses a whole block of tokens (DSpark, arXiv 2607.05147), beside its target.

The backbone reads the target's fused states as its context; a Markov head adds what the token
before makes likely, a confidence head learns which guesses are right. The loss of a place is a
tenth of the cross-entropy and nine tenths of the whole difference to the target's distribution,
less the later the place.

Shape letters: T tokens of a pack, A blocks, P places of a block, M = A * P places, D width, C
columns, K width of the Markov head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hunch.errors import ConfigError, UnsupportedModelError
from hunch.layers.norm import RMSNorm
from hunch.layers.rope import Rope
from hunch.models.build import build_block
from hunch.models.decoder import Decoder
from hunch.models.heads.block import BlockBody, BlockShape, build_body
from hunch.models.source import ShapeSource
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights
from hunch.train.blocks import Blocks
from hunch.train.cut import UNITS, check_units, fitted, read, strongest_units, with_units
from hunch.train.loss import teach
from hunch.train.packs import PackShape
from hunch.train.recipes.eagle3 import read_features
from hunch.train.student import (
    PackLoss,
    Recipe,
    StepInputs,
    Student,
    layer_config,
    unlike_llama,
    unlike_llama_inside,
)
from hunch.train.vocab import Columns

MARKOV = "markov_head.markov_w{}.weight"
CONFIDENCE = "confidence_head.proj.weight"
MASK = "mask_embedding"
_TESTED = 512  # blocks that are tested at once


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions:
    """train block KEY=VALUE..."""

    layers: int = 4
    units: float = 1.0  # share of the units that each layer's MLP keeps
    block: int = 7  # tokens guessed by one pass
    features: str = ""  # "2,10,18,26,34": after how many target layers; empty: five, evenly
    anchors: int = 48  # blocks that each text teaches per step
    rank: int = 0  # of the Markov head; 0: 128, for targets 1,024 wide or wider 256
    loss: str = "l1"
    decay: float = 4.0  # places after which a place counts a third

    def __post_init__(self) -> None:
        for name in ("layers", "anchors", "decay"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        check_units(self.units)
        if not 2 <= self.block <= 32:
            raise ConfigError(f"block={self.block} must be from 2 to 32")


class BlockStudent(Student):
    """Place s of a block anchored at a knows the states before a, and guesses token a + s + 1."""

    plain = (MARKOV.format(1), MARKOV.format(2), CONFIDENCE)

    def __init__(
        self, options: BlockOptions, target: Decoder, columns: Columns, weights: Weights
    ) -> None:
        super().__init__(target, columns)
        self.options, self.anchors, spec = options, options.anchors, target.spec
        self.feature_layers = _features(options.features, spec.num_layers)
        rank = options.rank or (256 if spec.width >= 1024 else 128)
        layers = min(options.layers, spec.num_layers)
        num_columns = len(columns) if len(columns) < spec.vocab_size else 0
        # Else the target has what Qwen3's layers lack, so none of its layers are taken over.
        differences = (*unlike_llama(spec).values(), *unlike_llama_inside(spec).values())
        self.is_alike = spec.is_gated and not any(differences)
        own = layers_of_its_own(spec, layers)
        if self.is_alike:
            own = replace(
                spec, num_layers=layers, windows=(None,) * layers, has_mlp_bias=False, rope_of=()
            )
        own = with_units(own, options.units) if options.units < 1 else own
        assert own.rope is not None
        self.rope = Rope(own.rope, own.head_dim, spec.max_len + options.block, target.device)
        self.spec = own
        self.shape = BlockShape(
            spec=own,
            feature_layers=self.feature_layers,
            feature_width=len(self.feature_layers) * spec.width,
            num_places=options.block,
            mask_token=None,
            is_shifted=True,
            markov_rank=rank,
            has_confidence=True,
            confidence_sees_token=True,
            num_columns=num_columns,
        )
        self.config = weights.config if self.is_alike else {}
        self.head_CD = target.head.weight_NK[columns.ids_C] * spec.logits_scale
        self.layer_names = [f"layers.{layer}." for layer in range(layers)]
        self.start(self._begin(weights))

    def _begin(self, weights: Weights) -> dict[str, Tensor]:
        """Layers start as the target's last ones; the rest starts so that it changes nothing."""
        spec, target, generator = self.shape.spec, self.target, torch.Generator().manual_seed(2)
        names, width = target.names, spec.width
        first = target.spec.num_layers - spec.num_layers
        shapes, units = ShapeSource(), dict[int, Tensor]()
        build_body(self.shape, shapes)
        if self.is_alike and spec.ffn_width != target.spec.ffn_width:
            for layer in range(first, target.spec.num_layers):
                prefix = names.layer.format(layer)
                units[layer] = strongest_units(weights, prefix, names, spec.ffn_width)
        found: dict[str, Tensor] = {}
        for name, shape in shapes.shapes.items():
            if name.startswith("layers.") and self.is_alike:
                number, part = name.removeprefix("layers.").split(".", 1)
                layer = first + int(number)
                stored = read(weights, names.layer.format(layer) + part)
                found[name] = fitted(stored, shape, units.get(layer))
            elif name.startswith("layers."):
                found[name] = _new_tensor(name, shape, generator)
            else:
                found[name] = torch.zeros(shape)
        noise = torch.randn(width, self.shape.feature_width, generator=generator)
        found["fc.weight"] = 0.02 * noise
        found["fc.weight"][:, -width:] += torch.eye(width)
        found["norm.weight"] = found["hidden_norm.weight"] = torch.ones(width)
        if isinstance(target.final_norm, RMSNorm):
            found["norm.weight"] = target.final_norm.weight_D.float().cpu()
        if self.is_alike:
            name = names.layer.format(first) + "input_layernorm.weight"
            found["hidden_norm.weight"] = read(weights, name)
        embedding_VD = target.embedding_VD.float().cpu()
        found[MASK] = embedding_VD.mean(0)
        turn_DK = torch.randn(width, self.shape.markov_rank, generator=generator) * width**-0.5
        before_VK = embedding_VD @ turn_DK
        found[MARKOV.format(1)] = before_VK / before_VK.std().clamp(min=1e-6)
        return found

    def loss_on(self, given: StepInputs) -> PackLoss:
        pack, body = given.pack, build_body(self.shape, self.source())
        place_T, context_TD = pack.place_T(), body.context(given.states.features)
        words = (given, body, context_TD, place_T)
        if given.opinions is not None:
            return PackLoss(self._teach(pack.anchor_A, pack.is_block_A, *words)[0], [])
        agreed_TP = torch.zeros(len(place_T), self.options.block, device=place_T.device)
        for first in range(0, len(pack.anchor_A), _TESTED):
            at = slice(first, first + _TESTED)
            _, row_M, is_right_M = self._teach(pack.anchor_A[at], pack.is_block_A[at], *words)
            depth_M = torch.arange(len(row_M), device=row_M.device) % self.options.block
            agreed_TP.index_put_((row_M, depth_M), is_right_M.float(), accumulate=True)
        agreed = list((agreed_TP > 0).unbind(1))
        for depth in range(1, len(agreed)):  # a guess counts where those before it were right
            agreed[depth] = agreed[depth] & agreed[depth - 1].roll(1)
        return PackLoss(torch.zeros(()), agreed)

    def _teach(
        self, anchor_A: Tensor, is_block_A: Tensor, given: StepInputs, body: BlockBody,
        context_TD: Tensor, place_T: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The loss of some blocks, by their anchors and whether they are there; the positions that
        decide their tokens, and whether their guesses are right."""
        pack, size = given.pack, self.shape.num_places
        depth_M = torch.arange(size, device=place_T.device).repeat(len(anchor_A))
        anchor_M = anchor_A.repeat_interleave(size)
        row_M = (anchor_M + depth_M).clamp(max=len(place_T) - 1)
        pos_M, first_M = (pack.pos_T.index_select(0, x) for x in (row_M, anchor_M))
        at_M = place_T.index_select(0, row_M)
        is_there_M = (at_M >= 0) & (pos_M == first_M + depth_M)  # in the text of its anchor
        is_there_M = is_there_M & is_block_A.repeat_interleave(size)
        weight_M = is_there_M * (-depth_M.float() / self.options.decay).exp()
        weight_M = weight_M / weight_M.sum().clamp(min=1e-6)
        assert body.mask_D is not None
        x = body.inputs(self.target.embed(pack.ids_T.index_select(0, anchor_A)), body.mask_D)
        num_keys = min(pack.anchors * len(place_T), len(anchor_A) * pack.longest)
        seen = Blocks(pack, context_TD, anchor_A, size, self.rope, num_keys)
        for source in self.sources:
            block = build_block(self.shape.spec, source, "", 0)
            x = block(x, seen.of(block.attn))
        told_MD = body.telling(body.norm(x)).flatten(0, 1)
        before_M = pack.ids_T.index_select(0, row_M)
        assert body.markov is not None
        latent_MK = body.markov.latent(before_M, told_MD).to(told_MD.dtype)
        head = torch.cat((self.head_CD, body.markov.after.weight_NK), dim=1)
        state, at_M = torch.cat((told_MD, latent_MK), dim=1), at_M.clamp(min=0)
        p_MC = None if given.opinions is None else given.opinions[at_M]
        loss, best_M = teach(state, head, p_MC, weight_M, self.options.loss, given.late)
        is_right_M = (best_M == pack.label_M.index_select(0, at_M)) & is_there_M
        odds_M = body.confidences(before_M, told_MD)
        assert odds_M is not None
        sure_M = functional.binary_cross_entropy_with_logits(
            odds_M, is_right_M.float(), reduction="none"
        )
        return loss + (sure_M * weight_M).sum(), row_M, is_right_M

    def flops(self, shape: PackShape) -> float:
        inside = sum(t.numel() for n, t in self.tensors.items() if n.startswith("layers."))
        num_places = shape.num_blocks * self.shape.num_places
        head = len(self.columns) * (self.shape.spec.width + self.shape.markov_rank)
        fused = self.tensors["fc.weight"].numel() * shape.num_tokens
        return 6.0 * ((inside + head) * num_places + fused)

    def settled(self) -> dict[str, Any]:
        features = ",".join(map(str, self.feature_layers))
        return {"features": features, "rank": self.shape.markov_rank}

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        spec = self.shape.spec
        config = {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            **layer_config(spec, self.config),
            "block_size": self.shape.num_places,
            "target_layer_ids": [layer - 1 for layer in self.feature_layers],
            "sample_from_anchor": True,
            "markov_rank": self.shape.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            UNITS: self.options.units,
        }
        tensors = self.values()
        if self.shape.num_columns:
            order_C, after = self.columns.ids_C.cpu().argsort(), MARKOV.format(2)
            tensors["d2t"] = self.columns.offsets()
            tensors[after] = tensors[after][order_C.to(tensors[after].device)]
            config["draft_vocab_size"] = len(self.columns)
        return config, tensors


def _features(text: str, num_layers: int) -> tuple[int, ...]:
    """Five of the target's layers, from the second to the one before the last."""
    if text:
        return read_features(text, num_layers)
    first, last = min(2, num_layers), max(num_layers - 2, 1)
    return tuple(sorted({round(first + i * (last - first) / 4) for i in range(5)}))


def layers_of_its_own(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """Layers of Qwen3 as wide as the target, for a target of another kind."""
    head_dim = 128 if spec.width % 128 == 0 and spec.width >= 1024 else 64
    num_heads = max(spec.width // head_dim, 1)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.width,
        "intermediate_size": 3 * spec.width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 4 if num_heads % 4 == 0 else num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": spec.max_len,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0 if spec.rope is None else spec.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return ModelSpec.from_config(config)


def _new_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A new tensor of a layer that is not taken over; at first the layer adds nothing."""
    if len(shape) == 1:
        return torch.ones(shape)
    if "o_proj" in name or "down_proj" in name:
        return torch.zeros(shape)
    found: Tensor = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    return found


def _check(options: BlockOptions, spec: ModelSpec) -> None:
    if spec.embed_width not in (0, spec.width):
        raise UnsupportedModelError(
            f"train block: the target ({spec.architecture}) has a projected embedding, which "
            "training does not know yet; use a lookup method"
        )
    _features(options.features, spec.num_layers)


RECIPE = Recipe(
    options=BlockOptions,
    student=BlockStudent,
    check=_check,
    has_few_columns=True,
    drafts_as="dspark",
)
